"""The command line: exit codes, streams, both outputs; against a real daemon where one is needed."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgpack
import pytest
from click.testing import CliRunner

import taskdb
from taskdb import commands as c
from taskdb.cli.keys import parse_key, show_key
from taskdb.cli.main import cli
from taskdb.cli.serve import Size
from tests.taskdb.server.procs import Daemon, Recorder, graph, key, run


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    """Holds x(0) in memory, x(1) leased, x(2) and x(3) queued, y waiting for x(3), and z failed."""

    async def fill(address: str) -> None:
        async with Recorder(address) as scheduler:
            keys = [key("x", i) for i in range(4)]
            await scheduler.ask(*graph("graph-1", keys), c.Credit(2, 2, 0))
            await scheduler.ask(scheduler.finish([1]), *graph("graph-2", [key("z")]))
            below = c.AddTasks("graph-3", 0, [keys[3], key("y")], [b"", b"spec"], [2, 1], [0, 1], [0], [1, 0])
            await scheduler.ask(c.BeginGraph("graph-3", "client-1", 2.0, 0.0), below, c.SealGraph("graph-3"))
            await scheduler.ask(c.Report([5], [1]), c.Fail(5, b"payload", "Traceback\nValueError: no"))  # type: ignore[list-item]
            await scheduler.durable()

    with Daemon(tmp_path_factory.mktemp("cli")) as daemon:
        asyncio.run(fill(daemon.address))
        yield daemon


def ask(daemon: Daemon, *args: str) -> Any:
    done = run(*args, "--output", "json", TASKDB_URL=daemon.address)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_version() -> None:
    done = run("--version")
    assert (done.returncode, done.stdout) == (0, f"taskdb {taskdb.__version__}\n")


@pytest.mark.parametrize("command", [[], ["serve"], ["status"], ["tasks"], ["explain"]])
def test_help_says_the_exit_codes(command: list[str]) -> None:
    done = CliRunner().invoke(cli, [*command, "--help"])
    assert done.exit_code == 0
    assert "3 daemon unreachable" in done.output


# ---------------------------------------------------------------------------------------------------- exit codes


@pytest.mark.parametrize("args", [["status"], ["tasks"], ["explain", "x"]])
def test_an_unreachable_daemon_is_one_line_and_3(args: list[str], tmp_path: Path) -> None:
    url = f"unix:{tmp_path / 'nobody'}"
    done = run(*args, "--url", url, "--timeout", "2")
    assert done.returncode == 3
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1
    assert url in done.stderr
    assert "taskdb serve" in done.stderr


@pytest.mark.parametrize(
    "args",
    [
        ["nothing"],
        ["serve"],
        ["serve", "--data", "x", "--listen", "nowhere"],
        ["serve", "--data", "x", "--listen", "127.0.0.1:99999"],
        ["serve", "--data", "x", "--listen", "unix:/nowhere/at/all/sock"],
        ["serve", "--data", "x", "--listen", f"unix:{'s' * 120}"],
        ["serve", "--data", "x", "--store-bytes-max", "many"],
        ["serve", "--data", "x", "--store-bytes-max", "1K"],
        ["serve", "--data", "x", "--ready-file", "nowhere/ready"],
        ["serve", "--data", "x", "--durability", "prayer"],
        ["tasks", "--state", "tired"],
        ["tasks", "--limit", "0"],
        ["tasks", "--cursor", "é"],
        ["explain"],
        ["explain", "({1: 2}, {3})"],
    ],
)
def test_usage_is_checked_before_anything_is_touched(args: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(cli, args)
    assert done.exit_code == 2
    assert list(tmp_path.iterdir()) == []


def test_a_damaged_store_is_5(tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.mkdir()
    (data / "data.mdb").write_bytes(b"no store" * 4096)
    done = run("serve", "--data", str(data), "--listen", "127.0.0.1:0")
    assert done.returncode == 5
    assert done.stderr.count("\n") == 1
    assert str(data) in done.stderr


# --------------------------------------------------------------------------------------------------------- online


@pytest.mark.e2e
def test_status(daemon: Daemon) -> None:
    reply = ask(daemon, "status")
    assert (reply["tasks"], reply["epoch"], reply["scheduler_attached"]) == (6, 1, False)
    assert reply["states"] == {"waiting": 1, "queued": 2, "processing": 1, "memory": 1, "released": 0, "erred": 1}
    assert {x["submission"]: x["tasks"] for x in reply["graphs"]} == {"graph-1": 4, "graph-2": 1, "graph-3": 1}
    assert reply["store_bytes"] > 0
    table = run("status", TASKDB_URL=daemon.address)
    assert table.returncode == 0
    assert table.stderr == ""
    for word in ("graph-1", "client-1", "epoch 1, not attached", reply["store_uuid"]):
        assert word in table.stdout


@pytest.mark.e2e
def test_tasks_filter_and_page(daemon: Daemon) -> None:
    assert {x["key"] if isinstance(x["key"], str) else tuple(x["key"]) for x in ask(daemon, "tasks")["tasks"]} == {
        *(("x", i) for i in range(4)),
        "y",
        "z",
    }
    assert [x["key"] for x in ask(daemon, "tasks", "--state", "erred")["tasks"]] == ["z"]
    assert [x["key"] for x in ask(daemon, "tasks", "--graph", "graph-3")["tasks"]] == ["y"]
    assert len(ask(daemon, "tasks", "--prefix", "x")["tasks"]) == 4
    seen, cursor = [], ()
    while True:
        page = ask(daemon, "tasks", "--limit", "4", *cursor)
        seen += [x["id"] for x in page["tasks"]]
        if not page["cursor"]:
            break
        cursor = ("--cursor", page["cursor"])
    assert sorted(seen) == [1, 2, 3, 4, 5, 6]
    table = run("tasks", "--limit", "4", TASKDB_URL=daemon.address)
    assert "('x', 0)" in table.stdout
    assert table.stderr.startswith("more: --cursor ")


@pytest.mark.e2e
def test_explain(daemon: Daemon) -> None:
    reply = ask(daemon, "explain", "y")
    assert (reply["task"]["state"], reply["waits_for"][0]["key"]) == ("waiting", ["x", 3])
    assert reply["reason"]
    failed = ask(daemon, "explain", "z")
    assert "ValueError: no" in failed["task"]["error"]
    assert ask(daemon, "explain", "('x', 0)")["task"]["state"] == "memory"
    assert ask(daemon, "explain", '["x", 0]')["task"]["state"] == "memory"
    table = run("explain", "y", TASKDB_URL=daemon.address)
    assert table.stdout.startswith("y: waiting. ")
    assert "('x', 3)" in table.stdout


@pytest.mark.e2e
def test_explain_of_nothing_is_1(daemon: Daemon) -> None:
    done = run("explain", "never", TASKDB_URL=daemon.address)
    assert (done.returncode, done.stdout) == (1, "")
    assert "never" in done.stderr


# ----------------------------------------------------------------------------------------------------------- pieces


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("x", "x"),
        ("sum-1(2", "sum-1(2"),
        ("('x', 0)", ("x", 0)),
        ("(('x', 1), 'y')", (("x", 1), "y")),
        ('["x", 0]', ("x", 0)),
        ("(1.5, None, True)", (1.5, None, True)),
        ('["x", null]', ("x", None)),
        ("(not a tuple", "(not a tuple"),
        ("12", "12"),
    ],
)
def test_keys_are_read_as_written(text: str, value: Any) -> None:
    assert msgpack.unpackb(parse_key(text), use_list=False) == value


def test_keys_are_shown_as_written() -> None:
    assert show_key(key("x", 0)) == "('x', 0)"
    assert show_key(key("x")) == "x"


@pytest.mark.parametrize(("text", "size"), [("1000", 1000), ("1K", 1024), ("1.5M", 3 << 19), ("2GiB", 2 << 30), ("1tb", 1 << 40)])
def test_sizes(text: str, size: int) -> None:
    assert Size().convert(text, None, None) == size
