"""From a submitted expression to runs of tasks for the database. Pure: no scheduler, no link.

Used in the scheduler for small graphs and in the ingest process for all others.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from graphlib import CycleError, TopologicalSorter
from typing import Any

import dask
from dask._task_spec import convert_legacy_graph
from distributed.protocol.pickle import dumps
from distributed.utils import key_split_group

from scheduler_adapter.keys import pack_key
from scheduler_adapter.specs import StoredSpec, is_p2p, pickle_spec
from taskdb.commands import AddTasks
from taskdb.errors import InvalidRequest, LimitExceeded
from taskdb.limits import SPEC_BYTES_MAX
from taskdb.model import TaskFlag

#: Tasks in one run: small enough that applying it does not delay anything (about 10 ms), large enough that messages cost little.
RUN_TASKS = 512
#: Specs in one run, so that a message stays far below MESSAGE_BYTES_MAX.
RUN_BYTES = 4 * 2**20


@dataclass
class Graph:
    """A materialised, culled and ordered graph."""

    dsk: dict[Any, Any]
    wanted: set[Any]
    #: Keys in submission order (dependencies first), those outside the graph (futures of earlier ones) at the front.
    external: list[Any]
    order: dict[Any, float]
    annotations_by_type: dict[str, dict[Any, Any]]
    global_annotations: dict[str, Any]
    #: Pairs of group names: a task of the first depends on one of the second.
    group_deps: set[tuple[str, str]] = field(default_factory=set)

    @property
    def has_p2p(self) -> bool:
        return any(is_p2p(spec) for spec in self.dsk.values())


def estimate_tasks(expr: Any) -> int | None:
    """How many tasks the expression will make, without making them; None if that cannot be said."""
    total = 0
    try:
        for node in expr.walk():
            name = type(node).__name__
            if name == "_MapExpr":
                total += min((len(i) for i in node.iterables), default=0)
            elif "dsk" in node._parameters:
                dsk = node.operand("dsk")
                if hasattr(dsk, "layers"):
                    total += sum(len(layer) for layer in dsk.layers.values())
                elif hasattr(dsk, "__len__"):
                    total += len(dsk)
            else:
                total += getattr(node, "npartitions", 1) or 1
    except Exception:
        return None
    return total


def materialise(expr: Any) -> tuple[dict[Any, Any], dict[str, dict[Any, Any]]]:
    """The expression's tasks and its annotations by type, as stock does it (`distributed.scheduler._materialize_graph`)."""
    dsk = convert_legacy_graph(expr.__dask_graph__())
    by_type: dict[str, dict[Any, Any]] = {}
    for kind, values in expr.__dask_annotations__().items():
        by_type.setdefault(kind, {}).update(values)
    return dsk, by_type


def prepare(
    dsk: dict[Any, Any],
    annotations_by_type: dict[str, dict[Any, Any]],
    keys: Iterable[Any],
    internal_priority: dict[Any, float] | None,
    global_annotations: dict[str, Any] | None,
) -> Graph:
    """Cull to what the wanted keys need, and order. Raises RuntimeError for a cycle, as `dask.order` does."""
    wanted = set(keys)
    culled: dict[Any, Any] = {}
    external: dict[Any, None] = {}
    stack = list(wanted)
    while stack:
        key = stack.pop()
        if key in culled or key in external:
            continue
        spec = dsk.get(key)
        if spec is None:
            external[key] = None
        else:
            culled[key] = spec
            stack.extend(spec.dependencies)
    order = internal_priority or dask.order.order(culled)
    if not _is_topological(culled, order):
        try:
            walk = list(TopologicalSorter({k: [d for d in s.dependencies if d in culled] for k, s in culled.items()}).static_order())
        except CycleError as e:
            raise RuntimeError(f"Cycle detected between the following keys:\n  -> {e.args[1]}") from e
        ordered = {k: culled[k] for k in walk}
        order = {k: order.get(k, i) for i, k in enumerate(walk)}
    else:
        ordered = {k: culled[k] for k in sorted(culled, key=order.__getitem__)}
    return Graph(ordered, wanted, list(external), order, annotations_by_type, dict(global_annotations or {}))


def _is_topological(dsk: dict[Any, Any], order: dict[Any, float]) -> bool:
    try:
        return all(order[d] < order[k] for k, spec in dsk.items() for d in spec.dependencies if d in dsk)
    except KeyError:
        return False


