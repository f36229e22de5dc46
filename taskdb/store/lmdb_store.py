"""The store on LMDB: one folder, one writer, snapshot readers. The only file that imports lmdb.

A store belongs to one process: a lock file of our own says so before LMDB is opened, with words a person can act on. Others may look at
it meanwhile (`LmdbSnapshot`). The map is huge and sparse, because growing it would kill open readers; the byte limit is our own.
"""

from __future__ import annotations

import errno
import logging
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

import lmdb

from taskdb.errors import (
    FormatMismatch,
    InvalidRequest,
    InvariantBroken,
    NotFound,
    StoreError,
    StoreFull,
    TaskDBError,
)
from taskdb.limits import READERS_CHECKED_WRITES, READERS_MAX, STORE_BYTES_MAX, STORE_MAP_BYTES
from taskdb.store.lock import NO_SPACE, FolderLock
from taskdb.store.migrate import GONE, OLDEST, migrate
from taskdb.store.pages import DATA_FILE, Pages, damaged, unreadable
from taskdb.store.schema import FORMAT_VERSION, U64, Meta, Table, meta_key

logger = logging.getLogger("taskdb.store")

_LMDB_LOCK_FILE = "lock.mdb"
#: Times a snapshot is tried for.
_BEGINS_MAX = 1_000
#: Tables, those of other formats, and some to spare.
_DBS_MAX = len(Table) + 8
#: Bytes written between two looks at the byte limit: how far a transaction may overshoot it.
_LIMIT_CHECK_BYTES = 1 << 20
#: What a put costs besides its value: key, node header and its share of a page.
_PUT_OVERHEAD_BYTES = 64


def _store_error(exc: lmdb.Error, folder: Path) -> TaskDBError:
    text = str(exc)
    if isinstance(exc, lmdb.MapFullError) or any(os.strerror(code) in text for code in NO_SPACE):
        return StoreFull(f"no space left for the store in {folder}")
    if isinstance(exc, lmdb.CorruptedError | lmdb.InvalidError | lmdb.PageNotFoundError | lmdb.PanicError):
        return damaged(folder, text)
    if isinstance(exc, lmdb.VersionMismatchError):
        return FormatMismatch(f"the store in {folder} was written by another version of LMDB")
    if os.strerror(errno.EACCES) in text:
        return unreadable(folder, os.strerror(errno.EACCES))
    return StoreError(f"the store in {folder} failed: {text}")


