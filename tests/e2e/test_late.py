"""A worker that comes back to the next scheduler when nobody waits for it any more. Each test has a cluster of its own."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
from distributed import Client, wait

from tests.e2e import functions as f
from tests.e2e.conftest import nothing_is_left
from tests.support.cluster import PATIENCE_SECONDS, Cluster, until

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(180), pytest.mark.usefixtures("clients_return")]


def lines(path: Path) -> list[str]:
    return path.read_text().split() if path.exists() else []


def keys_of_worker(dask_worker: Any) -> list[str]:
    return [str(key) for key in dask_worker.data]


def stored(cluster: Cluster, key: str) -> str | None:
    """Its state in the database."""
    return {task["key"]: task["state"] for task in cluster.taskdb("tasks")["tasks"]}.get(key)


def test_what_a_worker_brings_too_late_is_not_believed(tmp_path: Path, window: int | None) -> None:
    """Its keys may mean other tasks by then; and they do mean others when it comes back to the scheduler after that."""
    waits = {"DASK_TASKDB__WORKERS_RETURN": "5s"}
    runs = tmp_path / "runs"
    with Cluster(
        tmp_path, window=window, workers=2, survive=True, worker_args=(("--name", "one"), ("--name", "two")), env=waits
    ) as cluster:
        with Client(cluster.address) as client:
            late = cluster.workers[0]
            names = {ws["name"]: address for address, ws in client.scheduler_info(n_workers=-1)["workers"].items()}
            old = client.submit(f.count_run, str(runs), 1, key="old", workers=[names["one"]], allow_other_workers=True)
            assert old.result(timeout=PATIENCE_SECONDS) == 1
            until(lambda: stored(cluster, "old") == "memory", "that is on disk")
            os.kill(late.pid, signal.SIGSTOP)
            try:
                cluster.restart_scheduler()
                until(lambda: "1 workers did not come back: one" in cluster.scheduler_log(), "it is given up")
                assert old.result(timeout=PATIENCE_SECONDS) == 1, "computed again"
                assert lines(runs) == ["1", "1"]
                old.release()
                until(lambda: "old" not in client.run_on_scheduler(f.left_behind).get("tasks", {}), "the key is free")
                new = client.submit(f.add, 1, 41, key="old")
                assert new.result(timeout=PATIENCE_SECONDS) == 42
            finally:
                os.kill(late.pid, signal.SIGCONT)
            until(lambda: "one is back too late; the 1 results" in cluster.scheduler_log(), "it comes back")
            address = [names["one"]]
            until(lambda: list(client.run(keys_of_worker, workers=address).values()) == [[]], "it has let go of what it had")
            # From now on it is believed again.
            here = client.submit(f.count_run, str(runs), 2, key="here", workers=address)
            wait(here, timeout=PATIENCE_SECONDS)
            until(lambda: stored(cluster, "here") == "memory", "that is on disk")
            del cluster.env["DASK_TASKDB__WORKERS_RETURN"]
            cluster.kill(cluster.scheduler)
            cluster.start_scheduler()
            assert client.gather([new, here]) == [42, 2]
            assert lines(runs) == ["1", "1", "2"], "what it had finished does not run again"
            del old, new, here
        nothing_is_left(cluster)
