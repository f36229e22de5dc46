"""From an expression to runs of tasks."""

from __future__ import annotations

import pickle
from collections import Counter
from typing import Any

import dask
import pytest
from dask._task_spec import Task, TaskRef, convert_legacy_graph
from distributed.scheduler import Scheduler
from hypothesis import event, given
from hypothesis import strategies as st

from scheduler_adapter import graph as graphs
from scheduler_adapter.graph import Graph, prepare, runs
from scheduler_adapter.keys import pack_key, unpack_key
from scheduler_adapter.specs import Shared
from taskdb.commands import AddTasks
from taskdb.errors import InvalidRequest, LimitExceeded
from taskdb.limits import CHUNK_TASKS_MAX
from taskdb.model import TaskFlag
from tests.e2e.functions import first, inc, total


def task(key: Any, *deps: Any) -> Task:
    return Task(key, first, 0, *[TaskRef(d) for d in deps])


def ready(dsk: dict[Any, Any], keys: Any, order: Any = None, by_type: Any = None, annotations: Any = None) -> Graph:
    return prepare(dict(dsk), by_type or {}, keys, order, annotations)


@st.composite
def dags(draw: st.DrawFn) -> tuple[dict[Any, Any], list[Any]]:
    """A graph of up to 30 tasks in a random order of its dict, some inputs from outside, and what is wanted of it."""
    n = draw(st.integers(1, 30))
    names = [f"t-{i}" if i % 3 else ("tuple", i) for i in range(n)]
    outside = ["out-a", "out-b"]
    dsk = {}
    for i, name in enumerate(names):
        deps = draw(st.lists(st.sampled_from([*names[:i], *outside]), max_size=4))
        dsk[name] = task(name, *deps)
    wanted = draw(st.lists(st.sampled_from(names), min_size=1, unique=True))
    shuffled = draw(st.permutations(names))
    return {name: dsk[name] for name in shuffled}, wanted


class Table:
    """All runs of a graph, put together as the database does."""

    def __init__(self, commands: list[AddTasks]):
        self.keys: list[Any] = []
        self.flags: list[TaskFlag] = []
        self.deps: list[list[int]] = []
        self.counts: list[int] = []
        self.groups: list[str] = []
        self.orders: list[float] = []
        self.users: list[float] = []
        self.annotations: list[dict[str, Any]] = []
        names: list[str] = []
        self.specs: list[Any] = []
        shared: list[Shared] = [Shared({}, b"")]
        for run in commands:
            assert run.first_index == len(self.keys), "positions go on"
            names.extend(run.new_groups)
            shared.extend(map(Shared.read, run.new_shared))
            self.keys += [unpack_key(k) for k in run.keys]
            self.flags += [TaskFlag(f) for f in run.flags]
            self.counts += run.dependent_counts
            self.orders += run.orders
            self.users += run.user_priorities or [0.0] * len(run.keys)
            self.groups += [names[g] for g in run.groups]
            numbers = run.shared or [0] * len(run.keys)
            self.annotations += [shared[n].annotations for n in numbers]
            specs = [shared[n].spec(data) for data, n in zip(run.specs, numbers, strict=True)]
            self.specs += [pickle.loads(data) if data else None for data in specs]
            rest = list(run.deps)
            for n in run.dep_counts:
                self.deps.append(rest[:n])
                del rest[:n]
            assert rest == []

    def edges(self) -> dict[Any, list[Any]]:
        return {key: [self.keys[d] for d in deps] for key, deps in zip(self.keys, self.deps, strict=True)}


@given(dags())
def test_runs(given_graph: tuple[dict[Any, Any], list[Any]]) -> None:
    """Culled, dependencies first, dependents counted right, inputs from outside at the front."""
    dsk, wanted = given_graph
    event("edges" if any(spec.dependencies for spec in dsk.values()) else "no edge")
    table = Table(list(runs(ready(dsk, wanted), "g", held=False)))
    needed: set[Any] = set()
    stack = list(wanted)
    while stack:
        key = stack.pop()
        if key not in needed:
            needed.add(key)
            stack.extend(dsk[key].dependencies if key in dsk else ())
    assert len(table.keys) == len(set(table.keys))
    assert set(table.keys) == needed
    assert all(dep < i for i, deps in enumerate(table.deps) for dep in deps)
    for key, deps in table.edges().items():
        assert sorted(map(repr, deps)) == sorted(map(repr, dsk[key].dependencies if key in dsk else ()))
    dependents = Counter(dep for deps in table.edges().values() for dep in deps)
    assert table.counts == [dependents[key] for key in table.keys]
    assert table.specs == [dsk.get(key) for key in table.keys]
    external = [key not in dsk for key in table.keys]
    assert external == sorted(external, reverse=True)
    assert [bool(flag & TaskFlag.EXTERNAL) for flag in table.flags] == external
    assert {k for k, flag in zip(table.keys, table.flags) if flag & TaskFlag.WANTED} == set(wanted)


