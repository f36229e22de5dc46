"""Pickles put together from pieces, so that what differs from one spec to the next is a number in a fixed place.

The pieces are those of a recipe (taskdb.rules): they join to a pickle that takes `pickle.loads` and Dask to read, nothing of ours.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Hashable, Iterable, Sequence
from itertools import pairwise
from struct import pack
from typing import Any

from dask._task_spec import DataNode, GraphNode, parse_input
from dask.blockwise import BlockIndex, BlockwiseDep
from dask.layers import ArrayBlockIdDep, ArrayChunkShapeDep, ArraySliceDep

from scheduler_adapter.axes import Axes
from scheduler_adapter.layers import Argument, NotARule, Plan
from scheduler_adapter.specs import pickle_spec
from taskdb.rules import FIXED, LOOP, TABLE

#: Bytes of all tables of a rule.
TABLES_BYTES_MAX = 64 * 2**20
_SPECS = "dask._task_spec"
# Protocol 4: the first in which a name may have dots.
_BEGIN = pickle.PROTO + b"\x04"
_ZERO = pickle.BININT1 + b"\x00"
#: Values whose pickle refers to nothing before it.
_ATOMS = (int, bool, float, type(None))

#: A list of pieces.
Pieces = list[Any]


class Pickle:
    """One recipe. What is needed more than once is told at the beginning of the pickle, and referred to.

    Methods return pieces that put one more object on the stack of whoever reads the pickle.
    """

    def __init__(self) -> None:
        self._told: dict[bytes, bytes] = {}

    def _once(self, piece: bytes) -> bytes:
        reference = self._told.get(piece)
        if reference is None:
            reference = self._told[piece] = pickle.LONG_BINGET + pack("<I", len(self._told))
        return reference

    def text(self, value: str) -> Pieces:
        return [self._once(_text(value))]

    def name(self, module: str, name: str) -> Pieces:
        """Something to import."""
        return [self._once(_text(module) + _text(name) + pickle.STACK_GLOBAL)]

    def call(self, module: str, name: str, *args: Pieces) -> Pieces:
        return [*self.name(module, name), *tuple_of(args), pickle.REDUCE]

    def loaded(self, pickled: bytes) -> Pieces:
        """What these bytes are a pickle of."""
        return self.call("pickle", "loads", [pickle.BINBYTES + pack("<I", len(pickled)) + pickled])

    def value(self, value: Any) -> Pieces:
        if type(value) in _ATOMS:
            # Protocol 3 has no frames: between the opcode for the protocol and that for the end there is only the value.
            return [pickle.dumps(value, 3)[2:-1]]
        return self.loaded(pickle_spec(value))

    def key(self, name: str, indices: Iterable[Pieces]) -> Pieces:
        return tuple_of([self.text(name), *indices])

    def finish(self, pieces: Pieces) -> Pieces:
        """The recipe of a pickle of the one object that these pieces make."""
        told = [piece + pickle.LONG_BINPUT + reference[1:] + pickle.POP for piece, reference in self._told.items()]
        return _joined([_BEGIN, *told, *pieces, pickle.STOP])


def index(axis: int) -> Pieces:
    """The index on an axis, 0 if FIXED."""
    return [_ZERO] if axis == FIXED else [pickle.BININT, axis]


def tuple_of(items: Iterable[Pieces]) -> Pieces:
    return [pickle.MARK, *(piece for item in items for piece in item), pickle.TUPLE]


def list_of(items: Iterable[Pieces]) -> Pieces:
    return [pickle.MARK, *(piece for item in items for piece in item), pickle.LIST]


def dict_of(items: Iterable[Pieces]) -> Pieces:
    """Of keys and values by turns."""
    return [pickle.MARK, *(piece for item in items for piece in item), pickle.DICT]


def loop(axis: int, factor: int, pieces: Pieces) -> Pieces:
    """Objects, not one: these pieces for each index on the axis, at that factor."""
    return [[LOOP, axis, factor, pieces]]


def _text(value: str) -> bytes:
    data = value.encode()
    return pickle.BINUNICODE + pack("<I", len(data)) + data


def _joined(recipe: Pieces) -> Pieces:
    """Neighbouring bytes as one."""
    joined: Pieces = []
    for item in recipe:
        if isinstance(item, list) and item[0] == LOOP:
            item = [LOOP, item[1], item[2], _joined(item[3])]
        if isinstance(item, bytes) and joined and isinstance(joined[-1], bytes):
            joined[-1] += item
        else:
            joined.append(item)
    return joined


class Recipes:
    """Recipes of layers. Raises NotARule where a task depends on its indices in another way than a recipe can say."""

    def __init__(self, axes: Axes):
        self._axes = axes
        self._tables_bytes = 0

    def of(self, plans: Sequence[Plan]) -> Pieces:
        """Of layers whose tasks are put into one, each into that of the last."""
        if len(plans) == 1 and plans[0].template is None:
            return self._written(plans[0], pickle_spec)
        out = Pickle()
        tasks = [self._task(out, plan) for plan in plans]
        return out.finish(tasks[0] if len(tasks) == 1 else out.call(_SPECS, "GraphNode.fuse", *tasks))

    def _task(self, out: Pickle, plan: Plan) -> Pieces:
        if plan.template is None:
            return self._written(plan, lambda task: b"".join(out.loaded(pickle_spec(task))))
        return self._substituted(out, plan, plan.template)

    def _written(self, plan: Plan, piece_of: Callable[[GraphNode], bytes]) -> Pieces:
        axis = max((self._axes.of(plan, letter) for letter in plan.letters), default=FIXED)
        return self._table(axis, range(len(plan.tasks)), lambda i: [piece_of(plan.tasks[i])])

    def _substituted(self, out: Pickle, plan: Plan, template: GraphNode) -> Pieces:
        """What `dask.blockwise._make_blockwise_graph` makes of a block: the template with its arguments put in."""
        arguments: list[Pieces] = []
        for arg in plan.args:
            if isinstance(arg.source, str):
                value = self._blocks(out, plan, arg)
                if arg.lists and plan.concatenate:
                    function = out.name("dask.array.core", "concatenate_axes")
                    value = out.call(_SPECS, "Task", out.text(arg.token), function, value, list_of(map(out.value, arg.lists)))
            else:
                value = self._by_block(out, arg.source, self._of_argument(plan, arg))
            arguments += [out.text(arg.token), value]
        key = out.key(plan.name, [index(self._axes.of(plan, letter)) for letter in plan.letters])
        return out.call(_SPECS, "Task.substitute", out.loaded(pickle_spec(template)), dict_of(arguments), key)

    def _of_argument(self, plan: Plan, arg: Argument) -> list[int]:
        """Axes of an argument's indices. Where it has one block only, that is used for all."""
        return [FIXED if size == 1 else self._axes.of(plan, letter) for letter, size in zip(arg.letters, arg.shape, strict=True)]

    def _blocks(self, out: Pickle, plan: Plan, arg: Argument) -> Pieces:
        """The key of a block; or lists of references to blocks, one in another."""
        value = out.key(str(arg.source), map(index, self._of_argument(plan, arg)))
        if not arg.lists:
            return value
        value = out.call(_SPECS, "TaskRef", value)
        for level in reversed(arg.lists):
            # Dask repeats the one block that is used for all, unless the list is to be concatenated.
            if level is not None and not (arg.shape[level] == 1 and plan.concatenate):
                letter = arg.letters[level]
                if (axis := self._axes.of(plan, letter)) != FIXED:
                    value = loop(axis, self._axes.factor(plan, letter) // arg.ratios.get(letter, 1), value)
            value = out.call(_SPECS, "List", value)
        return value

    def _by_block(self, out: Pickle, dep: BlockwiseDep, axes: list[int]) -> Pieces:
        """A value that is told by the block's indices."""
        kind = type(dep)
        if kind in (BlockIndex, ArrayBlockIdDep):
            items = [index(axis) for axis in axes]
        elif kind is ArrayChunkShapeDep:
            items = [self._table(axis, chunks, out.value) for axis, chunks in zip(axes, dep.chunks, strict=True)]
        elif kind is ArraySliceDep:
            items = [
                self._table(axis, pairwise(starts), lambda ends: out.call("builtins", "slice", *map(out.value, ends), out.value(None)))
                for axis, starts in zip(axes, dep.starts, strict=True)
            ]
        else:
            return self._values(out, dep, axes)
        return out.call(_SPECS, "DataNode", out.value(None), tuple_of(items))

    def _values(self, out: Pickle, dep: BlockwiseDep, axes: list[int]) -> Pieces:
        """A value of any kind that is told by one index at most."""
        along = max(axes, default=FIXED)

        def value(i: int) -> Pieces:
            indices = tuple(0 if axis == FIXED else i for axis in axes)
            node = parse_input(dep.get(indices, indices))
            node = node if isinstance(node, GraphNode) else DataNode(None, node)
            if node.dependencies:
                raise NotARule(f"values of type {type(dep).__name__} have dependencies")
            return out.loaded(pickle_spec(node))

        return self._table(along, range(max(dep.numblocks, default=1)), value)

    def _table(self, axis: int, values: Iterable[Hashable], pieces_of: Callable[[Any], Pieces]) -> Pieces:
        """What an index gives, if these are the values of all indices."""
        known: dict[Hashable, bytes] = {}
        table = []
        for value in values:
            if (piece := known.get(value)) is None:
                piece = known[value] = b"".join(pieces_of(value))
            table.append(piece)
            self._tables_bytes += len(piece)
            if self._tables_bytes > TABLES_BYTES_MAX:
                raise NotARule("values of blocks are large")
        return [[TABLE, axis, table]] if axis != FIXED and any(piece != table[0] for piece in table) else table[:1]
