"""The rules of docs/engine.md, run over a whole store. One function a rule; each yields what breaks it, in words.

Not bounded in work or memory: for tests and for `taskdb verify`, never for production's hot path.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator

from taskdb.engine.refs import client_name, find_index, find_key, rule_place, spooled_runs
from taskdb.engine.todo import Todo
from taskdb.model import ACTIVE, TaskFlag, TaskState
from taskdb.store.base import ReadTxn
from taskdb.store.codec import (
    NO_GROUP,
    PARKED,
    RULED,
    UNGROWN,
    ClientRecord,
    GraphRecord,
    GraphStatus,
    TaskRecord,
    decode_client,
    decode_dropped,
    decode_error,
    decode_graph,
    decode_group,
    decode_growth,
    decode_ids,
    decode_rule,
    decode_task,
    queue_of,
)
from taskdb.store.schema import GRAPH_PART, RANK_BYTES, TODO_KEY, U64, U64_PAIR, Meta, Table, digest, meta_key
from taskdb.store.spooled import decode_spooled

_COMING = (TaskState.WAITING, TaskState.QUEUED)


class Snapshot:
    """All of a store, decoded once for all rules."""

    def __init__(self, txn: ReadTxn) -> None:
        self.txn = txn
        self.tasks: dict[int, TaskRecord] = {int.from_bytes(k): decode_task(int.from_bytes(k), v) for k, v in txn.scan(Table.TASKS)}
        self.edges: dict[int, tuple[int, ...]] = {int.from_bytes(k): decode_ids(v) for k, v in txn.scan(Table.EDGES)}
        self.graphs: dict[int, GraphRecord] = {int.from_bytes(k): decode_graph(int.from_bytes(k), v) for k, v in txn.scan(Table.GRAPHS)}
        self.clients: dict[int, ClientRecord] = {int.from_bytes(k): decode_client(int.from_bytes(k), v) for k, v in txn.scan(Table.CLIENTS)}
        self.todo: set[tuple[int, int, int]] = {TODO_KEY.unpack(k) for k, _ in txn.scan(Table.TODO)}
        self.dependents: dict[int, list[int]] = {task_id: [] for task_id in self.tasks}
        for task_id, deps in self.edges.items():
            for dep in deps:
                self.dependents.setdefault(dep, []).append(task_id)

    def deps(self, task: TaskRecord) -> list[TaskRecord]:
        return [self.tasks[dep] for dep in self.edges.get(task.id, ()) if dep in self.tasks]

    def due(self, kind: Todo, a: int) -> bool:
        return (kind, a, 0) in self.todo


def _named(task: TaskRecord) -> str:
    return f"task {task.id} ({TaskState(task.state).name})"


def links(snap: Snapshot) -> Iterator[str]:
    """Every link goes from a task to an older one that exists, and stands both ways; but one of a rule that was cut may still be named."""
    for task_id, deps in snap.edges.items():
        if task_id not in snap.tasks:
            yield f"edges of task {task_id}, which does not exist"
        for dep in deps:
            if dep not in snap.tasks:
                yield f"task {task_id} depends on {dep}, which does not exist"
            if dep >= task_id and not (task_id in snap.tasks and snap.tasks[task_id].flags & RULED):
                yield f"task {task_id} depends on {dep}, which is not older"
        if len(set(deps)) != len(deps) or not deps:
            yield f"edges of task {task_id} are empty or not distinct"
    recorded: dict[int, list[int]] = {}
    for key, data in snap.txn.scan(Table.REDGES):
        task_id, first = U64_PAIR.unpack(key)
        ids = decode_ids(data)
        if task_id not in snap.tasks:
            yield f"dependents of task {task_id}, which does not exist"
        if not ids or ids[0] != first or list(ids) != sorted(set(ids)):
            yield f"dependents of task {task_id} from {first} on are not ascending"
        recorded.setdefault(task_id, []).extend(ids)
    for task_id, dependents in snap.dependents.items():
        alive = {other for other in recorded.get(task_id, ()) if other in snap.tasks}
        cut = {other for other in alive if snap.tasks[other].flags & RULED and other not in snap.edges}
        if alive - cut != set(dependents) - cut:
            yield f"task {task_id} has dependents {sorted(dependents)}, but {sorted(alive)} stand there"


def counters(snap: Snapshot) -> Iterator[str]:
    """Each counter equals a recount."""
    wants = Counter(U64_PAIR.unpack(key)[1] for key, _ in snap.txn.scan(Table.WANTS))
    for task in snap.tasks.values():
        deps = snap.deps(task)
        active = task.state in ACTIVE
        ungrown = bool(task.flags & UNGROWN)
        expected = {
            "waiting_on": ungrown + sum(dep.state != TaskState.MEMORY for dep in deps) if active else 0,
            "blocked_on": ungrown + sum(dep.state not in (TaskState.MEMORY, TaskState.PROCESSING) for dep in deps) if active else 0,
            "need": sum(snap.tasks[other].state in ACTIVE for other in snap.dependents[task.id] if other in snap.tasks),
            "links": len(snap.dependents[task.id]),
            "wants": wants[task.id],
        }
        for name, value in expected.items():
            if getattr(task, name) != value:
                yield f"{_named(task)}: {name} is {getattr(task, name)}, counted {value}"


def states(snap: Snapshot) -> Iterator[str]:
    """Rules 1, 6, 7: the state follows from who needs it and what blocks it, unless todo names it."""
    for task in snap.tasks.values():
        needed = task.need or task.expected or task.wants
        linked = task.links or task.expected or task.wants
        if task.state in _COMING and (task.state == TaskState.WAITING) != bool(task.blocked_on):
            yield f"{_named(task)}: blocked_on is {task.blocked_on}"
        if not linked and not snap.due(Todo.DOWN, task.id):
            yield f"{_named(task)}: nothing links it, and it is not about to be forgotten"
        elif not needed and task.state not in (TaskState.RELEASED, TaskState.ERRED) and not snap.due(Todo.DOWN, task.id):
            yield f"{_named(task)}: nobody needs it, and it is not about to be released"
        elif needed and task.state == TaskState.RELEASED and not snap.due(Todo.UP, task.id):
            yield f"{_named(task)}: it is needed, and not about to be activated"
        if task.state in _COMING:
            for dep in snap.deps(task):
                if dep.state == TaskState.ERRED and not snap.due(Todo.FAIL, dep.id):
                    yield f"{_named(task)}: dependency {dep.id} is ERRED, and it is not about to fail"


def queues(snap: Snapshot) -> Iterator[str]:
    """Rule 2: the queues hold all and only QUEUED tasks, each the right ones."""
    for table, queue in ((Table.READY, 1), (Table.AHEAD, 2)):
        stored = {key for key, _ in snap.txn.scan(table)}
        right = {task.rank + U64.pack(task.id) for task in snap.tasks.values() if queue_of(task) == queue}
        for key in stored ^ right:
            yield f"task {int.from_bytes(key[RANK_BYTES:])} is {'wrongly' if key in stored else 'not'} in {table.name}"


def holds(snap: Snapshot) -> Iterator[str]:
    """Rule 3: PROCESSING and MEMORY tasks, and only they, are held, by the current epoch unless it is recovering."""
    data = snap.txn.get(Table.META, meta_key(Meta.EPOCH))
    epoch = 0 if data is None else U64.unpack(data)[0]
    recovering = snap.txn.get(Table.META, meta_key(Meta.RECOVERING)) is not None
    held = {int.from_bytes(key): int.from_bytes(value) for key, value in snap.txn.scan(Table.HOLDS)}
    right = {task.id for task in snap.tasks.values() if task.state in (TaskState.PROCESSING, TaskState.MEMORY)}
    for task_id in held.keys() - right:
        yield f"task {task_id} is held, and neither PROCESSING nor in MEMORY"
    for task_id in right - held.keys():
        yield f"task {task_id} is not held, though PROCESSING or in MEMORY"
    for task_id, owner in held.items():
        if owner > epoch or (owner < epoch and not recovering):
            yield f"task {task_id} is held by epoch {owner}, not {epoch}"
    for kind, owner, _ in snap.todo:
        if kind == Todo.GIVE_BACK and (owner != epoch or not recovering):
            yield f"what epochs before {owner} held is given back, in epoch {epoch}{'' if recovering else ', which has recovered'}"
    for task in snap.tasks.values():
        if task.flags & PARKED and (
            task.state != TaskState.QUEUED or not any(held.get(dep, epoch) != epoch for dep in snap.edges.get(task.id, ()))
        ):
            yield f"{_named(task)}: it is parked for nothing"


def wants(snap: Snapshot) -> Iterator[str]:
    """A want stands both ways, and is counted; clients without wants are gone, and only dropped ones have no name."""
    by_client = {U64_PAIR.unpack(key) for key, _ in snap.txn.scan(Table.WANTS)}
    by_task = {U64_PAIR.unpack(key)[::-1] for key, _ in snap.txn.scan(Table.WANTED_BY)}
    for client_id, task_id in by_client ^ by_task:
        yield f"the want of client {client_id} for task {task_id} stands one way only"
    counts = Counter(client_id for client_id, _ in by_client)
    for client_id, task_id in by_client:
        if client_id not in snap.clients or task_id not in snap.tasks:
            yield f"client {client_id} wants task {task_id}: one of them does not exist"
    named = {number for _, data in snap.txn.scan(Table.CLIENT_NAMES) for number in decode_ids(data)}
    for client in snap.clients.values():
        if client.wants != counts[client.id]:
            yield f"client {client.id}: wants is {client.wants}, counted {counts[client.id]}"
        if not client.wants and not client.dropped:
            yield f"client {client.id} wants nothing"
        if client.dropped != snap.due(Todo.DROP, client.id):
            yield f"client {client.id}: dropped is {client.dropped}, against todo"
        if (client.id in named) == client.dropped:
            yield f"client {client.id}: dropped is {client.dropped}, against its name"
        data = snap.txn.get(Table.CLIENT_NAMES, digest(client_name(client.name, client.internal)))
        if not client.dropped and client.id not in decode_ids(data or b""):
            yield f"client {client.id} is not found by its name"
    for number in named - snap.clients.keys():
        yield f"client {number} has a name and does not exist"


def keys(snap: Snapshot) -> Iterator[str]:
    """Every task is found by its key, and no key leads elsewhere."""
    found = 0
    for key, data in snap.txn.scan(Table.KEYS):
        ids = decode_ids(data)
        found += len(ids)
        names = [snap.txn.get(Table.NAMES, U64.pack(task_id)) for task_id in ids]
        if len(set(names)) != len(names):
            yield f"a key has two tasks of {ids}"
        for task_id, name in zip(ids, names):
            if name is None or digest(name) != key:
                yield f"digest {key.hex()} leads to task {task_id}, which has another key or none"
    named = 0
    for id_key, name in snap.txn.scan(Table.NAMES):
        named += 1
        if int.from_bytes(id_key) not in snap.tasks:
            yield f"task {int.from_bytes(id_key)} has a key and does not exist"
        if int.from_bytes(id_key) not in decode_ids(snap.txn.get(Table.KEYS, digest(name)) or b""):
            yield f"task {int.from_bytes(id_key)} is not found by its key"
    if not found == named == len(snap.tasks):
        yield f"{len(snap.tasks)} tasks have {named} keys, which lead to {found} tasks"


def errors(snap: Snapshot) -> Iterator[str]:
    """ERRED tasks, and only they, have an error; a cause has failed itself."""
    records = {int.from_bytes(key): decode_error(data) for key, data in snap.txn.scan(Table.ERRORS)}
    for task_id in records.keys() ^ {task.id for task in snap.tasks.values() if task.state == TaskState.ERRED}:
        yield f"task {task_id}: ERRED and error do not agree"


def orphans(snap: Snapshot) -> Iterator[str]:
    """No record without its task or graph."""
    for table in (Table.SPECS, Table.EDGES, Table.ERRORS, Table.HOLDS):
        for key, _ in snap.txn.scan(table):
            if int.from_bytes(key) not in snap.tasks:
                yield f"{table.name} of task {int.from_bytes(key)}, which does not exist"
    for key, _ in snap.txn.scan(Table.RUNS):
        if U64_PAIR.unpack(key)[0] not in snap.graphs:
            yield f"RUNS of graph {U64_PAIR.unpack(key)[0]}, which does not exist"
    for table in (Table.BLOBS, Table.GROUPS):
        for key, _ in snap.txn.scan(table):
            if GRAPH_PART.unpack(key)[0] not in snap.graphs:
                yield f"{table.name} of graph {GRAPH_PART.unpack(key)[0]}, which does not exist"
    for task in snap.tasks.values():
        if task.graph not in snap.graphs:
            yield f"{_named(task)}: graph {task.graph} does not exist"


def graphs(snap: Snapshot) -> Iterator[str]:
    """Counts by state, of wanted and of expected equal a recount; ended graphs are gone; names lead to what is not aborted."""
    states: Counter[tuple[int, int]] = Counter()
    groups: Counter[tuple[int, int]] = Counter()
    wanted: Counter[int] = Counter()
    expected: Counter[int] = Counter()
    for task in snap.tasks.values():
        states[task.graph, task.state] += 1
        groups[task.graph, task.group] += task.group != NO_GROUP
        wanted[task.graph] += task.wants > 0
        expected[task.graph] += task.expected
    for graph in snap.graphs.values():
        counts = [states[graph.id, state] for state in TaskState]
        if graph.counts != counts:
            yield f"graph {graph.id}: counts are {graph.counts}, counted {counts}"
        if graph.wanted != wanted[graph.id]:
            yield f"graph {graph.id}: wanted is {graph.wanted}, counted {wanted[graph.id]}"
        if graph.expected != expected[graph.id]:
            yield f"graph {graph.id}: expected is {graph.expected}, counted {expected[graph.id]}"
        if graph.expected and graph.status == GraphStatus.SEALED and not snap.due(Todo.UNEXPECT, graph.id):
            yield f"graph {graph.id} is sealed and expects {graph.expected}"
        if graph.ended and not snap.due(Todo.END, graph.id):
            yield f"graph {graph.id} has ended"
        if (graph.status == GraphStatus.ABORTED) != snap.due(Todo.ABORT, graph.id):
            yield f"graph {graph.id}: aborted, against todo"
    for key, data in snap.txn.scan(Table.GROUPS):
        part = GRAPH_PART.unpack(key)
        if decode_group(data)[0] != groups[part]:
            yield f"group {part}: {decode_group(data)[0]} live, counted {groups[part]}"
    for _, data in snap.txn.scan(Table.GRAPH_NAMES):
        for number in decode_ids(data):
            if number not in snap.graphs or snap.graphs[number].status == GraphStatus.ABORTED:
                yield f"graph {number} has a name, and is gone or aborted"


def residents(snap: Snapshot) -> Iterator[str]:
    """Data without a result is ERRED, let go, or leased: never queued."""
    for task in snap.tasks.values():
        if task.flags & TaskFlag.DATA and task.state in _COMING:
            yield f"{_named(task)}: data in a queue"


def growths(snap: Snapshot) -> Iterator[str]:
    """A graph grows iff it has a growth; that counts what is UNGROWN; tasks made expect the dependents that are yet to be made."""
    growing = {int.from_bytes(key): decode_growth(data) for key, data in snap.txn.scan(Table.GROWTH)}
    ungrown = Counter(task.graph for task in snap.tasks.values() if task.flags & UNGROWN)
    for graph in snap.graphs.values():
        growth = growing.pop(graph.id, None)
        if growth is None:
            if graph.status == GraphStatus.GROWING and next(spooled_runs(snap.txn, graph.id), None) is None:
                yield f"graph {graph.id} grows, and nothing says how far"
            continue
        if graph.status == GraphStatus.SEALED:
            yield f"graph {graph.id} is sealed, and grows"
        if growth.ungrown != ungrown[graph.id]:
            yield f"graph {graph.id}: ungrown is {growth.ungrown}, counted {ungrown[graph.id]}"
        if not growth.ungrown and graph.status == GraphStatus.GROWING and not snap.due(Todo.GROWN, graph.id):
            yield f"graph {graph.id} has nothing to grow"
        data = snap.txn.get(Table.RULES, U64.pack(graph.id))
        if data is None:
            yield f"graph {graph.id} grows, and has no rule"
            continue
        rule = decode_rule(data).rule
        if sum(growth.cursors) != growth.emitted or rule.cursors(growth.emitted) != growth.cursors:
            yield f"graph {graph.id}: {growth.emitted} tasks are made, but the cursors are {growth.cursors}"
        for task in snap.tasks.values():
            if task.graph == graph.id and task.flags & RULED and not task.flags & UNGROWN:
                layer, element = rule_place(snap.txn, task.id)
                indices = rule.indices(layer, element)
                if snap.txn.get(Table.NAMES, U64.pack(task.id)) != rule.key(layer, indices):
                    yield f"{_named(task)} has another key than its rule says"
                coming = sum(rule.number(*other) >= growth.emitted for other in rule.dependents_of(layer, indices))
                if task.expected < coming:
                    yield f"{_named(task)}: it expects {task.expected} dependents, and {coming} are yet to be made"
    for graph_id in growing:
        yield f"growth of graph {graph_id}, which does not exist"
    for key, _ in snap.txn.scan(Table.RULES):
        if int.from_bytes(key) not in snap.graphs:
            yield f"rule of graph {int.from_bytes(key)}, which does not exist"


def dropped(snap: Snapshot) -> Iterator[str]:
    """A task of a rule that runs, or is to, has the links its rule says; another one has these or none. What was dropped is counted."""
    rules = {int.from_bytes(key): decode_rule(data) for key, data in snap.txn.scan(Table.RULES)}
    live: Counter[tuple[int, int]] = Counter()
    for task in snap.tasks.values():
        if task.graph not in rules or not task.flags & RULED or task.flags & UNGROWN:
            continue
        rule = rules[task.graph].rule
        layer, element = rule_place(snap.txn, task.id)
        live[task.graph, layer] += 1
        names = [snap.txn.get(Table.NAMES, U64.pack(dep)) for dep in snap.edges.get(task.id, ())]
        if names != [rule.key(*dep) for dep in rule.deps(layer, rule.indices(layer, element))] and (task.state in ACTIVE or names):
            yield f"{_named(task)} has other links than its rule says"
    for key, data in snap.txn.scan(Table.DROPPED):
        graph_id, counts = int.from_bytes(key), decode_dropped(data)
        if graph_id not in rules or len(counts) != len(rules[graph_id].counts):
            yield f"tasks of graph {graph_id} were dropped, which has no such layers"
            continue
        stored, growth = rules[graph_id], snap.txn.get(Table.GROWTH, key)
        ends = stored.counts if growth is None else decode_growth(growth).cursors
        for layer, (count, end) in enumerate(zip(counts, ends, strict=True)):
            there = live[graph_id, layer]
            if not stored.outputs[layer] and count + there > end:
                yield f"graph {graph_id}: {count} tasks of layer {layer} were dropped and {there} are there, but {end} were made"


def spooled(snap: Snapshot) -> Iterator[str]:
    """Spooled runs are the last ones of a graph that is not complete, each under ids of its own; nothing else has their keys."""
    met: dict[bytes, int] = {}
    ends: dict[int, int] = {}
    for key, data in snap.txn.scan(Table.SPOOL):
        graph_id, first_index = U64_PAIR.unpack(key)
        run = decode_spooled(data)
        graph = snap.graphs.get(graph_id)
        if graph is None or graph.status == GraphStatus.SEALED:
            yield f"runs of graph {graph_id} are spooled, which is {'complete' if graph else 'gone'}"
            continue
        if ends.setdefault(graph_id, first_index) != first_index:
            yield f"graph {graph_id}: after index {ends[graph_id]} a run is missing"
        ends[graph_id] = first_index + run.tasks
        if find_index(snap.txn, graph_id, first_index) != (first_index, ends[graph_id] - 1, run.first_id):
            yield f"graph {graph_id}: the run from index {first_index} on has other ids than it was answered with"
        for number, name in enumerate(run.columns()[0], run.first_id):
            if number in snap.tasks:
                yield f"task {number} is there, and spooled"
            if graph.status != GraphStatus.ABORTED and (met.setdefault(name, number) != number or find_key(snap.txn, name)):
                yield f"task {number} is spooled, and there is another one of its key"
    for graph_id, end in ends.items():
        if end != snap.graphs[graph_id].added:
            yield f"graph {graph_id}: its last run is not spooled, but one before it"


RULES: tuple[Callable[[Snapshot], Iterator[str]], ...] = (
    links,
    counters,
    states,
    queues,
    holds,
    wants,
    keys,
    errors,
    orphans,
    graphs,
    residents,
    growths,
    dropped,
    spooled,
)


def violations(txn: ReadTxn) -> Iterator[str]:
    """Everything in a store that breaks a rule, each as "rule: words"."""
    snap = Snapshot(txn)
    for rule in RULES:
        for words in rule(snap):
            yield f"{rule.__name__}: {words}"
