"""`client.map` and graphs of delayed functions that go through the ingest process: results, errors, cancels, and what is killed."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from dask.delayed import delayed
from distributed import CancelledError, Client, wait

from tests.e2e import functions as f
from tests.e2e.conftest import nothing_is_left
from tests.support.cluster import PATIENCE_SECONDS, Cluster, until

pytestmark = [pytest.mark.e2e, pytest.mark.usefixtures("clients_return")]

ENV = {"DASK_TASKDB__LOCAL_TASKS": "20", "DASK_TASKDB__CLIENTS_RETURN": "5s"}
TASKS = 300


def runs(path: Path) -> int:
    return len(path.read_text().split()) if path.exists() else 0


def test_results(tmp_path: Path, few: int) -> None:
    """Of plain arguments, of futures, of keywords, of a function by value, and of priorities and the same calls twice."""
    shift = 7
    with Cluster(tmp_path, window=few, env=ENV) as cluster, Client(cluster.address) as client:
        plain = client.map(f.inc, range(TASKS), pure=False)
        used = client.map(f.add, plain, range(TASKS))
        words = client.map(lambda x, by: x + shift + by, range(TASKS), by=2, priority=5)
        equal = client.map(f.inc, [1, 2] * (TASKS // 2))
        lists = client.map(f.total, [[a, b, 1] for a, b in zip(plain, used, strict=True)])
        assert client.gather(plain) == list(range(1, TASKS + 1))
        assert client.gather(used) == [2 * i + 1 for i in range(TASKS)]
        assert client.gather(words) == [i + 9 for i in range(TASKS)]
        assert client.gather(equal) == [2, 3] * (TASKS // 2)
        assert client.gather(lists) == [3 * i + 3 for i in range(TASKS)]
        del plain, used, words, equal, lists
        nothing_is_left(cluster)


def test_the_same_keys_twice(tmp_path: Path, few: int) -> None:
    """While the first is running, and after: nothing runs again, and both clients hear of everything."""
    path = tmp_path / "runs"
    with Cluster(tmp_path, window=few, env=ENV) as cluster, Client(cluster.address) as one, Client(cluster.address) as two:
        first = one.map(f.count_run, [str(path)] * TASKS, range(TASKS))
        until(lambda: runs(path) > 20, "some have run", patience=2 * PATIENCE_SECONDS)
        second = two.map(f.count_run, [str(path)] * TASKS, range(TASKS))
        results = one.gather(first)
        assert two.gather(second) == results
        third = one.map(f.count_run, [str(path)] * TASKS, range(TASKS))
        del first
        assert one.gather(third) == results
        assert runs(path) == TASKS
        del second, third
        nothing_is_left(cluster)


def test_cancelled_half_way(tmp_path: Path, few: int) -> None:
    path = tmp_path / "runs"
    with Cluster(tmp_path, window=few, env=ENV) as cluster, Client(cluster.address) as client:
        futures = client.map(f.slow_inc, range(TASKS), seconds=0.05)
        until(lambda futures=futures: any(future.done() for future in futures), "some have run", patience=2 * PATIENCE_SECONDS)
        client.cancel(futures)
        with pytest.raises(CancelledError):
            futures[-1].result(timeout=60)
        del futures
        again = client.map(f.count_run, [str(path)] * TASKS, range(TASKS))
        wait(again, timeout=120)
        assert {future.status for future in again} == {"finished"}
        del again
        nothing_is_left(cluster)


def test_an_error(tmp_path: Path, few: int) -> None:
    with Cluster(tmp_path, window=few, env=ENV) as cluster, Client(cluster.address) as client:
        futures = client.map(f.inc, [*range(TASKS), "text"])
        wait(futures, timeout=120)
        assert Counter(future.status for future in futures) == {"finished": TASKS, "error": 1}
        assert type(futures[-1].exception()) is TypeError
        del futures
        nothing_is_left(cluster)


def blocks(path: Path) -> Any:
    """Twenty blocks of sums of three layers each, and one sum over them; 181 tasks."""
    run, total = delayed(f.count_run, pure=False), delayed(f.total, pure=False)
    ends = []
    for block in range(20):
        nodes = [run(str(path), block, dask_key_name=f"root-{block}-{i}") for i in range(4)]
        nodes = [run(str(path), 1, a, b) for a, b in zip(nodes, nodes[1:] + nodes[:1], strict=True)]
        ends.append(total(nodes))
    return total(ends)


@pytest.mark.parametrize("who", ["scheduler", "daemon"])
def test_killed_half_way(tmp_path: Path, few: int, who: str) -> None:
    """Nothing that was finished runs again."""
    path, other = tmp_path / "runs", tmp_path / "delayed"
    with Cluster(tmp_path, window=few, survive=True, env=ENV) as cluster, Client(cluster.address) as client:
        futures = client.map(f.count_run, [str(path)] * TASKS, range(TASKS))
        graph = client.compute(blocks(other))
        for part in (0.1, 0.5):
            until(lambda part=part: runs(path) > part * TASKS, "some are done", patience=2 * PATIENCE_SECONDS)
            if who == "scheduler":
                cluster.restart_scheduler()
            else:
                cluster.kill(cluster.daemon)
                cluster.start_daemon()
        assert client.gather(futures) == client.gather(client.map(f.first, futures))
        assert graph.result(timeout=120) == 80
        assert runs(path) == TASKS
        assert runs(other) == 160
        del futures, graph
        nothing_is_left(cluster)
