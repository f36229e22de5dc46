"""Layers of Dask's graphs of which the tasks follow from indices: Blockwise ones, steps of tree reductions, and a few tasks written down.

The private names of Dask that layers are made of are in this module and in symbolic.py, at the top.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from math import prod
from typing import Any

from dask._expr import _AnnotationsTombstone
from dask._task_spec import DataNode, GraphNode, Task, TaskRef
from dask.blockwise import BlockIndex, Blockwise, BlockwiseDep, blockwise_token
from dask.layers import ArrayBlockIdDep, ArrayChunkShapeDep, ArraySliceDep
from dask.typing import Key

#: Values or tasks in one table that are pickled one by one.
TABLE_PICKLES_MAX = 20_000
#: Values that are told by each index of a block by itself.
BY_INDICES = (BlockIndex, ArrayBlockIdDep, ArrayChunkShapeDep, ArraySliceDep)


class NotARule(Exception):
    """A graph, or a layer, cannot be had as part of a rule."""


@dataclass
class Argument:
    """An argument that differs from task to task: a block of a layer, a list of such blocks, or a value."""

    #: What stands for it in the template.
    token: str
    #: The name of a layer, or where values come from.
    source: str | BlockwiseDep
    #: Letter and number of blocks of each index of the source. A number of 1: that block is used for all.
    letters: tuple[Any, ...]
    shape: tuple[int, ...]
    #: Indices of the source that make a list, outermost first; None: a list of one.
    lists: Sequence[int | None] = ()
    #: Own letters that stand for several blocks of the source, in row: how many.
    ratios: dict[Any, int] = field(default_factory=dict)


@dataclass
class Plan:
    """A layer that may be one of the rule.

    Its tasks have keys (name, index for each letter); a single task may have its name as key.
    """

    name: str
    #: Letters of its key, in order.
    letters: tuple[Any, ...]
    #: Blocks along each letter, of its key or of an argument.
    sizes: Mapping[Any, int]
    annotations: dict[str, Any]
    data_producer: bool
    single: bool = False
    #: The tasks, if they are written down, in the order of their indices.
    tasks: list[GraphNode] = field(default_factory=list)
    #: Otherwise: the task with constant arguments in place, other arguments, and tasks that all of its tasks depend on.
    template: GraphNode | None = None
    args: list[Argument] = field(default_factory=list)
    constants: frozenset[Key] = frozenset()
    #: Whether lists of blocks are concatenated to one.
    concatenate: bool = False

    @property
    def blocks(self) -> Iterator[Argument]:
        return (arg for arg in self.args if isinstance(arg.source, str))

    @property
    def deps(self) -> Iterator[Any]:
        yield from (arg.source for arg in self.blocks)
        yield from self.constants

    @property
    def contracted(self) -> dict[Any, None]:
        """Letters of arguments that its own keys do not have."""
        return dict.fromkeys(letter for arg in self.args for letter in arg.letters if letter not in self.letters)

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.sizes[letter] for letter in self.letters)

    def is_one_to_one(self, other: Plan) -> bool:
        """Whether each task depends on one task of another layer, and each on another one."""
        if prod(self.shape) != prod(other.shape):
            return False
        for arg in self.blocks:
            if arg.source == other.name:
                pairs = zip(arg.letters, other.letters, strict=True)
                if arg.ratios or any(other.sizes[there] > 1 and here not in self.letters for here, there in pairs):
                    return False
        return True

    def has(self, key: Any) -> bool:
        """Whether a key is of one of its tasks, for keys that are its name or begin with it."""
        return key == self.name if self.single else is_block(key, self.shape)


def name_of(key: Any) -> str | None:
    """The layer's name, of a key of a block."""
    return key[0] if type(key) is tuple and key and type(key[0]) is str else None


def is_block(key: Any, shape: tuple[int, ...]) -> bool:
    return (
        type(key) is tuple and len(key) == len(shape) + 1 and all(isinstance(i, int) and 0 <= i < size for i, size in zip(key[1:], shape))
    )


