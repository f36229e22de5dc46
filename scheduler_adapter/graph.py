"""From a submitted expression to runs of tasks for the database. Pure: no scheduler, no link.

Used in the scheduler for small graphs and in the ingest process for all others.
"""

from __future__ import annotations

import pickle
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from typing import Any

import dask
from dask._task_spec import convert_legacy_graph
from distributed.protocol.pickle import dumps
from distributed.utils import key_split_group

from scheduler_adapter.keys import pack_key
from scheduler_adapter.specs import Shared, StoredSpec, is_p2p, looked_into, pickle_spec, shrink
from taskdb.commands import AddTasks
from taskdb.errors import InvalidRequest, LimitExceeded
from taskdb.limits import SPEC_BYTES_MAX
from taskdb.model import TaskFlag

#: Tasks in one run: small enough that applying it does not delay anything (about 10 ms), large enough that messages cost little.
RUN_TASKS = 512
#: Specs in one run, so that a message stays far below MESSAGE_BYTES_MAX.
RUN_BYTES = 4 * 2**20
#: Specs of a group are compressed with a common dictionary if there are so many tasks in it, and its first spec has so many bytes (deflate
#: looks back 32 KiB).
DICTIONARY_TASKS = 8
DICTIONARY_BYTES = (128, 32 * 1024)


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

    def groups(self) -> tuple[Counter[str], set[tuple[str, str]]]:
        """Number of tasks by group, and pairs of groups: a task of the first depends on one of the second. O(tasks + edges)."""
        names = {key: key_split_group(key) for key in (*self.dsk, *self.external)}
        sizes = Counter(names[key] for key in self.dsk)
        return sizes, {(names[key], names[dep]) for key, spec in self.dsk.items() for dep in spec.dependencies}

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
        self.index: dict[Any, int] = {key: i for i, key in enumerate(ahead.keys)}
        self.dependents: Counter[Any] = Counter()
        self.groups: dict[Any, str] = {}
        self.group_sizes: Counter[str] = Counter()
        for key in graph.external:
            self._see(key, ())
        for key, spec in graph.dsk.items():
            if key in spec.dependencies:
                raise InvalidRequest(f"task {key!r} depends on itself")
            self._see(key, spec.dependencies)
        self.group_numbers: dict[str, int] = {name: i for i, name in enumerate(ahead.groups)}
        self.dictionaries: dict[str, bytes] = {}
        self.shared_numbers: dict[Any, int] = {}
        self.shared_before = ahead.shared
        # Blobs are told apart by the identity of their values, so those must outlive the loop.
        self.kept: list[Any] = []
        self.run = _Run(submission, len(self.index))

    def _see(self, key: Any, dependencies: Iterable[Any]) -> None:
        group = self.groups[key] = key_split_group(key)
        self.group_sizes[group] += 1
        self.dependents.update(dependencies)

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
        group = self.groups.pop(key)
        number = self.group_numbers.get(group)
        if number is None:
            number = self.group_numbers[group] = len(self.group_numbers)
            run.new_groups.append(group)
        flags = TaskFlag.WANTED if key in graph.wanted else 0
        deps: list[int] = []
        data = b""
        user = 0.0
        shared = 0
        if spec is None:
            flags |= TaskFlag.EXTERNAL
        else:
            flags |= self.flags
            if spec.data_producer:
                flags |= TaskFlag.DATA_PRODUCER
            deps = [index[d] for d in spec.dependencies]
            data = spec.data if isinstance(spec, StoredSpec) else pickle_spec(spec)
            if len(data) > SPEC_BYTES_MAX:
                raise LimitExceeded(
                    f"task {key!r} carries {len(data):,} bytes, over the bound of {SPEC_BYTES_MAX:,}; "
                    "scatter the data first, or load it in the task"
                )
            dictionary = self._dictionary(group, data)
            data = shrink(data, dictionary)
            annotations, identity = _annotations_of(graph, key)
            if annotations or dictionary:
                shared = self._shared(annotations, dictionary, (identity, group if dictionary else None))
                user = -float(annotations.get("priority", 0) or 0)
        index[key] = len(index)
        order = float(graph.order.get(key, 0))
        run.add(pack_key(key), data, int(flags), deps, self.dependents.pop(key, 0), order, user, number, shared)

    def _dictionary(self, group: str, data: bytes) -> bytes:
        """What the group's specs are compressed with: its first spec, if it pays."""
        if self.group_sizes[group] < DICTIONARY_TASKS:
            return b""
        dictionary = self.dictionaries.get(group)
        if dictionary is None:
            dictionary = self.dictionaries[group] = data if DICTIONARY_BYTES[0] <= len(data) <= DICTIONARY_BYTES[1] else b""
        return dictionary

    def _shared(self, annotations: dict[str, Any], dictionary: bytes, identity: Any) -> int:
        number = self.shared_numbers.get(identity)
        if number is None:
            self.kept.append(annotations)
            number = self.shared_numbers[identity] = self.shared_before + len(self.shared_numbers) + 1
            self.run.new_shared.append(Shared(annotations, dictionary).write())
        return number


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
