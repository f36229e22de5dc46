from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import lmdb
import pytest

from taskdb.errors import FormatMismatch, InvariantBroken, NotFound, StoreCorrupt, StoreError, StoreFull, StoreLocked
from taskdb.limits import READERS_CHECKED_WRITES
from taskdb.store.lmdb_store import LmdbSnapshot, LmdbStore, _store_error
from taskdb.store.schema import FORMAT_VERSION, U64, Meta, Table, meta_key
from tests.support.store_laws import StoreLaws, T, everything, put


class TestLaws(StoreLaws):
    def make(self, where: Any, **options: Any) -> LmdbStore:
        return LmdbStore(where, sync=False, **options)


def test_what_is_committed_is_there_after_reopening(tmp_path: Path) -> None:
    store = LmdbStore(tmp_path)
    put(store, a=b"1")
    with store.read() as txn:
        uuid = txn.get(Table.META, meta_key(Meta.STORE_UUID))
    store.write().put(T, b"b", b"2")
    store.close()
    store = LmdbStore(tmp_path)
    assert everything(store) == [(b"a", b"1")]
    with store.read() as txn:
        assert txn.get(Table.META, meta_key(Meta.STORE_UUID)) == uuid
    store.close()


def test_a_second_daemon_is_told_who_has_the_store(tmp_path: Path) -> None:
    store = LmdbStore(tmp_path)
    with pytest.raises(StoreLocked) as caught:
        LmdbStore(tmp_path)
    message = str(caught.value)
    assert str(tmp_path) in message
    assert str(os.getpid()) in message
    assert "\n" not in message
    put(store, a=b"1")
    store.close()
    LmdbStore(tmp_path).close()


def test_the_lock_of_a_killed_process_is_free(tmp_path: Path) -> None:
    code = f"import os; from taskdb.store.lmdb_store import LmdbStore; s = LmdbStore({str(tmp_path)!r}); os._exit(9)"
    root = Path(__file__).parents[3]
    assert subprocess.run([sys.executable, "-c", code], cwd=root, env={**os.environ, "PYTHONPATH": str(root)}, check=False).returncode == 9
    LmdbStore(tmp_path).close()


def test_a_newer_format_is_refused_and_left_alone(tmp_path: Path) -> None:
    store = LmdbStore(tmp_path)
    txn = store.write()
    txn.put(Table.META, meta_key(Meta.FORMAT_VERSION), U64.pack(FORMAT_VERSION + 1))
    txn.commit()
    store.close()
    before = (tmp_path / "data.mdb").read_bytes()
    for _ in range(2):
        with pytest.raises(FormatMismatch, match="newer") as caught:
            LmdbStore(tmp_path)
        assert str(tmp_path) in str(caught.value)
    assert (tmp_path / "data.mdb").read_bytes() == before


def test_a_file_that_is_no_store_is_refused(tmp_path: Path) -> None:
    (tmp_path / "data.mdb").write_bytes(b"not a database " * 1000)
    with pytest.raises(StoreCorrupt, match="damaged"):
        LmdbStore(tmp_path)


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="cannot be opened"):
        LmdbStore(tmp_path / "file")


def test_a_full_disk_is_store_full(tmp_path: Path) -> None:
    error = _store_error(lmdb.Error("mdb_txn_commit: No space left on device"), tmp_path)
    assert type(error) is StoreFull
    assert error.retryable
    assert type(_store_error(lmdb.Error("mdb_txn_commit: Input/output error"), tmp_path)) is StoreError


def test_a_write_transaction_stays_on_its_thread(tmp_path: Path) -> None:
    store = LmdbStore(tmp_path)
    txn = store.write()
    caught: list[BaseException] = []

    def elsewhere() -> None:
        try:
            txn.commit()
        except InvariantBroken as exc:
            caught.append(exc)

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert len(caught) == 1
    txn.abort()
    store.close()


def test_the_huge_map_costs_no_disk(tmp_path: Path) -> None:
    store = LmdbStore(tmp_path)
    assert store.size_bytes() < 1 << 20
    store.close()