def is_as_said(layer: Blockwise) -> bool:
    """Whether its blocks are those of `dims`. Dask gets this wrong if a new axis of one block was fused with an argument that has more."""
    used = [(arg, letters) for arg, letters in layer.indices if letters is not None]
    return all(size <= layer.dims[letter] for arg, letters in used for letter, size in zip(letters, layer.numblocks[arg], strict=True))


def blockwise_plan(layer: Blockwise, annotations: dict[str, Any]) -> Plan:
    """Raises NotARule if its tasks are not all alike. Whether what it depends on can be in the rule is another matter."""
    name, task, own, sizes = layer.output, layer.task, layer.output_indices, layer.dims
    if type(name) is not str or type(layer)._dict is not Blockwise._dict or type(task).substitute is not Task.substitute:
        raise NotARule(f"layer {name} is of another kind")
    if not any(layer.concatenate is known for known in (None, False, True)) or len(set(own)) != len(own):
        raise NotARule(f"layer {name} has unknown options")
    if min(sizes.values(), default=1) < 1 or (layer.output_blocks and len(layer.output_blocks) != prod(sizes[i] for i in own)):
        raise NotARule(f"layer {name} does not have all its blocks")
    template = task
    args: list[Argument] = []
    for number, (arg, letters) in enumerate(layer.indices):
        token = blockwise_token(number)
        if token not in task.dependencies:
            continue
        if letters is not None and len(set(letters)) != len(letters):
            raise NotARule(f"layer {name} takes a diagonal")
        if letters is None:
            template = template.substitute({token: arg if isinstance(arg, (GraphNode, TaskRef)) else DataNode(None, arg)})
        elif arg not in layer.io_deps:
            lists = [i for i, letter in enumerate(letters) if letter not in own]
            args.append(Argument(token, arg, letters, tuple(layer.numblocks[arg]), lists))
        elif set(letters) <= set(own) and _is_expressible(layer.io_deps[arg]):
            args.append(Argument(token, layer.io_deps[arg], letters, tuple(layer.io_deps[arg].numblocks)))
        else:
            raise NotARule(f"layer {name} has values by block")
    constants = template.dependencies - {arg.token for arg in args}
    annotations = merged_annotations(name, annotations, layer.annotations)
    return Plan(
        name,
        own,
        sizes,
        annotations,
        task.data_producer,
        template=template,
        args=args,
        constants=constants,
        concatenate=layer.concatenate is True,
    )


def _is_expressible(dep: BlockwiseDep) -> bool:
    """Whether its values are told by the indices each by itself, or are few and told by one of them."""
    return type(dep) in BY_INDICES or (prod(dep.numblocks) <= TABLE_PICKLES_MAX and sum(size > 1 for size in dep.numblocks) <= 1)


