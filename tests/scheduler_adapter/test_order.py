"""The order of large graphs keeps about as few results as `dask.order` does, or it is that."""

from __future__ import annotations

import heapq
import random
from typing import Any

import dask
import pytest
from dask._task_spec import Task, TaskRef
from hypothesis import given

from bench.workloads import WORKLOADS
from scheduler_adapter import order as orders
from scheduler_adapter.graph import materialise, prepare
from tests.e2e.functions import first
from tests.scheduler_adapter.test_graph import dags, task


def live_max(dsk: dict[Any, Any], order: Any, threads: int, wanted: Any) -> int:
    """Most results that are alive if so many threads take tasks by their numbers, each for about the same time."""
    needs = {key: int(key in wanted) for key in dsk}
    users: dict[Any, list[Any]] = {key: [] for key in dsk}
    for key, spec in dsk.items():
        for dep in spec.dependencies:
            needs[dep] += 1
            users[dep].append(key)
    missing = {key: len(spec.dependencies) for key, spec in dsk.items()}
    ready = [(order[key], str(key), key) for key, n in missing.items() if not n]
    heapq.heapify(ready)
    running: list[Any] = []
    draw = random.Random(1)
    now, live, most = 0.0, 0, 0
    while ready or running:
        while ready and len(running) < threads:
            heapq.heappush(running, (now + draw.uniform(0.9, 1.1), *heapq.heappop(ready)))
        now, _, _, key = heapq.heappop(running)
        live += 1
        most = max(most, live)
        for dep in dsk[key].dependencies:
            needs[dep] -= 1
            live -= not needs[dep]
        for user in users[key]:
            missing[user] -= 1
            if not missing[user]:
                heapq.heappush(ready, (order[user], str(user), user))
    return most


def graph_of(workload: str, tasks: int) -> tuple[dict[Any, Any], set[Any]]:
    """What its submission is after it was culled."""
    from dask.base import collections_to_expr

    job = WORKLOADS[workload].build(tasks)
    assert job.submit is not None
    assert job.submit.__closure__
    (collection,) = [cell.cell_contents for cell in job.submit.__closure__ if dask.is_dask_collection(cell.cell_contents)]
    expr = collections_to_expr([collection]).optimize().finalize_compute().optimize()
    wanted = set(dask.core.flatten(expr.__dask_keys__()))
    dsk, by_type = materialise(expr)
    return prepare(dsk, by_type, wanted, None, {}).dsk, wanted


@pytest.mark.parametrize("workload", ["delayed-graph", "jobqueue", "tree-sum", "basic-sum", "anom-mean", "climatic-mean", "vorticity"])
def test_as_good_as_dask(workload: str) -> None:
    dsk, wanted = graph_of(workload, 1500)
    ours = orders.depth_first(dsk, wanted)
    if workload == "anom-mean":
        assert ours is None, "results are shared by tasks that are far from each other"
        return
    assert ours is not None
    stock = dask.order.order(dict(dsk))
    for threads in (1, 8, 32):
        assert live_max(dsk, ours, threads, wanted) <= 1.1 * live_max(dsk, stock, threads, wanted) + orders.MORE


@given(dags())
def test_dependencies_come_first(drawn: tuple[dict[Any, Any], list[Any]]) -> None:
    dsk, wanted = drawn
    numbers = orders.depth_first(dsk, wanted)
    if numbers is None:
        return
    assert sorted(numbers.values()) == list(range(len(dsk)))
    assert all(numbers[dep] < numbers[key] for key, spec in dsk.items() for dep in spec.dependencies if dep in dsk)


@pytest.mark.parametrize("cycle", [["a"], ["a", "b"], ["a", "b", "c"]])
@pytest.mark.parametrize("below", [True, False])
def test_a_cycle(monkeypatch: pytest.MonkeyPatch, cycle: list[str], below: bool) -> None:
    monkeypatch.setattr(orders, "LARGE_TASKS", 0)
    dsk = {key: task(key, cycle[i - 1]) for i, key in enumerate(cycle)}
    if below:
        dsk["top"] = task("top", *cycle)
    assert orders.depth_first(dsk) is None
    if len(cycle) > 1:
        with pytest.raises(RuntimeError, match="Cycle"):
            orders.order(dsk)


def test_only_large_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    # Of both orders one begins with the wide branch.
    dsk: dict[Any, Any] = {f"w-{i}": task(f"w-{i}") for i in range(5)}
    dsk["wide"] = Task("wide", first, *[TaskRef(f"w-{i}") for i in range(5)])
    dsk["narrow"] = task("narrow")
    dsk["top"] = task("top", "narrow", "wide")
    assert orders.order(dsk) == dask.order.order(dsk)
    monkeypatch.setattr(orders, "LARGE_TASKS", 5)
    numbers = orders.order(dsk)
    assert numbers == orders.depth_first(dsk)
    assert numbers["narrow"] == 6, "the branch that needs most comes first"
