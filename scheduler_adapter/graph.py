"""From a submitted expression to runs of tasks for the database. Pure: no scheduler, no link.

Used in the scheduler for small graphs and in the ingest process for all others.
"""

from __future__ import annotations

import pickle
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from graphlib import CycleError, TopologicalSorter
from typing import Any

from dask._task_spec import convert_legacy_graph
from distributed.protocol.pickle import dumps
from distributed.utils import key_split_group

from scheduler_adapter.keys import pack_key
from scheduler_adapter.order import order as order_of
from scheduler_adapter.specs import Shared, StoredSpec, is_p2p, looked_into, shrink
from scheduler_adapter.templates import Templates
from taskdb.commands import AddTasks
from taskdb.errors import InvalidRequest, LimitExceeded
from taskdb.limits import SPEC_BYTES_MAX
from taskdb.model import TaskFlag

#: Tasks in one run: small enough that applying it does not delay anything (about 10 ms), large enough that messages cost little.
RUN_TASKS = 512
#: Specs in one run, so that a message stays far below MESSAGE_BYTES_MAX.
RUN_BYTES = 4 * 2**20
#: Specs of a group are compressed with a common dictionary if there are so many tasks in it, and its first spec has so many bytes (deflate
#: looks back 32 KiB). What follows the head of a template is mostly keys, of which deflate makes little less.
DICTIONARY_TASKS = 8
DICTIONARY_BYTES_MIN, DICTIONARY_BYTES_MAX = 128, 32 * 1024
DICTIONARY_REST_MIN = 256

_WANTED = int(TaskFlag.WANTED)
_EXTERNAL = int(TaskFlag.EXTERNAL)
_DATA_PRODUCER = int(TaskFlag.DATA_PRODUCER)


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
    #: See `group_names`.
    names: dict[Any, str] = field(default_factory=dict)

    def groups(self) -> tuple[Counter[str], set[tuple[str, str]]]:
        """Number of tasks by group, and pairs of groups: a task of the first depends on one of the second. O(tasks + edges)."""
        names = self.group_names()
        sizes = Counter(names[key] for key in self.dsk)
        return sizes, {(names[key], names[dep]) for key, spec in self.dsk.items() for dep in spec.dependencies}

    def group_names(self) -> dict[Any, str]:
        """Name of each task's group, by key. Made once."""
        if not self.names:
            self.names = {key: key_split_group(key) for key in (*self.external, *self.dsk)}
        return self.names

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
    order = internal_priority or order_of(culled, wanted)
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


def pack_graph(graph: Graph) -> bytes:
    """For another process, which unpickles no spec but those the scheduler looks into."""
    specs = [(key, spec.data, spec.dependencies, spec.data_producer) for key, spec in ((k, StoredSpec.of(s)) for k, s in graph.dsk.items())]
    rest = (graph.wanted, graph.external, graph.order, graph.annotations_by_type, graph.global_annotations)
    packed: bytes = dumps((specs, rest))
    return packed


def unpack_graph(packed: bytes) -> Graph:
    specs, rest = pickle.loads(packed)
    return Graph({key: looked_into(StoredSpec(*spec)) for key, *spec in specs}, *rest)


def _is_topological(dsk: dict[Any, Any], order: dict[Any, float]) -> bool:
    try:
        return all(order[d] < order[k] for k, spec in dsk.items() for d in spec.dependencies if d in dsk)
    except KeyError:
        return False


@dataclass
class Ahead:
    """What of a submission has been added already, when the first run is."""

    #: Keys of the tasks, in order of their indices; they stand in the graph's `external`.
    keys: Sequence[Any] = ()
    groups: Sequence[str] = ()
    shared: int = 0


def runs(graph: Graph, submission: str, *, held: bool, consume: bool = False, ahead: Ahead | None = None) -> Iterator[AddTasks]:
    """The graph as AddTasks commands. `held`: the scheduler holds the tasks already. `consume`: drop each spec once it is out.

    Raises LimitExceeded for a key or a spec over its bound.
    """
    return _Writer(graph, submission, held, consume, ahead or Ahead()).runs()


