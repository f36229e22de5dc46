"""Imported by the fork server of the tests' processes: a thread of Dask's that it has is not there in what it forks."""

from __future__ import annotations

import os
import queue
import threading

from distributed import utils


def renew_offload() -> None:
    executor = utils._offload_executor
    executor._threads.clear()
    executor._idle_semaphore = threading.Semaphore(0)
    executor._work_queue = queue.SimpleQueue()


os.register_at_fork(after_in_child=renew_offload)
