"""The store on LMDB: one folder, one writer, snapshot readers. The only file that imports lmdb.

A store belongs to one process: a lock file of our own says so before LMDB is opened, with words a person can act on.
The map is huge and sparse, because growing it would kill open readers; the byte limit is our own.
"""

from __future__ import annotations

import errno
import fcntl
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lmdb

from taskdb.errors import (
    FormatMismatch,
    InvalidRequest,
    InvariantBroken,
    StoreCorrupt,
    StoreError,
    StoreFull,
    StoreLocked,
    TaskDBError,
)
from taskdb.limits import READERS_MAX, STORE_BYTES_MAX, STORE_MAP_BYTES
from taskdb.store.schema import FORMAT_VERSION, U64, Meta, Table, meta_key

LOCK_FILE = "taskdb.lock"

#: Bytes written between two looks at the byte limit: how far a transaction may overshoot it.
_LIMIT_CHECK_BYTES = 1 << 20
#: What a put costs besides its value: key, node header and its share of a page.
_PUT_OVERHEAD_BYTES = 64


def _store_error(exc: lmdb.Error, folder: Path) -> TaskDBError:
    text = str(exc)
    if isinstance(exc, lmdb.MapFullError) or os.strerror(errno.ENOSPC) in text or os.strerror(errno.EDQUOT) in text:
        return StoreFull(f"no space left for the store in {folder}")
    if isinstance(exc, lmdb.CorruptedError | lmdb.InvalidError | lmdb.PageNotFoundError | lmdb.PanicError):
        return StoreCorrupt(f"the store in {folder} is damaged ({text}): move it away or restore a copy")
    if isinstance(exc, lmdb.VersionMismatchError):
        return FormatMismatch(f"the store in {folder} was written by another version of LMDB")
    return StoreError(f"the store in {folder} failed: {text}")


class _Read:
    def __init__(self, txn: Any, dbs: dict[Table, Any], folder: Path) -> None:
        self._txn = txn
        self._dbs = dbs
        self._folder = folder
        self._cursors: dict[Table, Any] = {}

    def get(self, table: Table, key: bytes) -> bytes | None:
        try:
            value: bytes | None = self._txn.get(key, db=self._dbs[table])
        except lmdb.Error as exc:
            raise _store_error(exc, self._folder) from exc
        return value

    def scan(self, table: Table, start: bytes = b"", stop: bytes | None = None) -> Iterator[tuple[bytes, bytes]]:
        try:
            cursor = self._txn.cursor(db=self._dbs[table])
            if not cursor.set_range(start):
                return
            if stop is None:
                yield from cursor
                return
            for pair in cursor:
                if pair[0] >= stop:
                    return
                yield pair
        except lmdb.Error as exc:
            raise _store_error(exc, self._folder) from exc

    def first(self, table: Table, start: bytes = b"") -> tuple[bytes, bytes] | None:
        try:
            cursor = self._cursors.get(table)
            if cursor is None:
                cursor = self._cursors[table] = self._txn.cursor(db=self._dbs[table])
            if not cursor.set_range(start):
                return None
            pair: tuple[bytes, bytes] = cursor.item()
        except lmdb.Error as exc:
            raise _store_error(exc, self._folder) from exc
        return pair

    def count(self, table: Table) -> int:
        entries: int = self._txn.stat(self._dbs[table])["entries"]
        return entries


class _Write(_Read):
    def __init__(self, store: LmdbStore, txn: Any) -> None:
        super().__init__(txn, store._dbs, store.folder)
        self._store = store
        self._thread = threading.get_ident()
        self._over = False
        self._full = False
        #: Bytes that may be written before the limit is looked at again.
        self._unchecked_bytes = 0

    def _check_usable(self) -> None:
        if self._over:
            raise InvariantBroken("the transaction is over")
        if self._full:
            raise InvariantBroken("the store was full: the transaction must be aborted")
        # LMDB says nothing if a write transaction changes thread, and corrupts.
        if threading.get_ident() != self._thread:
            raise InvariantBroken("a write transaction was used from another thread")

    def put(self, table: Table, key: bytes, value: bytes) -> None:
        if self._over or self._full:
            self._check_usable()
        self._unchecked_bytes -= len(value) + _PUT_OVERHEAD_BYTES
        if self._unchecked_bytes < 0:
            self._check_limit(len(value))
        try:
            self._txn.put(key, value, db=self._dbs[table])
        except lmdb.Error as exc:
            self._full = True
            raise _store_error(exc, self._folder) from exc

    def delete(self, table: Table, key: bytes) -> bool:
        if self._over or self._full:
            self._check_usable()
        try:
            deleted: bool = self._txn.delete(key, db=self._dbs[table])
        except lmdb.Error as exc:
            self._full = True
            raise _store_error(exc, self._folder) from exc
        return deleted

    def _check_limit(self, coming: int) -> None:
        self._check_usable()
        left = self._store.bytes_max - _used_bytes(self._txn, self._dbs) - coming
        if left < 0:
            self._full = True
            raise StoreFull(f"the store in {self._folder} is at its limit of {self._store.bytes_max} bytes")
        self._unchecked_bytes = min(left, _LIMIT_CHECK_BYTES)

    def commit(self) -> None:
        self._check_usable()
        self._over = True
        try:
            self._txn.commit()
        except lmdb.Error as exc:
            raise _store_error(exc, self._folder) from exc
        finally:
            self._store._writer = None

    def abort(self) -> None:
        if not self._over:
            self._over = True
            self._txn.abort()
            self._store._writer = None


