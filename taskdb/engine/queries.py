"""Questions of people and tools: read only, on a snapshot, each with bounded work. Field names are those of the wire."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from taskdb.engine.critical import CriticalPath, critical_path
from taskdb.engine.reader import Reader, TaskInfo, key_text, state_name
from taskdb.engine.refs import find_key, ruled_tasks, unmade_by_group
from taskdb.errors import InvalidRequest
from taskdb.limits import EXPLAIN_QUEUE_MAX, EXPLAIN_TASKS_MAX
from taskdb.model import TaskState
from taskdb.store.base import ReadTxn
from taskdb.store.codec import (
    PARKED,
    UNGROWN,
    GraphStatus,
    TaskRecord,
    decode_client,
    decode_graph,
    queue_of,
)
from taskdb.store.schema import GRAPH_PART, U64, U64_PAIR, Meta, Table, meta_key


@dataclass(frozen=True, slots=True)
class GraphInfo:
    submission: str
    client: str
    label: str
    #: Seconds since the epoch.
    submitted: float
    sealed: bool
    #: Tasks that exist.
    tasks: int
    #: By name of state; states without tasks are left out.
    states: dict[str, int]
    #: Tasks that somebody wants.
    wanted: int
    #: Tasks of its rule that are yet to be made.
    unmade: int
    #: Tasks it has had: those that exist, that are gone, and that are yet to be made.
    total: int


@dataclass(frozen=True, slots=True)
class Status:
    epoch: int
    tasks: int
    states: dict[str, int]
    #: Items of background work waiting.
    todo: int
    graphs: list[GraphInfo]


@dataclass(slots=True)
class Explanation:
    task: TaskInfo | None = None
    reason: str = "no such task"
    waits_for: list[TaskInfo] = field(default_factory=list)
    chain: list[TaskInfo] = field(default_factory=list)
    ahead_in_queue: int = 0
    wanted_by: list[str] = field(default_factory=list)
    cause: TaskInfo | None = None
    path: CriticalPath = field(default_factory=CriticalPath)


@dataclass(frozen=True, slots=True)
class StoredTask:
    info: TaskInfo
    spec: bytes
    deps: list[bytes]
    #: Key of the task that failed, and its payload, if it is ERRED.
    cause: bytes
    payload: bytes
    #: With the spec: the shared blob.
    shared: bytes


def _states(counts: Sequence[int]) -> dict[str, int]:
    return {state_name(state): count for state, count in enumerate(counts, 1) if count}


def status(txn: ReadTxn) -> Status:
    """Counts of everything. Reads one record a graph."""
    graphs = []
    totals = [0] * len(TaskState)
    for key, data in txn.scan(Table.GRAPHS):
        graph = decode_graph(int.from_bytes(key), data)
        totals = [total + count for total, count in zip(totals, graph.counts)]
        graphs.append(
            GraphInfo(
                graph.submission,
                graph.client,
                graph.label,
                graph.submitted,
                graph.status in GraphStatus.COMPLETE,
                graph.alive,
                _states(graph.counts),
                graph.wanted,
                sum(unmade_by_group(txn, graph.id).values()) if graph.status == GraphStatus.GROWING else 0,
                graph.added + ruled_tasks(txn, graph.id),
            )
        )
    epoch = txn.get(Table.META, meta_key(Meta.EPOCH))
    return Status(0 if epoch is None else U64.unpack(epoch)[0], sum(totals), _states(totals), txn.count(Table.TODO), graphs)


def finished_graphs(txn: ReadTxn, submissions: Sequence[str], submitted_before: float) -> list[GraphInfo]:
    """Graphs that have nothing left to do: those of these names, and those that were submitted before a time. Raises InvalidRequest for a
    name that is unknown, or of a graph that has something left."""
    graphs = {graph.submission: graph for graph in status(txn).graphs}
    for name in submissions:
        if name not in graphs:
            raise InvalidRequest(f"there is no graph {name}")
        if not _finished(graphs[name]):
            raise InvalidRequest(f"graph {name} has unfinished tasks: cancel them first (taskdb cancel --graph {name}), or wait")
    named = set(submissions)
    return [graph for graph in graphs.values() if graph.submission in named or (_finished(graph) and graph.submitted < submitted_before)]


def _finished(graph: GraphInfo) -> bool:
    return graph.sealed and not graph.unmade and not any(graph.states.get(name) for name in ("waiting", "queued", "processing"))


# ------------------------------------------------------------------------------------------------------------- explain


def explain(txn: ReadTxn, key: bytes, limit: int = 10) -> Explanation:
    """Why a task does not run. Lists at most `limit` tasks of each kind (at most EXPLAIN_TASKS_MAX; 0: that many)."""
    limit = min(limit or EXPLAIN_TASKS_MAX, EXPLAIN_TASKS_MAX)
    reader = Reader(txn)
    answer = Explanation()
    task = reader.task(find_key(txn, key))
    if task is None:
        return answer
    answer.task = reader.info(task)
    for want, _ in txn.scan(Table.WANTED_BY, U64_PAIR.pack(task.id, 0), U64_PAIR.pack(task.id + 1, 0)):
        data = txn.get(Table.CLIENTS, want[8:])
        if data is not None and not (client := decode_client(0, data)).dropped:
            answer.wanted_by.append(client.name)
        if len(answer.wanted_by) == limit:
            break
    if task.state <= TaskState.PROCESSING:
        for dep in reader.tasks(reader.deps(task.id)):
            if dep.state != TaskState.MEMORY:
                answer.waits_for.append(reader.info(dep))
                if len(answer.waits_for) == limit:
                    break
        answer.chain = _chain(reader, task, limit)
        if answer.waits_for:
            answer.path = critical_path(reader, task, limit)
    answer.reason = _reason(reader, task, answer)
    return answer


def _chain(reader: Reader, task: TaskRecord, limit: int) -> list[TaskInfo]:
    """Down from a task, each time to a dependency that is not in memory, the least far along first."""
    chain: list[TaskInfo] = []
    while len(chain) < limit:
        waits_for = [dep for dep in reader.tasks(reader.deps(task.id)) if dep.state != TaskState.MEMORY]
        if not waits_for:
            break
        # WAITING and RELEASED ones are what keeps it from the scheduler; leased ones are on their way.
        task = min(waits_for, key=lambda dep: (dep.state == TaskState.PROCESSING, dep.state == TaskState.QUEUED, dep.id))
        chain.append(reader.info(task))
        if task.state > TaskState.PROCESSING:
            break
    return chain


def _reason(reader: Reader, task: TaskRecord, answer: Explanation) -> str:
    if task.flags & UNGROWN and task.state == TaskState.WAITING:
        return "waiting: what it depends on is yet to be made from the rule of its graph, when its turn comes"
    owner = reader.txn.get(Table.HOLDS, U64.pack(task.id))
    if owner is not None and owner != reader.txn.get(Table.META, meta_key(Meta.EPOCH)):
        state = TaskState(task.state).name.lower()
        return f"{state}: with a scheduler that is gone; a worker may bring it to this one, else it is given back"
    if task.flags & PARKED:
        return "queued: what it depends on was with a scheduler that is gone; a worker may bring that to this one, else it is given back"
    if task.state == TaskState.WAITING:
        end = f"; the chain ends at {key_text(answer.chain[-1].key)} ({answer.chain[-1].state})" if answer.chain else ""
        return f"waiting: {task.blocked_on} of its dependencies are neither in memory nor with the scheduler{end}"
    if task.state == TaskState.QUEUED:
        answer.ahead_in_queue, exact = _place(reader.txn, task)
        inputs = f"{task.waiting_on} of its dependencies are running" if task.waiting_on else "its dependencies are in memory"
        return f"queued: {inputs}; {'' if exact else 'at least '}{answer.ahead_in_queue} tasks are handed out before it"
    if task.state == TaskState.PROCESSING:
        inputs = f", waiting for {task.waiting_on} dependencies" if task.waiting_on else ""
        return f"processing: handed to the scheduler{inputs}"
    if task.state == TaskState.MEMORY:
        return "memory: finished, workers hold the result"
    if task.state == TaskState.RELEASED:
        return "released: nobody needs its result now"
    cause_id, error = reader.error(task.id)
    cause = reader.task(cause_id)
    text = f": {error.text.splitlines()[0]}" if error.text else ""
    if cause is None or cause_id == task.id:
        return f"erred: it failed{text}"
    answer.cause = reader.info(cause)
    return f"erred: {key_text(answer.cause.key)} failed{text}"


def _place(txn: ReadTxn, task: TaskRecord) -> tuple[int, bool]:
    """(tasks before it in its queue, whether that is all of them)."""
    table = Table.READY if queue_of(task) == 1 else Table.AHEAD
    count = 0
    for _ in txn.scan(table, b"", task.rank + U64.pack(task.id)):
        count += 1
        if count == EXPLAIN_QUEUE_MAX:
            return count, False
    return count, True


# ----------------------------------------------------------------------------------------------------------- get_tasks


def get_tasks(txn: ReadTxn, keys: Sequence[bytes], with_spec: bool = False) -> list[StoredTask | None]:
    """Everything stored under these keys, in their order; None for unknown ones."""
    reader = Reader(txn)
    answer: list[StoredTask | None] = []
    for key in keys:
        task = reader.task(find_key(txn, key))
        if task is None:
            answer.append(None)
            continue
        cause, payload = b"", b""
        if task.state == TaskState.ERRED:
            cause_id, error = reader.error(task.id)
            cause, payload = reader.key(cause_id), error.payload
        spec = reader.spec(task) if with_spec else b""
        shared = (txn.get(Table.BLOBS, GRAPH_PART.pack(task.graph, task.annotation)) or b"") if with_spec and task.annotation else b""
        answer.append(StoredTask(reader.info(task), spec, reader.dep_keys(task), cause, payload, shared))
    return answer