#: Tables whose new keys are mostly above all others.
_GROW_AT_END = frozenset((Table.TASKS, Table.EDGES, Table.REDGES, Table.NAMES, Table.SPECS, Table.RUNS))


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
        #: Of tables that grow at their end: a key that none is above.
        self._ends: dict[Table, bytes] = {}

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
            if table in _GROW_AT_END and key > self._end(table):
                # Pages that are appended to are filled; others are split in half.
                self._txn.put(key, value, db=self._dbs[table], append=True)
                self._ends[table] = key
            else:
                self._txn.put(key, value, db=self._dbs[table])
        except lmdb.Error as exc:
            self._full = True
            raise _store_error(exc, self._folder) from exc

    def _end(self, table: Table) -> bytes:
        end = self._ends.get(table)
        if end is None:
            cursor = self._txn.cursor(db=self._dbs[table])
            end = self._ends[table] = cursor.key() if cursor.last() else b""
        return end

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
        if self._store._rehearsal:
            raise InvariantBroken("a rehearsal is not committed")
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
    """The store in `folder`, which is made if it is not there (unless not `create`), and migrated if it is of an earlier format.

    `sync`: fsync at each commit; else what the operating system had not written is lost in a power cut (never order: LMDB
    without sync may then be damaged as a whole). `bytes_max`: limit of bytes in use. `rehearsal`: there is one write transaction, in
    which the store is migrated as well, and it can only be aborted. `thorough`: look at each page first. Raises StoreLocked,
    FormatMismatch, StoreCorrupt, StoreFull, StoreError, NotFound.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        sync: bool = True,
        bytes_max: int = STORE_BYTES_MAX,
        readers_max: int = READERS_MAX,
        create: bool = True,
        rehearsal: bool = False,
        thorough: bool = False,
    ) -> None:
        if sys.maxsize <= 2**32:
            raise InvalidRequest("taskdb needs a 64-bit Python")
        self.folder = Path(folder)
        self.bytes_max = bytes_max
        self._rehearsal = rehearsal
        self._writer: _Write | None = None
        self._writes = 0
        self._closed = False
        if not create:
            Pages(self.folder).close()
        self._lock = FolderLock(self.folder)
        try:
            _look(self.folder, thorough or self._lock.copied, self._lock.copied)
            self._open(sync, readers_max)
        except BaseException:
            self._lock.release(opened=False)
            raise

    def _open(self, sync: bool, readers_max: int) -> None:
        try:
            self._env = lmdb.open(
                str(self.folder),
                map_size=STORE_MAP_BYTES,
                max_dbs=_DBS_MAX,
                max_readers=readers_max,
                sync=sync,
                metasync=sync,
                meminit=False,
            )
            try:
                with self._env.begin() as reader:
                    version = _format(self._env, reader, self.folder)
                self._dbs: dict[Table, Any] = {}
                raw = self._env.begin(write=True)
                txn = _Write(self, raw)
                try:
                    for table in Table:
                        self._dbs[table] = self._env.open_db(_name(table), raw)
                    if not version:
                        txn.put(Table.META, meta_key(Meta.FORMAT_VERSION), U64.pack(FORMAT_VERSION))
                        txn.put(Table.META, meta_key(Meta.STORE_UUID), os.urandom(16))
                    elif version < FORMAT_VERSION:
                        self._migrate(raw, txn, version)
                except BaseException:
                    txn.abort()
                    raise
                if self._rehearsal:
                    self._writer = txn
                else:
                    txn.commit()
                    if version and version < FORMAT_VERSION:
                        logger.warning("the store in %s was migrated from format %s to %s", self.folder, version, FORMAT_VERSION)
            except BaseException:
                self._env.close()
                raise
        except lmdb.Error as exc:
            raise _store_error(exc, self.folder) from exc

    def _migrate(self, raw: Any, txn: _Write, version: int) -> None:
        def gone(name: str) -> Iterator[tuple[bytes, bytes]]:
            try:
                db = self._env.open_db(name.encode(), raw, create=False)
            except lmdb.NotFoundError:
                raise damaged(self.folder, f"no table {name}") from None
            yield from raw.cursor(db=db)

        migrate(txn, version, gone)
        for format_version in range(version, FORMAT_VERSION):
            for name in GONE.get(format_version, ()):
                raw.drop(self._env.open_db(name.encode(), raw, create=False))

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
        if self._rehearsal and self._writer is not None:
            return self._writer
        if self._writer is not None or self._rehearsal:
            raise InvariantBroken("a write transaction is open, or the rehearsal is over")
        try:
            if self._writes % READERS_CHECKED_WRITES == 0:
                # A reader of another process that was killed would keep old pages from being used again.
                self._env.reader_check()
            self._writes += 1
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
        return os.stat(self.folder / DATA_FILE).st_blocks * 512

    def used_bytes(self) -> int:
        with self._env.begin() as txn:
            return _used_bytes(txn, self._dbs)

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
        self._lock.release()


class LmdbSnapshot:
    """What the store in `folder` holds now, also while a daemon has it open: consistent, read only, without the writer's lock.

    Close it soon: while it is open a daemon cannot use again the space of what it changes. IMPORTANT: a file that may be damaged is looked
    over with `pages` before anything is read from it through LMDB. Raises NotFound, StoreCorrupt, StoreError.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        Pages(folder).close()
        #: Without a lock file of LMDB nobody has it open, and none is made: the folder may be a backup, or may not be written to.
        self._alone = not (folder / _LMDB_LOCK_FILE).exists()
        try:
            self._env = lmdb.open(
                str(folder), map_size=STORE_MAP_BYTES, max_dbs=_DBS_MAX, readonly=True, create=False, lock=not self._alone
            )
        except lmdb.Error as exc:
            raise _store_error(exc, folder) from exc
        try:
            self._txn, self.pages = self._begin()
        except BaseException:
            self._env.close()
            raise

    def _begin(self) -> tuple[Any, Pages]:
        # The file's head names the last two transactions only, and a daemon may commit in between.
        for _ in range(_BEGINS_MAX):
            txn = self._env.begin()
            try:
                return txn, Pages(self.folder, txn.id())
            except LookupError:
                txn.abort()
        raise damaged(self.folder, "its head names no transaction")

    def format_version(self) -> int:
        """Raises StoreCorrupt, and FormatMismatch if this taskdb does not know it."""
        try:
            version = _format(self._env, self._txn, self.folder)
        except lmdb.Error as exc:
            raise _store_error(exc, self.folder) from exc
        if not version:
            raise damaged(self.folder, "it has no tables")
        return version

    def read(self) -> _Read:
        """The tables. Raises StoreCorrupt, FormatMismatch (another format than the current one)."""
        version = self.format_version()
        if version < FORMAT_VERSION:
            raise FormatMismatch(
                f"the store in {self.folder} has format {version}: `taskdb serve` or `taskdb recover` makes it format {FORMAT_VERSION}"
            )
        dbs: dict[Table, Any] = {}
        try:
            for table in Table:
                dbs[table] = self._env.open_db(_name(table), self._txn, create=False)
        except lmdb.Error as exc:
            raise damaged(self.folder, f"no table {table.name.lower()}") from exc
        return _Read(self._txn, dbs, self.folder)

    def copy_to(self, fd: int) -> None:
        """Write it into a file, without unused pages. Raises OSError, StoreError."""
        try:
            self._env.copyfd(fd, compact=True, txn=self._txn)
        except lmdb.Error as exc:
            code = next((code for code in (*NO_SPACE, errno.EIO) if os.strerror(code) in str(exc)), None)
            if code is None:
                raise _store_error(exc, self.folder) from exc
            raise OSError(code, os.strerror(code)) from exc

    def check_alone(self) -> None:
        """Call it last: raises StoreError if a daemon began to write to what was read without a lock."""
        if self._alone and (self.folder / _LMDB_LOCK_FILE).exists():
            raise StoreError(f"the store in {self.folder} was opened by another process meanwhile: run this again")

    def close(self) -> None:
        self.pages.close()
        self._txn.abort()
        self._env.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *details: object) -> None:
        self.close()


