"""What the history says: of one task, and of a graph. Reads blocks one by one; what is on disk is bounded, and so is this."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from taskdb.engine.reader import state_name
from taskdb.engine.refs import find_key
from taskdb.limits import STORY_EVENTS_MAX
from taskdb.model import TaskState
from taskdb.store.base import ReadTxn
from taskdb.store.history import Columns, StoredBlock
from taskdb.store.schema import Table

_MEMORY = int(TaskState.MEMORY)


@dataclass(frozen=True, slots=True)
class Event:
    #: Seconds since the epoch.
    time: float
    #: Of the task: a key may have meant several, one after the other.
    id: int
    #: "came", "ran", "failed", "forgotten", or the state it came into.
    what: str
    submission: str = ""
    worker: str = ""
    #: Of "ran"; 0 else.
    seconds: float = 0.0
    text: str = ""


@dataclass(frozen=True, slots=True)
class Story:
    #: The task under the key now; 0: none.
    id: int
    #: In order.
    events: list[Event]
    #: When the history begins; 0: there is none.
    since: float
    #: There were more before these.
    more: bool


def blocks(txn: ReadTxn) -> Iterator[StoredBlock]:
    for _, data in txn.scan(Table.HISTORY):
        yield StoredBlock(data)


def story(txn: ReadTxn, key: bytes, limit: int = STORY_EVENTS_MAX) -> Story:
    """The last `limit` events of all tasks that have had this key (at most STORY_EVENTS_MAX; 0: that many)."""
    limit = min(limit or STORY_EVENTS_MAX, STORY_EVENTS_MAX)
    now = find_key(txn, key)
    ids = {now} if now else set()
    events: deque[Event] = deque(maxlen=limit)
    count, since = 0, 0.0
    for block in blocks(txn):
        since = since or block.begin
        came = block.ids_of(key)
        ids.update(came)
        if ids:
            for event in _events(block.columns(), ids, set(came)):
                events.append(event)
                count += 1
    return Story(now, list(events), since, count > limit)


def _events(columns: Columns, ids: set[int], came: set[int]) -> list[Event]:
    found: list[Event] = []
    for at in _rows(columns, ids):
        task_id, state, when = int(columns.ids[at]), int(columns.states[at]), float(columns.times[at])
        graph = columns.graphs.get(int(columns.of_graph[at]))
        submission = graph[0] if graph else ""
        if task_id in came:
            came.discard(task_id)
            found.append(Event(when, task_id, "came", submission))
        if state == TaskState.ERRED and (texts := [text for failed, text in columns.failures if failed == task_id]):
            found.append(Event(when, task_id, "failed", submission, text=texts[-1]))
        found.append(Event(when, task_id, state_name(state) if state else "forgotten", submission))
    for task_id, worker, began, seconds in columns.runs:
        if task_id in ids:
            found.append(Event(began, task_id, "ran", "", worker, seconds))
    return sorted(found, key=lambda event: event.time)


def _rows(columns: Columns, ids: set[int]) -> list[int]:
    if len(ids) == 1:
        (only,) = ids
        rows: list[int] = (columns.ids == only).nonzero()[0].tolist()
        return rows
    return [at for at, task_id in enumerate(columns.ids.tolist()) if task_id in ids]
