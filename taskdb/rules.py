"""Rules: graphs that are not written down task by task. Pure index arithmetic; knows nothing of Dask, stores or links.

A rule has *axes* (sizes, outermost loop first) and *layers*. The tasks of a layer are all combinations of indices of its own axes. A task
depends on those tasks of an earlier layer that have its index on each axis both have; on an axis that only the dependency has, on all of
them (a contraction). A layer may be coarser on an axis: by a factor of 4, its index 2 stands for the indices 8 to 11, and it depends on
those of a finer layer (a step of a tree reduction). So what a task depends on, how many depend on it, its key and its spec all follow from
its layer and its indices.

Tasks are *emitted* in one fixed order in which dependencies come first: that of a loop over all axes, outermost first, in which a task
comes as soon as all it depends on has come. It is the depth-first order from the outputs, if axes are ordered as a walk from the outputs
meets them. Since the order is a merge of one arithmetic sequence a layer, it can be taken up anywhere, and nothing is kept but a cursor
for each layer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from heapq import merge
from itertools import islice, product
from math import prod
from typing import Any

import msgpack

from taskdb.errors import InvalidRequest, LimitExceeded
from taskdb.limits import (
    COUNT_MAX,
    KEY_BYTES_MAX,
    RULE_AXES_MAX,
    RULE_DEPS_MAX,
    RULE_LAYERS_MAX,
    RULE_POSITIONS_MAX,
    SPEC_BYTES_MAX,
)

#: In the place of an axis in a key: the index is always 0.
FIXED = -1
#: First entries of lists in a recipe.
TABLE, LOOP = 0, 1

#: What a spec is made of, joined: bytes; the index on an axis (4 bytes, little-endian); [TABLE, axis, pieces]: the piece of that index;
#: [LOOP, axis, factor, recipe]: the recipe once for each index on the axis, at that factor, in order: of all indices if the axis is not the
#: layer's own, else of those that its index stands for.
Recipe = Sequence[Any]


@dataclass(frozen=True, slots=True)
class Layer:
    """Tasks that differ in their indices only."""

    #: Packed key up to its first index.
    prefix: bytes
    #: The axis of each index of the key, in the key's order, or FIXED. Axes are distinct.
    axes: tuple[int, ...]
    #: Layers it depends on, each smaller than its own number, ascending.
    deps: tuple[int, ...]
    recipe: Recipe
    #: TaskFlag bits (DATA_PRODUCER).
    flags: int = 0
    #: Rank.user.
    user: float = 0.0
    #: Blob of the submission its tasks share, as in AddTasks.
    shared: int = 0
    #: Of each index of the key: how many indices of the axis it stands for, a multiple of that of each dependency that has the axis. Empty:
    #: one each.
    factors: tuple[int, ...] = ()


class Rule:
    """Raises InvalidRequest, LimitExceeded for what is not one."""

    def __init__(self, sizes: Sequence[int], layers: Sequence[Layer]):
        self.sizes = tuple(sizes)
        self.layers = tuple(layers)
        self._check()
        #: Of each layer: its axes and their factors.
        self._factors = [dict(zip(layer.axes, layer.factors or (1,) * len(layer.axes), strict=True)) for layer in self.layers]
        for factors in self._factors:
            factors.pop(FIXED, None)
        self._check_factors()
        #: Axis numbers of a layer's tasks in the order in which their indices count, and numbers of indices on them.
        self._loops: list[tuple[int, ...]] = []
        self._shapes: list[tuple[int, ...]] = []
        #: Position in the order is `base` and, for each of the first axes of `_loops`, (factor, size, step): step times the last index that
        #: the task's own stands for.
        self._bases: list[int] = []
        self._steps: list[tuple[tuple[int, int, int], ...]] = []
        self._arrange()
        self.counts = tuple(prod(shape) for shape in self._shapes)
        self.tasks = sum(self.counts)
        if self.tasks > COUNT_MAX:
            raise LimitExceeded(f"a rule of {self.tasks} tasks, at most {COUNT_MAX}")
        #: Dependents of each task of a layer.
        self.dependents = tuple(self._fan_out(number) for number in range(len(self.layers)))
        self._check_sizes()

    def size(self, axis: int, factor: int) -> int:
        """Number of indices on an axis at a factor."""
        return -(-self.sizes[axis] // factor)

    # ------------------------------------------------------------------------------------------------------------ order

    def _arrange(self) -> None:
        """Place each layer in the loop. On an axis a task has its own index; or, if all of the axis must have come before, it is at its
        end; or, if nothing about it depends on the axis, at its beginning."""
        steps = [prod(self.sizes[axis + 1 :]) for axis in range(len(self.sizes))]
        ends: list[set[int]] = []
        for layer, factors in zip(self.layers, self._factors, strict=True):
            end: set[int] = set()
            for dep in layer.deps:
                end |= ends[dep] | (self._factors[dep].keys() - factors.keys())
            ends.append(end)
            direct = tuple(sorted(factors.keys() - end))
            loops = direct + tuple(sorted(factors.keys() & end))
            self._loops.append(loops)
            self._shapes.append(tuple(self.size(axis, factors[axis]) for axis in loops))
            self._bases.append(sum((self.sizes[axis] - 1) * steps[axis] for axis in end))
            self._steps.append(tuple((factors[axis], self.sizes[axis], steps[axis]) for axis in direct))

    def _position(self, layer: int, indices: Sequence[int]) -> int:
        position = self._bases[layer]
        for index, (factor, size, step) in zip(indices, self._steps[layer], strict=False):
            position += (index if factor == 1 else min((index + 1) * factor, size) - 1) * step
        return position

    def _sequence(self, layer: int, start: int) -> Iterator[tuple[int, int, int]]:
        """(position, layer, element) of a layer's tasks from an element on."""
        shape = self._shapes[layer]
        for element in range(start, self.counts[layer]):
            yield self._position(layer, unravel(element, shape)), layer, element

    def emit(self, cursors: Sequence[int], count: int) -> list[tuple[int, int]]:
        """The next (layer, element) in order, at most `count`, of those from these elements on (one a layer)."""
        sequences = [self._sequence(layer, cursor) for layer, cursor in enumerate(cursors) if cursor < self.counts[layer]]
        return [(layer, element) for _, layer, element in islice(merge(*sequences), count)]

    def number(self, layer: int, element: int) -> int:
        """How many tasks are emitted before this one. O(layers * log(tasks))."""
        at = (self._position(layer, unravel(element, self._shapes[layer])), layer, element)
        return sum(self._before(other, at) for other in range(len(self.layers)))

    def cursors(self, emitted: int) -> list[int]:
        """The cursors after so many tasks. O(layers * log²(tasks))."""
        low, high = 0, prod(self.sizes)
        while low < high:  # the last position before which not more than `emitted` have come
            middle = (low + high + 1) // 2
            if sum(self._before(layer, (middle, -1, -1)) for layer in range(len(self.layers))) <= emitted:
                low = middle
            else:
                high = middle - 1
        cursors = [self._before(layer, (low, -1, -1)) for layer in range(len(self.layers))]
        for layer, _ in self.emit(cursors, emitted - sum(cursors)):
            cursors[layer] += 1
        return cursors

    def _before(self, layer: int, at: tuple[int, int, int]) -> int:
        """Tasks of a layer that come before a place in the order. O(axes): the place is read as digits, one for each axis."""
        position, other, element = at
        rest = position - self._bases[layer]
        if rest < 0:
            return 0
        shape = self._shapes[layer]
        before = 0
        for number, (factor, size, step) in enumerate(self._steps[layer]):
            digit, rest = divmod(rest, step)
            if digit >= size:
                return (before + 1) * prod(shape[number:])
            index = digit // factor
            before = before * shape[number] + index
            if digit < min((index + 1) * factor, size) - 1:
                return before * prod(shape[number + 1 :])
        # Those that differ in further indices only have one position.
        same = prod(shape[len(self._steps[layer]) :])
        if rest > 0 or layer < other:
            return (before + 1) * same
        return before * same if layer > other else min(max(element, before * same), (before + 1) * same)

    # ------------------------------------------------------------------------------------------------------------ tasks

    def indices(self, layer: int, element: int) -> dict[int, int]:
        """Axis -> index of a task."""
        return dict(zip(self._loops[layer], unravel(element, self._shapes[layer]), strict=True))

    def element(self, layer: int, indices: dict[int, int]) -> int:
        """The task with these indices; others than those on its own axes are ignored."""
        element = 0
        for axis, size in zip(self._loops[layer], self._shapes[layer], strict=True):
            element = element * size + indices[axis]
        return element

    def key(self, layer: int, indices: dict[int, int]) -> bytes:
        """Packed key."""
        this = self.layers[layer]
        return this.prefix + b"".join([_packed(indices[axis] if axis >= 0 else 0) for axis in this.axes])

    def deps(self, layer: int, indices: dict[int, int]) -> Iterator[tuple[int, dict[int, int]]]:
        """(layer, indices) of what a task depends on."""
        own = self._factors[layer]
        for dep in self.layers[layer].deps:
            many = {axis: self._under(own, indices, axis, factor) for axis, factor in self._factors[dep].items() if own.get(axis) != factor}
            if not many:
                yield dep, indices
                continue
            for values in product(*many.values()):
                yield dep, {**indices, **dict(zip(many, values, strict=True))}

    def _under(self, own: dict[int, int], indices: dict[int, int], axis: int, factor: int) -> range:
        """Indices on an axis, at a factor, that a task stands for: all, if the axis is not its own."""
        size = self.size(axis, factor)
        if axis not in own:
            return range(size)
        ratio = own[axis] // factor
        return range(indices[axis] * ratio, min((indices[axis] + 1) * ratio, size))

    def dependents_of(self, layer: int, indices: dict[int, int]) -> Iterator[tuple[int, int]]:
        """(layer, element) of what depends on a task."""
        own = self._factors[layer]
        for other, this in enumerate(self.layers):
            if layer in this.deps:
                factors = self._factors[other]
                there = {axis: indices[axis] * own[axis] // factor for axis, factor in factors.items() if axis in own}
                free = [axis for axis in factors if axis not in own]
                for values in product(*(range(self.size(axis, factors[axis])) for axis in free)):
                    yield other, self.element(other, {**there, **dict(zip(free, values, strict=True))})

    def spec(self, layer: int, element: int) -> bytes:
        parts: list[bytes] = []
        self._render(self.layers[layer].recipe, self._factors[layer], self.indices(layer, element), parts)
        return b"".join(parts)

    def _render(self, recipe: Recipe, own: dict[int, int], indices: dict[int, int], parts: list[bytes]) -> None:
        for item in recipe:
            if type(item) is bytes:
                parts.append(item)
            elif type(item) is int:
                parts.append(indices[item].to_bytes(4, "little"))
            elif item[0] == TABLE:
                parts.append(item[2][indices[item[1]]])
            else:
                _, axis, factor, inner = item
                for value in self._under(own, indices, axis, factor):
                    self._render(inner, {**own, axis: factor}, {**indices, axis: value}, parts)

    def _fan_out(self, number: int) -> int:
        own = self._factors[number]
        return sum(
            prod(self.size(axis, factor) for axis, factor in self._factors[other].items() if axis not in own)
            for other, layer in enumerate(self.layers)
            if number in layer.deps
        )

    # ----------------------------------------------------------------------------------------------------------- checks

    def _check(self) -> None:
        if not 0 < len(self.layers) <= RULE_LAYERS_MAX:
            raise LimitExceeded(f"a rule of {len(self.layers)} layers, not 1 to {RULE_LAYERS_MAX}")
        if len(self.sizes) > RULE_AXES_MAX:
            raise LimitExceeded(f"a rule of {len(self.sizes)} axes, at most {RULE_AXES_MAX}")
        if any(size < 1 for size in self.sizes):
            raise InvalidRequest("an axis of a rule has no index")
        if prod(self.sizes) > RULE_POSITIONS_MAX:
            raise LimitExceeded(f"the axes of a rule span {prod(self.sizes)} positions, at most {RULE_POSITIONS_MAX}")
        axes = range(len(self.sizes))
        for number, layer in enumerate(self.layers):
            own = [axis for axis in layer.axes if axis != FIXED]
            if len(set(own)) != len(own) or any(axis not in axes for axis in own):
                raise InvalidRequest(f"layer {number} of a rule has axes {layer.axes}")
            if len(layer.factors) not in (0, len(layer.axes)) or any(factor < 1 for factor in layer.factors):
                raise InvalidRequest(f"layer {number} of a rule has factors {layer.factors}")
            if any(not 0 <= dep < number for dep in layer.deps) or list(layer.deps) != sorted(set(layer.deps)):
                raise InvalidRequest(f"layer {number} of a rule depends on layers {layer.deps}")
            if not 0 < len(layer.prefix) + 9 * len(layer.axes) <= KEY_BYTES_MAX:
                raise LimitExceeded(f"keys of layer {number} of a rule are longer than {KEY_BYTES_MAX} bytes")
            if layer.user != layer.user:
                raise InvalidRequest("a priority is a number")

    def _check_factors(self) -> None:
        for number, (layer, own) in enumerate(zip(self.layers, self._factors, strict=True)):
            for dep in layer.deps:
                if any(own[axis] % factor for axis, factor in self._factors[dep].items() if axis in own):
                    raise InvalidRequest(f"layer {number} of a rule is not as coarse as layer {dep}, which it depends on")

    def _check_sizes(self) -> None:
        for number, layer in enumerate(self.layers):
            own = self._factors[number]
            deps = sum(prod(self._most_under(own, axis, factor) for axis, factor in self._factors[dep].items()) for dep in layer.deps)
            if deps > RULE_DEPS_MAX:
                raise LimitExceeded(f"a task of layer {number} of a rule has {deps} dependencies, at most {RULE_DEPS_MAX}")
            if self.dependents[number] > COUNT_MAX:
                raise LimitExceeded(f"a task of layer {number} of a rule has {self.dependents[number]} dependents, at most {COUNT_MAX}")
            size = self._check_recipe(layer.recipe, own, number)
            if size > SPEC_BYTES_MAX:
                raise LimitExceeded(f"a spec of layer {number} of a rule has up to {size} bytes, at most {SPEC_BYTES_MAX}")

    def _most_under(self, own: dict[int, int], axis: int, factor: int) -> int:
        size = self.size(axis, factor)
        return min(own[axis] // factor, size) if axis in own else size

    def _check_recipe(self, recipe: Recipe, own: dict[int, int], number: int) -> int:
        """Largest size of what it yields, in bytes."""
        size = 0
        for item in recipe:
            match item:
                case bytes():
                    size += len(item)
                case int() if item in own:
                    size += 4
                case [0, int(axis), list(pieces)] if (
                    axis in own and len(pieces) == self.size(axis, own[axis]) and all(type(piece) is bytes for piece in pieces)
                ):
                    size += max(map(len, pieces))
                case [1, int(axis), int(factor), list(inner)] if (
                    axis in range(len(self.sizes)) and factor > 0 and own.get(axis, factor) % factor == 0
                ):
                    size += self._most_under(own, axis, factor) * self._check_recipe(inner, {**own, axis: factor}, number)
                case _:
                    raise InvalidRequest(f"the recipe of layer {number} of a rule cannot be read")
        return size

    # ------------------------------------------------------------------------------------------------------------ bytes

    def write(self) -> bytes:
        layers = [(x.prefix, x.axes, x.deps, x.recipe, x.flags, x.user, x.shared, x.factors) for x in self.layers]
        packed: bytes = msgpack.packb((self.sizes, layers), use_bin_type=True)
        return packed

    @classmethod
    def read(cls, data: bytes) -> Rule:
        """Raises InvalidRequest, LimitExceeded."""
        try:
            sizes, layers = msgpack.unpackb(data, use_list=True, raw=False)
            read = [
                Layer(bytes(prefix), _ints(axes), _ints(deps), list(recipe), int(flags), float(user), int(shared), _ints(factors))
                for prefix, axes, deps, recipe, flags, user, shared, factors in layers
            ]
            sizes = _ints(sizes)
        except (ValueError, TypeError, msgpack.exceptions.UnpackException):
            raise InvalidRequest("a rule cannot be read") from None
        return cls(sizes, read)


def unravel(element: int, shape: Sequence[int]) -> list[int]:
    """Indices of an element in row-major order."""
    indices = []
    for size in reversed(shape):
        element, index = divmod(element, size)
        indices.append(index)
    indices.reverse()
    return indices


def _packed(index: int) -> bytes:
    if index < 128:
        return _SMALL[index]
    packed: bytes = msgpack.packb(index)
    return packed


_SMALL = [msgpack.packb(i) for i in range(128)]


def _ints(values: Sequence[Any]) -> tuple[int, ...]:
    return tuple(map(int, values))
