"""Expressions of `client.map` and of delayed functions give the tasks Dask's own expansion gives."""

from __future__ import annotations

from collections import Counter
from typing import Any

import dask
import pytest
from dask._task_spec import TaskRef
from dask.base import collections_to_expr
from dask.delayed import Delayed, delayed
from distributed.client import _MapExpr
from hypothesis import given
from hypothesis import strategies as st

from scheduler_adapter.expand import expand
from scheduler_adapter.graph import materialise, prepare, runs
from scheduler_adapter.templates import Call
from tests.e2e.functions import first, inc, total
from tests.scheduler_adapter.test_graph import Table

values = st.one_of(st.integers(), st.text(max_size=3), st.none(), st.floats(allow_nan=False), st.just([1, 2]), st.just(("a", 1)))
futures = st.sampled_from(["f-1", "f-2"]).map(TaskRef)


@st.composite
def maps(draw: st.DrawFn) -> Any:
    n = draw(st.integers(1, 30))
    arg = st.one_of(values, values, values, futures, st.lists(futures, min_size=1, max_size=2))
    iterables = draw(st.lists(st.lists(arg, min_size=n, max_size=n), min_size=1, max_size=2))
    kwargs = draw(st.dictionaries(st.sampled_from("ab"), st.one_of(values, futures), max_size=1))
    named = draw(st.booleans())
    key = [f"mine-{i}" for i in range(n)] if named else "inc"
    # Calls that are alike have one key, if they are pure.
    return _MapExpr(first, iterables, key=key, pure=draw(st.booleans()), annotations={}, kwargs=kwargs)


def check(expr: Any, keys: Any, priority: Any = None) -> list[Any]:
    """Both ways: the same keys, dependencies, wants and order, and specs that are equal. Returns the tasks as they were expanded."""
    stock, stock_annotations = materialise(expr)
    ours, annotations = expand(expr)
    assert stock.keys() <= ours.keys()
    expanded = list(ours.values())
    tables = []
    for dsk, by_type in ((stock, stock_annotations), (ours, annotations)):
        graph = prepare(dict(dsk), by_type, keys, priority, {})
        tables.append(Table(list(runs(graph, "g", held=False))))
    one, other = tables
    assert set(one.keys) == set(other.keys)
    at = {key: i for i, key in enumerate(other.keys)}
    for i, key in enumerate(one.keys):
        j = at[key]
        assert {one.keys[d] for d in one.deps[i]} == {other.keys[d] for d in other.deps[j]}
        assert one.flags[i] == other.flags[j]
        assert one.counts[i] == other.counts[j]
        assert one.groups[i] == other.groups[j]
        assert one.users[i] == other.users[j]
        if priority:
            assert one.orders[i] == other.orders[j]
        assert one.specs[i] == other.specs[j]
        assert repr(one.specs[i]) == repr(other.specs[j])
    return expanded


@given(maps())
def test_map(expr: Any) -> None:
    keys = list(expr.keys)
    check(expr, keys, dict(zip(keys, range(len(keys)), strict=True)))


def test_a_map_makes_no_tasks() -> None:
    expr = _MapExpr(inc, [range(50)], key="inc", pure=False, annotations={}, kwargs={"by": 2})
    assert {type(spec) for spec in check(expr, set(expr.keys))} == {Call}


def test_a_map_with_a_large_keyword() -> None:
    """Dask makes it a task of its own."""
    expr = _MapExpr(first, [range(5)], key="inc", pure=False, annotations={}, kwargs={"rest": "x" * 200_000})
    assert "rest" in expand(expr)[0]
    check(expr, set(expr.keys))


@st.composite
def delayeds(draw: st.DrawFn) -> list[Delayed]:
    """Some results of a random graph: of layers that share tasks, some with annotations, some with more outputs than are wanted."""
    step = delayed(first, pure=draw(st.booleans()))
    nodes: list[Any] = [step(i) for i in range(3)]
    for i in range(draw(st.integers(1, 15))):
        args = draw(
            st.lists(st.one_of(st.sampled_from(nodes), st.integers(0, 3), st.lists(st.sampled_from(nodes), max_size=2)), max_size=3)
        )
        kwargs = draw(st.dictionaries(st.sampled_from("ab"), st.sampled_from(nodes), max_size=1))
        notes = {"priority": i} if draw(st.integers(0, 3)) == 0 else {}
        with dask.annotate(**notes):
            nodes.append(step(i, *args, **kwargs))
    return draw(st.lists(st.sampled_from(nodes), min_size=1, max_size=3, unique_by=id))


@given(delayeds())
def test_delayed(collections: list[Delayed]) -> None:
    expr = collections_to_expr(collections).optimize()
    check(expr, {c.key for c in collections})


def test_delayed_is_not_culled_layer_by_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    step = delayed(inc, pure=False)
    top = delayed(total, pure=False)([step(step(i)) for i in range(20)])
    expr = collections_to_expr([top]).optimize()
    check(expr, {top.key})
    calls: Counter[str] = Counter()
    monkeypatch.setattr("dask.highlevelgraph.HighLevelGraph.cull", lambda *a: calls.update(["cull"]))
    dsk, _ = expand(collections_to_expr([top]).optimize())
    assert len(dsk) == 41
    assert not calls


def test_two_tasks_under_one_key() -> None:
    """Which of them Dask takes is left to Dask."""
    a = delayed(first)(1, dask_key_name="x")
    b = delayed(first)(2, dask_key_name="x")
    top = delayed(total)([delayed(inc)(a), delayed(inc)(b)])
    check(collections_to_expr([top]).optimize(), {top.key})


@pytest.mark.parametrize("fused", [True, False])
def test_delayed_that_is_fused(fused: bool) -> None:
    top = delayed(inc)(delayed(inc)(delayed(inc)(1)))
    with dask.config.set({"optimization.fuse.delayed": fused}):
        expr = collections_to_expr([top]).optimize()
        assert len(expand(expr)[0]) == (1 if fused else 3)
        check(expr, {top.key})
