"""Stores of earlier formats become this one's, in the transaction in which they are opened. One function a format: from it to the next."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from taskdb.errors import StoreCorrupt
from taskdb.model import TaskState
from taskdb.store.base import WriteTxn
from taskdb.store.schema import FORMAT_VERSION, U64, Meta, Table, meta_key

#: The first format there was.
OLDEST = 1

#: By format: tables it has, and the next one has not.
GONE: dict[int, tuple[str, ...]] = {1: ("leases",)}


def migrate(txn: WriteTxn, version: int, gone: Callable[[str], Iterator[tuple[bytes, bytes]]]) -> None:
    """From format `version` to the current one. `gone` reads a table of GONE by its name. Raises StoreCorrupt, StoreFull.

    Touches every task once; writes little.
    """
    for step in _STEPS[version - OLDEST :]:
        step(txn, gone)
    txn.put(Table.META, meta_key(Meta.FORMAT_VERSION), U64.pack(FORMAT_VERSION))


def _from_1(txn: WriteTxn, gone: Callable[[str], Iterator[tuple[bytes, bytes]]]) -> None:
    """Leases become holds: of leased tasks and of results. Submissions get flags. Epochs say where their ids begin."""
    epoch = txn.get(Table.META, meta_key(Meta.EPOCH)) or U64.pack(0)
    owners = dict(gone("leases"))
    for key, data in txn.scan(Table.TASKS):
        state = data[0] if data else 0
        if state == TaskState.PROCESSING and key not in owners:
            raise StoreCorrupt(f"task {int.from_bytes(key)} is PROCESSING, and nobody has leased it")
        if state in (TaskState.PROCESSING, TaskState.MEMORY):
            txn.put(Table.HOLDS, key, owners.get(key, epoch))
    if any(owner != epoch for owner in owners.values()):
        # Leases that were about to be given back.
        txn.put(Table.META, meta_key(Meta.RECOVERING), epoch)
    for key, data in list(txn.scan(Table.GRAPHS)):
        txn.put(Table.GRAPHS, key, data[:1] + b"\0" + data[1:])
    if epoch != U64.pack(0):
        # In this format nothing that workers of an epoch before it held was believed.
        txn.put(Table.EPOCHS, epoch, U64.pack(1))


def _from_2(txn: WriteTxn, gone: Callable[[str], Iterator[tuple[bytes, bytes]]]) -> None:
    """Tasks of rules may be dropped, and there is a table that counts them. Nothing has been dropped yet."""


def _from_3(txn: WriteTxn, gone: Callable[[str], Iterator[tuple[bytes, bytes]]]) -> None:
    """There is a history, and it begins now. Errors may have a traceback; those that have none are read as they were."""


def _from_4(txn: WriteTxn, gone: Callable[[str], Iterator[tuple[bytes, bytes]]]) -> None:
    """Runs of tasks may wait in a table of their own. None does yet."""


_STEPS = (_from_1, _from_2, _from_3, _from_4)
assert OLDEST + len(_STEPS) == FORMAT_VERSION