@given(dags())
def test_order_is_dasks(given_graph: tuple[dict[Any, Any], list[Any]]) -> None:
    dsk, wanted = given_graph
    graph = ready(dsk, wanted)
    expected = dask.order.order(dict(graph.dsk))
    # Of equal choices `dask.order` takes the first in the dict.
    assert sorted(graph.order.values()) == sorted(expected.values())
    assert list(graph.dsk) == sorted(graph.dsk, key=graph.order.__getitem__)


def test_many_tasks_are_cut_into_runs() -> None:
    n = 3 * graphs.RUN_TASKS + 7
    dsk = {f"w-{i}": task(f"w-{i}") for i in range(n)} | {"s": task("s", *[f"w-{i}" for i in range(n)])}
    commands = list(runs(ready(dsk, ["s"]), "g", held=False))
    assert len(commands) > 3
    assert all(len(run.keys) <= CHUNK_TASKS_MAX for run in commands)
    table = Table(commands)
    assert sorted(table.edges()["s"]) == sorted(f"w-{i}" for i in range(n))
    assert set(table.groups) == {"w", "s"}


def test_specs_of_a_large_group_come_back() -> None:
    """They are compressed with what they share."""
    n = 3 * graphs.RUN_TASKS
    dsk = {f"w-{i}": Task(f"w-{i}", first, i, "common" * 50) for i in range(n)}
    commands = list(runs(ready(dsk, list(dsk)), "g", held=False))
    table = Table(commands)
    assert dict(zip(table.keys, table.specs)) == dsk
    assert sum(len(spec) for run in commands for spec in run.specs) < 150 * n, "tens of bytes instead of hundreds"


