"""The laws of a store (docstrings of taskdb/store/base.py) as tests. Subclass StoreLaws in a test file and say how a store is made."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from taskdb.errors import InvariantBroken, StoreFull
from taskdb.store.base import Store
from taskdb.store.schema import FORMAT_VERSION, U64, Meta, Table, meta_key

T = Table.NAMES


def put(store: Store, **pairs: bytes) -> None:
    txn = store.write()
    for key, value in pairs.items():
        txn.put(T, key.encode(), value)
    txn.commit()


def everything(store: Store, table: Table = T) -> list[tuple[bytes, bytes]]:
    with store.read() as txn:
        return list(txn.scan(table))


class StoreLaws:
    def make(self, where: Any, **options: Any) -> Store:
        """A new, empty store; options as the store's own (`bytes_max`)."""
        raise NotImplementedError

    @pytest.fixture
    def store(self, tmp_path: Any) -> Iterator[Store]:
        store = self.make(tmp_path)
        yield store
        store.close()

    def test_a_new_store_has_format_and_uuid(self, store: Store) -> None:
        with store.read() as txn:
            assert txn.get(Table.META, meta_key(Meta.FORMAT_VERSION)) == U64.pack(FORMAT_VERSION)
            assert len(txn.get(Table.META, meta_key(Meta.STORE_UUID)) or b"") == 16

    def test_what_is_committed_is_read(self, store: Store) -> None:
        put(store, a=b"1", b=b"")
        with store.read() as txn:
            assert txn.get(T, b"a") == b"1"
            assert txn.get(T, b"b") == b""
            assert txn.get(T, b"c") is None
            assert txn.get(Table.SPECS, b"a") is None
            assert txn.count(T) == 2

    def test_scan_is_ordered_and_half_open(self, store: Store) -> None:
        put(store, c=b"3", a=b"1", b=b"2", bb=b"22")
        with store.read() as txn:
            assert [key for key, _ in txn.scan(T)] == [b"a", b"b", b"bb", b"c"]
            assert list(txn.scan(T, b"b", b"c")) == [(b"b", b"2"), (b"bb", b"22")]
            assert [key for key, _ in txn.scan(T, b"aa")] == [b"b", b"bb", b"c"]
            assert list(txn.scan(T, b"d")) == []
            assert list(txn.scan(T, b"b", b"b")) == []

    def test_first(self, store: Store) -> None:
        put(store, b=b"2", d=b"4")
        with store.read() as txn:
            assert txn.first(T) == (b"b", b"2")
            assert txn.first(T, b"b") == (b"b", b"2")
            assert txn.first(T, b"c") == (b"d", b"4")
            assert txn.first(T, b"e") is None
            assert txn.first(Table.SPECS) is None

    def test_bytes_order_is_number_order(self, store: Store) -> None:
        txn = store.write()
        for number in (256, 1, 2**40, 255, 0):
            txn.put(T, U64.pack(number), b"")
        txn.commit()
        assert [int.from_bytes(key) for key, _ in everything(store)] == [0, 1, 255, 256, 2**40]

    def test_a_writer_reads_its_own_writes(self, store: Store) -> None:
        put(store, a=b"1", b=b"2")
        txn = store.write()
        txn.put(T, b"a", b"new")
        txn.put(T, b"c", b"3")
        assert txn.delete(T, b"b")
        assert not txn.delete(T, b"b")
        assert list(txn.scan(T)) == [(b"a", b"new"), (b"c", b"3")]
        assert txn.first(T, b"b") == (b"c", b"3")
        assert txn.get(T, b"b") is None
        assert txn.count(T) == 2
        txn.abort()

    def test_first_sees_writes_made_after_it_was_asked_before(self, store: Store) -> None:
        txn = store.write()
        for number in range(300):
            txn.put(T, U64.pack(number), b"x" * 100)
        for number in range(300):
            assert txn.first(T, U64.pack(0)) == (U64.pack(number), b"x" * 100)
            txn.delete(T, U64.pack(number))
            txn.put(T, U64.pack(1000 + number), b"y")
        txn.abort()

    def test_abort_leaves_nothing(self, store: Store) -> None:
        put(store, a=b"1")
        txn = store.write()
        txn.put(T, b"a", b"2")
        txn.put(T, b"b", b"2")
        txn.delete(T, b"a")
        txn.abort()
        assert everything(store) == [(b"a", b"1")]

    def test_a_snapshot_never_moves(self, store: Store) -> None:
        put(store, a=b"1")
        with store.read() as before:
            put(store, a=b"2", b=b"2")
            assert list(before.scan(T)) == [(b"a", b"1")]
            with store.read() as after:
                assert after.get(T, b"a") == b"2"
            assert before.get(T, b"b") is None

    def test_a_reader_does_not_see_an_open_write(self, store: Store) -> None:
        put(store, a=b"1")
        txn = store.write()
        txn.put(T, b"a", b"2")
        txn.delete(T, b"a")
        with store.read() as reader:
            assert list(reader.scan(T)) == [(b"a", b"1")]
            txn.put(T, b"c", b"3")
            txn.commit()
            assert list(reader.scan(T)) == [(b"a", b"1")]
        assert everything(store) == [(b"c", b"3")]

    def test_one_writer(self, store: Store) -> None:
        txn = store.write()
        with pytest.raises(InvariantBroken):
            store.write()
        txn.abort()
        store.write().abort()

    @pytest.mark.parametrize("end", ["commit", "abort"])
    def test_a_transaction_that_is_over_is_unusable(self, store: Store, end: str) -> None:
        txn = store.write()
        getattr(txn, end)()
        with pytest.raises(InvariantBroken):
            txn.put(T, b"a", b"")
        with pytest.raises(InvariantBroken):
            txn.commit()
        txn.abort()

    def test_large_values(self, store: Store) -> None:
        put(store, a=b"x" * 5_000_000)
        assert everything(store) == [(b"a", b"x" * 5_000_000)]

    def test_close_aborts_and_can_be_repeated(self, tmp_path: Any) -> None:
        store = self.make(tmp_path / "closing")
        store.write().put(T, b"a", b"")
        store.close()
        store.close()

    def test_a_full_store_refuses_and_keeps_what_it_had(self, tmp_path: Any) -> None:
        store = self.make(tmp_path / "small", bytes_max=2_000_000)
        put(store, a=b"1")
        room = store.free_bytes()
        assert 0 < room <= 2_000_000
        txn = store.write()

        def fill() -> None:
            for number in range(10_000):
                txn.put(T, U64.pack(number), b"x" * 1000)

        with pytest.raises(StoreFull):
            fill()
        with pytest.raises(InvariantBroken):
            txn.put(T, b"b", b"")
        with pytest.raises(InvariantBroken):
            txn.commit()
        txn.abort()
        assert everything(store) == [(b"a", b"1")]
        put(store, b=b"2")
        assert store.free_bytes() > 1_000_000
        store.close()

    def test_deleting_makes_room(self, tmp_path: Any) -> None:
        store = self.make(tmp_path / "small", bytes_max=2_000_000)
        for _ in range(5):
            txn = store.write()
            for number in range(1000):
                txn.put(T, U64.pack(number), b"x" * 1000)
            txn.commit()
            txn = store.write()
            for number in range(1000):
                txn.delete(T, U64.pack(number))
            txn.commit()
        assert store.free_bytes() > 1_000_000
        store.close()
