"""What a client was told is on disk must be there when the daemon, or the scheduler, has just been killed.

Told to the client: a submission, once it is acknowledged; a dataset or a Variable, once the call that set it has returned. Told to the
scheduler: the number of the last batch that is on disk.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from distributed import Client

from scheduler_adapter import dask_client as internals
from scheduler_adapter.kept import DATASETS, VARIABLES
from scheduler_adapter.keys import pack_key
from scheduler_adapter.selftest.jobs import Promises
from taskdb.engine.recovery import kept
from taskdb.engine.refs import find_client, find_key
from taskdb.store.base import ReadTxn
from taskdb.store.lmdb_store import LmdbSnapshot
from taskdb.store.schema import U64, U64_PAIR, Table


@dataclass
class Told:
    """As of a moment before the kill."""

    #: Keys the client wants, of acknowledged submissions and of data it has scattered.
    keys: set[Any]
    datasets: set[str] = field(default_factory=set)
    variables: set[str] = field(default_factory=set)


def told(client: Client, promises: Promises) -> Told:
    async def acknowledged() -> set[Any]:
        keys = await internals.wanted_keys(client)
        return keys - client.taskdb.outbox.submitted_keys() - promises.found

    return Told(client.sync(acknowledged), set(promises.datasets), set(promises.variables))


def batches_on_disk(client: Client) -> tuple[int, int]:
    """Epoch of the scheduler, and the last of its batches that it was told is on disk."""

    def ask(dask_scheduler: Any) -> tuple[int, int]:
        session = dask_scheduler.taskdb.session
        return session.epoch, session.durable_seq

    epoch, seq = client.run_on_scheduler(ask)
    return epoch, seq


def missing(
    folder: Path, client: Client, before: Told, promises: Promises, batches: tuple[int, int] | None = None
) -> tuple[int, list[str]]:
    """(how much was looked for, what of it is not in the store). Not looked for is what the client has let go of since."""
    after = told(client, promises)
    found: list[str] = []
    keys = before.keys & after.keys
    with LmdbSnapshot(folder) as snapshot:
        txn = snapshot.read()
        number = find_client(txn, client.id, internal=False)
        found += [f"key {key!r} of client {client.id}" for key in keys if not _wanted(txn, key, number)]
        names = {name for name, _ in kept(txn)}
        items = [DATASETS + pack_key(name) for name in before.datasets & after.datasets]
        items += [VARIABLES + pack_key(name) for name in before.variables & after.variables]
        found += [f"kept item {item!r}" for item in items if item not in names]
        if batches is not None:
            epoch, seq = batches
            data = txn.get(Table.SESSIONS, U64.pack(epoch))
            applied = 0 if data is None else int(U64.unpack(data)[0])
            if applied < seq:
                found.append(f"{seq - applied} batches of epoch {epoch} up to {seq}")
    return len(keys) + len(items) + (batches is not None), found


def _wanted(txn: ReadTxn, key: Any, client: int) -> bool:
    id = find_key(txn, pack_key(key))
    return bool(id) and bool(client) and txn.get(Table.WANTED_BY, U64_PAIR.pack(id, client)) is not None
