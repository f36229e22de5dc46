"""Records <-> bytes. Nothing but layout: no rules, no tables.

Record objects are mutable: the engine keeps each once per transaction and writes it back at the end.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from struct import Struct, error, pack, unpack

import msgpack

from taskdb.errors import InvalidRequest, LimitExceeded, StoreCorrupt
from taskdb.model import Rank, TaskState
from taskdb.rules import Rule
from taskdb.store.schema import U64

_TASK = Struct(">BBHhIIIIIIqQII24s")
TASK_BYTES = _TASK.size
_RANK = Struct(">3d")
_RANK_BITS = Struct(">3Q")
_SIGN = 1 << 63
_ALL = (1 << 64) - 1

#: Stored flags of our own, beside those of a task as it arrives.
#: QUEUED, but a dependency is held by a scheduler that is gone, so it stands in no queue.
PARKED = 64
#: Made from its submission's rule: its spec is its place there.
RULED = 16
#: RULED, and its dependencies are yet to be made: it waits for them as for one dependency.
UNGROWN = 32
#: It was ERRED, and was neither leased nor named for release since. So the scheduler may still hold it as failed.
REVIVED = 128

#: A task without group.
NO_GROUP = 2**32 - 1

_STATES_MAX = int(max(TaskState))
WAITING = TaskState.WAITING
QUEUED = TaskState.QUEUED


class TaskRecord:
    """One task. The fields are those of docs/engine.md; `rank` is the order-preserving form of model.Rank."""

    __slots__ = (
        "annotation",
        "blocked_on",
        "deps",
        "dirty",
        "expected",
        "flags",
        "graph",
        "group",
        "id",
        "links",
        "nbytes",
        "need",
        "rank",
        "reclaim",
        "retries",
        "state",
        "stored_held",
        "stored_queue",
        "stored_state",
        "suspicious",
        "waiting_on",
        "wants",
    )

    id: int
    state: int
    flags: int
    suspicious: int
    retries: int
    waiting_on: int
    blocked_on: int
    need: int
    links: int
    expected: int
    wants: int
    nbytes: int
    graph: int
    group: int
    annotation: int
    rank: bytes
    #: Ids of its dependencies, once they have been read in this transaction.
    deps: tuple[int, ...] | None
    #: Must be written at the end of the transaction.
    dirty: bool
    #: The queue it stands in on disk: 0 none, 1 ready, 2 ahead.
    stored_queue: int
    #: Its state on disk; 0: it is new.
    stored_state: int
    #: It stands in the holds on disk.
    stored_held: bool
    #: Its hold is to be written anew: the scheduler of this epoch has it.
    reclaim: bool


def queue_of(task: TaskRecord) -> int:
    """The queue a task belongs in: 0 none, 1 ready, 2 ahead."""
    if task.state != QUEUED or task.flags & PARKED:
        return 0
    return 2 if task.waiting_on else 1


def decode_task(task_id: int, data: bytes) -> TaskRecord:
    """Raises StoreCorrupt."""
    task = TaskRecord()
    task.id = task_id
    try:
        (
            state,
            task.flags,
            task.suspicious,
            task.retries,
            waiting_on,
            task.blocked_on,
            task.need,
            task.links,
            task.expected,
            task.wants,
            task.nbytes,
            task.graph,
            task.group,
            task.annotation,
            task.rank,
        ) = _TASK.unpack(data)
    except error:
        raise StoreCorrupt(f"task {task_id}: record of {len(data)} bytes, not {_TASK.size}") from None
    if not 1 <= state <= _STATES_MAX:
        raise StoreCorrupt(f"task {task_id}: there is no state {state}")
    task.state = task.stored_state = state
    task.waiting_on = waiting_on
    task.deps = None
    task.dirty = False
    task.stored_queue = 0 if state != 2 or task.flags & PARKED else (2 if waiting_on else 1)
    task.stored_held = 3 <= state <= 4
    task.reclaim = False
    return task


def encode_task(task: TaskRecord) -> bytes:
    return _TASK.pack(
        task.state,
        task.flags,
        task.suspicious,
        task.retries,
        task.waiting_on,
        task.blocked_on,
        task.need,
        task.links,
        task.expected,
        task.wants,
        task.nbytes,
        task.graph,
        task.group,
        task.annotation,
        task.rank,
    )


def encode_rank(user: float, generation: float, order: float) -> bytes:
    """24 bytes that compare as the three numbers do. -0.0 counts as 0.0; NaN has no place and must not come here."""
    # Adding 0.0 turns -0.0 into 0.0: equal numbers must have equal bytes.
    a, b, c = _RANK_BITS.unpack(_RANK.pack(user + 0.0, generation + 0.0, order + 0.0))
    return _RANK_BITS.pack(a ^ (_ALL if a & _SIGN else _SIGN), b ^ (_ALL if b & _SIGN else _SIGN), c ^ (_ALL if c & _SIGN else _SIGN))


def decode_rank(data: bytes) -> Rank:
    bits = [value ^ (_SIGN if value & _SIGN else _ALL) for value in _RANK_BITS.unpack(data)]
    return Rank(*_RANK.unpack(_RANK_BITS.pack(*bits)))


def explained(failed: Exception) -> Exception:
    """What a failure to unpack a number says of the store. Any other error as it is."""
    if isinstance(failed, error):
        return StoreCorrupt(f"the store holds what cannot be read ({failed}): `taskdb verify` says where")
    return failed


def encode_ids(ids: Sequence[int]) -> bytes:
    if len(ids) == 1:
        return U64.pack(ids[0])
    return pack(f">{len(ids)}Q", *ids)


def decode_ids(data: bytes) -> tuple[int, ...]:
    """Raises StoreCorrupt."""
    if len(data) % 8:
        raise StoreCorrupt(f"a list of ids has {len(data)} bytes")
    return unpack(f">{len(data) // 8}Q", data)


def encode_strings(texts: Iterable[str]) -> bytes:
    parts = []
    for text in texts:
        raw = text.encode()
        parts.append(pack(">I", len(raw)))
        parts.append(raw)
    return b"".join(parts)


def decode_strings(data: bytes) -> list[str]:
    """Raises StoreCorrupt."""
    texts = []
    at = 0
    try:
        while at < len(data):
            (size,) = unpack(">I", data[at : at + 4])
            texts.append(data[at + 4 : at + 4 + size].decode())
            at += 4 + size
    except (error, UnicodeDecodeError):
        raise StoreCorrupt("a list of texts cannot be read") from None
    return texts


class GraphStatus:
    """Where a submission stands."""

    OPEN = 1
    SEALED = 2
    #: Being forgotten. Has lost its name.
    ABORTED = 3
    #: Complete, but tasks of its rule are yet to be made.
    GROWING = 4

    #: Nothing more of it comes from outside.
    COMPLETE = (SEALED, GROWING)


#: A stored flag of a submission, beside those of model.GraphFlag: its client was dropped, and wants nothing of what is still spooled.
UNWANTED = 128

_GRAPH = Struct(">BBddQQQ6QII")


@dataclass(slots=True)
class GraphRecord:
    """One submission."""

    id: int
    status: int
    generation: float
    submitted: float
    #: Indices added so far.
    added: int
    #: Sum of `expected` of its tasks.
    expected: int
    #: Its tasks that somebody wants.
    wanted: int
    #: Its tasks by state; index is TaskState - 1.
    counts: list[int]
    #: Names and blobs introduced so far.
    groups: int
    annotations: int
    submission: str
    client: str
    label: str
    #: GraphFlag bits.
    flags: int = 0
    dirty: bool = field(default=False)

    @property
    def alive(self) -> int:
        return sum(self.counts)

    @property
    def ended(self) -> bool:
        """Nothing of it is left, and nothing more will come."""
        return self.status == GraphStatus.SEALED and not any(self.counts)


def encode_graph(graph: GraphRecord) -> bytes:
    fixed = _GRAPH.pack(
        graph.status,
        graph.flags,
        graph.generation,
        graph.submitted,
        graph.added,
        graph.expected,
        graph.wanted,
        *graph.counts,
        graph.groups,
        graph.annotations,
    )
    return fixed + encode_strings((graph.submission, graph.client, graph.label))


def decode_graph(graph_id: int, data: bytes) -> GraphRecord:
    """Raises StoreCorrupt."""
    try:
        values = _GRAPH.unpack(data[: _GRAPH.size])
        submission, client, label = decode_strings(data[_GRAPH.size :])
    except (error, ValueError):
        raise StoreCorrupt(f"graph {graph_id}: record cannot be read") from None
    status, flags, generation, submitted, added, expected, wanted, *counts = values[:13]
    groups, annotations = values[13:]
    return GraphRecord(
        graph_id, status, generation, submitted, added, expected, wanted, counts, groups, annotations, submission, client, label, flags
    )


_CLIENT = Struct(">BQ")


@dataclass(slots=True)
class ClientRecord:
    """One client that wants something."""

    id: int
    name: str
    #: Stands for an open submission, which wants what it builds on. Never named in an answer.
    internal: bool
    #: Its wants are being removed. Has lost its name; never named in an answer.
    dropped: bool
    #: Number of its wants.
    wants: int
    dirty: bool = False


def encode_client(client: ClientRecord) -> bytes:
    return _CLIENT.pack(client.internal | client.dropped << 1, client.wants) + client.name.encode()


def decode_client(client_id: int, data: bytes) -> ClientRecord:
    """Raises StoreCorrupt."""
    try:
        bits, wants = _CLIENT.unpack(data[: _CLIENT.size])
        name = data[_CLIENT.size :].decode()
    except (error, UnicodeDecodeError):
        raise StoreCorrupt(f"client {client_id}: record cannot be read") from None
    return ClientRecord(client_id, name, bool(bits & 1), bool(bits & 2), wants)


@dataclass(frozen=True, slots=True)
class ErrorRecord:
    """Why a task is ERRED: `cause` is the id of the task that failed, or 0 if it failed itself."""

    cause: int = 0
    text: str = ""
    payload: bytes = b""
    traceback: str = ""


#: Set in the size of the text: a traceback follows. (Records of format 3 have none.)
_TRACEBACK = 1 << 31


def encode_error(record: ErrorRecord) -> bytes:
    text, traceback = record.text.encode(errors="replace"), record.traceback.encode(errors="replace")
    if not traceback:
        return U64.pack(record.cause) + pack(">I", len(text)) + text + record.payload
    return U64.pack(record.cause) + pack(">II", len(text) | _TRACEBACK, len(traceback)) + text + traceback + record.payload


def decode_error(data: bytes) -> ErrorRecord:
    """Raises StoreCorrupt."""
    try:
        (cause,) = U64.unpack(data[:8])
        (size,) = unpack(">I", data[8:12])
        if not size & _TRACEBACK:
            return ErrorRecord(cause, data[12 : 12 + size].decode(), data[12 + size :])
        start = 16 + (size & ~_TRACEBACK)
        stop = start + int(unpack(">I", data[12:16])[0])
        return ErrorRecord(cause, data[16:start].decode(), data[stop:], data[start:stop].decode())
    except (error, UnicodeDecodeError):
        raise StoreCorrupt("an error record cannot be read") from None


def encode_kept(name: bytes, value: bytes) -> bytes:
    return pack(">I", len(name)) + name + value


def decode_kept(data: bytes) -> tuple[bytes, bytes]:
    """(name, value). Raises StoreCorrupt."""
    try:
        (size,) = unpack(">I", data[:4])
    except error:
        raise StoreCorrupt("a kept item cannot be read") from None
    if len(data) < 4 + size:
        raise StoreCorrupt("a kept item is cut short")
    return data[4 : 4 + size], data[4 + size :]


def encode_group(live: int, name: str) -> bytes:
    return U64.pack(live) + name.encode()


def decode_group(data: bytes) -> tuple[int, str]:
    """(live tasks, name). Raises StoreCorrupt."""
    try:
        return U64.unpack(data[:8])[0], data[8:].decode()
    except (error, UnicodeDecodeError):
        raise StoreCorrupt("a group record cannot be read") from None


@dataclass(frozen=True, slots=True)
class RuleHead:
    """Where the tasks of a submission's rule stand."""

    #: Id of the task that is emitted first; each has the id that its number says. Those of outputs come before all of these.
    first_id: int
    #: Number of the group of the rule's first layer.
    first_group: int
    #: Tasks of each layer.
    counts: tuple[int, ...]
    #: Elements of each layer that exist from the start, ascending.
    outputs: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class StoredRule(RuleHead):
    rule: Rule


