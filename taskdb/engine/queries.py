"""Questions of people and tools: read only, on a snapshot, each with bounded work. Field names are those of the wire."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgpack

from taskdb.engine.refs import find_graph, find_key, next_run, rule_place, unmade_by_group
from taskdb.errors import InvalidRequest
from taskdb.limits import EXPLAIN_QUEUE_MAX, EXPLAIN_TASKS_MAX, LIST_SCAN_MAX, LIST_TASKS_MAX
from taskdb.model import TaskState
from taskdb.rules import Rule
from taskdb.store.base import ReadTxn
from taskdb.store.codec import (
    NO_GROUP,
    PARKED,
    RULED,
    UNGROWN,
    ErrorRecord,
    GraphRecord,
    GraphStatus,
    TaskRecord,
    decode_client,
    decode_error,
    decode_graph,
    decode_group,
    decode_ids,
    decode_rank,
    decode_rule,
    decode_task,
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


@dataclass(frozen=True, slots=True)
class Status:
    epoch: int
    tasks: int
    states: dict[str, int]
    #: Items of background work waiting.
    todo: int
    graphs: list[GraphInfo]


@dataclass(frozen=True, slots=True)
class TaskInfo:
    id: int
    key: bytes
    state: str
    submission: str
    group: str
    waiting_on: int
    blocked_on: int
    need: int
    wants: int
    nbytes: int
    user: float
    generation: float
    order: float
    suspicious: int
    #: Text of the error, if it failed itself or the task it is blamed on did.
    error: str


@dataclass(frozen=True, slots=True)
class TaskPage:
    tasks: list[TaskInfo]
    #: Where the next page begins; b"" at the end. A page may be empty and not the last.
    cursor: bytes


@dataclass(slots=True)
class Explanation:
    task: TaskInfo | None = None
    reason: str = "no such task"
    waits_for: list[TaskInfo] = field(default_factory=list)
    chain: list[TaskInfo] = field(default_factory=list)
    ahead_in_queue: int = 0
    wanted_by: list[str] = field(default_factory=list)
    cause: TaskInfo | None = None


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


def key_text(key: bytes) -> str:
    """A packed key for people: a string as it is, else its parts as Python writes them."""
    value = _unpack(key)
    return value if isinstance(value, str) else repr(value)


def key_name(key: bytes) -> str:
    """What a prefix is compared with: the key if it is a string, the first part if it is a tuple."""
    value = _unpack(key)
    if isinstance(value, tuple) and value:
        value = value[0]
    return value if isinstance(value, str) else repr(value)


def _unpack(key: bytes) -> Any:
    try:
        return msgpack.unpackb(key, use_list=False, strict_map_key=False)
    except Exception:
        # Keys are only bytes to the database: whoever packed it otherwise sees the bytes.
        return key


class _Reader:
    """Records of a snapshot, decoded; names of graphs and groups are read once."""

    def __init__(self, txn: ReadTxn) -> None:
        self.txn = txn
        self._graphs: dict[int, GraphRecord | None] = {}
        self._groups: dict[tuple[int, int], str] = {}
        self._rules: dict[int, Rule] = {}

    def task(self, task_id: int) -> TaskRecord | None:
        data = self.txn.get(Table.TASKS, U64.pack(task_id))
        return None if data is None else decode_task(task_id, data)

    def tasks(self, ids: Sequence[int]) -> Iterator[TaskRecord]:
        for task_id in ids:
            task = self.task(task_id)
            if task is not None:
                yield task

    def deps(self, task_id: int) -> tuple[int, ...]:
        return decode_ids(self.txn.get(Table.EDGES, U64.pack(task_id)) or b"")

    def key(self, task_id: int) -> bytes:
        return self.txn.get(Table.NAMES, U64.pack(task_id)) or b""

    def spec(self, task: TaskRecord) -> bytes:
        if task.flags & RULED:
            return self._rule(task).spec(*rule_place(self.txn, task.id))
        return self.txn.get(Table.SPECS, U64.pack(task.id)) or b""

    def dep_keys(self, task: TaskRecord) -> list[bytes]:
        if not task.flags & RULED:
            return [self.key(dep_id) for dep_id in self.deps(task.id)]
        # It may have been cut, or not been linked yet.
        rule = self._rule(task)
        layer, element = rule_place(self.txn, task.id)
        return [rule.key(*dep) for dep in rule.deps(layer, rule.indices(layer, element))]

    def _rule(self, task: TaskRecord) -> Rule:
        if task.graph not in self._rules:
            self._rules[task.graph] = decode_rule(self.txn.get(Table.RULES, U64.pack(task.graph)) or b"").rule
        return self._rules[task.graph]

    def error(self, task_id: int) -> tuple[int, ErrorRecord]:
        """(id of the task that failed itself, its error) of an ERRED task."""
        data = self.txn.get(Table.ERRORS, U64.pack(task_id))
        record = ErrorRecord() if data is None else decode_error(data)
        if record.cause:
            data = self.txn.get(Table.ERRORS, U64.pack(record.cause))
            return record.cause, ErrorRecord() if data is None else decode_error(data)
        return task_id, record

    def submission(self, graph_id: int) -> str:
        if graph_id not in self._graphs:
            data = self.txn.get(Table.GRAPHS, U64.pack(graph_id))
            self._graphs[graph_id] = None if data is None else decode_graph(graph_id, data)
        graph = self._graphs[graph_id]
        return "" if graph is None else graph.submission

    def group(self, graph_id: int, index: int) -> str:
        if index == NO_GROUP:
            return ""
        name = self._groups.get((graph_id, index))
        if name is None:
            data = self.txn.get(Table.GROUPS, GRAPH_PART.pack(graph_id, index))
            name = self._groups[graph_id, index] = "" if data is None else decode_group(data)[1]
        return name

    def info(self, task: TaskRecord) -> TaskInfo:
        rank = decode_rank(task.rank)
        return TaskInfo(
            task.id,
            self.key(task.id),
            state_name(task.state),
            self.submission(task.graph),
            self.group(task.graph, task.group),
            task.waiting_on,
            task.blocked_on,
            task.need,
            task.wants,
            task.nbytes,
            rank.user,
            rank.generation,
            rank.order,
            task.suspicious,
            self.error(task.id)[1].text if task.state == TaskState.ERRED else "",
        )


def state_name(state: int) -> str:
    return TaskState(state).name.lower()


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
            )
        )
    epoch = txn.get(Table.META, meta_key(Meta.EPOCH))
    return Status(0 if epoch is None else U64.unpack(epoch)[0], sum(totals), _states(totals), txn.count(Table.TODO), graphs)


# ---------------------------------------------------------------------------------------------------------- list_tasks


def list_tasks(txn: ReadTxn, submission: str = "", state: str = "", prefix: str = "", cursor: bytes = b"", limit: int = 100) -> TaskPage:
    """Tasks by id that pass all filters (empty: lets all through), at most `limit` (at most LIST_TASKS_MAX; 0: that many).

    Looks at no more than LIST_SCAN_MAX tasks, so a page may be short and not the last. Raises InvalidRequest.
    """
    if cursor and len(cursor) != U64.size:
        raise InvalidRequest("the cursor is not one of a reply")
    if state and state.upper() not in TaskState.__members__:
        raise InvalidRequest(f"unknown state {state}: one of {', '.join(name.lower() for name in TaskState.__members__)}")
    limit = min(limit or LIST_TASKS_MAX, LIST_TASKS_MAX)
    reader = _Reader(txn)
    wanted_state = TaskState[state.upper()] if state else None
    start = int.from_bytes(cursor)
    tasks: list[TaskInfo] = []
    for seen, (position, task_id) in enumerate(_candidates(txn, submission, wanted_state, start)):
        if seen == LIST_SCAN_MAX or len(tasks) == limit:
            return TaskPage(tasks, U64.pack(position))
        task = reader.task(task_id)
        if task is None or (wanted_state is not None and task.state != wanted_state):
            continue
        if submission and reader.submission(task.graph) != submission:
            continue
        if prefix and not key_name(reader.key(task_id)).startswith(prefix):
            continue
        tasks.append(reader.info(task))
    return TaskPage(tasks, b"")


#: Where tasks of a state, and few others, are found.
_INDEX = {TaskState.PROCESSING: Table.HOLDS, TaskState.MEMORY: Table.HOLDS, TaskState.ERRED: Table.ERRORS}


def _candidates(txn: ReadTxn, submission: str, state: TaskState | None, start: int) -> Iterator[tuple[int, int]]:
    """(cursor, id) of every task that may pass, in a fixed order, from a cursor on."""
    if submission:
        graph_id = find_graph(txn, submission)
        while graph_id and (run := next_run(txn, graph_id, start)) is not None:
            first, last, first_id = run
            start = max(start, first)
            # Of a long run few may be left.
            pairs = txn.scan(Table.TASKS, U64.pack(first_id + start - first), U64.pack(first_id + last + 1 - first)) if first_id else ()
            found = False
            for key, _ in pairs:
                found = True
                task_id = int.from_bytes(key)
                yield first + task_id - first_id, task_id
            if not found:
                yield last, 0  # the work is bounded even if nothing is left of any run
            start = last + 1
        return
    table = _INDEX.get(state, Table.TASKS) if state is not None else Table.TASKS
    for key, _ in txn.scan(table, U64.pack(start)):
        task_id = int.from_bytes(key)
        yield task_id, task_id


# ------------------------------------------------------------------------------------------------------------- explain


def explain(txn: ReadTxn, key: bytes, limit: int = 10) -> Explanation:
    """Why a task does not run. Lists at most `limit` tasks of each kind (at most EXPLAIN_TASKS_MAX; 0: that many)."""
    limit = min(limit or EXPLAIN_TASKS_MAX, EXPLAIN_TASKS_MAX)
    reader = _Reader(txn)
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
    answer.reason = _reason(reader, task, answer)
    return answer


def _chain(reader: _Reader, task: TaskRecord, limit: int) -> list[TaskInfo]:
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


def _reason(reader: _Reader, task: TaskRecord, answer: Explanation) -> str:
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
    reader = _Reader(txn)
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
