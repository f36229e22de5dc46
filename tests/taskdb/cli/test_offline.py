"""verify, backup, restore and recover: on stores at rest, beside a daemon that serves them, and on what is damaged."""

from __future__ import annotations

import asyncio
import io
import json
import os
import pty
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from taskdb import commands as c
from taskdb.cli.main import cli, main
from taskdb.cli.output import show_seconds
from taskdb.model import Level
from taskdb.store.codec import decode_task, encode_task
from taskdb.store.lmdb_store import LmdbStore
from taskdb.store.schema import FORMAT_VERSION, U64, Meta, Table, meta_key
from tests.support.stores import Stored, abandoned, crowd
from tests.taskdb.server.procs import Daemon, Recorder, command, environment, graph, key, run, until, until_async
from tests.taskdb.store.test_pages import tables, torn

COMMANDS = {
    "verify": ("verify", "--data", "DATA"),
    "backup": ("backup", "--data", "DATA", "--to", "COPY"),
    "restore": ("restore", "--from", "DATA", "--data", "COPY"),
    "recover": ("recover", "--data", "DATA"),
    "dry run": ("recover", "--data", "DATA", "--dry-run"),
    "serve": ("serve", "--data", "DATA", "--listen", "127.0.0.1:0"),
}


@pytest.fixture
def data(tmp_path: Path) -> Path:
    abandoned(tmp_path / "data")
    return tmp_path / "data"


def words(name: str, data: Path) -> list[str]:
    return [str(data) if word == "DATA" else str(data.parent / "copy") if word == "COPY" else word for word in COMMANDS[name]]


def here(*args: str) -> subprocess.CompletedProcess[str]:
    """A command in this process, which is much faster."""
    out, errors = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(errors), pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["taskdb", *args])
        with pytest.raises(SystemExit) as ended:
            main()
    return subprocess.CompletedProcess(args, int(ended.value.code or 0), out.getvalue(), errors.getvalue())


def one_line(done: subprocess.CompletedProcess[str], code: int, *parts: str) -> None:
    """It ended with this code and said why, in one line."""
    assert (done.returncode, done.stderr.count("\n")) == (code, 1), done.stderr
    for part in parts:
        assert part in done.stderr


def ask(*args: str) -> Any:
    done = here(*args, "--output", "json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def files(folder: Path) -> dict[str, bytes]:
    """But for LMDB's list of readers."""
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name != "lock.mdb"}


@pytest.mark.parametrize("name", ["verify", "backup", "restore", "recover"])
def test_help_says_where_it_works_and_the_exit_codes(name: str) -> None:
    done = CliRunner().invoke(cli, [name, "--help"])
    assert done.exit_code == 0
    assert "Offline: " in done.output
    assert "5 store corrupt" in done.output


