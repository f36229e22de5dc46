"""From a graph of layers to a rule (taskdb.rules): what a layer's tasks are follows from their indices, so none of them is made here.

Layers of a rule are Blockwise ones, steps of tree reductions (which clients send task by task: each is looked at once), and tasks that
depend on nothing, if all of a layer use one, or those of a layer differ in one index only. What a rule cannot say (few tasks: finalisation,
slices) is materialised, and may depend on tasks of the rule, its *outputs*. A graph that is not such a one is not compiled.

What Dask does to a graph of arrays is done to layers: Blockwise fusion, root fusion, and linear fusion. To the tasks of the rest it is done
as Dask does it. Tasks of the rule are not fused with those of the rest.
"""

from __future__ import annotations

import logging
from collections import Counter, defaultdict
from collections.abc import Container, Iterable
from copy import copy
from dataclasses import dataclass
from graphlib import TopologicalSorter
from itertools import chain
from math import prod
from typing import Any

import dask
from dask._expr import HLGExpr, _AnnotationsTombstone, _HLGExprSequence
from dask._task_spec import Alias, GraphNode, convert_legacy_graph, fuse_linear_task_spec
from dask.array.optimization import _is_getter_task, _optimize_slices
from dask.array.optimization import optimize as optimize_array
from dask.blockwise import Blockwise, optimize_blockwise
from dask.core import flatten
from dask.highlevelgraph import HighLevelGraph, MaterializedLayer
from dask.layers import ArrayOverlapLayer
from dask.typing import Key
from distributed.utils import key_split_group

from scheduler_adapter.axes import Axes
from scheduler_adapter.graph import Graph, prepare
from scheduler_adapter.keys import pack_key
from scheduler_adapter.layers import (
    NotARule,
    Plan,
    blockwise_plan,
    is_as_said,
    is_block,
    merged_annotations,
    name_of,
    reduced,
    reduction_plan,
    written_plan,
)
from scheduler_adapter.recipes import Recipes
from scheduler_adapter.specs import Shared
from taskdb.errors import TaskDBError
from taskdb.limits import RULE_OUTPUTS_MAX
from taskdb.model import TaskFlag
from taskdb.rules import Layer, Rule

logger = logging.getLogger(__name__)

#: Tasks that are not in the rule; and those that are written down or made to find them.
REST_MAX = 20_000
WRITTEN_MAX = 100_000
#: Outputs and tasks that are not in the rule may be a quarter of its tasks, or so many: otherwise a rule is not worth it.
FEW = 2_000


@dataclass
class Symbolic:
    """A graph of which most is a rule."""

    rule: Rule
    #: Group name (distributed.utils.key_split_group of its keys) of each layer of the rule.
    groups: list[str]
    #: Annotations (Shared.write()) of layers. Layer.shared counts from 1 into this list, 0: none.
    shared: list[bytes]
    #: (layer, element) of tasks of the rule that are wanted or that tasks of `rest` depend on, with their keys, in emission order.
    outputs: list[tuple[int, int]]
    output_keys: list[Key]
    #: The tasks that are not in the rule. `external` is `output_keys`, then keys of other graphs. Values of `order` compare with numbers of
    #: the rule's tasks (Rule.number): a task comes right after the last one of the rule that it needs.
    rest: Graph


def compile_rule(
    expr: Any, keys: Iterable[Key], annotations: dict[str, Any] | None, internal_priority: dict[Key, float] | None
) -> Symbolic | None:
    """None: not a graph that can be had as a rule, or not worth it; it is to be materialised. `expr` is optimised, and is not changed.

    Takes time and memory for layers, for blocks along one axis, for outputs, for the rest, and for tasks written down in `expr`; not for
    other tasks of the rule.
    """
    try:
        if internal_priority:
            raise NotARule("there are priorities by key")
        wanted = set(keys)
        if len(wanted) > RULE_OUTPUTS_MAX:
            raise NotARule(f"{len(wanted)} keys are wanted")
        return _Compiler(_layers_of(expr), wanted, merged_annotations("the graph", annotations or {}, None), _is_fused(expr)).compile()
    except (NotARule, TaskDBError) as e:
        logger.debug("Not a rule: %s", e)
    except Exception:
        # What is wrong with the graph is told by who materialises it.
        logger.debug("Not a rule", exc_info=True)
    return None


def _operands(expr: Any) -> list[Any]:
    return list(expr.operands) if type(expr) is _HLGExprSequence else [expr]


def _is_fused(expr: Any) -> bool:
    """Whether `dask.array.optimization.optimize` would fuse tasks of all its graphs."""
    active = dask.config.get("optimization.fuse.active", None) is not False
    return active and all(operand.low_level_optimizer is not None for operand in _operands(expr))


