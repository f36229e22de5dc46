"""Tasks of a submitted expression, where there are many: the same as Dask's own expansion gives, in less time.

`client.map` makes calls that all have one function: no `Task` is made for those that only differ in plain arguments. A graph of delayed
functions is put together from its layers at once: Dask culls each of them by all keys that were met so far, which is quadratic. All other
expressions are left to Dask.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import dask
from dask._expr import HLGExpr, HLGFinalizeCompute, _HLGExprGroup, _HLGExprSequence
from dask._task_spec import Task, convert_legacy_graph, parse_input
from dask.delayed import optimize as optimize_delayed
from dask.highlevelgraph import MaterializedLayer
from distributed.sizeof import sizeof

from scheduler_adapter.dask_internals import is_map
from scheduler_adapter.graph import materialise
from scheduler_adapter.templates import Call, Calls, is_plain

#: Keywords of `client.map` that are larger are tasks of their own (`_MapExpr._layer`), bytes.
_LARGE = 1e5
_Expansion = tuple[dict[Any, Any], dict[str, dict[Any, Any]]]


def expand(expr: Any) -> _Expansion:
    """As `graph.materialise`: tasks and annotations by type. Some tasks may be `Call`s, and some that nothing needs may be among them."""
    if is_map(expr):
        return _map(expr) or materialise(expr)
    return _delayed(expr) or materialise(expr)


def _map(expr: Any) -> _Expansion | None:
    if any(sizeof(value) > _LARGE for value in expr.kwargs.values()):
        return None
    func = expr.func
    kwargs = {name: parse_input(value) for name, value in expr.kwargs.items()}
    calls = Calls(func, kwargs)
    dsk: dict[Any, Any] = {}
    needs = bool(calls.dependencies)
    for key, args in zip(expr.keys, zip(*expr.iterables, strict=False), strict=False):
        plain = not needs and all(map(is_plain, args))
        dsk[key] = Call(calls, args) if plain else Task(key, func, *parse_input(args), **kwargs)
    return dsk, {kind: dict(values) for kind, values in expr.__dask_annotations__().items()}


def _delayed(expr: Any) -> _Expansion | None:
    """None if there is more to it than layers of written tasks that are culled."""
    operands = list(expr.operands) if type(expr) is _HLGExprSequence else [expr]
    if dask.config.get("optimization.fuse.delayed") or not operands:
        return None
    dsk: dict[Any, Any] = {}
    annotations: dict[str, dict[Any, Any]] = {}
    for operand in operands:
        if type(operand) not in (HLGExpr, _HLGExprGroup, HLGFinalizeCompute) or operand.low_level_optimizer is not optimize_delayed:
            return None
        graph = operand.hlg
        # In Dask's order: of tasks, and annotations, under one key the last is taken.
        for name in reversed(graph._toposort_layers()):
            layer = graph.layers[name]
            if type(layer) is not MaterializedLayer or layer.has_legacy_tasks or not _put(dsk, layer.mapping):
                return None
            for kind, value in (layer.annotations or {}).items():
                if callable(value):
                    return None  # it may be asked about culled tasks
                annotations.setdefault(kind, {}).update(dict.fromkeys(layer.mapping, value))
    return convert_legacy_graph(dsk), annotations


def _put(dsk: dict[Any, Any], tasks: Mapping[Any, Any]) -> bool:
    """Whether no key has come to stand for two different tasks: it depends on what is culled which of them Dask takes."""
    if any(dsk[key] is not tasks[key] for key in dsk.keys() & tasks.keys()):
        return False
    dsk.update(tasks)
    return True