@pytest.mark.parametrize(
    "args",
    [["verify"], ["backup", "--data", "x"], ["restore", "--data", "x"], ["recover"], ["recover", "--data", "x", "--store-bytes-max", "y"]],
)
def test_usage(args: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert CliRunner().invoke(cli, args).exit_code == 2
    assert list(tmp_path.iterdir()) == []


# ----------------------------------------------------------------------------------------------------------- verify


def test_verify_a_whole_store(data: Path) -> None:
    before = files(data)
    report = ask("verify", "--data", str(data))
    assert report["ok"]
    assert (report["violations"], report["first"], report["format"], report["rules"]) == ({}, None, FORMAT_VERSION, 14)
    assert report["states"] == {"waiting": 2, "queued": 5, "processing": 2, "memory": 3, "released": 1, "erred": 1}
    assert (report["tasks"], report["graphs"], report["clients"], report["wanted"], report["kept"]) == (14, 3, 2, 3, 3)
    assert report["pages"] > 20
    assert report["records"] > 100
    table = here("verify", "--data", str(data))
    assert (table.returncode, table.stderr) == (0, "")
    for part in (report["uuid"], "14: 2 waiting", "wanted results 3", "none"):
        assert part in table.stdout
    assert files(data) == before


def damage_task(txn: Any) -> None:
    task = decode_task(1, txn.get(Table.TASKS, U64.pack(1)))
    task.need = 7
    txn.put(Table.TASKS, U64.pack(1), encode_task(task))


def put(table: Table, name: bytes, value: bytes) -> Callable[[Any], None]:
    return lambda txn: txn.put(table, name, value)


#: Tables whose values may be any bytes, and those that are empty here.
NOT_CUT = {Table.META, Table.SPECS, Table.BLOBS, Table.NAMES, Table.READY, Table.AHEAD, Table.WANTED_BY, Table.TODO, Table.HISTORY}
NOT_CUT |= {Table.ANSWERS, Table.RULES, Table.GROWTH, Table.DROPPED, Table.SPOOL}


def cut_first(table: Table) -> Callable[[Any], None]:
    def damage(txn: Any) -> None:
        name, value = txn.first(table)
        txn.put(table, name, value[:3])

    return damage


@pytest.mark.parametrize(
    ("check", "code", "damage"),
    [
        ("counters", 1, damage_task),
        ("holds", 1, put(Table.HOLDS, U64.pack(99), U64.pack(1))),
        ("keys", 1, put(Table.KEYS, bytes(16), U64.pack(1))),
        ("links", 1, put(Table.EDGES, U64.pack(1), U64.pack(99))),
        *(("records", 5, cut_first(table)) for table in Table if table not in NOT_CUT),
        ("records", 5, put(Table.META, b"\x63", b"")),
        ("records", 5, put(Table.META, meta_key(Meta.STORE_UUID), b"short")),
        ("records", 5, put(Table.TODO, bytes(17), U64.pack(0))),
        ("records", 5, put(Table.TASKS, U64.pack(1), bytes(78))),
        ("records", 5, put(Table.READY, b"short", b"")),
        ("records", 5, put(Table.WANTED_BY, bytes(16), b"more")),
        ("records", 5, put(Table.KEPT, bytes(16), bytes(4))),
        ("records", 5, put(Table.RULES, U64.pack(1), b"no rule")),
        ("records", 5, put(Table.GROWTH, U64.pack(1), b"short")),
        ("records", 5, put(Table.DROPPED, U64.pack(1), b"short")),
        ("records", 5, put(Table.SPOOL, bytes(16), b"no run")),
    ],
)
def test_verify_says_what_is_wrong_in_one_line(data: Path, check: str, code: int, damage: Callable[[Any], None]) -> None:
    store = LmdbStore(data)
    txn = store.write()
    damage(txn)
    txn.commit()
    store.close()
    before = (data / "data.mdb").read_bytes()
    done = here("verify", "--data", str(data), "--output", "json")
    report = json.loads(done.stdout)
    one_line(done, code, report["first"], "backup")
    assert not report["ok"]
    assert check in report["violations"]
    assert report["first"].split(":")[0] in report["violations"]
    assert (data / "data.mdb").read_bytes() == before
    table = here("verify", "--data", str(data))
    assert report["first"].split(":")[0] in table.stdout


@pytest.mark.e2e
def test_verify_and_backup_while_a_daemon_serves_and_writes(tmp_path: Path) -> None:
    """Each sees one moment, and a backup holds what was acknowledged before it was begun."""

    async def work(address: str) -> None:
        async with Recorder(address) as scheduler:
            acknowledged, ended = 0, False

            async def churn() -> None:
                nonlocal acknowledged
                while not ended:
                    keys = [key("x", i) for i in range(acknowledged, acknowledged + 50)]
                    await scheduler.ask(*graph(f"graph-{acknowledged}", keys), scheduler.credit(40))
                    await scheduler.ask(scheduler.finish(sorted(scheduler.held)[:20]))
                    await scheduler.durable()
                    acknowledged += 50

            churning = asyncio.create_task(churn())
            for number in range(3):
                await until_async(lambda at=acknowledged: acknowledged > at, "the daemon to go on")
                verified = await asyncio.to_thread(ask, "verify", "--data", str(data))
                assert verified["ok"]
                least = acknowledged
                copy = tmp_path / f"copy-{number}"
                await asyncio.to_thread(ask, "backup", "--data", str(data), "--to", str(copy))
                report = await asyncio.to_thread(ask, "verify", "--data", str(copy))
                assert report["ok"]
                assert report["uuid"] == verified["uuid"]
                assert least <= report["tasks"] <= acknowledged + 50
            ended = True
            await churning

    with Daemon(tmp_path) as daemon:
        data = daemon.data
        asyncio.run(work(daemon.address))
        assert daemon.send(signal.SIGTERM) == 0


def test_progress_is_shown_on_a_terminal_only(data: Path) -> None:
    ours, theirs = pty.openpty()
    done = subprocess.run(command("verify", "--data", str(data)), stdout=subprocess.PIPE, stderr=theirs, env=environment(), check=True)
    os.close(theirs)
    shown = os.read(ours, 100_000).decode()
    os.close(ours)
    assert "pages: " in shown
    assert shown.endswith("\x1b[K")
    assert b"pages: " not in done.stdout


# --------------------------------------------------------------------------------------------------- backup, restore


def test_a_backup_is_the_store_and_a_restored_one_serves(data: Path, tmp_path: Path) -> None:
    before = tables(data)
    done = ask("backup", "--data", str(data), "--to", str(tmp_path / "copy"))
    assert done["bytes"] == (tmp_path / "copy/data.mdb").stat().st_size
    assert [path.name for path in (tmp_path / "copy").iterdir()] == ["data.mdb"]
    assert tables(tmp_path / "copy") == before
    shutil.rmtree(data)
    for _ in range(2):  # into a folder that is not there, and into one whose data was moved away
        ask("restore", "--from", str(tmp_path / "copy"), "--data", str(data))
        assert tables(data) == before
        (data / "data.mdb").unlink()
    ask("restore", "--from", str(tmp_path / "copy"), "--data", str(data))
    with Daemon(tmp_path) as daemon:
        assert ask("status", "--url", daemon.address)["tasks"] == 14
        one_line(here("restore", "--from", str(tmp_path / "copy"), "--data", str(data)), 4, "in use by process", "stop that taskdb daemon")


def test_a_backup_is_smaller_than_what_it_is_of(tmp_path: Path) -> None:
    stored = Stored(tmp_path / "data")
    crowd(stored, 5_000)
    stored.do(c.DropClient("crowd"))
    stored.step()
    stored.close()
    done = ask("backup", "--data", str(tmp_path / "data"), "--to", str(tmp_path / "copy"))
    assert done["bytes"] < (tmp_path / "data/data.mdb").stat().st_size / 5


def test_nothing_is_written_over(data: Path, tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "file").write_text("mine")
    before = files(data)
    for target in ("there", "file", "data"):
        one_line(here("backup", "--data", str(data), "--to", str(tmp_path / target)), 1, "exists already")
    (tmp_path / "there/mine").write_text("mine")
    for target in ("there", "data"):
        one_line(here("restore", "--from", str(data), "--data", str(tmp_path / target)), 1, "is not empty")
    one_line(here("restore", "--from", str(data), "--data", str(tmp_path / "file")), 1, str(tmp_path / "file"))
    assert files(data) == before
    assert sorted(path.name for path in tmp_path.rglob("*")) == sorted([*before, "lock.mdb", "data", "there", "mine", "file"])


LIMITED = """
import os, resource, sys
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[1]),) * 2)
os.execv(sys.argv[2], sys.argv[2:])
"""


def limited(size: int, *args: str) -> subprocess.CompletedProcess[str]:
    """A command whose files may not grow beyond `size` bytes: as on a full disk."""
    line = [sys.executable, "-c", LIMITED, str(size), *command(*args)]
    return subprocess.run(line, capture_output=True, text=True, env=environment(), timeout=30, check=False)


def test_without_room_there_is_no_half_of_a_copy(data: Path, tmp_path: Path) -> None:
    before = files(data)
    one_line(limited(20_000, "backup", "--data", str(data), "--to", str(tmp_path / "copy")), 1, "no space left", "make room")
    one_line(limited(20_000, "restore", "--from", str(data), "--data", str(tmp_path / "new")), 1, "no space left", "make room")
    assert sorted(path.name for path in tmp_path.rglob("*") if path.is_file()) == sorted([*before, "lock.mdb", "taskdb.lock"])
    assert files(data) == before
    ask("restore", "--from", str(data), "--data", str(tmp_path / "new"))


# ---------------------------------------------------------------------------------------------------------- recover


def test_a_dry_run_says_what_recover_does_and_writes_nothing(data: Path) -> None:
    before = (data / "data.mdb").read_bytes()
    table = here("recover", "--data", str(data), "--dry-run")
    assert table.returncode == 0
    assert table.stderr == "a dry run: nothing was written\n"
    dry = ask("recover", "--data", str(data), "--dry-run")
    assert (data / "data.mdb").read_bytes() == before
    done = ask("recover", "--data", str(data))
    assert {**dry, "dry_run": False} == done
    assert done["repaired"] == {"holds": 5, "open_submissions": 1, "index_entries": 0}
    assert (done["changed"], done["epoch"]) == (True, 2)
    assert done["kept"]["states"] == {"waiting": 5, "queued": 4, "processing": 0, "memory": 0, "released": 0, "erred": 1}
    assert (done["kept"]["graphs"], done["kept"]["clients"], done["kept"]["wanted"], done["kept"]["kept"]) == (2, 1, 2, 3)
    assert done["to_run"] == {"tasks": 9, "unfinished": 6, "begun": 1, "lost_results": 2, "released_inputs": 1, "unmade": 0}
    assert done["lost"] == {"data": 1, "cancelled": 1, "unneeded_results": 0, "dropped": 2, "forgotten": 0}
    assert (done["cost"]["seconds"], done["cost"]["tasks_known"], done["cost"]["tasks_unknown"]) == (10.0, 8, 1)
    for part in (
        "holds given back 5",
        "9: 6 unfinished (1 of them begun)",
        "10 s of one thread for 8 tasks",
        "not known for 1",
        "load-1a2b",
    ):
        assert part in table.stdout
    assert ask("verify", "--data", str(data))["ok"]
    again = ask("recover", "--data", str(data))
    assert (again["changed"], again["epoch"], again["to_run"]["tasks"]) == (False, 2, 9)


@pytest.mark.e2e
@pytest.mark.parametrize("name", ["recover", "dry run"])
def test_recover_is_not_for_a_store_in_use(tmp_path: Path, name: str) -> None:
    with Daemon(tmp_path) as daemon:
        assert daemon.process is not None
        one_line(run(*words(name, daemon.data)), 4, f"in use by process {daemon.process.pid}", "stop that taskdb daemon")


def test_without_room_nothing_is_lost_and_it_can_be_done_again(tmp_path: Path) -> None:
    data = tmp_path / "data"
    stored = Stored(data)
    crowd(stored, 3_000)
    stored.report(Level.MEMORY, *stored.lease(1_000))
    stored.close()
    # No page is free in it.
    assert here("compact", "--data", str(data)).returncode == 0
    size = (data / "data.mdb").stat().st_size
    for done in (
        limited(size, "recover", "--data", str(data)),
        here("recover", "--data", str(data), "--store-bytes-max", str(size // 2)),
    ):
        one_line(done, 1, "make room", "run this again")
        report = ask("verify", "--data", str(data))
        assert report["ok"]
        assert (report["tasks"], report["wanted"]) == (3_000, 3_000)
    assert ask("recover", "--data", str(data))["kept"]["states"]["queued"] == 3_000
    assert ask("verify", "--data", str(data))["ok"]


def test_recover_says_so_if_a_rule_is_broken(data: Path) -> None:
    store = LmdbStore(data)
    txn = store.write()
    txn.put(Table.EDGES, U64.pack(5), U64.pack(99))
    txn.commit()
    store.close()
    one_line(here("recover", "--data", str(data)), 5, "task 99 is gone", "taskdb verify", "restore a backup")


@pytest.mark.parametrize(("seconds", "text"), [(0.0, "0 s"), (0.25, "0.25 s"), (59.9, "59.9 s"), (90, "1.5 min"), (7200, "2.0 h")])
def test_durations_as_they_are_shown(seconds: float, text: str) -> None:
    assert show_seconds(seconds) == text


# ----------------------------------------------------------------------------------------------------------- faults


@pytest.mark.parametrize("name", COMMANDS)
@pytest.mark.parametrize(
    ("size", "part"),
    [(0, "0 bytes"), (1_000, "cut short"), (40_960, "beyond the end of the file")],
)
def test_a_file_cut_short(data: Path, name: str, size: int, part: str) -> None:
    os.truncate(data / "data.mdb", size)
    before = (data / "data.mdb").read_bytes()
    one_line(here(*words(name, data)), 5, str(data), part, "restore a backup")
    assert (data / "data.mdb").read_bytes() == before
    assert not (data.parent / "copy").exists()


@pytest.mark.parametrize("name", [name for name in COMMANDS if name != "serve"])
def test_a_page_overwritten(data: Path, name: str) -> None:
    """Tools look before they read. (A daemon that starts does not read all of a store.)"""
    whole = (data / "data.mdb").read_bytes()
    size = os.sysconf("SC_PAGE_SIZE")
    found = 0
    for number in range(2, len(whole) // size, 5):
        (data / "data.mdb").write_bytes(whole[: number * size] + b"\xa5" * size + whole[(number + 1) * size :])
        done = here(*words(name, data))
        if done.returncode == 0:  # a page that is not in use
            shutil.rmtree(data.parent / "copy", ignore_errors=True)
        else:
            one_line(done, 5, "page", "restore a backup")
            found += 1
    assert found > 0


@pytest.mark.parametrize("name", COMMANDS)
def test_a_copy_made_with_cp_while_in_use(tmp_path: Path, name: str) -> None:
    torn(tmp_path / "live", tmp_path / "data")
    one_line(here(*words(name, tmp_path / "data")), 5, "restore a backup")
    if name in ("recover", "dry run", "serve"):
        one_line(here(*words(name, tmp_path / "data")), 5, "it was copied while it was in use")


@pytest.mark.parametrize("name", [name for name in COMMANDS if name != "serve"])
@pytest.mark.parametrize("what", ["nothing", "empty", "other", "file"])
def test_no_store(tmp_path: Path, name: str, what: str) -> None:
    data = tmp_path / "data"
    if what == "file":
        data.write_text("mine")
    elif what != "nothing":
        data.mkdir()
    if what == "other":
        (data / "mine").write_text("mine")
    before = sorted(tmp_path.rglob("*"))
    one_line(here(*words(name, data)), 1, f"there is no store in {data}")
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("name", COMMANDS)
def test_a_newer_format(data: Path, name: str) -> None:
    store = LmdbStore(data)
    txn = store.write()
    txn.put(Table.META, meta_key(Meta.FORMAT_VERSION), U64.pack(FORMAT_VERSION + 1))
    txn.commit()
    store.close()
    one_line(here(*words(name, data)), 4, f"format {FORMAT_VERSION + 1}", "use a newer taskdb")
    assert not (data.parent / "copy").exists()


#: Root may do everything, unless told otherwise.
UNPRIVILEGED = ["setpriv", "--bounding-set=-dac_override,-dac_read_search"] if os.geteuid() == 0 else []


@pytest.mark.skipif(bool(UNPRIVILEGED) and shutil.which("setpriv") is None, reason="root, and no setpriv")
@pytest.mark.parametrize("name", COMMANDS)
@pytest.mark.parametrize("denied", ["data", "data/data.mdb"])
def test_permission_denied(data: Path, name: str, denied: str) -> None:
    before = files(data)
    path = data.parent / denied
    path.chmod(0)
    try:
        done = subprocess.run(
            [*UNPRIVILEGED, *command(*words(name, data))], capture_output=True, text=True, env=environment(), timeout=30, check=False
        )
    finally:
        path.chmod(0o755)
    one_line(done, 1, str(data), "Permission denied", "check the owner and the rights")
    assert {**files(data), "taskdb.lock": b""} == {**before, "taskdb.lock": b""}


def test_a_backup_on_a_disk_that_cannot_be_written_to(data: Path, tmp_path: Path) -> None:
    ask("backup", "--data", str(data), "--to", str(tmp_path / "copy"))
    (tmp_path / "copy/data.mdb").chmod(0o444)
    (tmp_path / "copy").chmod(0o555)
    try:
        done = subprocess.run(
            [*UNPRIVILEGED, *command("verify", "--data", str(tmp_path / "copy"))],
            capture_output=True,
            text=True,
            env=environment(),
            timeout=30,
            check=False,
        )
    finally:
        (tmp_path / "copy").chmod(0o755)
    assert done.returncode == 0, done.stderr


def test_ctrl_c_is_no_traceback(tmp_path: Path) -> None:
    """Interrupted once it reads the store."""
    stored = Stored(tmp_path / "data")
    crowd(stored, 20_000)
    stored.close()
    process = subprocess.Popen(
        command("verify", "--data", str(tmp_path / "data")), stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment()
    )
    until(lambda: str(process.pid) in readers(tmp_path / "data") or process.poll() is not None, "verify to read")
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=30)
    # 0: it was faster than we.
    assert process.returncode in (0, 130)
    assert errors.strip() == ""


def readers(folder: Path) -> str:
    done = subprocess.run(
        [sys.executable, "-c", f"import lmdb; print(lmdb.open({str(folder)!r}, readonly=True, max_dbs=40).readers())"],
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout
