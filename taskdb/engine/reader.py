"""Records of a snapshot, decoded for people and tools."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import msgpack

from taskdb.engine.refs import rule_place
from taskdb.model import TaskState
from taskdb.rules import Rule
from taskdb.store.base import ReadTxn
from taskdb.store.codec import (
    NO_GROUP,
    RULED,
    ErrorRecord,
    GraphRecord,
    TaskRecord,
    decode_error,
    decode_graph,
    decode_group,
    decode_ids,
    decode_rank,
    decode_rule,
    decode_task,
)
from taskdb.store.schema import GRAPH_PART, U64, Table


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
    #: In a sorted list: bytes that compare as the list is sorted.
    token: bytes = b""


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


def prefix_text(name: str | bytes) -> str:
    """What Dask calls the prefix, of a group's name or a packed key: its words up to a token or a number."""
    first, *words = (name if isinstance(name, str) else key_name(name)).split("-")
    for word in words:
        if not word.isalpha() or (len(word) == 8 and all(letter in "0123456789abcdef" for letter in word)):
            break
        first += "-" + word
    return first


def _unpack(key: bytes) -> Any:
    try:
        return msgpack.unpackb(key, use_list=False, strict_map_key=False)
    except Exception:
        # Keys are only bytes to the database: whoever packed it otherwise sees the bytes.
        return key


class Reader:
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
        graph = self.graph(graph_id)
        return "" if graph is None else graph.submission

    def graph(self, graph_id: int) -> GraphRecord | None:
        if graph_id not in self._graphs:
            data = self.txn.get(Table.GRAPHS, U64.pack(graph_id))
            self._graphs[graph_id] = None if data is None else decode_graph(graph_id, data)
        return self._graphs[graph_id]

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
