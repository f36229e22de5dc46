"""Tables that follow from others, compared with what they follow from: HOLDS and the queues from tasks, KEYS from names, WANTED_BY from
wants. For `taskdb recover`; the engine keeps them itself.

Forwards: each record has its entry. Backwards, if the numbers differ: each entry has its record. No memory to speak of.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from taskdb.engine.engine import current_epoch
from taskdb.model import TaskState
from taskdb.store.base import ReadTxn
from taskdb.store.codec import PARKED, decode_ids, decode_task, encode_ids, queue_of
from taskdb.store.columns import task_slices
from taskdb.store.schema import RANK_BYTES, U64, U64_PAIR, Table, digest

#: (table, key, right value or None: no such entry)
Fault = tuple[Table, bytes, bytes | None]

_HELD = (TaskState.PROCESSING, TaskState.MEMORY)


def faults(txn: ReadTxn) -> Iterator[Fault]:
    """Entries that are missing or wrong. Two may be of one key: look again once they are put right. Raises StoreCorrupt."""
    yield from _of_tasks(txn)
    yield from _keys(txn)
    yield from _wanted_by(txn)


def _of_tasks(txn: ReadTxn) -> Iterator[Fault]:
    unknown_owner = U64.pack(current_epoch(txn))
    held = queued = 0
    for ids, tasks in task_slices(txn):
        chosen = ids[np.isin(tasks["state"], _HELD)]
        held += len(chosen)
        for task_id in chosen.tolist():
            if txn.get(Table.HOLDS, U64.pack(task_id)) is None:
                yield Table.HOLDS, U64.pack(task_id), unknown_owner
        at = np.flatnonzero((tasks["state"] == TaskState.QUEUED) & (tasks["flags"] & PARKED == 0))
        queued += len(at)
        for task_id, rank, waits in zip(ids[at].tolist(), tasks["rank"][at].tolist(), (tasks["waiting_on"][at] > 0).tolist()):
            table = Table.AHEAD if waits else Table.READY
            key = rank + U64.pack(task_id)
            if txn.get(table, key) is None:
                yield table, key, b""
    if txn.count(Table.HOLDS) != held:
        for key, _ in txn.scan(Table.HOLDS):
            data = txn.get(Table.TASKS, key)
            if data is None or decode_task(0, data).state not in _HELD:
                yield Table.HOLDS, key, None
    if txn.count(Table.READY) + txn.count(Table.AHEAD) != queued:
        for table, queue in ((Table.READY, 1), (Table.AHEAD, 2)):
            for key, _ in txn.scan(table):
                data = txn.get(Table.TASKS, key[RANK_BYTES:])
                task = None if data is None else decode_task(0, data)
                if task is None or queue_of(task) != queue or task.rank != key[:RANK_BYTES]:
                    yield table, key, None


def _keys(txn: ReadTxn) -> Iterator[Fault]:
    for id_key, name in txn.scan(Table.NAMES):
        found = txn.get(Table.KEYS, digest(name)) or b""
        if found != id_key and int.from_bytes(id_key) not in decode_ids(found):
            yield Table.KEYS, digest(name), encode_ids(sorted((*decode_ids(found), int.from_bytes(id_key))))
    if sum(len(data) // U64.size for _, data in txn.scan(Table.KEYS)) != txn.count(Table.NAMES):
        for key, data in txn.scan(Table.KEYS):
            right = [task_id for task_id in sorted(set(decode_ids(data))) if _has_name(txn, task_id, key)]
            if encode_ids(right) != data:
                yield Table.KEYS, key, encode_ids(right) or None


def _has_name(txn: ReadTxn, task_id: int, key: bytes) -> bool:
    name = txn.get(Table.NAMES, U64.pack(task_id))
    return name is not None and digest(name) == key


def _wanted_by(txn: ReadTxn) -> Iterator[Fault]:
    for key, _ in txn.scan(Table.WANTS):
        reverse = key[U64.size :] + key[: U64.size]
        if txn.get(Table.WANTED_BY, reverse) is None:
            yield Table.WANTED_BY, reverse, b""
    if txn.count(Table.WANTED_BY) != txn.count(Table.WANTS):
        for key, _ in txn.scan(Table.WANTED_BY):
            task_id, client_id = U64_PAIR.unpack(key)
            if txn.get(Table.WANTS, U64_PAIR.pack(client_id, task_id)) is None:
                yield Table.WANTED_BY, key, None