def reduction_plan(mapping: Mapping[Key, Any], plans: Mapping[Any, Plan], annotations: dict[str, Any]) -> Plan:
    """A step of a tree reduction (dask.array.reductions): each task has the same function, and lists of neighbouring blocks of one layer.

    `plans`: of the layers there are. Raises NotARule if it is not such a step. Takes some 10 µs a task: they have been told one by one.
    """
    key, task = next(iter(mapping.items()))
    source = plans.get(reduced(mapping))
    lengths = []
    first: Any = task[1] if source is not None else None
    last = first
    while type(first) is list and first:
        lengths.append(len(first))
        first, last = first[0], last[-1]
    if source is None or source.single or not name_of(key) or any(key[1:]) or not source.has(first) or not source.has(last):
        raise NotARule(f"{key} is no step of a reduction")
    # From the task that is first along all axes.
    shape = source.shape
    groups = [b - a + 1 for a, b in zip(first[1:], last[1:])]
    listed = iter([i for i, group in enumerate(groups) if group > 1])
    levels = [next(listed, None) if length > 1 else None for length in lengths]
    dropped = len(groups) + 1 - len(key)
    whole = [i for i, (group, size) in enumerate(zip(groups, shape)) if group == size]
    # Indices that the result does not have are of axes that became one block; which of those that had one is of no account.
    gone = set(sorted(whole, key=lambda i: groups[i] == 1)[:dropped])
    letters = [i for i in range(len(groups)) if i not in gone]
    sizes: dict[Any, int] = {}
    of_source: list[Any] = []
    ratios = {}
    for i, (group, size) in enumerate(zip(groups, shape)):
        if group == size > 1:
            # All blocks go into one.
            of_source.append(("all", i))
            sizes["all", i] = size
            sizes[i] = 1
        else:
            of_source.append(i)
            sizes[i] = -(-size // group)
            if group > 1:
                ratios[i] = group
    plan = Plan(
        key[0],
        tuple(letters),
        sizes,
        annotations,
        False,
        template=Task(key[0], task[0], TaskRef("blocks")),
        args=[Argument("blocks", source.name, tuple(of_source), shape, levels, ratios)],
    )
    if len(mapping) != prod(plan.shape):
        raise NotARule(f"{plan.name} does not have all its blocks")
    for indices in product(*map(range, plan.shape)):
        at = dict(zip(letters, indices))
        starts = [at.get(i, 0) * group for i, group in enumerate(groups)]
        blocks = _lists_of(source.name, starts, [min(a + b, size) for a, b, size in zip(starts, groups, shape)], levels)
        found = mapping.get((plan.name, *indices))
        if type(found) is not tuple or len(found) != 2 or found[0] is not task[0] or found[1] != blocks:
            raise NotARule(f"{plan.name} is no step of a reduction")
    return plan


def reduced(mapping: Mapping[Key, Any]) -> str | None:
    """Of which layer these tasks have lists of blocks, if they look like a step of a tree reduction."""
    task = next(iter(mapping.values()), None)
    first = task[1] if type(task) is tuple and len(task) == 2 and callable(task[0]) and type(task[1]) is list else None
    while type(first) is list and first:
        first = first[0]
    return name_of(first)


def _lists_of(name: str, starts: list[int], ends: list[int], levels: Sequence[int | None]) -> Any:
    """Keys of neighbouring blocks, in lists."""
    if not levels:
        return (name, *starts)
    level, *inner = levels
    if level is None:
        return [_lists_of(name, starts, ends, inner)]
    return [_lists_of(name, [*starts[:level], i, *starts[level + 1 :]], ends, inner) for i in range(starts[level], ends[level])]


def written_plan(name: str, numblocks: tuple[int, ...] | None, dsk: Mapping[Key, Any], annotations: dict[str, Any]) -> Plan:
    """Tasks that are written down; `numblocks` None: the single one that is called so.

    Raises NotARule unless all are there, depend on nothing, and differ in one index at most.
    """
    shape = numblocks or ()
    if prod(shape) > TABLE_PICKLES_MAX or sum(size > 1 for size in shape) > 1:
        raise NotARule(f"{name} has {prod(shape)} tasks")
    keys = [name] if numblocks is None else [(name, *indices) for indices in product(*map(range, shape))]
    tasks = [task for key in keys if (task := dsk.get(key)) is not None and not task.dependencies]
    if len(tasks) != len(keys) or len({task.data_producer for task in tasks}) != 1:
        raise NotARule(f"{name} has dependencies, or is of another graph")
    letters = tuple(range(len(shape)))
    sizes = dict(zip(letters, shape))
    return Plan(name, letters, sizes, annotations, tasks[0].data_producer, single=numblocks is None, tasks=tasks)


def merged_annotations(name: Any, annotations: dict[str, Any], own: Mapping[str, Any] | None) -> dict[str, Any]:
    """Raises NotARule if they differ from task to task."""
    merged = {**annotations, **{kind: value for kind, value in (own or {}).items() if value is not None}}
    if any(callable(value) or isinstance(value, _AnnotationsTombstone) for value in merged.values()):
        raise NotARule(f"{name} has annotations by key")
    return merged