def _used_bytes(txn: Any, dbs: dict[Table, Any]) -> int:
    """Bytes of the pages in use (pages that were freed are used again before the file grows)."""
    pages = 0
    page_bytes = 4096
    for db in dbs.values():
        stat = txn.stat(db)
        page_bytes = stat["psize"]
        pages += stat["branch_pages"] + stat["leaf_pages"] + stat["overflow_pages"]
    return pages * page_bytes


class LmdbStore:
    """The store in `folder`, which is made if it is not there.

    `sync`: fsync at each commit; else what the operating system had not written is lost in a power cut (never order: LMDB
    without sync may then be damaged as a whole). `bytes_max`: limit of bytes in use. Raises StoreLocked, FormatMismatch,
    StoreCorrupt, StoreFull, StoreError.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        sync: bool = True,
        bytes_max: int = STORE_BYTES_MAX,
        readers_max: int = READERS_MAX,
    ) -> None:
        if sys.maxsize <= 2**32:
            raise InvalidRequest("taskdb needs a 64-bit Python")
        self.folder = Path(folder)
        self.bytes_max = bytes_max
        self._writer: _Write | None = None
        self._closed = False
        self._lock_fd = self._lock()
        try:
            self._open(sync, readers_max)
        except BaseException:
            os.close(self._lock_fd)
            raise

    def _lock(self) -> int:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            fd = os.open(self.folder / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as exc:
            if exc.errno in (errno.ENOSPC, errno.EDQUOT):
                raise StoreFull(f"no space left for the store in {self.folder}") from exc
            raise StoreError(f"the store in {self.folder} cannot be opened: {exc.strerror}") from exc
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            owner = os.pread(fd, 32, 0).decode(errors="replace").strip()
            os.close(fd)
            who = f"process {owner}" if owner else "another process"
            raise StoreLocked(f"the store in {self.folder} is in use by {who}: stop that taskdb daemon, or choose another folder") from None
        try:
            os.ftruncate(fd, 0)
            os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
        except OSError:
            # The number is only for the message above; on a full disk the lock holds without it.
            pass
        return fd

    def _open(self, sync: bool, readers_max: int) -> None:
        try:
            self._env = lmdb.open(
                str(self.folder),
                map_size=STORE_MAP_BYTES,
                max_dbs=len(Table) + 8,
                max_readers=readers_max,
                sync=sync,
                metasync=sync,
                meminit=False,
            )
            try:
                self._dbs: dict[Table, Any] = {}
                with self._env.begin() as txn:
                    meta = self._env.open_db(Table.META.name.lower().encode(), txn, create=False) if _has(txn, Table.META) else None
                    if meta is not None:
                        self._check_format(txn.get(meta_key(Meta.FORMAT_VERSION), db=meta))
                with self._env.begin(write=True) as txn:
                    for table in Table:
                        self._dbs[table] = self._env.open_db(table.name.lower().encode(), txn)
                    if meta is None:
                        txn.put(meta_key(Meta.FORMAT_VERSION), U64.pack(FORMAT_VERSION), db=self._dbs[Table.META])
                        txn.put(meta_key(Meta.STORE_UUID), os.urandom(16), db=self._dbs[Table.META])
            except BaseException:
                self._env.close()
                raise
        except lmdb.Error as exc:
            raise _store_error(exc, self.folder) from exc

    def _check_format(self, data: bytes | None) -> None:
        if data is None or len(data) != U64.size:
            raise StoreCorrupt(f"the store in {self.folder} has no format version: move it away or restore a copy")
        version = U64.unpack(data)[0]
        if version != FORMAT_VERSION:
            todo = "use a newer taskdb" if version > FORMAT_VERSION else "use the taskdb that wrote it"
            raise FormatMismatch(
                f"the store in {self.folder} has format {version}, this taskdb reads {FORMAT_VERSION}: {todo}, or choose another folder"
            )

    @contextmanager
    def read(self) -> Iterator[_Read]:
        try:
            txn = self._env.begin()
        except lmdb.Error as exc:
            raise _store_error(exc, self.folder) from exc
        try:
            yield _Read(txn, self._dbs, self.folder)
        finally:
            txn.abort()

    def write(self) -> _Write:
        if self._writer is not None:
            raise InvariantBroken("a write transaction is open")
        try:
            self._writer = _Write(self, self._env.begin(write=True))
        except lmdb.Error as exc:
            raise _store_error(exc, self.folder) from exc
        return self._writer

    def sync(self) -> None:
        """Make every commit so far durable. Nothing to do if each commit syncs."""
        try:
            self._env.sync(True)
        except lmdb.Error as exc:
            raise _store_error(exc, self.folder) from exc

    def size_bytes(self) -> int:
        return os.stat(self.folder / "data.mdb").st_blocks * 512

    def free_bytes(self) -> int:
        """Pages that were freed inside the file count as free: they are used again."""
        if self._writer is not None:
            # What the open transaction takes counts too.
            used = _used_bytes(self._writer._txn, self._dbs)
        else:
            with self._env.begin() as txn:
                used = _used_bytes(txn, self._dbs)
        disk = os.statvfs(self.folder)
        room = disk.f_bavail * disk.f_frsize + max(0, self.size_bytes() - used)
        return max(0, min(self.bytes_max - used, room))

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        if self._writer is not None:
            self._writer.abort()
        self._env.close()
        # Last: nobody may open the folder before LMDB has let go of it.
        os.close(self._lock_fd)


def _has(txn: Any, table: Table) -> bool:
    return txn.get(table.name.lower().encode()) is not None
