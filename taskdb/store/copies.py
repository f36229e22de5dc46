"""Copies of whole stores: a backup of one that may be in use, a store from a backup, a smaller file in its own place. The copy is there at
once, or not at all."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

from taskdb.errors import InvalidRequest, StoreError, StoreFull, TaskDBError
from taskdb.store.lmdb_store import LmdbSnapshot
from taskdb.store.lock import LOCK_FILE, NO_SPACE, FolderLock
from taskdb.store.pages import DATA_FILE, Pages, damaged

_PART = ".part"
#: What may lie in a folder that is to become a store: leftovers of one whose data was moved away.
_LEFTOVERS = frozenset((LOCK_FILE, "lock.mdb", DATA_FILE + _PART))

Tick = Callable[[int], None]


def backup(folder: Path, target: Path, tick: Tick) -> int:
    """Copy the store in `folder` to the new folder `target`. Returns bytes. Raises what LmdbSnapshot does, and InvalidRequest, StoreFull.

    It is looked over first: what is damaged is not copied.
    """
    if target.exists():
        raise InvalidRequest(f"{target} exists already: a backup needs a name that is free")
    with LmdbSnapshot(folder) as snapshot:
        _check(snapshot, tick)
        part = target.with_name(f".{target.name}.{os.getpid()}{_PART}")
        try:
            part.mkdir(mode=0o700)
            size = _write(snapshot, part / DATA_FILE)
            _sync(part)
            snapshot.check_alone()
            part.rename(target)
            _sync(target.parent)
        except OSError as exc:
            raise _target_error(target, exc) from exc
        finally:
            shutil.rmtree(part, ignore_errors=True)
    return size


def restore(source: Path, folder: Path, tick: Tick) -> int:
    """Make the store in `folder`, which is empty or not there, a copy of the one in `source`. Returns bytes. Raises as `backup` does, and
    StoreLocked."""
    with LmdbSnapshot(source) as snapshot:
        _check(snapshot, tick)
        try:
            there = sorted(path.name for path in folder.iterdir()) if folder.exists() else []
        except OSError as exc:
            raise _target_error(folder, exc) from exc
        if not _LEFTOVERS.issuperset(there) and LOCK_FILE not in there:
            raise _not_empty(folder, there)
        # A daemon that has it open, or opens it now, is found out here.
        lock = FolderLock(folder)
        try:
            if not _LEFTOVERS.issuperset(there):
                raise _not_empty(folder, there)
            part = folder / (DATA_FILE + _PART)
            try:
                size = _write(snapshot, part)
                snapshot.check_alone()
                part.rename(folder / DATA_FILE)
                _sync(folder)
            except OSError as exc:
                raise _target_error(folder, exc) from exc
            finally:
                part.unlink(missing_ok=True)
        finally:
            lock.release()
    return size


def compact(folder: Path, tick: Tick) -> tuple[int, int]:
    """Write the store in `folder` anew, without unused pages, in place of what is there. Returns its bytes on disk before and after. Needs
    room for the new file beside the old one. Raises as `backup` does, and StoreLocked."""
    Pages(folder).close()
    lock = FolderLock(folder)
    try:
        with LmdbSnapshot(folder) as snapshot:
            _check(snapshot, tick)
            before = _disk_bytes(folder)
            part = folder / (DATA_FILE + _PART)
            try:
                _write(snapshot, part)
                part.rename(folder / DATA_FILE)
                # LMDB's own lock file belongs to the file that was there: who still reads that keeps both, and nobody else gets them.
                (folder / "lock.mdb").unlink(missing_ok=True)
                _sync(folder)
            except OSError as exc:
                raise _target_error(folder, exc) from exc
            finally:
                part.unlink(missing_ok=True)
        return before, _disk_bytes(folder)
    finally:
        lock.release()


def _disk_bytes(folder: Path) -> int:
    return (folder / DATA_FILE).stat().st_blocks * 512


def _check(snapshot: LmdbSnapshot, tick: Tick) -> None:
    words = next(snapshot.pages.problems(tick), "")
    if words:
        raise damaged(snapshot.folder, words)
    snapshot.format_version()


def _write(snapshot: LmdbSnapshot, path: Path) -> int:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
    try:
        snapshot.copy_to(fd)
        os.fsync(fd)
        return os.fstat(fd).st_size
    finally:
        os.close(fd)


def _sync(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _not_empty(folder: Path, there: list[str]) -> InvalidRequest:
    return InvalidRequest(f"{folder} is not empty (it holds {there[0]}): restore into a new folder, or move away what is there")


def _target_error(target: Path, exc: OSError) -> TaskDBError:
    if exc.errno in NO_SPACE:
        return StoreFull(f"no space left for the copy in {target}: nothing was left there; make room, or choose another place")
    return StoreError(f"the copy in {target} cannot be written: {exc.strerror}")