def test_an_lmdb_file_of_another_program_is_left_alone(tmp_path: Path) -> None:
    with lmdb.open(str(tmp_path)) as env, env.begin(write=True) as txn:
        txn.put(b"a", b"b")
    before = (tmp_path / "data.mdb").read_bytes()
    for opening in (LmdbStore, lambda folder: LmdbSnapshot(folder).read()):
        with pytest.raises(StoreCorrupt, match="another program"):
            opening(tmp_path)
    assert (tmp_path / "data.mdb").read_bytes() == before


def test_tools_make_no_store(tmp_path: Path) -> None:
    for opening in (LmdbSnapshot, lambda folder: LmdbStore(folder, create=False)):
        with pytest.raises(NotFound, match="no store"):
            opening(tmp_path / "data")
    assert not (tmp_path / "data").exists()


def test_a_rehearsal_has_one_transaction_that_is_never_committed(tmp_path: Path) -> None:
    store = LmdbStore(tmp_path)
    put(store, a=b"1")
    store.close()
    before = (tmp_path / "data.mdb").read_bytes()
    store = LmdbStore(tmp_path, rehearsal=True)
    txn = store.write()
    txn.put(T, b"b", b"2")
    assert store.write().get(T, b"b") == b"2"
    with pytest.raises(InvariantBroken, match="rehearsal"):
        txn.commit()
    txn.abort()
    with pytest.raises(InvariantBroken, match="over"):
        store.write()
    store.close()
    assert (tmp_path / "data.mdb").read_bytes() == before


# ------------------------------------------------------------------------------------------------- others look at it

LOOK = """
import sys
from pathlib import Path
from taskdb.store.lmdb_store import LmdbSnapshot
from taskdb.store.schema import Table
T = Table(int(sys.argv[2]))
with LmdbSnapshot(Path(sys.argv[1])) as snapshot:
    txn = snapshot.read()
    print(txn.count(T), flush=True)
    sys.stdin.readline()
    print(len(list(txn.scan(T))), next(snapshot.pages.problems(), "whole"), flush=True)
    sys.stdin.readline()
"""


def look(folder: Path) -> subprocess.Popen[str]:
    """A process that holds a snapshot: says how much it has, and, told to go on, all it has."""
    root = Path(__file__).parents[3]
    return subprocess.Popen(
        [sys.executable, "-c", LOOK, str(folder), str(int(T))],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(root)},
    )


def test_another_process_sees_one_moment(tmp_path: Path) -> None:
    store = LmdbStore(tmp_path, sync=False)
    put(store, a=b"1")
    with look(tmp_path) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.readline() == "1\n"
        # Each of these frees pages that the next would use again.
        for number in range(200):
            txn = store.write()
            for i in range(50):
                txn.put(T, i.to_bytes(8), number.to_bytes(8) * 100)
            txn.commit()
        process.stdin.write("\n")
        process.stdin.flush()
        assert process.stdout.readline() == "1 whole\n"
        process.communicate("\n")
    assert process.returncode == 0
    store.close()


def test_the_pages_a_killed_reader_saw_are_used_again(tmp_path: Path) -> None:
    store = LmdbStore(tmp_path, sync=False)
    put(store, a=b"1")
    with look(tmp_path) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "1\n"
        assert str(process.pid) in store._env.readers()
        process.kill()
    for _ in range(READERS_CHECKED_WRITES):
        put(store, a=b"2")
    assert str(process.pid) not in store._env.readers()
    store.close()


def test_a_snapshot_needs_no_lock_file(tmp_path: Path) -> None:
    """As of a backup, also on a disk that cannot be written to."""
    store = LmdbStore(tmp_path / "data")
    put(store, a=b"1")
    store.close()
    for name in ("lock.mdb", "taskdb.lock"):
        (tmp_path / "data" / name).unlink()
    with LmdbSnapshot(tmp_path / "data") as snapshot:
        assert dict(snapshot.read().scan(T)) == {b"a": b"1"}
        snapshot.check_alone()
        assert [path.name for path in (tmp_path / "data").iterdir()] == ["data.mdb"]
        # But then nobody knows of this reader.
        (tmp_path / "data/lock.mdb").touch()
        with pytest.raises(StoreError, match="run this again"):
            snapshot.check_alone()
