"""Arrays of all kinds, and whether rules made of their graphs are what Dask makes of them."""

from __future__ import annotations

import pickle
from collections import defaultdict
from collections.abc import Iterable
from functools import partial
from itertools import chain
from typing import Any

import dask
import dask.array as da
import numpy as np
from dask._expr import FinalizeCompute
from dask._task_spec import Alias, _execute_subgraph, convert_legacy_graph
from dask.base import collections_to_expr, tokenize
from dask.core import flatten
from hypothesis import strategies as st

from scheduler_adapter import symbolic
from scheduler_adapter.keys import pack_key, unpack_key
from scheduler_adapter.specs import pickle_spec
from scheduler_adapter.symbolic import Symbolic, compile_rule
from taskdb.model import TaskFlag
from taskdb.rules import Rule

# ------------------------------------------------------------------------------------------------------- what is done to blocks


def mix(*args: Any, ndim: int) -> Any:
    """A block of one number that tells which blocks it was made of, in which order and how nested."""

    def number(x: Any) -> float:
        if isinstance(x, list):
            return sum((i + 2) * number(item) for i, item in enumerate(x)) % 1009
        return float(np.sum(np.asarray(x) * np.arange(1, np.size(x) + 1).reshape(np.shape(x)))) % 1009

    return np.full((1,) * ndim, (sum((i + 3) * number(x) for i, x in enumerate(args)) + 1) % 1009)


def add_block_id(x: Any, block_id: Any = None) -> Any:
    return x + sum((n + 1) * i for n, i in enumerate(block_id))


def add_block_info(x: Any, block_info: Any = None) -> Any:
    return x + sum((n + 1) * i for n, i in enumerate(block_info[None]["chunk-location"]))


class Stored:
    """An array that is read in slices."""

    dtype = np.dtype(float)

    def __init__(self, *shape: int):
        self.shape = shape
        self.ndim = len(shape)

    def __getitem__(self, item: Any) -> Any:
        return np.arange(np.prod(self.shape), dtype=float).reshape(self.shape)[item]

    def __dask_tokenize__(self) -> Any:
        return "Stored", self.shape


LETTERS = "ijklmnop"


def contracted(arrays: list[tuple[Any, str]], out: str, concatenate: Any, new_axes: dict[str, Any] | None = None) -> Any:
    args = chain(*arrays)
    return da.blockwise(
        partial(mix, ndim=len(out)),
        out,
        *args,
        concatenate=concatenate,
        new_axes=new_axes,
        adjust_chunks=dict.fromkeys({i for _, ind in arrays for i in ind}, lambda size: 1),
        align_arrays=False,
        dtype=float,
        meta=np.empty((0,) * len(out)),
    )


def whole(n: int) -> Any:
    """A cube of n³ blocks, contracted to one number."""
    y = da.ones((n, n, n), chunks=1).map_blocks(lambda b: b + 1, dtype=float)
    for i, o in (("ijk", "jk"), ("jk", "k"), ("k", "")):
        y = contracted([(y, i)], o, None)
    return y


# --------------------------------------------------------------------------------------------------------------- programs

Step = tuple[str, int, int, int]


