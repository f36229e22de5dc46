"""Task records as columns: for what looks at all tasks at once. The layout is that of `codec.py`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import islice

import numpy as np
import numpy.typing as npt

from taskdb.errors import StoreCorrupt
from taskdb.store.base import ReadTxn
from taskdb.store.codec import TASK_BYTES
from taskdb.store.schema import Table

#: The fields of TaskRecord, as stored.
TASK = np.dtype(
    [
        ("state", "u1"),
        ("flags", "u1"),
        ("suspicious", ">u2"),
        ("retries", ">i2"),
        ("waiting_on", ">u4"),
        ("blocked_on", ">u4"),
        ("need", ">u4"),
        ("links", ">u4"),
        ("expected", ">u4"),
        ("wants", ">u4"),
        ("nbytes", ">i8"),
        ("graph", ">u8"),
        ("group", ">u4"),
        ("annotation", ">u4"),
        ("rank", "V24"),
    ]
)
assert TASK.itemsize == TASK_BYTES

#: Tasks decoded at a time: some MiB.
_SLICE = 65_536


def task_slices(txn: ReadTxn, tick: Callable[[int], None] = lambda tasks: None) -> Iterator[tuple[npt.NDArray[np.uint64], np.ndarray]]:
    """Ids and records (TASK) of all tasks, ascending, in slices. Raises StoreCorrupt. `tick` is told how many there were so far."""
    done = 0
    pairs = txn.scan(Table.TASKS)
    while some := list(islice(pairs, _SLICE)):
        done += len(some)
        tick(done)
        yield record_columns(some)


def record_columns(pairs: Sequence[tuple[bytes, bytes]]) -> tuple[npt.NDArray[np.uint64], np.ndarray]:
    """Ids and records (TASK) of pairs of Table.TASKS. Raises StoreCorrupt."""
    ids, records = b"".join([key for key, _ in pairs]), b"".join([data for _, data in pairs])
    if len(ids) != 8 * len(pairs) or len(records) != TASK.itemsize * len(pairs):
        raise StoreCorrupt("a task's record cannot be read: `taskdb verify` says which")
    return np.frombuffer(ids, ">u8").astype(np.uint64), np.frombuffer(records, TASK)