def encode_rule(stored: StoredRule) -> bytes:
    outputs = [encode_ids(elements) for elements in stored.outputs]
    packed: bytes = msgpack.packb((stored.first_id, stored.first_group, stored.counts, outputs, stored.rule.write()))
    return packed


def decode_rule_head(data: bytes) -> RuleHead:
    """Without reading the rule itself, which may be large. Raises StoreCorrupt."""
    return _decode_rule(data)[0]


def decode_rule(data: bytes) -> StoredRule:
    """Raises StoreCorrupt."""
    head, written = _decode_rule(data)
    try:
        rule = Rule.read(written)
    except (InvalidRequest, LimitExceeded):
        raise StoreCorrupt("a rule cannot be read") from None
    if rule.counts != head.counts:
        raise StoreCorrupt("a rule has other tasks than it had")
    return StoredRule(head.first_id, head.first_group, head.counts, head.outputs, rule)


def _decode_rule(data: bytes) -> tuple[RuleHead, bytes]:
    try:
        first_id, first_group, counts, outputs, written = msgpack.unpackb(data)
        return RuleHead(int(first_id), int(first_group), tuple(counts), tuple(decode_ids(ids) for ids in outputs)), bytes(written)
    except (ValueError, TypeError, msgpack.exceptions.UnpackException):
        raise StoreCorrupt("a rule cannot be read") from None


_GROWTH = Struct(">QQ")


@dataclass(slots=True)
class Growth:
    """How far a rule has been carried out."""

    #: Tasks emitted so far.
    emitted: int
    #: Outputs that are there and UNGROWN.
    ungrown: int
    #: Elements emitted of each layer.
    cursors: list[int]
    dirty: bool = False


def encode_growth(growth: Growth) -> bytes:
    return _GROWTH.pack(growth.emitted, growth.ungrown) + encode_ids(growth.cursors)


def decode_growth(data: bytes) -> Growth:
    """Raises StoreCorrupt."""
    try:
        emitted, ungrown = _GROWTH.unpack(data[: _GROWTH.size])
    except error:
        raise StoreCorrupt("a growth record cannot be read") from None
    return Growth(emitted, ungrown, list(decode_ids(data[_GROWTH.size :])))


def encode_dropped(counts: Sequence[int]) -> bytes:
    return pack(f">{len(counts)}q", *counts)


def decode_dropped(data: bytes) -> list[int]:
    """Dropped tasks of each layer of a rule. Raises StoreCorrupt."""
    if not data or len(data) % 8:
        raise StoreCorrupt(f"a list of counts has {len(data)} bytes")
    return list(unpack(f">{len(data) // 8}q", data))
