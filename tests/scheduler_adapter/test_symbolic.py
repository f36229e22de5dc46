"""From graphs of arrays to rules."""

from __future__ import annotations

import subprocess
import sys
from typing import Any, ClassVar

import dask
import dask.array as da
import pytest
from dask._task_spec import Task, TaskRef
from dask.blockwise import Blockwise
from dask.core import flatten
from dask.highlevelgraph import HighLevelGraph, MaterializedLayer
from hypothesis import event, given, note, settings
from hypothesis import strategies as st

from scheduler_adapter.specs import Shared
from scheduler_adapter.symbolic import compile_rule
from taskdb.rules import Rule
from tests.support.arrays import (
    PROGRAMS,
    Step,
    Stored,
    add_block_id,
    add_block_info,
    all_tasks,
    check,
    compiled,
    contracted,
    expression,
    parts,
    run_program,
    whole,
)


@given(PROGRAMS, st.booleans(), st.booleans(), st.integers(1, 3))
@settings(max_examples=30, deadline=None)
def test_the_rule_is_what_dask_makes(program: list[Step], compute: bool, optimize: bool, outputs: int) -> None:
    arrays = run_program(program)
    note(f"{program}")
    expr = expression(*arrays[-outputs:], compute=compute, optimize_graph=optimize)
    found = check(expr)
    if found is None:
        event("not a rule")
    else:
        event(f"{len(found.rule.layers)} layers, {'some' if len(found.rest.dsk) > 1 else 'no'} rest")


# ------------------------------------------------------------------------------------------------------- what must be a rule


def ones(*shape: int) -> Any:
    return da.ones(shape, chunks=1)


def twice(x: Any) -> Any:
    return x * 2


RULES = {
    "elementwise": (lambda: da.where(ones(2, 3) > 0, ones(2, 3) + ones(3), 1.5), 1),
    "annotated": (lambda: annotated(ones(3), priority=3), 1),
    "block ids": (lambda: ones(2, 3).map_blocks(add_block_id, dtype=float), 1),
    "block info along one axis": (lambda: ones(3).map_blocks(add_block_info, dtype=float), 1),
    "chunks of several sizes": (lambda: da.full((6, 4), 2.0, chunks=((1, 2, 3), (2, 2))).map_blocks(twice), 1),
    "one block": (lambda: ones(1, 1) + 1, 1),
    "no axis": (lambda: da.ones(()) + 1, 1),
    "slices of what is stored": (lambda: da.from_array(Stored(5, 4), chunks=(2, 3), inline_array=True) + 1, 1),
    "a task all depend on": (lambda: da.from_array(Stored(5, 4), chunks=(2, 3)) + 1, 2),
    "written down along one axis": (lambda: contracted([(da.arange(4, chunks=1), "i"), (ones(4, 3), "ij")], "j", None), 3),
    "a cube": (lambda: whole(3), 4),
    "a product": (lambda: contracted([(ones(2, 3), "ij"), (ones(3, 4) + 1, "jk")], "ik", True), 3),
    "transposed": (lambda: ones(3, 3) + da.full((3, 3), 2.0, chunks=1).T, 1),
    "transposed as wanted": (lambda: contracted([(ones(2, 3), "ij")], "ji", None), 1),
    "tensordot": (lambda: da.tensordot(ones(2, 3), ones(3, 2) + 1, 1), 2),
    "new axes": (lambda: contracted([(ones(2), "i")], "zi", None, {"z": (1, 1)}), 1),
    "broadcast contraction": (lambda: contracted([(ones(1, 2), "ij"), (ones(3, 2) + 1, "ij")], "j", False), 3),
    "broadcast contraction, concatenated": (lambda: contracted([(ones(1, 2), "ij"), (ones(3, 2) + 1, "ij")], "j", True), 3),
    "used twice": (lambda: contracted([(x := ones(3), "i"), (contracted([(x, "i")], "", True), "")], "i", None), 3),
    "a reduction": (lambda: (ones(9, 3) + 1).sum(axis=0, split_every=2), 5),
    "a reduction of all axes": (lambda: (ones(5, 7) + 1).mean(split_every={0: 2, 1: 3}), 4),
    "a reduction that keeps axes": (lambda: (ones(5, 1, 7) + 1).std(axis=(1, 2), keepdims=True, split_every=4), 4),
    "a difference from a mean": (lambda: (x := ones(6, 5) + 1) - x.mean(axis=0, split_every=2), 6),
    "a reduction of what was reduced": (lambda: (ones(9, 8) + 1).sum(axis=0, split_every=2).max(split_every=2), 8),
    "a reduction of what is written down": (lambda: da.arange(9, chunks=1).sum(split_every=2), 5),
    "a reduction of what was contracted": (lambda: contracted([(ones(4, 3), "ij")], "i", None).sum(split_every=2), 4),
    "one block a task": (lambda: (ones(3, 1) + 1).sum(axis=1), 1),
    "roots of one layer": (lambda: da.arange(4, chunks=1) + da.arange(1, 5, chunks=1) + ones(4), 1),
    "roots of one layer, and one that is repeated": (lambda: da.arange(4, chunks=1) + da.arange(1, chunks=1) + ones(4), 3),
    "as many tasks, of other blocks": (lambda: contracted([(da.arange(2, chunks=1), "i")], "z", None, {"z": (1, 1)}), 2),
    "a part of something": (lambda: contracted([(whole(3)[None] + ones(2), "i")], "", None) + (ones(4) + 1)[:2].sum(), 4),
}