class _Writer:
    """Turns a graph into runs, one after another."""

    def __init__(self, graph: Graph, submission: str, held: bool, consume: bool, ahead: Ahead):
        self.graph = graph
        self.submission = submission
        self.consume = consume
        self.flags = int(TaskFlag.HELD) if held else 0
        self.annotated = bool(graph.annotations_by_type or graph.global_annotations)
        self.index: dict[Any, int] = {key: i for i, key in enumerate(ahead.keys)}
        self.templates = Templates()
        self.dependents: dict[Any, int] = {}
        self.groups = graph.group_names()
        self.group_sizes = Counter(self.groups.values())
        self._see()
        self.group_numbers: dict[str, int] = {name: i for i, name in enumerate(ahead.groups)}
        self.dictionaries: dict[Any, bytes] = {}
        self.shared_numbers: dict[Any, int] = {}
        self.shared_before = ahead.shared
        # Blobs are told apart by the identity of their values, so those must outlive the loop.
        self.kept: list[Any] = []
        self.run = _Run(submission, len(self.index))

    def _see(self) -> None:
        """Look at all of it once."""
        dependents = self.dependents
        for key, spec in self.graph.dsk.items():
            self.templates.see(spec)
            deps = spec.dependencies
            if deps:
                if key in deps:
                    raise InvalidRequest(f"task {key!r} depends on itself")
                for dep in deps:
                    dependents[dep] = dependents.get(dep, 0) + 1

    def runs(self) -> Iterator[AddTasks]:
        graph = self.graph
        for key in graph.external:
            if key not in self.index:
                self._add(key, None)
        for key in list(graph.dsk):
            self._add(key, graph.dsk[key])
            if self.consume:
                graph.dsk[key] = None
            if self.run.size >= RUN_TASKS or self.run.bytes >= RUN_BYTES:
                yield self.run.command()
                self.run = _Run(self.submission, len(self.index))
        if self.run.size:
            yield self.run.command()

    def _add(self, key: Any, spec: Any) -> None:
        graph, run, index = self.graph, self.run, self.index
        group = self.groups[key]
        number = self.group_numbers.get(group)
        if number is None:
            number = self.group_numbers[group] = len(self.group_numbers)
            run.new_groups.append(group)
        flags = _WANTED if key in graph.wanted else 0
        deps: list[int] = []
        data = b""
        user = 0.0
        shared = 0
        if spec is None:
            flags |= _EXTERNAL
        else:
            flags |= self.flags
            if spec.data_producer:
                flags |= _DATA_PRODUCER
            deps = [index[d] for d in spec.dependencies]
            data, shared, user = self._spec(key, spec, group)
        index[key] = len(index)
        run.add(pack_key(key), data, flags, deps, self.dependents.pop(key, 0), float(graph.order.get(key, 0)), user, number, shared)

    def _spec(self, key: Any, spec: Any, group: str) -> tuple[bytes, int, float]:
        """The spec as it is stored, the number of the blob that goes with it, and the priority its user gave it."""
        template = None
        if type(spec) is StoredSpec:
            data = spec.data
        else:
            data, template = self.templates.write(key, spec)
        if len(data) > SPEC_BYTES_MAX:
            raise LimitExceeded(
                f"task {key!r} carries {len(data):,} bytes, over the bound of {SPEC_BYTES_MAX:,}; "
                "scatter the data first, or load it in the task"
            )
        if template is None:
            dictionary = self._dictionary(group, data, DICTIONARY_BYTES_MIN) if self.group_sizes[group] >= DICTIONARY_TASKS else b""
        else:
            dictionary = self._dictionary(id(template), data, DICTIONARY_REST_MIN)
        data = shrink(data, dictionary)
        annotations, identity = _annotations_of(self.graph, key) if self.annotated else ({}, ())
        if not annotations and not dictionary and template is None:
            return data, 0, 0.0
        by = id(template) if template is not None else group if dictionary else None
        number = self.shared_numbers.get((identity, by))
        if number is None:
            self.kept.append((annotations, template))
            number = self.shared_numbers[identity, by] = self.shared_before + len(self.shared_numbers) + 1
            head = template.head if template is not None else b""
            self.run.new_shared.append(Shared(annotations, dictionary, head).write())
        return data, number, -float(annotations.get("priority", 0) or 0) if annotations else 0.0

    def _dictionary(self, alike: Any, data: bytes, least: int) -> bytes:
        """What specs that are alike are compressed with: the first of them, if it pays."""
        dictionary = self.dictionaries.get(alike)
        if dictionary is None:
            dictionary = self.dictionaries[alike] = data if least <= len(data) <= DICTIONARY_BYTES_MAX else b""
        return dictionary


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
        self.shared: list[int] = []
        self.new_shared: list[bytes] = []

    def add(
        self, key: bytes, spec: bytes, flags: int, deps: list[int], dependents: int, order: float, user: float, group: int, shared: int
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
        self.shared.append(shared)
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
            shared=self.shared if any(self.shared) else (),
            new_shared=self.new_shared,
        )
