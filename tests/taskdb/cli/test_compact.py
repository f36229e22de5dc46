"""`taskdb compact`: the file shrinks, and holds what it held; what cannot be done leaves it alone."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from taskdb.cli.main import cli
from taskdb.store.lmdb_store import LmdbStore
from taskdb.store.schema import U64, Table
from tests.support.stores import abandoned
from tests.taskdb.server.procs import Daemon, run


@pytest.fixture
def data(tmp_path: Path) -> Path:
    abandoned(tmp_path / "data")
    return tmp_path / "data"


def compact(data: Path, *args: str) -> Result:
    return CliRunner().invoke(cli, ["compact", "--data", str(data), *args])


def contents(data: Path) -> dict[str, list[tuple[bytes, bytes]]]:
    store = LmdbStore(data)
    with store.read() as txn:
        found = {table.name: list(txn.scan(table)) for table in Table}
    store.close()
    return found


def test_space_goes_back_to_the_disk(data: Path) -> None:
    before = contents(data)
    store = LmdbStore(data)
    for value in (b"x" * 4_000, b""):
        txn = store.write()
        for number in range(1_000):
            if value:
                txn.put(Table.KEPT, U64.pack(number), value)
            else:
                txn.delete(Table.KEPT, U64.pack(number))
        txn.commit()
    store.close()
    done = compact(data, "--output", "json")
    assert done.exit_code == 0, done.stderr
    sizes = json.loads(done.stdout)
    assert sizes["bytes"] < 1 << 20 < 3 << 20 < sizes["bytes_before"]
    assert sizes["bytes"] == (data / "data.mdb").stat().st_blocks * 512
    assert contents(data) == before
    assert CliRunner().invoke(cli, ["verify", "--data", str(data)]).exit_code == 0
    assert not [path for path in data.iterdir() if path.name.endswith(".part")]


def test_a_daemon_serves_what_was_compacted(data: Path) -> None:
    assert compact(data).exit_code == 0
    with Daemon(data.parent) as daemon:
        refused = compact(data)
        assert refused.exit_code == 4
        assert "in use by process" in refused.stderr
        assert run("status", TASKDB_URL=daemon.address).returncode == 0


def test_what_is_damaged_or_not_there_is_left_alone(data: Path, tmp_path: Path) -> None:
    with (data / "data.mdb").open("r+b") as file:
        file.seek(8 * 4096)
        file.write(b"\xff" * 4096 * 4)
    before = (data / "data.mdb").read_bytes()
    done = compact(data)
    assert done.exit_code == 5
    assert done.stderr.count("\n") == 1
    assert (data / "data.mdb").read_bytes() == before
    assert compact(tmp_path / "nowhere").exit_code == 1
    assert not (tmp_path / "nowhere").exists()


def test_without_room_nothing_changes(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = (data / "data.mdb").read_bytes()

    def no_space(fd: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", no_space)
    done = compact(data)
    assert done.exit_code == 1
    assert "no space left" in done.stderr
    assert (data / "data.mdb").read_bytes() == before
    assert not (data / "data.mdb.part").exists()
