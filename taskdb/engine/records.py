"""What `taskdb/store/schema.py` promises of each record alone: its key's form, and a value that can be read. Rules between records are
`invariants.py`'s."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from taskdb.commands import DURATIONS
from taskdb.engine.todo import Todo
from taskdb.errors import StoreCorrupt
from taskdb.limits import KEY_BYTES_MAX
from taskdb.model import TaskState
from taskdb.store.base import ReadTxn
from taskdb.store.codec import (
    GraphStatus,
    decode_client,
    decode_dropped,
    decode_error,
    decode_graph,
    decode_group,
    decode_growth,
    decode_ids,
    decode_kept,
    decode_rule,
    decode_task,
)
from taskdb.store.history import StoredBlock
from taskdb.store.schema import DIGEST_BYTES, GRAPH_PART, RANK_BYTES, TODO_KEY, U64, U64_PAIR, Meta, Table, digest, meta_key
from taskdb.store.spooled import decode_spooled

#: Reads one record. Raises StoreCorrupt or ValueError.
Check = Callable[[bytes, bytes], object]

#: Records between two calls of `tick`.
_TICK_RECORDS = 8_192


def _bad(words: str) -> ValueError:
    return ValueError(words)


def _sized(size: int) -> Check:
    def check(key: bytes, data: bytes) -> None:
        if len(data) != size:
            raise _bad(f"a value of {len(data)} bytes, not {size}")

    return check


def _meta(key: bytes, data: bytes) -> None:
    meta = Meta(key[0])  # ValueError
    if meta is Meta.SCHEDULER:
        data.decode()  # UnicodeDecodeError is a ValueError
    else:
        _sized(16 if meta is Meta.STORE_UUID else U64.size)(key, data)


def _task(key: bytes, data: bytes) -> None:
    TaskState(decode_task(int.from_bytes(key), data).state)


def _graph(key: bytes, data: bytes) -> None:
    graph = decode_graph(int.from_bytes(key), data)
    if graph.status not in (GraphStatus.OPEN, GraphStatus.ABORTED, *GraphStatus.COMPLETE):
        raise _bad(f"its status is {graph.status}")


def _ids(key: bytes, data: bytes) -> None:
    if not decode_ids(data):
        raise _bad("an empty list of ids")


def _key(key: bytes, data: bytes) -> None:
    if not 0 < len(data) <= KEY_BYTES_MAX:
        raise _bad(f"a task's key of {len(data)} bytes")


def _any(key: bytes, data: bytes) -> None:
    pass


def _todo(key: bytes, data: bytes) -> None:
    Todo(key[0])
    _sized(U64.size)(key, data)


def _block(key: bytes, data: bytes) -> None:
    block = StoredBlock(data)
    block.keys()
    block.columns()


def _kept(key: bytes, data: bytes) -> None:
    name, value = decode_kept(data)
    if digest(name) != key:
        raise _bad(f"it is named {name!r}, and not found by that")
    if name.startswith(DURATIONS):
        _sized(8)(key, value)


_CHECKS: dict[Table, tuple[int, Check]] = {
    Table.META: (1, _meta),
    Table.GRAPHS: (U64.size, _graph),
    Table.GRAPH_NAMES: (DIGEST_BYTES, _ids),
    Table.RUNS: (U64_PAIR.size, _sized(U64_PAIR.size)),
    Table.TASKS: (U64.size, _task),
    Table.EDGES: (U64.size, _ids),
    Table.REDGES: (U64_PAIR.size, _ids),
    Table.KEYS: (DIGEST_BYTES, _ids),
    Table.NAMES: (U64.size, _key),
    Table.SPECS: (U64.size, _any),
    Table.BLOBS: (GRAPH_PART.size, _any),
    Table.GROUPS: (GRAPH_PART.size, lambda key, data: decode_group(data)),
    Table.READY: (RANK_BYTES + U64.size, _sized(0)),
    Table.AHEAD: (RANK_BYTES + U64.size, _sized(0)),
    Table.HOLDS: (U64.size, _sized(U64.size)),
    Table.CLIENT_NAMES: (DIGEST_BYTES, _ids),
    Table.CLIENTS: (U64.size, lambda key, data: decode_client(0, data)),
    Table.WANTS: (U64_PAIR.size, _sized(U64.size)),
    Table.WANTED_BY: (U64_PAIR.size, _sized(0)),
    Table.ERRORS: (U64.size, lambda key, data: decode_error(data)),
    Table.TODO: (TODO_KEY.size, _todo),
    Table.SESSIONS: (U64.size, _sized(U64.size)),
    Table.EPOCHS: (U64.size, _sized(U64.size)),
    Table.KEPT: (DIGEST_BYTES, _kept),
    Table.ANSWERS: (U64.size, _any),
    Table.RULES: (U64.size, lambda key, data: decode_rule(data)),
    Table.GROWTH: (U64.size, lambda key, data: decode_growth(data)),
    Table.DROPPED: (U64.size, lambda key, data: decode_dropped(data)),
    Table.HISTORY: (U64.size, _block),
    Table.SPOOL: (U64_PAIR.size, lambda key, data: decode_spooled(data).columns()),
}
assert _CHECKS.keys() == set(Table)


def unreadable(txn: ReadTxn, tick: Callable[[int], None] = lambda records: None) -> Iterator[str]:
    """Every record that breaks its form, in words. Bounded memory. `tick` is told now and then how many records were read."""
    read = 0
    for meta in (Meta.FORMAT_VERSION, Meta.STORE_UUID):
        if txn.get(Table.META, meta_key(meta)) is None:
            yield f"META: no {meta.name}"
    for table, (key_bytes, check) in _CHECKS.items():
        found = 0
        before: bytes | None = None
        for key, data in txn.scan(table):
            found += 1
            try:
                if len(key) != key_bytes:
                    raise _bad(f"a key of {len(key)} bytes, not {key_bytes}")
                if before is not None and key <= before:
                    raise _bad("it is not in its place")
                check(key, data)
            except (StoreCorrupt, ValueError) as exc:
                yield f"{table.name} {key.hex()}: {exc}"
            before = key
            read += 1
            if read % _TICK_RECORDS == 0:
                tick(read)
        if found != txn.count(table):
            yield f"{table.name}: {found} records are found, {txn.count(table)} are counted"
    tick(read)


def total(txn: ReadTxn) -> int:
    """Records of the store."""
    return sum(txn.count(table) for table in Table)