def annotated(x: Any, **annotations: Any) -> Any:
    with dask.annotate(**annotations):
        return x.map_blocks(twice)


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("compute", [True, False])
def test_is_a_rule(name: str, compute: bool) -> None:
    make, layers = RULES[name]
    found = check(expression(make(), compute=compute))
    assert found is not None
    assert len(found.rule.layers) == layers
    assert Rule.read(found.rule.write()).layers


def made_of(found: Any) -> dict[str, int]:
    """Of how many tasks each task is made, by the name of its key without the token."""
    tasks = {**all_tasks(found.rule), **found.rest.dsk}
    return {(key if isinstance(key, str) else key[0]).rsplit("-", 1)[0]: len(parts(task)) for key, task in tasks.items()}


def test_a_task_takes_in_the_one_it_depends_on() -> None:
    found = check(expression(da.arange(100, chunks=1).sum()))
    assert found is not None
    assert made_of(found) == {"sum": 2, "sum-partial": 1, "sum-aggregate": 1, "finalize-hlgfinalizecompute": 1}
    assert found.rule.counts == (100, 25, 7, 2)[: len(found.rule.counts) - 1] + (1,)


def test_what_is_wanted_or_used_or_annotated_is_not_taken_in() -> None:
    x = da.arange(5, chunks=1)
    total = contracted([(x, "i")], "", None)
    for others, number in (([], 2), ([x], 1), ([contracted([(x, "i")], "", True)], 1)):
        y = contracted([(x.map_blocks(twice) if not others else x, "i")], "i", None) + 1
        found = check(expression(contracted([(y, "i")], "", None), *others, compute=False))
        assert found is not None
        assert made_of(found)["add"] == number
    found = check(expression(contracted([(annotated(x, retries=2), "i")], "", None), total))
    assert found is not None
    assert set(made_of(found).values()) == {1}


def test_fusion_is_switched_off() -> None:
    x = da.arange(5, chunks=1)
    with dask.config.set({"optimization.fuse.active": False}):
        found = check(expression(x.sum(split_every=2), ones(3, 3)[:2]))
    assert found is not None
    assert set(made_of(found).values()) == {1}


class Watched(Stored):
    """What is read of any of them is told."""

    read: ClassVar[list[Any]] = []

    def __getitem__(self, item: Any) -> Any:
        self.read.append(item)
        return super().__getitem__(item)


SLICES = {
    "twice": lambda x: x[5:][2:6],
    "twice, in other axes": lambda x: x[3:, 1:][1:9, 2],
    "all blocks": lambda x: x[:, 3],
    "all blocks, backwards": lambda x: x[::-1, 2:4],
    "all blocks, some as they are": lambda x: x[2:],
    "summed": lambda x: x[:, 2:].sum(axis=0, split_every=2),
    "of two kinds": lambda x: da.concatenate([x[3:7], x[12:, :]]),
}


@pytest.mark.parametrize("name", SLICES)
def test_slices_read_what_they_need(name: str) -> None:
    """Of a layer in the rest too, and of one of which all blocks are needed."""
    expr = expression(SLICES[name](da.from_array(Watched(20, 6), chunks=(5, 6))), ones(3) + 1)
    keys = list(flatten(expr.__dask_keys__()))
    found = compiled(expr)
    assert found is not None
    reads = []
    for graph in (dict(expr.__dask_graph__()), {**all_tasks(found.rule), **found.rest.dsk}):
        Watched.read.clear()
        dask.get(graph, keys)
        reads.append(sorted(map(str, Watched.read)))
    assert reads[0] == reads[1]
    assert check(expr) is not None


