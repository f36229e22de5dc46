"""`taskdb graphs` and `tasks` against a real daemon."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import pytest

from taskdb import commands as c
from tests.taskdb.server.procs import Daemon, Recorder, begin, graph, invoke, key


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    """graph-1 has x(0) in memory, x(1) leased, x(2) and x(3) queued; other-2, of another client, has one failed task z."""

    async def fill(address: str) -> None:
        async with Recorder(address) as scheduler:
            keys = [key("x", i) for i in range(4)]
            run_of = c.AddTasks("graph-1", 0, keys, [b"spec"] * 4, [1] * 4, groups=[0] * 4, new_groups=["x-group"])
            await scheduler.ask(begin("graph-1"), run_of, c.SealGraph("graph-1"), c.Credit(2, 2, 0))
            await scheduler.ask(scheduler.finish([1]), *graph("other-2", [key("z")], "client-2"))
            await scheduler.ask(c.Fail(5, b"payload", "ValueError('no')", '  File "z.py", line 7, in z'))
            await scheduler.durable()

    with Daemon(tmp_path_factory.mktemp("listing")) as daemon:
        asyncio.run(fill(daemon.address))
        yield daemon


def ask(daemon: Daemon, *args: str) -> Any:
    done = invoke(daemon, *args, "--output", "json")
    assert done.exit_code == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.e2e
def test_graphs(daemon: Daemon) -> None:
    found = {graph["submission"]: graph for graph in ask(daemon, "graphs")["graphs"]}
    assert {name: (graph["total"], graph["done"], graph["client"]) for name, graph in found.items()} == {
        "graph-1": (4, 1, "client-1"),
        "other-2": (1, 1, "client-2"),
    }
    for args, names in (
        (["--client", "client-2"], ["other-2"]),
        (["--unfinished"], ["graph-1"]),
        (["--finished"], ["other-2"]),
        (["--failed"], ["other-2"]),
    ):
        assert [graph["submission"] for graph in ask(daemon, "graphs", *args)["graphs"]] == names
    table = invoke(daemon, "graphs", "--limit", "1")
    assert table.exit_code == 0
    assert table.stdout.count("client-") == 1
    assert table.stderr.startswith("more: 1 graphs")


@pytest.mark.e2e
@pytest.mark.parametrize(
    ("args", "ids"),
    [
        (["--group", "x"], [1, 2, 3, 4]),
        (["--pattern", "*3)"], [4]),
        (["--graph", "oth"], [5]),
        (["--state", "queued", "--wanted"], [3, 4]),
        (["--sort", "bytes", "--descending", "--limit", "2"], [1, 2]),
        (["--sort", "priority", "--state", "queued"], [3, 4]),
    ],
)
def test_filters_and_sorting(daemon: Daemon, args: list[str], ids: list[int]) -> None:
    assert [task["id"] for task in ask(daemon, "tasks", *args)["tasks"]] == ids


@pytest.mark.e2e
def test_sorted_pages_follow_each_other(daemon: Daemon) -> None:
    first = ask(daemon, "tasks", "--sort", "priority", "--descending", "--limit", "3")
    second = ask(daemon, "tasks", "--sort", "priority", "--descending", "--limit", "3", "--cursor", first["cursor"])
    assert [task["id"] for task in first["tasks"] + second["tasks"]] == [4, 3, 2, 1, 5]
    assert second["cursor"] is None


@pytest.mark.e2e
def test_errors(daemon: Daemon) -> None:
    (group,) = ask(daemon, "errors")["errors"]
    assert (group["exception"], group["prefix"], group["failed"], group["key"]) == ("ValueError", "z", 1, "z")
    assert ask(daemon, "errors", "--graph", "graph-1") == {"errors": []}
    words = invoke(daemon, "errors").stdout
    assert "ValueError('no')" in words
    assert 'File "z.py", line 7' in words
    assert 'File "z.py"' not in invoke(daemon, "errors", "--no-traceback").stdout


@pytest.mark.e2e
def test_story(daemon: Daemon) -> None:
    events = ask(daemon, "story", "('x', 0)")["events"]
    assert [event["what"] for event in events] == ["came", "queued", "processing", "memory"]
    assert [event["time"] for event in events] == sorted(event["time"] for event in events)
    words = invoke(daemon, "story", "z").stdout
    assert "failed  ValueError('no')" in words
    nothing = invoke(daemon, "story", "never")
    assert (nothing.exit_code, nothing.stdout) == (1, "")
    assert "it begins" in nothing.stderr


@pytest.mark.e2e
def test_refusals_are_one_line(daemon: Daemon) -> None:
    for args, code, words in (
        (["tasks", "--graph", "nothing"], 1, "taskdb graphs"),
        (["tasks", "--descending"], 2, "--sort"),
        (["tasks", "--sort", "priority", "--cursor", "AAAA"], 1, "sorted otherwise"),
    ):
        done = invoke(daemon, *args)
        assert (done.exit_code, done.stdout) == (code, "")
        assert words in done.stderr
