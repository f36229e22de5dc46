"""The store: ordered tables of bytes with one writer and snapshot readers. The docstrings are the laws.

`tests/support/store_laws.py` runs them against every implementation.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Protocol

from taskdb.store.schema import Table


class ReadTxn(Protocol):
    """A consistent snapshot: it never sees a commit that came after it began."""

    def get(self, table: Table, key: bytes) -> bytes | None:
        """The value under `key`, or None."""

    def scan(self, table: Table, start: bytes = b"", stop: bytes | None = None) -> Iterator[tuple[bytes, bytes]]:
        """Pairs with start <= key < stop (None: to the end), in key order. Do not write to the table while iterating."""

    def first(self, table: Table, start: bytes = b"") -> tuple[bytes, bytes] | None:
        """The first pair with key >= start, or None."""

    def count(self, table: Table) -> int:
        """Number of pairs in the table. O(1)."""


class WriteTxn(ReadTxn, Protocol):
    """The only writer; it reads its own writes. Used from the thread that began it, and no other."""

    def put(self, table: Table, key: bytes, value: bytes) -> None:
        """Set. Raises StoreFull when the store may not grow; the transaction is then unusable and must be aborted."""

    def delete(self, table: Table, key: bytes) -> bool:
        """Remove; False if it was not there."""

    def commit(self) -> None:
        """Make all writes visible, and durable if the store syncs. Raises StoreFull or StoreError: then nothing was written."""

    def abort(self) -> None:
        """Drop all writes. After commit or abort the transaction is unusable."""


class Store(Protocol):
    def read(self) -> AbstractContextManager[ReadTxn]:
        """Open a snapshot; close it soon: an old reader keeps old pages from being reused."""

    def write(self) -> WriteTxn:
        """Open the write transaction. Raises InvariantBroken if one is open already."""

    def size_bytes(self) -> int:
        """Bytes the store occupies on disk (or would)."""

    def used_bytes(self) -> int:
        """Bytes of what is in use, as of the last commit: the rest of what it occupies is used again before it grows."""

    def free_bytes(self) -> int:
        """Bytes it may still grow by: the smaller of its own limit and the disk's free space."""

    def close(self) -> None:
        """Close; a write transaction still open is aborted. Idempotent."""