def _layers_of(expr: Any) -> dict[str, Any]:
    """Layers of all graphs of an expression, after Blockwise fusion."""
    graphs = []
    for operand in _operands(expr):
        if not isinstance(operand, HLGExpr):
            raise NotARule(f"an expression of type {type(operand).__name__}")
        graph = operand.hlg
        if (optimizer := operand.low_level_optimizer) is not None:
            if optimizer is not optimize_array:
                raise NotARule(f"a graph optimised by {optimizer}")
            layers = {name: copy(layer) for name, layer in graph.layers.items()}
            for layer in layers.values():
                if isinstance(layer, Blockwise):
                    # Fusion changes it.
                    layer.new_axes = dict(layer.new_axes)
            graph = optimize_blockwise(HighLevelGraph(layers, graph.dependencies), keys=list(flatten(operand.__dask_keys__())))
        graphs.append(graph)
    return dict(HighLevelGraph.merge(*graphs).layers)


class _Compiler:
    """One graph on its way to a rule."""

    def __init__(self, layers: dict[str, Any], wanted: set[Key], annotations: dict[str, Any], fuse: bool):
        self.wanted = wanted
        self.annotations = annotations
        self.fuse = fuse
        #: Layers that may be in the rule: Blockwise ones, and steps of tree reductions.
        self.layers: dict[str, Blockwise | MaterializedLayer] = {}
        #: Tasks that are written down, and annotations of their layers.
        self.dsk: dict[Key, Any] = {}
        self.annotations_of: dict[Key, dict[str, Any]] = {}
        others = []
        for layer in layers.values():
            if (name := _name(layer)) is None:
                others.append(layer)
            elif self.layers.setdefault(name, layer) is not layer:
                raise NotARule("two layers have one name")
            if isinstance(layer, Blockwise) and not is_as_said(layer):
                raise NotARule(f"layer {name} has unknown blocks")
        if not self.layers:
            raise NotARule("no task follows from indices")
        for layer in others:
            self._write_down(layer)
        self.dsk = convert_legacy_graph(self.dsk, self)
        #: Layers that can be in the rule. Dependencies first.
        self.plans: dict[Any, Plan] = {}

    def __contains__(self, key: Key) -> bool:
        return key in self.dsk or self._layer_of(key) is not None

    def _layer_of(self, key: Any) -> str | None:
        """The layer a task is of, if that may be in the rule."""
        layer = self.layers.get(name) if (name := name_of(key)) else None
        if layer is None:
            return None
        if isinstance(layer, Blockwise):
            return name if is_block(key, tuple(layer.dims[letter] for letter in layer.output_indices)) else None
        return name if key in layer.mapping else None

    def _plan_of(self, key: Any) -> Plan | None:
        """The layer of the rule that a task is in."""
        plan = self.plans.get(name_of(key) or key)
        return plan if plan is not None and plan.has(key) else None

    def _write_down(self, layer: Any) -> None:
        known = isinstance(layer, (MaterializedLayer, Blockwise))
        if not known and (type(layer) is not ArrayOverlapLayer or prod(layer.numblocks) > REST_MAX):
            raise NotARule(f"a layer of type {type(layer).__name__}")
        if len(self.dsk) + len(layer) > WRITTEN_MAX:
            raise NotARule(f"more than {WRITTEN_MAX} tasks are written down")
        self._add(dict(layer), layer.annotations)

    def _write_down_part(self, name: str, keys: set[Any]) -> None:
        """Some tasks of a layer that is not in the rule."""
        layer = self.layers[name]
        if isinstance(layer, Blockwise):
            tasks = dict(layer._cull({key[1:] for key in keys}))
        else:
            tasks = convert_legacy_graph({key: layer.mapping[key] for key in keys}, self)
        self._add(tasks, layer.annotations)

    def _add(self, tasks: dict[Key, Any], annotations: dict[str, Any] | None) -> None:
        self.dsk.update(tasks)
        if annotations:
            self.annotations_of.update(dict.fromkeys(tasks, annotations))

    def compile(self) -> Symbolic:
        self._plan()
        most = max(FEW, sum(prod(plan.shape) for plan in self.plans.values()) // 4)
        while True:
            rest, blocks = self._walk(most)
            names = self._reached(blocks)
            used = {dep for name in names for dep in self.plans[name].deps}
            sliced = self._sliced(rest) if self.fuse else set()
            written = [
                name
                for name in names
                if name not in used
                # Not all of its tasks are needed; or it is a root, and parts of it.
                and (len(blocks[name]) < prod(self.plans[name].shape) or (not any(self.plans[name].blocks) and blocks[name] & sliced))
            ]
            if not written:
                break
            # The tasks that are needed will be written down.
            for name in written:
                del self.plans[name]
        if all(self.plans[name].single for name in names):
            raise NotARule("no layer follows from indices down to its roots")
        fused = self._fused(names, blocks)
        rule, shared = self._rule([self.plans[name] for name in names], fused)
        outputs = sum(map(len, blocks.values()))
        if max(outputs, len(rest)) > max(FEW, rule.tasks // 4):
            raise NotARule(f"{outputs} outputs of {rule.tasks} tasks, and {len(rest)} others")
        found = []
        for number, name in enumerate(fused):
            axes = rule.layers[number].axes
            for key in blocks[name]:
                element = rule.element(number, {} if self.plans[name].single else dict(zip(axes, key[1:], strict=True)))
                found.append((rule.number(number, element), number, element, key))
        found.sort(key=lambda output: output[0])
        return Symbolic(
            rule,
            [key_split_group(name if self.plans[name].single else (name,)) for name in fused],
            shared,
            [(number, element) for _, number, element, _ in found],
            [key for _, _, _, key in found],
            self._rest(rest, {key: place for place, _, _, key in found}),
        )

    def _plan(self) -> None:
        names = set(self.layers)
        uses = {name: names.intersection(_uses(layer)) for name, layer in self.layers.items()}
        for name in TopologicalSorter(uses).static_order():
            layer = self.layers[name]
            try:
                if isinstance(layer, Blockwise):
                    plan = blockwise_plan(layer, self.annotations)
                    for arg in plan.blocks:
                        self._plan_use(arg.source, arg.shape)
                    for key in plan.constants:
                        self._plan_use(key, None)
                else:
                    plan = reduction_plan(layer.mapping, self.plans, merged_annotations(name, self.annotations, layer.annotations))
                self.plans[name] = plan
            except NotARule as e:
                logger.debug("%s", e)

    def _plan_use(self, name: Any, numblocks: tuple[int, ...] | None) -> None:
        """Something that a layer depends on: all blocks of another, or (`numblocks` None) one task. Raises NotARule if that is not in the
        rule."""
        if name not in self.plans and name not in self.layers and type(name) is str:
            some = name if numblocks is None else (name, *[0] * len(numblocks))
            annotations = merged_annotations(name, self.annotations, self.annotations_of.get(some))
            self.plans[name] = written_plan(name, numblocks, self.dsk, annotations)
        plan = self.plans.get(name)
        if plan is None or plan.single != (numblocks is None) or plan.shape != (numblocks or ()):
            raise NotARule(f"{name} is not in the rule")

    def _walk(self, most: int) -> tuple[dict[Key, Any], dict[Any, set[Key]]]:
        """Tasks needed that are not in the rule, and keys needed of each layer of the rule; at most so many of either."""
        rest: dict[Key, Any] = {}
        blocks: dict[Any, set[Key]] = defaultdict(set)
        missing: dict[str, set[Any]] = defaultdict(set)
        seen: set[Key] = set()
        stack = list(self.wanted)
        while stack or missing:
            if not stack:
                name, keys = missing.popitem()
                self._write_down_part(name, keys)
                seen -= keys
                stack.extend(keys)
                continue
            key = stack.pop()
            if key in seen:
                continue
            seen.add(key)
            if len(rest) > min(most, REST_MAX) or len(seen) - len(rest) > min(most, RULE_OUTPUTS_MAX):
                raise NotARule("many tasks are wanted or not in the rule")
            if (plan := self._plan_of(key)) is not None:
                blocks[plan.name].add(key)
            elif (task := self.dsk.get(key)) is not None:
                rest[key] = task
                stack.extend(task.dependencies)
            elif (part := self._layer_of(key)) is not None:
                missing[part].add(key)
        return rest, blocks

    def _sliced(self, rest: dict[Key, Any]) -> set[Key]:
        """Keys of tasks that nothing but a slice in the rest uses. Dask fuses it with them, so that no more than it is read."""
        uses = Counter(dep for task in rest.values() for dep in task.dependencies)
        sliced = {dep for task in rest.values() if _is_getter_task(task) and len(task.dependencies) == 1 for dep in task.dependencies}
        return {key for key in sliced - self.wanted if uses[key] == 1}

    def _reached(self, names: Iterable[Any]) -> list[Any]:
        """Layers of the rule that are needed. Dependencies first."""
        reached: set[Any] = set()
        stack = list(names)
        while stack:
            name = stack.pop()
            if name not in reached:
                reached.add(name)
                stack.extend(self.plans[name].deps)
        return [name for name in self.plans if name in reached]

    def _fused(self, names: list[Any], wanted: Container[Any]) -> dict[Any, list[Plan]]:
        """Layers whose tasks are put into one, by the name of the last, whose keys these have. `wanted`: layers that stay.

        As `fuse_linear_task_spec` does it: a task that depends on one other, which nothing else depends on, takes that in. As `fuse_roots`
        does it: a Blockwise task takes in all it depends on, if those depend on nothing, and nothing else depends on them.
        """
        uses = Counter(dep for name in names for dep in set(self.plans[name].deps))
        fused: dict[Any, list[Plan]] = {}
        for name in names:
            plan = self.plans[name]
            deps = [self.plans[dep] for dep in dict.fromkeys(plan.deps)]
            roots = isinstance(self.layers.get(name), Blockwise) and not any(any(dep.deps) for dep in deps)
            if (
                self.fuse
                and (len(deps) == 1 or roots)
                and all(uses[dep.name] == 1 and dep.name not in wanted for dep in deps)
                and all(plan.is_one_to_one(dep) and plan.annotations == dep.annotations for dep in deps)
            ):
                fused[name] = [*chain.from_iterable(fused.pop(dep.name) for dep in deps), plan]
            else:
                fused[name] = [plan]
        return fused

    def _rule(self, plans: list[Plan], fused: dict[Any, list[Plan]]) -> tuple[Rule, list[bytes]]:
        axes = Axes(plans)
        recipes = Recipes(axes)
        numbers = {name: number for number, name in enumerate(fused)}
        shared: dict[bytes, int] = {}
        layers = []
        for together in fused.values():
            plan = together[-1]
            own = tuple(axes.of(plan, letter) for letter in plan.letters)
            factors = tuple(axes.factor(plan, letter) for letter in plan.letters)
            # An index of 0 is one byte.
            packed = pack_key(plan.name if plan.single else (plan.name, *[0] * len(own)))
            blob = Shared(plan.annotations, b"").write() if plan.annotations else None
            layers.append(
                Layer(
                    packed[: len(packed) - len(own)],
                    own,
                    tuple(sorted({numbers[dep] for each in together for dep in each.deps if dep in numbers})),
                    recipes.of(together),
                    int(TaskFlag.DATA_PRODUCER) if any(each.data_producer for each in together) else 0,
                    -float(plan.annotations.get("priority", 0) or 0),
                    shared.setdefault(blob, len(shared) + 1) if blob else 0,
                    factors if any(factor > 1 for factor in factors) else (),
                )
            )
        return Rule(axes.sizes, layers), list(shared)

    def _rest(self, rest: dict[Key, Any], outputs: dict[Key, int]) -> Graph:
        if self.fuse and rest:
            rest = self._fused_rest(rest)
        by_type: dict[str, dict[Key, Any]] = defaultdict(dict)
        for key in rest:
            for kind, value in self.annotations_of.get(key, {}).items():
                value = value(key) if callable(value) else value
                if not isinstance(value, _AnnotationsTombstone):
                    by_type[kind][key] = value
        graph = prepare(rest, dict(by_type), self.wanted, None, self.annotations)
        if graph.has_p2p:
            raise NotARule("a shuffle")
        graph.external = [*outputs, *(key for key in graph.external if key not in outputs)]
        places = dict(outputs)
        for number, (key, task) in enumerate(graph.dsk.items()):
            places[key] = max((places.get(dep, 0) for dep in task.dependencies), default=0)
            graph.order[key] = places[key] + 0.5 + 0.4 * number / len(graph.dsk)
        return graph

    def _fused_rest(self, rest: dict[Key, GraphNode]) -> dict[Key, GraphNode]:
        """What Dask's low-level steps make of tasks. Unlike there, a fused task has the key of its last one, and no alias of it is left."""
        annotations = self.annotations_of
        others = {dep for key, task in rest.items() for dep in task.dependencies if annotations.get(dep) != annotations.get(key)}
        stay = self.wanted | (others & rest.keys())
        fused: dict[Key, GraphNode] = fuse_linear_task_spec(rest, stay)
        for key, task in list(fused.items()):
            if isinstance(task, Alias) and task is not rest.get(key):
                fused[key] = made = fused.pop(task.target)
                made.key = key
        # Other tasks than those made here may have parts in common with the layers they are of.
        fused.update(_optimize_slices({key: task for key, task in fused.items() if task is not rest.get(key)}))
        return fused


def _name(layer: Any) -> str | None:
    """What keys of its tasks begin with, of a layer that may be in a rule."""
    if isinstance(layer, Blockwise):
        return str(layer.output)
    if type(layer) is not MaterializedLayer or not reduced(layer.mapping):
        return None
    name = name_of(next(iter(layer.mapping)))
    return name if all(name_of(key) == name for key in layer.mapping) else None


def _uses(layer: Blockwise | MaterializedLayer) -> Iterable[str]:
    """What may be names of layers it depends on."""
    if isinstance(layer, Blockwise):
        return [arg for arg, _ in layer.indices if type(arg) is str]
    name = reduced(layer.mapping)
    return [name] if name else []
