"""A store in sorted maps, for tests: it can drop what was not synced, as a power cut does. Not for production.

Writes go into the live maps at once, with a log to undo them. Readers share the maps until somebody writes.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from sortedcontainers import SortedDict

from taskdb.errors import InvariantBroken, StoreFull
from taskdb.store.schema import FORMAT_VERSION, U64, Meta, Table, meta_key

_Undo = list[tuple[Table, bytes, bytes | None]]
_Tables = dict[Table, "SortedDict[bytes, bytes]"]


class _Read:
    def __init__(self, tables: _Tables) -> None:
        self._tables = tables

    def get(self, table: Table, key: bytes) -> bytes | None:
        value: bytes | None = self._tables[table].get(key)
        return value

    def scan(self, table: Table, start: bytes = b"", stop: bytes | None = None) -> Iterator[tuple[bytes, bytes]]:
        pairs = self._tables[table]
        for key in pairs.irange(start, stop, inclusive=(True, False)):
            yield key, pairs[key]

    def first(self, table: Table, start: bytes = b"") -> tuple[bytes, bytes] | None:
        return next(self.scan(table, start), None)

    def count(self, table: Table) -> int:
        return len(self._tables[table])


class _Write(_Read):
    def __init__(self, store: MemoryStore) -> None:
        super().__init__(store._tables)
        self._store = store
        self.undo: _Undo = []
        self._over = False
        self._full = False

    def _mutable(self, table: Table) -> SortedDict[bytes, bytes]:
        if self._over:
            raise InvariantBroken("the transaction is over")
        if self._full:
            raise InvariantBroken("the store was full: the transaction must be aborted")
        return self._store._mutable(table)

    def put(self, table: Table, key: bytes, value: bytes) -> None:
        pairs = self._mutable(table)
        old = pairs.get(key)
        size = self._store._size + len(value) - (len(old) if old is not None else -len(key))
        if size > self._store.bytes_max:
            self._full = True
            raise StoreFull(f"the store is at its limit of {self._store.bytes_max} bytes")
        self._store._size = size
        self.undo.append((table, key, old))
        pairs[key] = value

    def delete(self, table: Table, key: bytes) -> bool:
        pairs = self._mutable(table)
        old = pairs.pop(key, None)
        if old is None:
            return False
        self._store._size -= len(key) + len(old)
        self.undo.append((table, key, old))
        return True

    def commit(self) -> None:
        if self._over:
            raise InvariantBroken("the transaction is over")
        if self._full:
            raise InvariantBroken("the store was full: the transaction must be aborted")
        self._over = True
        self._store._committed(self)

    def abort(self) -> None:
        if not self._over:
            self._over = True
            self._store._aborted(self)


class MemoryStore:
    """`sync=False`: a commit is durable only once `sync()` was called, and `crash()` drops the others."""

    def __init__(self, *, sync: bool = True, bytes_max: int = 2**62) -> None:
        self._tables: _Tables = {table: SortedDict() for table in Table}
        self._sync = sync
        self.bytes_max = bytes_max
        self._size = 0
        #: Commits since the last sync, to be undone by a crash.
        self._unsynced: list[_Undo] = []
        self._writer: _Write | None = None
        #: Snapshots open, and the maps each shares with the store.
        self._readers: list[_Tables] = []
        first = self.write()
        first.put(Table.META, meta_key(Meta.FORMAT_VERSION), U64.pack(FORMAT_VERSION))
        first.put(Table.META, meta_key(Meta.STORE_UUID), os.urandom(16))
        first.commit()
        self.sync()

    @contextmanager
    def read(self) -> Iterator[_Read]:
        tables = dict(self._tables)
        if self._writer is not None:
            # The live maps hold what the writer has not committed: take it back in a copy.
            tables = {table: SortedDict(pairs) for table, pairs in tables.items()}
            _undo(tables, self._writer.undo)
        self._readers.append(tables)
        try:
            yield _Read(tables)
        finally:
            self._readers = [other for other in self._readers if other is not tables]

    def write(self) -> _Write:
        if self._writer is not None:
            raise InvariantBroken("a write transaction is open")
        self._writer = _Write(self)
        return self._writer

    def sync(self) -> None:
        """Make every commit so far durable."""
        self._unsynced.clear()

    def crash(self) -> None:
        """What a power cut does: drop the open transaction, and every commit that was not synced."""
        if self._writer is not None:
            self._writer.abort()
        while self._unsynced:
            self._take_back(self._unsynced.pop())

    def size_bytes(self) -> int:
        return self._size

    def used_bytes(self) -> int:
        return self._size

    def free_bytes(self) -> int:
        return max(0, self.bytes_max - self._size)

    def close(self) -> None:
        if self._writer is not None:
            self._writer.abort()

    def _mutable(self, table: Table) -> SortedDict[bytes, bytes]:
        pairs = self._tables[table]
        if any(tables[table] is pairs for tables in self._readers):
            pairs = self._tables[table] = SortedDict(pairs)
        return pairs

    def _committed(self, txn: _Write) -> None:
        self._writer = None
        if not self._sync:
            self._unsynced.append(txn.undo)

    def _aborted(self, txn: _Write) -> None:
        self._writer = None
        self._take_back(txn.undo)

    def _take_back(self, log: _Undo) -> None:
        for table, _, _ in log:
            self._mutable(table)
        _undo(self._tables, log)
        self._size = sum(len(key) + len(value) for pairs in self._tables.values() for key, value in pairs.items())


def _undo(tables: _Tables, log: _Undo) -> None:
    for table, key, old in reversed(log):
        if old is None:
            tables[table].pop(key, None)
        else:
            tables[table][key] = old
