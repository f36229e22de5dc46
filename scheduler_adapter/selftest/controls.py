"""Planted faults: each must be found by the same checks that the rounds rely on. A check that finds none of them proves nothing."""

from __future__ import annotations

import contextlib
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from distributed import Client, Future, wait

from scheduler_adapter.local.cluster import Cluster
from scheduler_adapter.selftest import acknowledged, work
from scheduler_adapter.selftest.jobs import Job, Promises, label

#: (folder, window) -> (whether it was caught, what was planted and found).
Control = Callable[[Path, int], tuple[bool, str]]

PATIENCE_SECONDS = 60.0


@contextlib.contextmanager
def _cluster(folder: Path, window: int, survive: bool) -> Iterator[tuple[Cluster, Client]]:
    with (
        Cluster(folder, window=window, survive=survive, workers=1, threads=2) as cluster,
        contextlib.closing(Client(cluster.address)) as client,
    ):
        yield cluster, client


def _until(condition: Callable[[], Any], what: str) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"waited {PATIENCE_SECONDS:.0f} s for: {what}")
        time.sleep(0.02)


def _row(client: Client, runs: Path, name: str, n: int) -> list[Future]:
    keys = [f"{name}-{i}" for i in range(n)]
    row: list[Future] = client.map(work.value, [str(runs)] * n, [label(key) for key in keys], [0.0] * n, list(range(n)), key=keys)
    return row


def lost_commit(folder: Path, window: int) -> tuple[bool, str]:
    """The store goes back to what it was before the last acknowledged submission, as it would by a write that never reached the disk.

    (To leave out the sync would show nothing here: what a killed process has written is in the system's page cache.)
    """
    n, runs = 20, folder / "runs"
    with _cluster(folder, window, survive=True) as (cluster, client):
        promises = Promises()
        assert cluster.daemon is not None
        first = _row(client, runs, "first", n)
        wait(first, timeout=PATIENCE_SECONDS)
        _until(lambda: not client.sync(_unacknowledged, client), "the submission is acknowledged")
        cluster.kill(cluster.daemon)
        shutil.copytree(cluster.data, folder / "before")
        cluster.start_again(cluster.daemon)
        second = _row(client, runs, "second", n)
        wait(second, timeout=PATIENCE_SECONDS)
        _until(lambda: not client.sync(_unacknowledged, client), "the second one is, too")
        told, batches = acknowledged.told(client, promises), acknowledged.batches_on_disk(client)
        cluster.kill(cluster.daemon)
        looked, whole = acknowledged.missing(cluster.data, client, told, promises, batches)
        _, missing = acknowledged.missing(folder / "before", client, told, promises, batches)
        caught = not whole and len(missing) > n
    return caught, f"the last acknowledged commit is taken away: {len(missing)} of {looked} acknowledged writes missing"


async def _unacknowledged(client: Client) -> int:
    return len(client.taskdb.outbox)


def stock_workers(folder: Path, window: int) -> tuple[bool, str]:
    """Workers without our preload end with their scheduler: what had finished runs again."""
    n, runs = 20, folder / "runs"
    with _cluster(folder, window, survive=False) as (cluster, client):
        row = _row(client, runs, "row", n)
        wait(row, timeout=PATIENCE_SECONDS)
        (worker,) = cluster.workers
        cluster.kill(cluster.scheduler)
        worker.popen.wait(PATIENCE_SECONDS)
        cluster.processes.ended(worker)
        cluster.start_again(cluster.scheduler)
        cluster.start_again(worker)
        right = sum(client.gather(row)) == n * (n - 1) // 2
        again = work.Runs.read(runs).again.total()
    return right and again == n, f"workers without the preload, and a killed scheduler: {again} of {n} finished tasks ran again"


def wrong_result(folder: Path, window: int) -> tuple[bool, str]:
    """A result that is one too high."""

    def shape(job: Job) -> None:
        job.check("the planted result", job.result(job.value(42, "x")), 41)

    with _cluster(folder, window, survive=True) as (_, client):
        job = Job(shape, 1, client, "planted", folder / "runs", 0, 0.0, Promises())
        job.start()
        _until(lambda: job.done, "the job is done")
    return job.checked == 1 and "42 and not 41" in job.problem, f"a wrong result: {job.problem or 'taken for right'}"


CONTROLS: tuple[Control, ...] = (lost_commit, stock_workers, wrong_result)
