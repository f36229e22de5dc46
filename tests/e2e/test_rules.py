"""Graphs that are sent as rules: everything as with any other graph, and nothing written for what has yet to be needed."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import dask.array as da
import numpy as np
import pytest
from distributed import CancelledError, Client, wait

from taskdb.wire.reader import Client as Reader
from tests.e2e import functions as f
from tests.e2e.conftest import nothing_is_left
from tests.support.cluster import PATIENCE_SECONDS, Cluster, until

pytestmark = [pytest.mark.e2e, pytest.mark.usefixtures("clients_return")]

ENV = {"DASK_TASKDB__RULE_TASKS": "100", "DASK_TASKDB__LOCAL_TASKS": "100", "DASK_TASKDB__CLIENTS_RETURN": "5s"}


def contract(y: da.Array, i: str, o: str) -> da.Array:
    return da.blockwise(f.block_sum, o, y, i, dtype=float, meta=np.empty((0,) * len(o)))


def cube(n: int, path: Path, seconds: float = 0.0, fails: tuple[int, ...] | None = None) -> da.Array:
    """n³ blocks that count their runs, n² sums of n of them, n sums of these."""
    x = da.ones((n, n, n), chunks=1).map_blocks(f.count_block, str(path), seconds, fails, dtype=float)
    return contract(contract(x, "ijk", "jk"), "jk", "k")


def runs(path: Path) -> Counter[str]:
    return Counter(path.read_text().split()) if path.exists() else Counter()


def unmade(cluster: Cluster) -> int:
    with Reader(cluster.url) as reader:
        return sum(graph.unmade for graph in reader.status().graphs)


def test_it_runs_and_is_gone(tmp_path: Path, few: int) -> None:
    with Cluster(tmp_path, window=few, env=ENV) as cluster, Client(cluster.address) as client:
        one = client.compute(contract(cube(6, tmp_path / "runs", 0.01), "k", ""))
        until(lambda: len(runs(tmp_path / "runs")) > 10, "some have run", patience=2 * PATIENCE_SECONDS)
        assert one.result(timeout=120) == 216
        assert set(runs(tmp_path / "runs").values()) == {1}
        del one
        nothing_is_left(cluster)


def test_many_results_are_wanted_and_used(tmp_path: Path, few: int) -> None:
    with Cluster(tmp_path, window=few, env=ENV) as cluster, Client(cluster.address) as client:
        kept = client.persist(cube(6, tmp_path / "runs"))
        total = client.compute(kept.sum())
        assert total.result(timeout=120) == 216
        np.testing.assert_array_equal(client.compute(kept).result(timeout=60), np.full(6, 36.0))
        assert set(runs(tmp_path / "runs").values()) == {1}
        del kept, total
        nothing_is_left(cluster)


def test_the_same_from_two_clients(tmp_path: Path, few: int) -> None:
    with Cluster(tmp_path, window=few, env=ENV) as cluster, Client(cluster.address) as one, Client(cluster.address) as two:
        array = cube(6, tmp_path / "runs", 0.005)
        first = one.compute(array)
        until(lambda: len(runs(tmp_path / "runs")) > 20, "some have run", patience=2 * PATIENCE_SECONDS)
        second = two.compute(array)
        with Reader(cluster.url) as reader:
            until(lambda: [graph.sealed for graph in reader.status().graphs] == [True, True], "both are there")
        del first
        np.testing.assert_array_equal(second.result(timeout=120), np.full(6, 36.0))
        assert set(runs(tmp_path / "runs").values()) == {1}
        del second
        nothing_is_left(cluster)


def test_given_up_half_way(tmp_path: Path, few: int) -> None:
    with Cluster(tmp_path, window=few, env=ENV) as cluster, Client(cluster.address) as client:
        future = client.compute(cube(20, tmp_path / "runs", 0.01))
        until(lambda: len(runs(tmp_path / "runs")) > 20, "some have run", patience=2 * PATIENCE_SECONDS)
        assert unmade(cluster) > 0
        client.cancel(future)
        with pytest.raises(CancelledError):
            future.result(timeout=60)
        nothing_is_left(cluster)
        assert len(runs(tmp_path / "runs")) < 8000


def test_an_error_reaches_the_client(tmp_path: Path, few: int) -> None:
    with Cluster(tmp_path, window=few, env=ENV) as cluster, Client(cluster.address) as client:
        future = client.compute(cube(6, tmp_path / "runs", fails=(3, 2, 5)))
        with pytest.raises(ValueError, match="one block is bad"):
            future.result(timeout=120)
        future.release()  # what was raised refers to it
        nothing_is_left(cluster)


def test_progress_counts_what_is_not_made(tmp_path: Path, few: int) -> None:
    with Cluster(tmp_path, window=few, env=ENV) as cluster, Client(cluster.address) as client:
        future = client.compute(cube(16, tmp_path / "runs", 0.01))
        until(lambda: len(runs(tmp_path / "runs")) > 10, "some have run", patience=2 * PATIENCE_SECONDS)
        totals = {name: sum(counts.values()) for name, counts in client.run_on_scheduler(f.group_counts).items()}
        assert sorted(totals.values())[-2:] == [256, 4096]
        assert unmade(cluster) > 0
        client.cancel(future)
        del future
        nothing_is_left(cluster)


@pytest.mark.parametrize("who", ["scheduler", "daemon"])
def test_killed_half_way(tmp_path: Path, few: int, who: str) -> None:
    """Nothing that was finished runs again, and what is not made yet is made by the next."""
    with Cluster(tmp_path, window=few, survive=True, env=ENV) as cluster, Client(cluster.address) as client:
        future = client.compute(cube(9, tmp_path / "runs", 0.02))
        for part in (0.1, 0.3, 0.6):
            until(lambda part=part: len(runs(tmp_path / "runs")) > part * 729, "some are done", patience=2 * PATIENCE_SECONDS)
            if who == "scheduler":
                cluster.restart_scheduler()
            else:
                cluster.kill(cluster.daemon)
                cluster.start_daemon()
        np.testing.assert_array_equal(future.result(timeout=180), np.full(9, 81.0))
        assert {place: count for place, count in runs(tmp_path / "runs").items() if count > 1} == {}
        del future
        nothing_is_left(cluster)


def test_a_worker_is_killed_when_early_results_were_dropped(tmp_path: Path, few: int) -> None:
    """What it held of a tree of sums is computed again from tasks that were no more in the database."""
    with Cluster(tmp_path, window=few, env=ENV) as cluster, Client(cluster.address) as client:
        blocks = da.ones((1000,), chunks=1).map_blocks(f.count_block, str(tmp_path / "runs"), 0.005, dtype=float)
        future = client.compute(blocks.sum(split_every=8))
        until(lambda: len(runs(tmp_path / "runs")) > 600, "most have run", patience=2 * PATIENCE_SECONDS)
        with Reader(cluster.url) as reader:
            left = sum(graph.tasks + graph.unmade for graph in reader.status().graphs)
            assert left < 700, "of 1,143, more than 600 of which have run"
        cluster.kill(cluster.workers[0])
        assert future.result(timeout=180) == 1000
        assert len(runs(tmp_path / "runs")) == 1000
        with Reader(cluster.url) as reader:
            until(lambda: [graph.tasks for graph in reader.status().graphs] == [2], "only the output, and what uses it, is left")
        del future
        nothing_is_left(cluster)


def test_everything_killed(tmp_path: Path, few: int) -> None:
    with Cluster(tmp_path, window=few, env=ENV) as cluster:
        with Client(cluster.address) as client:
            kept = client.persist(cube(8, tmp_path / "runs", 0.01))
            client.publish_dataset(kept=kept)
            until(lambda: len(runs(tmp_path / "runs")) > 200, "some are done", patience=2 * PATIENCE_SECONDS)
            for spawned in (cluster.scheduler, cluster.daemon, *cluster.workers):
                cluster.kill(spawned)
        cluster.start_daemon()
        cluster.start_scheduler()
        for _ in range(2):
            cluster.start_worker(wait=False)
        with Client(cluster.address) as client:
            again: Any = client.get_dataset("kept")
            np.testing.assert_array_equal(again.compute(), np.full(8, 64.0))
            client.unpublish_dataset("kept")
            wait([])
            del again
            nothing_is_left(cluster)