def test_several_collections_are_one_rule() -> None:
    x = ones(3, 4) + 1
    found = check(expression(x, contracted([(x, "ij")], "i", None), ones(5) * 2))
    assert found is not None
    assert len(found.rule.layers) == 3
    assert len(found.outputs) == 3 * 4 + 3 + 5
    assert len(found.groups) == 3


def test_axes_are_met_from_the_outputs() -> None:
    """The order is depth first: after each row its sum comes."""
    found = compiled(expression(whole(3)))
    assert found is not None
    order = [layer for layer, _ in found.rule.emit([0] * 4, found.rule.tasks)]
    assert order == (([0] * 3 + [1]) * 3 + [2]) * 3 + [3]


def test_a_tree_is_climbed_as_it_grows() -> None:
    found = compiled(expression((ones(2, 5) + 1).sum(axis=1, split_every=2)))
    assert found is not None
    assert [layer for layer, _ in found.rule.emit([0] * 4, found.rule.tasks)] == [0, 0, 1, 0, 0, 1, 2, 0, 1, 2, 3] * 2


def test_a_mean_is_taken_along_the_inner_axis() -> None:
    """A column's differences from its mean wait for that column only."""
    x = ones(4, 3) + 1
    found = compiled(expression(x - x.mean(axis=0, split_every=4)))
    assert found is not None
    order = [layer for layer, _ in found.rule.emit([0] * len(found.rule.layers), found.rule.tasks)]
    last = len(found.rule.layers) - 1
    assert order.index(last) < 2 * 4 + 2


def test_neighbours_that_are_not_are_no_step_of_a_reduction() -> None:
    x = (ones(6) + 1).sum(split_every=2, keepdims=True)
    graph = x.__dask_graph__()
    name = next(name for name in graph.layers if "partial" in name)
    mapping = graph.layers[name].mapping
    a, b = (name, 0), (name, 1)
    mapping[a], mapping[b] = mapping[b], mapping[a]
    found = check(expression(x))
    assert found is not None
    assert len(found.rule.layers) == 1
    assert {a, b} < found.rest.dsk.keys()


def test_a_layer_of_all_kinds_of_tasks() -> None:
    """What was optimised before is one layer."""
    x = (ones(6) + 1).sum(split_every=2)
    partial = next(layer for name, layer in x.__dask_graph__().layers.items() if "partial" in name)
    tasks = {**partial.mapping, **{key: task for layer in x.__dask_graph__().layers.values() for key, task in layer.items()}}
    flat = da.Array(HighLevelGraph({x.name: MaterializedLayer(tasks)}, {x.name: set()}), x.name, chunks=(), dtype=float)
    assert check(expression(flat)) is None
    found = check(expression(flat, ones(3) + 1))
    assert found is not None
    assert len([part for task in found.rest.dsk.values() for part in parts(task)]) > len(tasks) - 10


def test_a_graph_that_is_not_optimised() -> None:
    found = check(expression(ones(3) + 1 + 2, optimize_graph=False))
    assert found is not None
    assert len(found.rule.layers) == 3


def test_annotations_and_priority() -> None:
    x = contracted([(annotated(ones(3), priority=7), "i")], "", None)
    y = contracted([(annotated(ones(4), retries=2), "i")], "", None)
    found = compiled(expression(x, y), {"retries": 5, "priority": 1})
    assert found is not None
    annotations = [Shared.read(blob).annotations for blob in found.shared]
    assert sorted((each["retries"], each["priority"]) for each in annotations) == [(2, 1), (5, 1), (5, 7)]
    assert all(layer.user == -annotations[layer.shared - 1]["priority"] for layer in found.rule.layers)
    assert found.rest.global_annotations == {"retries": 5, "priority": 1}
    assert {layer.shared for layer in found.rule.layers} == {1, 2, 3}
    plain = compiled(expression(ones(3) + 1))
    assert plain is not None
    assert [layer.shared for layer in plain.rule.layers] == [0]


def test_annotations_of_the_rest() -> None:
    with dask.annotate(colour=lambda key: 4):
        x = (ones(4, 3) + 1).sum(axis=0, split_every=2)
    y = ones(3) + 1
    found = compiled(expression(x, y))
    assert found is not None
    assert set(found.rest.annotations_by_type["colour"].values()) == {4}
    assert set(found.rest.annotations_by_type["colour"]) < found.rest.dsk.keys()


# ------------------------------------------------------------------------------------------------------ what must not be one


def held(x: Any) -> Any:
    """An array whose blocks are of another graph."""
    name = "held"
    layer = {(name, i): Task((name, i), twice, TaskRef(("elsewhere", i))) for i in range(x)}
    return da.Array(HighLevelGraph({name: layer}, {name: set()}), name, chunks=((1,) * x,), dtype=float)


