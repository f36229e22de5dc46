"""The lock file of a store: one process at a time may write. LMDB's own lock does not say who, and would let a second writer in.

Its text is the writer's process and the file's own number (inode). An orderly end empties it; so text with another number says that the
folder is a copy of one that was in use.
"""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path

from taskdb.errors import StoreFull, StoreLocked
from taskdb.store.pages import unreadable

LOCK_FILE = "taskdb.lock"
#: Errors that say that a file may not grow.
NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class FolderLock:
    """Taken at once; the folder is made if it is not there. Raises StoreLocked, StoreFull, StoreError."""

    def __init__(self, folder: Path) -> None:
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)  # what is in it is its owner's
            self._fd = os.open(folder / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as exc:
            if exc.errno in NO_SPACE:
                raise StoreFull(f"no space left for the store in {folder}") from exc
            raise unreadable(folder, exc.strerror or "") from exc
        self._former = os.pread(self._fd, 64, 0)
        words = self._former.decode(errors="replace").split()
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self._fd)
            who = f"process {words[0]}" if words else "another process"
            raise StoreLocked(f"the store in {folder} is in use by {who}: stop that taskdb daemon, or choose another folder") from None
        own = str(os.fstat(self._fd).st_ino)
        #: The folder was copied while a process had it open, or after that process had died.
        self.copied = len(words) == 2 and words[1] != own
        self._write(f"{os.getpid()} {own}\n".encode())

    def _write(self, text: bytes) -> None:
        try:
            os.ftruncate(self._fd, 0)
            os.pwrite(self._fd, text, 0)
        except OSError:
            # Only for words: on a full disk the lock holds without it.
            pass

    def release(self, *, opened: bool = True) -> None:
        """Not `opened`: the store was left as it was found."""
        self._write(b"" if opened else self._former)
        os.close(self._fd)