def run_step(arrays: list[Any], step: Step) -> Any:
    """One more array, made of those there are; None where the step does not apply."""
    name, p, q, r = step
    if name in ("ones", "stored", "random"):
        shape = [1 + (p + i * q) % 5 for i in range(r % 3 + 1)]
        match name:
            case "ones":
                return da.ones(shape, chunks=1)
            case "stored":
                return da.from_array(Stored(*shape), chunks=1, inline_array=bool(q % 2))
            case _:
                return da.from_array(np.arange(np.prod(shape), dtype=float).reshape(shape), chunks=1)
    if name == "uneven":
        return da.full((5, 4), p, chunks=((1, 3, 1), (2, 2)))
    if name == "arange":
        return da.arange(1 + p % 4, chunks=1, dtype=float)
    if not arrays:
        return None
    x = arrays[p % len(arrays)]
    y = arrays[q % len(arrays)]
    concatenate = (None, False, True)[r % 3]
    match name:
        case "plus":
            return x + r
        case "same":
            return x * 2 - x
        case "where":
            return da.where(x > 1, x, float(r))
        case "lambda":
            return x.map_blocks(lambda b: b * 3 + r, dtype=float)
        case "literals":
            return x.map_blocks(mix, [1, 2], {"a": r}.get("a"), ndim=x.ndim, dtype=float, chunks=tuple((1,) * n for n in x.numblocks))
        case "block_id":
            return x.map_blocks(add_block_id, dtype=float)
        case "block_info":
            return x.map_blocks(add_block_info, dtype=float)
        case "delayed":
            return x.map_blocks(np.add, dask.delayed(np.float64)(r), dtype=float, meta=np.empty((0,) * x.ndim))
        case "add" if all(a == b or 1 in (a, b) for a, b in zip(x.shape[::-1], y.shape[::-1], strict=False)):
            return x + y
        case "transpose" if x.ndim == y.ndim and all(a == b or 1 in (a, b) for a, b in zip(x.shape, y.shape[::-1], strict=True)):
            return x + y.T
        case "outer" if x.ndim + y.ndim <= 4:
            return contracted([(x, LETTERS[: x.ndim]), (y, LETTERS[x.ndim : x.ndim + y.ndim])], LETTERS[: x.ndim + y.ndim], None)
        case "contract" if x.ndim:
            letters = LETTERS[: x.ndim]
            return contracted([(x, letters)], letters.replace(letters[q % x.ndim], ""), concatenate)
        case "contract_all":
            return contracted([(x, LETTERS[: x.ndim])], "", concatenate)
        case "dot" if x.ndim == y.ndim == 2 and (x.numblocks[1] == y.numblocks[0] or 1 in (x.numblocks[1], y.numblocks[0])):
            return contracted([(x, "ij"), (y, "jk")], ("ik", "ki", "i")[p % 3], concatenate)
        case "new_axes" if x.ndim < 3:
            letters = LETTERS[: x.ndim]
            return contracted([(x, letters)], (letters + "z", "z" + letters)[p % 2], None, {"z": ((1, 1, 1), 1)[q % 2]})
        case "tensordot" if x.ndim == y.ndim == 2 and x.chunks[1] == y.chunks[0]:
            return da.tensordot(x, y, 1)
        case "sum" if x.ndim:
            return x.sum(axis=q % x.ndim, split_every=2 + r % 3, keepdims=q > 4)
        case "mean" if x.ndim:
            return (da.mean, da.std, da.max)[q % 3](x, split_every={i: 2 + (r + i) % 3 for i in range(x.ndim)}, keepdims=q > 4)
        case "anomaly" if x.ndim:
            return x - x.mean(axis=q % x.ndim, split_every=2 + r % 3, keepdims=True)
        case "slice" if x.ndim:
            return x[: 1 + r % 3]
        case "annotate":
            with dask.annotate(priority=r, retries=2):
                return x.map_blocks(np.negative, dtype=float)
    return None


def run_program(program: Iterable[Step]) -> list[Any]:
    arrays: list[Any] = []
    for step in program:
        made = run_step(arrays, step)
        if made is not None and made.npartitions <= 125:
            arrays.append(made)
    return arrays


ROOTS = ["ones", "stored", "random", "uneven", "arange"]
SIMPLE = ["plus", "same", "where", "lambda", "literals", "block_id", "block_info", "delayed", "annotate"]
SHAPED = ["add", "transpose", "outer", "contract", "contract_all", "dot", "new_axes", "tensordot", "sum", "sum", "mean", "anomaly", "slice"]
NUMBERS = st.integers(0, 8)


def steps(names: list[str]) -> st.SearchStrategy[Step]:
    return st.tuples(st.sampled_from(names), NUMBERS, NUMBERS, NUMBERS)


PROGRAMS = st.builds(
    lambda first, more: [first, *more],
    steps(["ones", "ones", "stored", "uneven"]),
    st.lists(st.one_of(steps(SHAPED), steps(SHAPED), steps(SIMPLE), steps(ROOTS)), max_size=8),
)

# ---------------------------------------------------------------------------------------------------------------- checks


def expression(*arrays: Any, compute: bool = True, optimize_graph: bool = True) -> Any:
    expr = collections_to_expr(list(arrays), optimize_graph=optimize_graph)
    return (FinalizeCompute(expr) if compute else expr).optimize()


def compiled(expr: Any, annotations: dict[str, Any] | None = None) -> Symbolic | None:
    return compile_rule(expr, list(flatten(expr.__dask_keys__())), annotations, None)


def all_tasks(rule: Rule) -> dict[Any, Any]:
    """What the database makes of a rule."""
    tasks = {}
    for layer, element in rule.emit([0] * len(rule.layers), rule.tasks):
        indices = rule.indices(layer, element)
        key = unpack_key(rule.key(layer, indices))
        task = tasks[key] = pickle.loads(rule.spec(layer, element))
        assert task.key == key
        assert pack_key(key) == rule.key(layer, indices)
        deps = [unpack_key(rule.key(dep, at)) for dep, at in rule.deps(layer, indices)]
        assert sorted(deps, key=str) == sorted(task.dependencies, key=str)
        assert tasks.keys() >= set(deps), "dependencies come first"
        assert bool(rule.layers[layer].flags & TaskFlag.DATA_PRODUCER) == task.data_producer
    assert len(tasks) == rule.tasks
    return tasks


