from __future__ import annotations

from typing import Any

import pytest

from taskdb.store.memory_store import MemoryStore
from tests.support.store_laws import StoreLaws, T, everything, put


class TestLaws(StoreLaws):
    def make(self, where: Any, **options: Any) -> MemoryStore:
        return MemoryStore(**options)


def test_a_crash_drops_what_was_not_synced() -> None:
    store = MemoryStore(sync=False)
    put(store, a=b"1", b=b"1")
    store.sync()
    put(store, a=b"2", c=b"3")
    txn = store.write()
    txn.delete(T, b"b")
    txn.commit()
    store.write().put(T, b"d", b"4")
    store.crash()
    assert everything(store) == [(b"a", b"1"), (b"b", b"1")]
    put(store, e=b"5")
    assert everything(store) == [(b"a", b"1"), (b"b", b"1"), (b"e", b"5")]


def test_a_store_that_syncs_loses_only_the_open_transaction() -> None:
    store = MemoryStore(sync=True)
    put(store, a=b"1")
    store.write().put(T, b"b", b"2")
    store.crash()
    assert everything(store) == [(b"a", b"1")]


def test_without_sync_a_commit_does_not_survive() -> None:
    """The negative control of the test above: the same check fails on a store that does not sync."""
    store = MemoryStore(sync=False)
    put(store, a=b"1")
    store.crash()
    with pytest.raises(AssertionError):
        assert everything(store) == [(b"a", b"1")]


def test_a_snapshot_survives_a_crash() -> None:
    store = MemoryStore(sync=False)
    put(store, a=b"1")
    with store.read() as before:
        store.crash()
        assert before.get(T, b"a") == b"1"
    assert everything(store) == []
