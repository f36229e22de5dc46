"""A head and a rest are the task that was written down."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest
from dask._task_spec import Alias, List, Task, TaskRef
from hypothesis import given
from hypothesis import strategies as st

from scheduler_adapter.templates import HEAD_BYTES_MAX, TEMPLATE_TASKS, Call, Calls, Template, Templates, is_plain
from tests.e2e.functions import first, inc

plain = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(st.characters(), max_size=9))
atoms = st.recursive(plain, lambda inner: st.lists(inner, max_size=3).map(tuple), max_leaves=5)
keys = st.one_of(st.text(max_size=9), st.tuples(st.text(max_size=5), st.integers(0, 9)))
references = st.one_of(keys.map(TaskRef), keys.map(Alias))


def read(template: Template, key: Any, args: Any) -> Any:
    rest = template.rest(key, args)
    assert rest is not None
    return pickle.loads(template.head + rest)


def same(one: Any, other: Any) -> None:
    """As to Dask, and in all that a worker looks at."""
    assert type(one) is type(other)
    assert (one.key, one.func, one.dependencies, one.data_producer) == (other.key, other.func, other.dependencies, other.data_producer)
    # `repr` tells 1 from 1.0 and True, and NaN is itself.
    assert repr((one.args, one.kwargs)) == repr((other.args, other.kwargs))
    assert list(map(type, one.args)) == list(map(type, other.args))
    assert one._token is None
    assert one._is_coro is None


@given(keys, st.lists(st.one_of(atoms, references), max_size=5), st.dictionaries(st.sampled_from("abc"), atoms), st.booleans())
def test_tasks_come_back(key: Any, args: list[Any], kwargs: dict[str, Any], producer: bool) -> None:
    template = Template(first, kwargs, producer)
    assert template.fits
    same(read(template, key, args), Task(key, first, *args, _data_producer=producer, **kwargs))


@given(st.lists(st.one_of(atoms, st.lists(st.integers(), max_size=3), st.dictionaries(st.text(), st.integers(), max_size=2)), max_size=4))
def test_one_argument_of_any_kind(args: list[Any]) -> None:
    template = Template(first)
    if sum(not is_plain(arg) and type(arg) is not tuple for arg in args) > 1:
        assert template.rest("k", args) is None
    else:
        same(read(template, "k", args), Task("k", first, *args))


def test_objects_in_common_stay_in_common() -> None:
    x: list[int] = []
    assert Template(first).rest("k", [x, x]) is None
    assert Template(first, {"a": x}).rest("k", [x]) is None
    assert Template(first, {"a": x}).rest("k", [1]) is not None
    state: list[int] = []

    def put() -> None:
        state.append(1)

    # Both are pickled by value, with one list in common.
    assert Template(lambda f: state).rest("k", [put]) is None
    assert not Template(lambda f: state, {"f": put}).fits


def test_arguments_dask_has_its_own_classes_for() -> None:
    same(read(Template(first), "k", [List(TaskRef("a"), 1)]), Task("k", first, List(TaskRef("a"), 1)))
    assert read(Template(first), "k", [np.float64(2.5)]).args == (2.5,)
    moved = Alias("a", "b")
    assert read(Template(first), "k", [moved]).args[0].target == "b"


def test_a_function_by_value() -> None:
    add = 5
    task = read(Template(lambda x: x + add), "k", [TaskRef("a")])
    assert task({"a": 2}) == 7


def test_a_head_over_its_bound() -> None:
    assert not Template(first, {"a": "x" * HEAD_BYTES_MAX}).fits


def test_what_cannot_be_pickled() -> None:
    with pytest.raises(TypeError):
        Template(first).rest("k", [(i for i in ())])


def test_templates_are_made_where_they_pay() -> None:
    templates = Templates()
    many = [Task(f"m-{i}", inc, i) for i in range(TEMPLATE_TASKS)]
    one = Task("o", first, 1)
    words = Task("w", inc, x=1)
    for spec in (*many, one, words):
        templates.see(spec)
    found = {templates.write(spec.key, spec)[1] for spec in many}
    assert len(found) == 1
    assert found != {None}
    for spec in (one, words):
        data, template = templates.write(spec.key, spec)
        assert template is None
        assert pickle.loads(data) == spec
    calls = Calls(first, {"a": 1})
    data, template = templates.write("c", Call(calls, (2,)))
    assert template is not None
    same(pickle.loads(template.head + data), Call(calls, (2,)).task("c"))
