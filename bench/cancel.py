"""How long `client.cancel` of many futures takes: until the call returns, and until scheduler and database hold none of the tasks.

The futures are siblings: they depend on nothing, and one of them runs. Another client asks meanwhile, again and again, for a small result.
"""

from __future__ import annotations

import tempfile
import threading
import time
from pathlib import Path
from typing import Any, NamedTuple

from distributed import Client

from scheduler_adapter.local.cluster import Cluster
from taskdb.client import Client as Reader

#: Bounds on the submission, and on the cancel.
PATIENCE_S = 1200.0
POLL_S = 0.02


class Taken(NamedTuple):
    """Seconds."""

    called: float
    gone: float
    #: The longest that the other client waited for an answer.
    longest_answer: float


def run(side: str, tasks: int, window: int | None = None) -> Taken:
    """One run on a cluster of its own. Raises TimeoutError."""
    with (
        tempfile.TemporaryDirectory(prefix="taskdb-bench-") as folder,
        Cluster(Path(folder), stock=side == "stock", window=window, workers=1) as cluster,
        Client(cluster.address, set_as_default=False) as other,
        Client(cluster.address, set_as_default=False) as client,
    ):
        futures = client.map(time.sleep, [0.1] * tasks, pure=False, batch_size=tasks)
        _until(lambda: client.sync(client.scheduler.get_task_status, keys=[futures[-1].key])[futures[-1].key], "the tasks have arrived")
        answers = _Answers(other)
        began = time.perf_counter()
        client.cancel(futures)
        called = time.perf_counter() - began
        _until(lambda: not other.run_on_scheduler(_resident), "the scheduler holds none of them")
        if cluster.has_daemon:
            with Reader(cluster.url) as reader:
                _until(lambda: not reader.status().graphs, "the database holds none of them")
        gone = time.perf_counter() - began
        return Taken(called, gone, answers.stop())


def _resident(dask_scheduler: Any) -> int:
    return len(dask_scheduler.tasks)


def _until(condition: Any, what: str) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"waited {PATIENCE_S:.0f} s until {what}")
        time.sleep(POLL_S)


class _Answers:
    """Asks the scheduler something small, in a thread of its own."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._longest = 0.0
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._ask, daemon=True)
        self._thread.start()

    def _ask(self) -> None:
        while not self._stopped.is_set():
            began = time.perf_counter()
            self._client.sync(self._client.scheduler.ncores)
            self._longest = max(self._longest, time.perf_counter() - began)
            time.sleep(POLL_S)

    def stop(self) -> float:
        self._stopped.set()
        self._thread.join()
        return self._longest