def parts(task: Any) -> list[Any]:
    """The tasks that one is made of, if layers were put into one."""
    inner = task.args[0] if getattr(task, "func", None) is _execute_subgraph else {}
    return list(inner.values()) if task.key in inner else [task]


def check_as_dask(expr: Any, tasks: dict[Any, Any]) -> None:
    """The rule's tasks are those that Dask makes of the same layers."""
    layers = symbolic._layers_of(expr)
    known = dict(chain.from_iterable(layer.items() for layer in layers.values()))
    stock = convert_legacy_graph(known)
    for whole in tasks.values():
        for task in parts(whole):
            key = task.key
            assert task.dependencies == stock[key].dependencies
            assert task.data_producer == stock[key].data_producer
            # A step of a reduction has lists of another type.
            if type(known[key]) is not tuple:
                assert type(task) is type(stock[key])
                assert tokenize(task) == tokenize(pickle.loads(pickle_spec(stock[key])))
        assert whole.data_producer == any(task.data_producer for task in parts(whole))


def optimised(expr: Any) -> dict[Any, Any]:
    """The graph as Dask optimises it, but for the aliases that fusion makes: a fused task has the key of its last one."""
    graph = convert_legacy_graph(expr.__dask_graph__())
    for alias in [task for task in graph.values() if isinstance(task, Alias)]:
        fused = graph.get(alias.target)
        if getattr(fused, "func", None) is _execute_subgraph and fused.args[1] == alias.key:
            del graph[alias.target]
            graph[alias.key] = fused.substitute({}, key=alias.key)
    return dict(graph)


def check_fused(expr: Any, tasks: dict[Any, Any], found: Symbolic) -> None:
    """As few tasks as Dask makes, but where Dask fuses some tasks of a layer only, or such as are not in the rule, or ones of different
    annotations. The same dependencies where it fuses the same."""
    stock = optimised(expr)
    counts: dict[Any, set[int]] = defaultdict(set)
    for key, task in tasks.items():
        counts[key[0]].add(len(task.dependencies))
    # The last task of a step of a reduction may have one block only.
    some = sum(len(task.dependencies) == 1 and len(counts[key[0]]) > 1 for key, task in tasks.items())
    some += sum(found.rule.counts[layer] for layer in {layer for layer, _ in found.outputs})
    if not found.shared and not found.rest.annotations_by_type:
        assert len(tasks) <= len(stock) + some
    for key, task in tasks.items():
        if key in stock and {part.key for part in parts(task)} == {part.key for part in parts(stock[key])}:
            assert task.dependencies == stock[key].dependencies
            assert task.data_producer == stock[key].data_producer


def check_places(found: Symbolic) -> None:
    """Outputs and the rest are in order, and a task of the rest comes right after what it needs."""
    rule, rest = found.rule, found.rest
    numbers = [rule.number(*output) for output in found.outputs]
    assert numbers == sorted(set(numbers))
    assert rest.external[: len(numbers)] == found.output_keys
    places: dict[Any, float] = dict(zip(found.output_keys, numbers, strict=True))
    for key, task in rest.dsk.items():
        assert key not in places
        needed = [places[dep] for dep in task.dependencies if dep in places]
        assert all(rest.order[key] > place for place in needed)
        assert rest.order[key] < max(map(int, needed), default=0) + 1
        places[key] = rest.order[key]


def check(expr: Any) -> Symbolic | None:
    found = compiled(expr)
    if found is None:
        return None
    tasks = all_tasks(found.rule)
    assert not tasks.keys() & found.rest.dsk.keys()
    check_as_dask(expr, tasks)
    check_fused(expr, {**tasks, **found.rest.dsk}, found)
    check_places(found)
    for output, key in zip(found.outputs, found.output_keys, strict=True):
        assert unpack_key(found.rule.key(output[0], found.rule.indices(*output))) == key
    keys = list(flatten(expr.__dask_keys__()))
    ours = dask.get({**tasks, **found.rest.dsk}, keys)
    theirs = dask.get(dict(expr.__dask_graph__()), keys)
    for key, a, b in zip(keys, ours, theirs, strict=True):
        np.testing.assert_array_equal(a, b, err_msg=str(key))
    needed = {dep for task in found.rest.dsk.values() for dep in task.dependencies}
    assert set(found.output_keys) == tasks.keys() & (set(keys) | needed)
    return found
