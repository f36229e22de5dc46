"""Stores of earlier formats are opened, with all that is in them; what cannot be is left alone."""

from __future__ import annotations

import logging
from pathlib import Path

import lmdb
import pytest

from taskdb.commands import EndRecovery, Report
from taskdb.engine.engine import Engine
from taskdb.engine.invariants import violations
from taskdb.engine.records import unreadable
from taskdb.engine.recovery import clients, graphs
from taskdb.errors import StoreCorrupt, StoreFull
from taskdb.model import Level
from taskdb.store.lmdb_store import LmdbStore
from taskdb.store.schema import FORMAT_VERSION, U64, Meta, Table, meta_key
from tests.support import format1
from tests.taskdb.server.procs import Daemon, run


def names(folder: Path) -> set[str]:
    with lmdb.open(str(folder), readonly=True, max_dbs=40, lock=False) as env, env.begin() as txn:
        return {name.decode() for name, _ in txn.cursor()}


def test_format_1_becomes_the_current_one(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    format1.write(tmp_path / "data")
    with caplog.at_level(logging.WARNING):
        store = LmdbStore(tmp_path / "data")
    assert [record.getMessage() for record in caplog.records] == [
        f"the store in {tmp_path / 'data'} was migrated from format 1 to {FORMAT_VERSION}"
    ]
    with store.read() as txn:
        assert list(unreadable(txn)) == []
        assert list(violations(txn)) == []
        assert txn.get(Table.META, meta_key(Meta.FORMAT_VERSION)) == U64.pack(FORMAT_VERSION)
        assert txn.get(Table.META, meta_key(Meta.STORE_UUID)) == format1.UUID
        # Leased tasks and results are held by the scheduler they were with.
        assert dict(txn.scan(Table.HOLDS)) == {U64.pack(task_id): U64.pack(format1.EPOCH) for task_id in (1, 2, 5, 8)}
        assert txn.get(Table.META, meta_key(Meta.RECOVERING)) is None
        assert dict(txn.scan(Table.EPOCHS)) == {U64.pack(format1.EPOCH): U64.pack(1)}
        assert list(clients(txn)) == ["c1"]
        (graph,) = graphs(txn)
        assert (graph.submission, graph.client, graph.flags, graph.tasks, graph.groups) == ("g1", "c1", 0, 9, {"load": 4, "use": 5})
        untouched = set(Table) - {
            Table.META,
            Table.GRAPHS,
            Table.HOLDS,
            Table.EPOCHS,
            Table.KEPT,
            Table.ANSWERS,
            Table.RULES,
            Table.GROWTH,
            Table.DROPPED,
            Table.HISTORY,
            Table.SPOOL,
        }
        assert {table.name.lower(): dict(txn.scan(table)) for table in untouched} == {
            name: pairs for name, pairs in format1.records(format1.EPOCH).items() if name not in ("meta", "graphs", "leases")
        }
    store.close()
    assert names(tmp_path / "data") == {table.name.lower() for table in Table}


def test_it_is_migrated_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    format1.write(tmp_path / "data")
    LmdbStore(tmp_path / "data").close()
    before = (tmp_path / "data/data.mdb").read_bytes()
    caplog.clear()
    LmdbStore(tmp_path / "data").close()
    assert caplog.records == []
    assert (tmp_path / "data/data.mdb").read_bytes() == before


def test_the_engine_goes_on_with_it(tmp_path: Path) -> None:
    format1.write(tmp_path / "data")
    store, engine = LmdbStore(tmp_path / "data"), Engine()
    txn = store.write()
    epoch = engine.begin_epoch(txn, "scheduler-4")
    engine.apply(txn, epoch, 1, [EndRecovery()])
    while engine.step(txn)[1]:
        pass
    leases, _ = engine.lease(txn, 9, 9)
    # All but the failed one: the results are gone, and the load that had been let go is needed again.
    assert [lease.key for lease in leases] == [format1.key(task_id) for task_id in range(1, 9)]
    engine.apply(txn, epoch, 2, [Report([lease.id for lease in leases], [Level.MEMORY] * 8, [8] * 8)])
    txn.commit()
    with store.read() as snapshot:
        assert list(violations(snapshot)) == []
    store.close()


def test_leases_that_were_being_given_back_still_are(tmp_path: Path) -> None:
    format1.write(tmp_path / "data", leased_by=format1.EPOCH - 1)
    store, engine = LmdbStore(tmp_path / "data"), Engine()
    with store.read() as txn:
        assert list(violations(txn)) == []
        assert txn.get(Table.META, meta_key(Meta.RECOVERING)) is not None
    txn = store.write()
    while engine.step(txn)[1]:
        pass
    # The results are the current scheduler's.
    assert dict(txn.scan(Table.HOLDS)) == {U64.pack(task_id): U64.pack(format1.EPOCH) for task_id in (1, 8)}
    assert txn.get(Table.META, meta_key(Meta.RECOVERING)) is None
    assert list(violations(txn)) == []
    txn.abort()
    store.close()


def test_a_rehearsal_migrates_and_writes_nothing(tmp_path: Path) -> None:
    format1.write(tmp_path / "data")
    before = (tmp_path / "data/data.mdb").read_bytes()
    store = LmdbStore(tmp_path / "data", rehearsal=True)
    txn = store.write()
    assert txn.count(Table.HOLDS) == 4
    txn.abort()
    store.close()
    assert (tmp_path / "data/data.mdb").read_bytes() == before


@pytest.mark.parametrize(("delete", "words"), [(False, "nobody has leased it"), (True, "no table leases")])
def test_what_cannot_be_migrated_is_left_alone(tmp_path: Path, delete: bool, words: str) -> None:
    format1.write(tmp_path / "data")
    with lmdb.open(str(tmp_path / "data"), max_dbs=40) as env:
        db = env.open_db(b"leases")
        with env.begin(write=True) as txn:
            txn.drop(db, delete=delete)
    before = (tmp_path / "data/data.mdb").read_bytes()
    with pytest.raises(StoreCorrupt, match=words):
        LmdbStore(tmp_path / "data")
    assert (tmp_path / "data/data.mdb").read_bytes() == before


def test_without_room_nothing_is_migrated(tmp_path: Path) -> None:
    format1.write(tmp_path / "data")
    with pytest.raises(StoreFull):
        LmdbStore(tmp_path / "data", bytes_max=4096)
    assert "holds" not in names(tmp_path / "data")
    LmdbStore(tmp_path / "data").close()


@pytest.mark.e2e
def test_a_daemon_serves_it_and_says_so(tmp_path: Path) -> None:
    format1.write(tmp_path / "data")
    with Daemon(tmp_path) as daemon:
        assert f"migrated from format 1 to {FORMAT_VERSION}" in daemon.words()
        done = run("explain", "load", TASKDB_URL=daemon.address)
        assert done.returncode == 1  # answered
        assert f"format {FORMAT_VERSION}" in run("status", TASKDB_URL=daemon.address).stdout


@pytest.mark.e2e
def test_tools_that_only_read_do_not_migrate(tmp_path: Path) -> None:
    format1.write(tmp_path / "data")
    before = (tmp_path / "data/data.mdb").read_bytes()
    done = run("verify", "--data", str(tmp_path / "data"))
    assert (done.returncode, done.stderr.count("\n")) == (4, 1)
    assert "taskdb recover" in done.stderr
    # An operator copies it first.
    assert run("backup", "--data", str(tmp_path / "data"), "--to", str(tmp_path / "copy")).returncode == 0
    assert (tmp_path / "data/data.mdb").read_bytes() == before
    done = run("recover", "--data", str(tmp_path / "copy"))
    assert done.returncode == 0
    assert "migrated from format 1" in done.stderr
    assert run("verify", "--data", str(tmp_path / "copy")).returncode == 0