def runs(graph: Graph, submission: str, *, held: bool, consume: bool = False) -> Iterator[AddTasks]:
    """The graph as AddTasks commands. `held`: the scheduler holds the tasks already. `consume`: drop each spec once it is out.

    Raises LimitExceeded for a key or a spec over its bound.
    """
    index: dict[Any, int] = {}
    dependents: dict[Any, int] = dict.fromkeys(graph.external, 0)
    for spec in graph.dsk.values():
        for dep in spec.dependencies:
            dependents[dep] = dependents.get(dep, 0) + 1
    group_of_index: list[int] = []
    group_numbers: dict[str, int] = {}
    group_names: list[str] = []
    blobs: dict[Any, int] = {}
    # Blobs are recognised by the identity of their values, so those must outlive the loop.
    kept: list[Any] = []
    run = _Run(submission, 0)

    def add(key: Any, spec: Any, base_flags: int) -> None:
        flags = base_flags | (TaskFlag.WANTED if key in graph.wanted else 0)
        deps: list[int] = []
        data = b""
        if spec is not None:
            deps = [index[d] for d in spec.dependencies]
            if spec.data_producer:
                flags |= TaskFlag.DATA_PRODUCER
            data = spec.data if isinstance(spec, StoredSpec) else pickle_spec(spec)
            if len(data) > SPEC_BYTES_MAX:
                raise LimitExceeded(
                    f"task {key!r} carries {len(data):,} bytes, over the bound of {SPEC_BYTES_MAX:,}; "
                    "scatter the data first, or load it in the task"
                )
        name = key_split_group(key)
        number = group_numbers.get(name)
        if number is None:
            number = group_numbers[name] = len(group_names)
            group_names.append(name)
            run.new_groups.append(name)
        group_of_index.append(number)
        for d in deps:
            graph.group_deps.add((name, group_names[group_of_index[d]]))
        index[key] = len(index)
        user = 0.0
        blob = 0
        merged, identity = _annotations_of(graph, key)
        if merged:
            kept.append(merged)
            blob = blobs.get(identity, 0)
            if not blob:
                blob = blobs[identity] = len(blobs) + 1
                run.new_annotations.append(dumps(merged))
            user = -float(merged.get("priority", 0) or 0)
        run.add(pack_key(key), data, int(flags), deps, dependents.get(key, 0), float(graph.order.get(key, 0)), user, number, blob)

    base = int(TaskFlag.HELD) if held else 0
    for key in graph.external:
        add(key, None, int(TaskFlag.EXTERNAL))
    keys = list(graph.dsk)
    for key in keys:
        spec = graph.dsk[key]
        if key not in spec.dependencies:
            add(key, spec, base)
        else:
            raise InvalidRequest(f"task {key!r} depends on itself")
        if consume:
            graph.dsk[key] = None
        if run.size >= RUN_TASKS or run.bytes >= RUN_BYTES:
            yield run.command()
            run = _Run(submission, len(index))
    if run.size:
        yield run.command()


def _annotations_of(graph: Graph, key: Any) -> tuple[dict[str, Any], tuple[Any, ...]]:
    """The task's annotations (a layer's own before global ones) and what tells equal ones apart cheaply."""
    if not graph.annotations_by_type and not graph.global_annotations:
        return {}, ()
    merged: dict[str, Any] = {}
    for kind, value in graph.global_annotations.items():
        merged[kind] = value(key) if callable(value) else value
    for kind, by_key in graph.annotations_by_type.items():
        if (value := by_key.get(key)) is not None:
            merged[kind] = value
    return merged, tuple((kind, value if isinstance(value, (int, float, str)) else id(value)) for kind, value in merged.items())


class _Run:
    """Columns of one AddTasks while they fill."""

    def __init__(self, submission: str, first_index: int):
        self.submission = submission
        self.first_index = first_index
        self.size = self.bytes = 0
        self.keys: list[bytes] = []
        self.specs: list[bytes] = []
        self.flags: list[int] = []
        self.dep_counts: list[int] = []
        self.deps: list[int] = []
        self.dependent_counts: list[int] = []
        self.orders: list[float] = []
        self.users: list[float] = []
        self.groups: list[int] = []
        self.new_groups: list[str] = []
        self.annotations: list[int] = []
        self.new_annotations: list[bytes] = []

    def add(
        self, key: bytes, spec: bytes, flags: int, deps: list[int], dependents: int, order: float, user: float, group: int, blob: int
    ) -> None:
        self.keys.append(key)
        self.specs.append(spec)
        self.flags.append(flags)
        self.dep_counts.append(len(deps))
        self.deps.extend(deps)
        self.dependent_counts.append(dependents)
        self.orders.append(order)
        self.users.append(user)
        self.groups.append(group)
        self.annotations.append(blob)
        self.size += 1
        self.bytes += len(key) + len(spec) + 8 * len(deps)

    def command(self) -> AddTasks:
        return AddTasks(
            self.submission,
            self.first_index,
            keys=self.keys,
            specs=self.specs,
            flags=self.flags,
            dep_counts=self.dep_counts,
            deps=self.deps,
            dependent_counts=self.dependent_counts,
            orders=self.orders,
            user_priorities=self.users if any(self.users) else (),
            groups=self.groups,
            new_groups=self.new_groups,
            annotations=self.annotations if any(self.annotations) else (),
            new_annotations=self.new_annotations,
        )