NOT_RULES = {
    "a sum with itself transposed": lambda: (x := ones(3, 3) + 1) + contracted([(x, "ij")], "ji", None),
    "an outer product with itself": lambda: da.outer(x := ones(3) + 1, x),
    "materialised roots": lambda: da.random.random((3, 3), chunks=1) + 1,
    "inputs of other graphs": lambda: held(3) + 1,
    "no Blockwise layer": lambda: da.arange(5, chunks=1),
    "a dataframe": lambda: __import__("dask.dataframe").dataframe.from_dict({"a": range(4)}, npartitions=2).sum(),
    "a bag": lambda: __import__("dask.bag").bag.range(4, npartitions=2).sum(),
    "delayed": lambda: dask.delayed(twice)(1),
    "an array and something delayed": lambda: dask.delayed(twice)(ones(3)),
    "annotations by key": lambda: annotated(ones(3), priority=lambda key: 3),
    "too many outputs": lambda: da.ones(3000, chunks=1) + 1,
    "values by block along two axes": lambda: ones(2, 2).map_blocks(add_block_info, dtype=float),
    "one of many dependencies": lambda: contracted([(da.ones(20_000, chunks=1), "i")], "", None),
    "a part": lambda: (ones(4) + 1)[1:3],
}


@pytest.mark.parametrize("name", NOT_RULES)
def test_is_not_a_rule(name: str) -> None:
    assert compiled(expression(NOT_RULES[name]())) is None


def test_priorities_and_annotations_by_key_are_not() -> None:
    expr = expression(ones(3) + 1)
    keys = list(flatten(expr.__dask_keys__()))
    assert compile_rule(expr, keys, None, None) is not None
    assert compile_rule(expr, keys, None, {keys[0]: 1}) is None
    assert compile_rule(expr, keys, {"priority": lambda key: 1}, None) is None


def test_blocks_that_dask_does_not_know_of() -> None:
    """A new axis of one block is fused with an argument that has more: `Blockwise.dims` is one there."""
    x = contracted([(da.arange(3, chunks=1), "i")], "iz", None, {"z": 1})
    y = x + da.from_array(Stored(3, 4), chunks=1)
    for expr in (expression(y), expression(y, da.arange(3, chunks=1).sum(split_every=2)), expression(y.sum(axis=0))):
        assert check(expr) is None


def test_another_optimisation_is_not() -> None:
    with dask.config.set(array_optimize=lambda dsk, keys, **kwargs: dsk):
        expr = expression(ones(3) + 1)
    assert compiled(expr) is None


def test_the_expression_is_left_as_it_was() -> None:
    """It is materialised if there is no rule, or if that is refused."""
    x = contracted([(ones(2), "i")], "zi", None, {"z": (1, 1)})
    expr = expression(contracted([(x, "zi")], "yi", None, {"y": (1, 1, 1)}))
    before = [(layer, dict(layer.new_axes)) for layer in expr.operands[0].hlg.layers.values() if isinstance(layer, Blockwise)]
    assert compiled(expr) is not None
    assert all(layer.new_axes == axes for layer, axes in before)


# -------------------------------------------------------------------------------------------------------------------- cost


def test_a_billion_tasks_are_not_made(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any) -> None:
        raise AssertionError("a layer was expanded")

    for name in ("_dict", "get_output_keys", "__iter__", "__getitem__", "_cull", "_cull_dependencies"):
        monkeypatch.setattr(Blockwise, name, property(refuse) if name == "_dict" else refuse)
    found = compiled(expression(whole(1000)))
    assert found is not None
    assert found.rule.tasks == 1000**3 + 1000**2 + 1000 + 1
    assert len(found.outputs) == len(found.rest.dsk) == 1
    assert len(found.rule.write()) < 20_000


def test_a_spec_is_read_without_any_of_ours() -> None:
    found = compiled(expression(contracted([(da.ones((4, 3), chunks=1).map_blocks(lambda b: b + 1, dtype=float), "ij")], "i", True)))
    assert found is not None
    spec = pickle_without_tests(found.rule, 0)
    code = f"""
import pickle, sys
for name in ("scheduler_adapter", "taskdb", "tests"):
    sys.modules[name] = None
task = pickle.loads({spec!r})
assert task.key[1:] == (2, 1), task
print(task().sum())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False, cwd="/")
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) == 2


def pickle_without_tests(rule: Rule, layer: int) -> bytes:
    axes = rule.layers[layer].axes
    spec = rule.spec(layer, rule.element(layer, dict(zip(axes, (2, 1), strict=True))))
    assert b"scheduler_adapter.r" not in spec
    assert b"taskdb" not in spec
    return spec
