"""Tasks by filters, in pages: by id, or by what they are sorted by. Each call does bounded work on one snapshot.

Records are looked at as columns, some thousands at a time; keys are only read of tasks that pass everything else. A sorted page is the best
of a stretch of the store: whoever asks goes on with the cursor, and merges the pages of all stretches by their tokens.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from fnmatch import translate
from itertools import islice
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from taskdb.engine.reader import Reader, TaskInfo, key_name, key_text
from taskdb.engine.refs import find_graph, next_run
from taskdb.errors import InvalidRequest
from taskdb.limits import LIST_NAMES_MAX, LIST_SCAN_MAX, LIST_TASKS_MAX
from taskdb.model import TaskState
from taskdb.store.base import ReadTxn
from taskdb.store.columns import TASK, record_columns
from taskdb.store.history import StoredBlock
from taskdb.store.schema import U64, Table

#: What tasks are sorted by -> the field of their record.
SORTS = {
    "bytes": "nbytes",
    "priority": "rank",
    "waits-for": "waiting_on",
    "needed-by": "need",
    "wanted-by": "wants",
    "suspicious": "suspicious",
}
#: Records decoded at a time: few at first, as a page may be full soon.
_CHUNK, _CHUNK_FIRST = 4_096, 256
#: Places in a block of the history, and the records that reading one is worth.
_BLOCK = 1 << 20
_BLOCK_COST = 2_000
#: Where tasks of a state, and few others, are found.
_INDEX = {TaskState.PROCESSING: Table.HOLDS, TaskState.MEMORY: Table.HOLDS, TaskState.ERRED: Table.ERRORS}

T = TypeVar("T")
Ids = npt.NDArray[np.uint64]


@dataclass(frozen=True, slots=True)
class Filters:
    """What a task must be. What is empty lets everything through."""

    submission: str = ""
    state: str = ""
    #: Its key, or the first part of it, begins with this.
    prefix: str = ""
    #: Name of its group, or what that begins with, up to a "-".
    group: str = ""
    #: As a file's name is matched by a shell: * ? [a-z]. Of the whole key, as it is shown.
    pattern: str = ""
    #: Somebody wants its result.
    wanted: bool = False
    #: Address of the worker that computed it, as far as the history reaches. One that was computed twice may come twice.
    worker: str = ""


@dataclass(frozen=True, slots=True)
class TaskPage:
    tasks: list[TaskInfo]
    #: Where the next page begins; b"" at the end. A page may be empty and not the last.
    cursor: bytes


@dataclass(frozen=True, slots=True)
class _Chunk:
    #: Cursor of each task, its id, and its record (TASK).
    positions: Ids
    ids: Ids
    records: np.ndarray
    #: Cursor of what comes after.
    next: int
    #: Records that finding these was worth.
    cost: int


def list_tasks(
    txn: ReadTxn,
    filters: Filters = Filters(),
    cursor: bytes = b"",
    limit: int = 100,
    sort: str = "",
    descending: bool = False,
    after: bytes = b"",
) -> TaskPage:
    """At most `limit` tasks (at most LIST_TASKS_MAX; 0: that many) that pass `filters`, by id or by `sort`.

    Looks at about LIST_SCAN_MAX tasks, and at the keys of about LIST_NAMES_MAX: a page may be short and not the last. Sorted: the best of
    the stretch looked at, only those that come after the token `after`. Raises InvalidRequest.
    """
    if cursor and len(cursor) != U64.size:
        raise InvalidRequest("the cursor is not one of a reply")
    if filters.state and filters.state.upper() not in TaskState.__members__:
        raise InvalidRequest(f"unknown state {filters.state}: one of {', '.join(name.lower() for name in TaskState.__members__)}")
    if sort and sort not in SORTS:
        raise InvalidRequest(f"tasks are not sorted by {sort}: one of {', '.join(SORTS)}")
    limit = min(limit or LIST_TASKS_MAX, LIST_TASKS_MAX)
    reader = Reader(txn)
    passes = _Passes(reader, filters)
    if sort:
        return _sorted(reader, passes, filters, int.from_bytes(cursor), limit, _Order(sort, descending, after))
    tasks: list[TaskInfo] = []
    seen = 0
    for chunk in _chunks(reader, filters, int.from_bytes(cursor)):
        for at in np.flatnonzero(passes.columns(chunk)):
            if len(tasks) == limit or passes.names_read >= LIST_NAMES_MAX:
                return TaskPage(tasks, U64.pack(int(chunk.positions[at])))
            task_id = int(chunk.ids[at])
            if passes.name(task_id) and (task := reader.task(task_id)) is not None:
                tasks.append(reader.info(task))
        seen += chunk.cost
        if seen >= LIST_SCAN_MAX:
            return TaskPage(tasks, U64.pack(chunk.next))
    return TaskPage(tasks, b"")


class _Order:
    """Tokens: bytes that compare as tasks are sorted; the id last, so that no two are the same."""

    def __init__(self, sort: str, descending: bool, after: bytes) -> None:
        self._field = SORTS[sort]
        self._descending = descending
        self.bytes = 8 * (4 if self._field == "rank" else 2)
        if after and len(after) != self.bytes:
            raise InvalidRequest("that token is of a list that is sorted otherwise")
        self.after = after

    def sorted(self, ids: Ids, records: np.ndarray) -> Iterator[tuple[bytes, int]]:
        """Tokens and ids, in order."""
        if self._field == "rank":
            values = np.ascontiguousarray(records["rank"]).view(">u8").reshape(len(ids), 3).astype(np.uint64)
        else:
            values = (records[self._field].astype(np.int64).view(np.uint64) ^ np.uint64(1 << 63)).reshape(len(ids), 1)
        if self._descending:
            values = ~values
        table = np.concatenate([values, ids.reshape(-1, 1)], axis=1)
        table = table[np.lexsort(table.T[::-1])]
        tokens = np.ascontiguousarray(table.astype(">u8")).view(f"V{self.bytes}").reshape(-1)
        return zip(tokens.tolist(), table[:, -1].tolist())


def _sorted(reader: Reader, passes: _Passes, filters: Filters, start: int, limit: int, order: _Order) -> TaskPage:
    best: list[tuple[bytes, int]] = []
    rest, seen = b"", 0
    for chunk in _chunks(reader, filters, start):
        mask = passes.columns(chunk)
        ids = chunk.ids[mask]
        best = _merge(best, order.sorted(ids, chunk.records[mask]), limit, order.after, passes)
        seen += chunk.cost
        if seen >= LIST_SCAN_MAX or passes.names_read >= LIST_NAMES_MAX:
            rest = U64.pack(chunk.next)
            break
    tasks = []
    for token, task_id in best:
        task = reader.task(task_id)
        if task is not None:
            tasks.append(replace(reader.info(task), token=token))
    return TaskPage(tasks, rest)


def _merge(
    best: list[tuple[bytes, int]], found: Iterable[tuple[bytes, int]], limit: int, after: bytes, passes: _Passes
) -> list[tuple[bytes, int]]:
    """The first of both. Names are read of those only that would be among them."""
    last = best[-1][0] if len(best) == limit else b"\xff" * 64
    kept: list[tuple[bytes, int]] = []
    for token, task_id in found:
        if token >= last or len(kept) == limit:
            break
        if token > after and passes.name(task_id):
            kept.append((token, task_id))
    return sorted(best + kept)[:limit]


class _Passes:
    """The filters: those on columns, and those on names."""

    def __init__(self, reader: Reader, filters: Filters) -> None:
        self._reader = reader
        self._state = int(TaskState[filters.state.upper()]) if filters.state else 0
        self._graph = find_graph(reader.txn, filters.submission) if filters.submission else 0
        self._group = filters.group
        self._groups: dict[tuple[int, int], bool] = {}
        self._prefix = filters.prefix
        self._pattern = re.compile(translate(filters.pattern)) if filters.pattern else None
        self._wanted = filters.wanted
        self.names_read = 0

    def columns(self, chunk: _Chunk) -> npt.NDArray[np.bool_]:
        records = chunk.records
        mask = np.ones(len(records), np.bool_)
        if self._state:
            mask &= records["state"] == self._state
        if self._graph:
            mask &= records["graph"] == self._graph
        if self._wanted:
            mask &= records["wants"] > 0
        if self._group:
            mask &= self._in_group(records, mask)
        return mask

    def _in_group(self, records: np.ndarray, mask: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
        pairs = np.empty(len(records), [("graph", "u8"), ("group", "u4")])
        pairs["graph"], pairs["group"] = records["graph"], records["group"]
        unique, inverse = np.unique(pairs[mask], return_inverse=True)
        fits = np.array([self._fits(int(graph), int(group)) for graph, group in unique.tolist()], np.bool_)
        found = np.zeros(len(records), np.bool_)
        if len(unique):
            found[mask] = fits[inverse]
        return found

    def _fits(self, graph: int, group: int) -> bool:
        known = self._groups.get((graph, group))
        if known is None:
            name = self._reader.group(graph, group)
            known = self._groups[graph, group] = name == self._group or name.startswith(self._group + "-")
        return known

    def name(self, task_id: int) -> bool:
        if not self._prefix and self._pattern is None:
            return True
        self.names_read += 1
        key = self._reader.key(task_id)
        if self._prefix and not key_name(key).startswith(self._prefix):
            return False
        return self._pattern is None or self._pattern.match(key_text(key)) is not None


def _chunks(reader: Reader, filters: Filters, start: int) -> Iterator[_Chunk]:
    """Every task that may pass, in a fixed order, from a cursor on."""
    txn = reader.txn
    if filters.worker:
        yield from _of_worker(txn, filters.worker, start)
        return
    if filters.submission:
        yield from _of_graph(txn, find_graph(txn, filters.submission), start)
        return
    table = _INDEX.get(TaskState[filters.state.upper()]) if filters.state else None
    if table is None:
        pairs = txn.scan(Table.TASKS, U64.pack(start))
        for some in _cut(pairs):
            ids, records = record_columns(some)
            yield _Chunk(ids, ids, records, int(ids[-1]) + 1, len(ids))
        return
    keys = (key for key, _ in txn.scan(table, U64.pack(start)))
    for listed in _cut(keys):
        ids, records = record_columns([(key, data) for key in listed if (data := txn.get(Table.TASKS, key)) is not None])
        yield _Chunk(ids, ids, records, int.from_bytes(listed[-1]) + 1, len(listed))


def _cut(items: Iterator[T]) -> Iterator[list[T]]:
    size = min(_CHUNK_FIRST, _CHUNK)
    while some := list(islice(items, size)):
        yield some
        size = min(2 * size, _CHUNK)


def _of_worker(txn: ReadTxn, worker: str, start: int) -> Iterator[_Chunk]:
    """Positions are numbers of blocks of the history, and places in them."""
    for number_key, data in txn.scan(Table.HISTORY, U64.pack(start // _BLOCK)):
        first = int.from_bytes(number_key) * _BLOCK
        found: dict[int, int] = {}
        for place, (task_id, by, _, _) in enumerate(StoredBlock(data).columns().runs):
            if by == worker and first + place >= start:
                found.setdefault(task_id, first + place)
        there = [(U64.pack(task_id), place) for task_id, place in found.items()]
        pairs = [(key, record, place) for key, place in there if (record := txn.get(Table.TASKS, key)) is not None]
        ids, records = record_columns([(key, record) for key, record, _ in pairs])
        yield _Chunk(np.array([place for *_, place in pairs], np.uint64), ids, records, first + _BLOCK, _BLOCK_COST)


def _of_graph(txn: ReadTxn, graph_id: int, start: int) -> Iterator[_Chunk]:
    """Positions are indices in the submission."""
    while graph_id and (run := next_run(txn, graph_id, start)) is not None:
        first, last, first_id = run
        start = max(start, first)
        # Of a long run few may be left.
        pairs = txn.scan(Table.TASKS, U64.pack(first_id + start - first), U64.pack(first_id + last + 1 - first)) if first_id else iter(())
        for some in _cut(pairs):
            ids, records = record_columns(some)
            positions = (ids - np.uint64(first_id) + np.uint64(first)).astype(np.uint64)
            yield _Chunk(positions, ids, records, int(positions[-1]) + 1, len(ids))
        start = last + 1
        nothing = np.empty(0, np.uint64)
        yield _Chunk(nothing, nothing, np.empty(0, TASK), start, 1)  # the work is bounded even if nothing is left of any run


__all__ = ["SORTS", "Filters", "TaskPage", "list_tasks"]
