"""The records of one task, in all tables: written when it comes, removed when it goes. Links and counts are others' business."""

from __future__ import annotations

from taskdb.engine.refs import KeyPlace
from taskdb.engine.work import Work
from taskdb.model import TaskState
from taskdb.store.codec import GraphRecord, TaskRecord
from taskdb.store.schema import U64, Table, digest

_RELEASED = int(TaskState.RELEASED)
_ERRED = int(TaskState.ERRED)


def new_task(
    work: Work,
    graph: GraphRecord,
    task_id: int,
    at: KeyPlace,
    flags: int,
    expected: int,
    group: int,
    annotation: int,
    rank: bytes,
) -> TaskRecord:
    """A task under a key that is free. It has yet to be linked and placed."""
    task = TaskRecord()
    task.id = task_id
    task.state = _RELEASED
    task.flags = flags
    task.suspicious = 0
    task.retries = -1
    task.waiting_on = task.blocked_on = task.need = task.links = task.wants = 0
    task.expected = expected
    task.nbytes = -1
    task.graph = graph.id
    task.group = group
    task.annotation = annotation
    task.rank = rank
    task.deps = ()
    task.dirty = True
    task.stored_queue = task.stored_state = 0
    task.stored_held = task.reclaim = False
    work.add_task(task)
    if work.moves is not None:
        work.moves.keys.append((task_id, at.key))
    id_key = U64.pack(task_id)
    work.txn.put(Table.NAMES, id_key, at.key)
    work.txn.put(Table.KEYS, at.digest, id_key if at.ids is None else at.ids + id_key)
    graph.expected += expected
    work.count_group(graph.id, group, 1)
    return task


def remove_records(work: Work, task: TaskRecord) -> None:
    txn = work.txn
    id_key = U64.pack(task.id)
    key = work.key(task.id)
    key_digest = digest(key)
    others = txn.get(Table.KEYS, key_digest) or b""
    rest = b"".join(others[at : at + 8] for at in range(0, len(others), 8) if others[at : at + 8] != id_key)
    if rest:
        txn.put(Table.KEYS, key_digest, rest)
    else:
        txn.delete(Table.KEYS, key_digest)
    txn.delete(Table.NAMES, id_key)
    txn.delete(Table.SPECS, id_key)
    if task.deps:
        txn.delete(Table.EDGES, id_key)
    if task.state == _ERRED:
        txn.delete(Table.ERRORS, id_key)
    work.remove_task(task)