def test_large_specs_are_cut_into_runs() -> None:
    dsk = {f"b-{i}": Task(f"b-{i}", len, bytes([i]) * (graphs.RUN_BYTES // 2)) for i in range(4)}
    commands = list(runs(ready(dsk, list(dsk)), "g", held=False))
    assert len(commands) == 2


def test_consume_frees_what_is_out() -> None:
    graph = ready({"a": task("a"), "b": task("b", "a")}, ["b"])
    list(runs(graph, "g", held=False, consume=True))
    assert list(graph.dsk.values()) == [None, None]


def test_held_tasks_are_told_so() -> None:
    table = Table(list(runs(ready({"a": task("a", "out")}, ["a"]), "g", held=True)))
    assert table.flags == [TaskFlag.EXTERNAL, TaskFlag.HELD | TaskFlag.WANTED]


def test_given_order_is_kept_if_it_is_one() -> None:
    dsk = {"a": task("a"), "b": task("b"), "c": task("c", "a", "b")}
    assert list(ready(dsk, ["c"], {"b": 0, "a": 1, "c": 2}).dsk) == ["b", "a", "c"]


def test_given_order_that_contradicts_the_graph() -> None:
    """Clients may send any numbers: priorities stay theirs, dependencies still come first."""
    dsk = {"a": task("a"), "b": task("b", "a"), "c": task("c", "b")}
    graph = ready(dsk, ["c"], {"a": 5, "b": 1, "c": 0})
    table = Table(list(runs(graph, "g", held=False)))
    assert table.keys == ["a", "b", "c"]
    assert table.orders == [5, 1, 0]


@pytest.mark.parametrize("given_order", [None, {"a": 0, "b": 1, "c": 2}])
def test_cycle_is_stocks_error(given_order: Any) -> None:
    dsk = {"a": task("a", "c"), "b": task("b", "a"), "c": task("c", "b")}
    with pytest.raises(RuntimeError, match="Cycle detected between the following keys") as stock:
        dask.order.order(dict(dsk))
    with pytest.raises(RuntimeError, match="Cycle detected between the following keys") as ours:
        list(runs(ready(dsk, ["a"], given_order), "g", held=False))
    assert type(ours.value) is type(stock.value)
    assert all(key in str(ours.value) for key in "abc")


def test_task_that_depends_on_itself() -> None:
    with pytest.raises((RuntimeError, InvalidRequest), match=r"(?i)cycle|itself"):
        list(runs(ready({"a": task("a", "a")}, ["a"]), "g", held=False))


def test_key_over_the_bound() -> None:
    long = "k" * 100_000
    with pytest.raises(LimitExceeded, match="shorter"):
        list(runs(ready({long: task(long)}, [long]), "g", held=False))


def test_group_dependencies() -> None:
    graph = ready({"x-1": task("x-1"), ("y", 1): task(("y", 1), "x-1"), "z": task("z", ("y", 1))}, ["z"])
    list(runs(graph, "g", held=False))
    assert {("y", "x"), ("z", "y")} <= graph.groups()[1]


def test_data_producers_are_marked() -> None:
    dsk = {"a": Task("a", inc, 1, _data_producer=True), "b": task("b", "a")}
    table = Table(list(runs(ready(dsk, ["b"]), "g", held=False)))
    assert [bool(f & TaskFlag.DATA_PRODUCER) for f in table.flags] == [True, False]


# ---------------------------------------------------------------------------------------------------------- annotations


class Stand:
    """What `_apply_annotations` needs of a task."""

    def __init__(self, key: Any):
        self.key = key
        self.annotations: dict[str, Any] = {}
        self.host_restrictions = self.worker_restrictions = self.resource_restrictions = None
        self.loose_restrictions = False
        self.retries = 0


def values(kind: str) -> st.SearchStrategy[Any]:
    return {
        "priority": st.integers(-5, 5),
        "retries": st.integers(0, 3),
        "resources": st.dictionaries(st.sampled_from(["GPU", "MEM"]), st.integers(1, 3)),
        "allow_other_workers": st.booleans(),
        "note": st.none() | st.text(max_size=3),
    }[kind]


KINDS = ["priority", "retries", "resources", "allow_other_workers", "note"]


@given(st.data())
def test_annotations_are_merged_as_stock_does(data: st.DataObject) -> None:
    keys = ["a", "b", ("c", 1)]
    by_type = {
        k: data.draw(st.dictionaries(st.sampled_from(keys), values(k))) for k in data.draw(st.lists(st.sampled_from(KINDS), unique=True))
    }
    general = {k: data.draw(values(k)) for k in data.draw(st.lists(st.sampled_from(KINDS), unique=True))}
    tasks = [Stand(k) for k in keys]
    Scheduler._apply_annotations(None, tasks=tasks, annotations_by_type=by_type, global_annotations=general)  # type: ignore[arg-type]
    table = Table(list(runs(ready({k: task(k) for k in keys}, keys, None, by_type, general), "g", held=False)))
    ours = dict(zip(table.keys, table.annotations, strict=True))
    assert ours == {ts.key: ts.annotations for ts in tasks}
    assert dict(zip(table.keys, table.users, strict=True)) == {ts.key: -ts.annotations.get("priority", 0) for ts in tasks}


def test_annotations_that_are_functions_of_the_key() -> None:
    table = Table(
        list(runs(ready({k: task(k) for k in "ab"}, "ab", None, {}, {"priority": lambda key: 7 if key == "a" else 0}), "g", held=False))
    )
    assert dict(zip(table.keys, table.users)) == {"a": -7, "b": 0}


def test_equal_annotations_are_stored_once_a_run() -> None:
    workers = ["tcp://127.0.0.1:1"]
    n = 100
    by_type = {"workers": {f"k-{i}": workers for i in range(n)}}
    (run,) = runs(ready({f"k-{i}": task(f"k-{i}") for i in range(n)}, [f"k-{i}" for i in range(n)], None, by_type), "g", held=False)
    assert len(run.new_shared) == 1
    assert set(run.shared) == {1}


def test_annotations_of_several_runs() -> None:
    """Numbers of annotations go on from run to run."""
    n = 2 * graphs.RUN_TASKS
    by_type = {"retries": {f"k-{i:04}": i % 3 + 1 for i in range(n)}}
    keys = [f"k-{i:04}" for i in range(n)]
    table = Table(list(runs(ready({k: task(k) for k in keys}, keys, None, by_type), "g", held=False)))
    assert dict(zip(table.keys, table.annotations)) == {k: {"retries": v} for k, v in by_type["retries"].items()}


# ------------------------------------------------------------------------------------------------------------ estimate


def test_estimate_is_no_less_than_the_graph() -> None:
    """It decides whether a graph is read on the loop: a lower number would stall it."""
    import dask.array as da
    from dask.base import collections_to_expr

    for x in (da.ones((100, 100), chunks=10).sum(), da.ones(1000, chunks=10) + 1, dask.delayed(inc)(1)):
        expr = collections_to_expr([x]).optimize()
        estimate = graphs.estimate_tasks(expr)
        assert estimate is None or estimate >= len(graphs.materialise(expr)[0]) // 2


def test_legacy_tuples_are_understood() -> None:
    dsk = convert_legacy_graph({"a": 1, "b": (inc, "a"), "c": (total, ["a", "b"])})
    table = Table(list(runs(ready(dsk, ["c"]), "g", held=False)))
    assert {k: set(v) for k, v in table.edges().items()} == {"a": set(), "b": {"a"}, "c": {"a", "b"}}
    assert pack_key("c") in [pack_key(k) for k in table.keys]