def _look(folder: Path, thorough: bool, copied: bool) -> None:
    """Look at a store's file before it is mapped. `thorough`: at each page, as is done, too, if the file seems to be cut short."""
    try:
        pages = Pages(folder)
    except NotFound:
        return
    try:
        if thorough or pages.is_short:
            words = next(pages.problems(), "")
            if words:
                raise damaged(folder, words + ("; it was copied while it was in use" if copied else ""))
    finally:
        pages.close()


def _format(env: Any, txn: Any, folder: Path) -> int:
    """Format version of the store, 0 if it is new. Raises StoreCorrupt, FormatMismatch."""
    if txn.get(_name(Table.META)) is None:
        if txn.stat()["entries"]:
            raise damaged(folder, "it is an LMDB file of another program")
        return 0
    data = txn.get(meta_key(Meta.FORMAT_VERSION), db=env.open_db(_name(Table.META), txn, create=False))
    version = int.from_bytes(data) if data is not None and len(data) == U64.size else 0
    if version < OLDEST:
        raise damaged(folder, "it has no format version")
    if version > FORMAT_VERSION:
        raise FormatMismatch(
            f"the store in {folder} has format {version}, and this taskdb reads none above {FORMAT_VERSION}: "
            "use a newer taskdb, or choose another folder"
        )
    return version


def _name(table: Table) -> bytes:
    return table.name.lower().encode()
