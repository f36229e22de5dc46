"""`taskdb report`, `export`, `watch` and `graphs --past` on a daemon whose graph is over."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from taskdb import commands as c
from taskdb.cli import report_page
from taskdb.model import Level
from tests.taskdb.server.procs import Daemon, Recorder, invoke, key

EVIL = "<script>alert(1)</script>"


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    """Graph "over-1": 20 tasks of two groups ran on two workers, one of them for long, and one failed; then it was let go of. "here-2" has
    two tasks, one of them done."""

    async def fill(address: str) -> None:
        async with Recorder(address) as scheduler:
            keys = [key(EVIL if i == 3 else "load", i) for i in range(21)]
            groups = [0] * 10 + [1] * 11
            run = c.AddTasks("over-1", 0, keys, [b"s"] * 21, [1] * 21, groups=groups, new_groups=["load-00ff00ff", "store-1"])
            await scheduler.ask(
                c.BeginGraph("over-1", "alice", 1.0, 1_000.0, "a <b>label</b>"), run, c.SealGraph("over-1"), c.Credit(50, 50, 0)
            )
            ids = list(range(1, 21))
            took = [9.0 if i == 7 else 0.5 for i in ids]
            began = [time.time() - 20 + i // 2 * 0.5 for i in ids]
            done = c.Report(ids, [Level.MEMORY] * 20, [8] * 20, [], [], [1, 2] * 10, began, took, ["tcp://w:1", "tcp://w:2"])
            await scheduler.ask(done, c.Fail(21, b"payload", f"ValueError('{EVIL}')"))
            await scheduler.ask(c.DropClient("alice"))
            await scheduler.ask(
                c.BeginGraph("here-2", "bob", 1.0, 2_000.0, ""),
                c.AddTasks("here-2", 0, [key("x"), key("y")], [b"s"] * 2, [1, 1]),
                c.SealGraph("here-2"),
            )
            await scheduler.ask(scheduler.finish([22]))
            await scheduler.durable()

    with Daemon(tmp_path_factory.mktemp("report")) as daemon:
        asyncio.run(fill(daemon.address))
        yield daemon


def ask(daemon: Daemon, *args: str) -> Any:
    done = invoke(daemon, *args, "--output", "json")
    assert done.exit_code == 0, done.stderr
    return json.loads(done.stdout)


class Page(HTMLParser):
    """Tags with their attributes, and the text; fails for tags that are not closed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words = ""
        self._open: list[str] = []
        self.feed(text)
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in ("meta",):
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words += data


@pytest.mark.e2e
@pytest.mark.parametrize("bars", [4_000, 5], ids=["bars", "slots"])
def test_report(daemon: Daemon, tmp_path: Path, bars: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report_page, "_BARS_MAX", bars)
    target = tmp_path / "report.html"
    found = ask(daemon, "report", "over", "-o", str(target))
    assert (found["tasks"], found["ran"], found["failed"], found["workers"]) == (21, 20, 1, 2)
    assert found["seconds"] == pytest.approx(18.5)
    assert [(x["prefix"], x["ran"]) for x in found["prefixes"]] == [("load", 10), ("store", 10)]
    assert [(x["key"], x["seconds"], x["times_median"]) for x in found["stragglers"]] == [("('load', 6)", 9.0, 18.0)]
    text = target.read_text()
    page = Page(text)
    # Nothing runs, and nothing is loaded.
    assert {tag for tag, _ in page.tags}.isdisjoint({"script", "link", "img", "iframe", "object"})
    assert not any(name in ("src", "href", "onload", "onclick") for _, attributes in page.tags for name in attributes)
    assert "http" not in text
    for words in ("a <b>label</b>", "load", "store", "('load', 6)", "ValueError", EVIL, "w:2"):
        assert words in page.words
    drawn = [attributes for tag, attributes in page.tags if tag == "rect" and "height" in attributes]
    assert len(drawn) > 10


@pytest.mark.e2e
def test_the_newest_graph_is_reported_if_none_is_named(daemon: Daemon, tmp_path: Path) -> None:
    assert ask(daemon, "report", "-o", str(tmp_path / "x.html"))["submission"] == "here-2"
    nothing = invoke(daemon, "report", "never", "-o", str(tmp_path / "y.html"))
    assert nothing.exit_code == 1
    assert "graphs --past" in nothing.stderr
    assert not (tmp_path / "y.html").exists()


@pytest.mark.e2e
def test_graphs_that_are_gone(daemon: Daemon) -> None:
    assert [graph["submission"] for graph in ask(daemon, "graphs")["graphs"]] == ["here-2"]
    past = ask(daemon, "graphs", "--past")["graphs"]
    assert [(graph["submission"], graph["client"]) for graph in past] == [("here-2", "bob"), ("over-1", "alice")]
    assert ask(daemon, "graphs", "--past", "--client", "al")["graphs"] == past[1:]


@pytest.mark.e2e
def test_export(daemon: Daemon, tmp_path: Path) -> None:
    lines = [json.loads(line) for line in invoke(daemon, "export").stdout.splitlines()]
    assert [(line["key"], line["state"]) for line in lines] == [("x", "memory"), ("y", "processing")]
    target = tmp_path / "history.jsonl"
    assert ask(daemon, "export", "--history", "--graph", "over", "-o", str(target))["to"] == str(target)
    moves = [json.loads(line) for line in target.read_text().splitlines()]
    assert sum(move["what"] == "ran" for move in moves) == 20
    assert sum(move["what"] == "forgotten" for move in moves) == 21
    assert sum("key" in move for move in moves) == 21
    assert {move["submission"] for move in moves if "submission" in move} == {"over-1"}
    assert [path.name for path in tmp_path.iterdir()] == ["history.jsonl"]


@pytest.mark.e2e
def test_watch(daemon: Daemon) -> None:
    done = invoke(daemon, "watch", "--count", "2", "--interval", "0.05", "--output", "json")
    looks = [json.loads(line) for line in done.stdout.splitlines()]
    assert [[(graph["submission"], graph["done"], graph["total"]) for graph in look["graphs"]] for look in looks] == [
        [("here-2", 1, 2)]
    ] * 2
    words = invoke(daemon, "watch", "here", "--count", "1")
    assert (words.exit_code, words.stdout) == (0, "here-2: 50%, 1/2 tasks, 1 with the scheduler, 0 queued, 0 failed, 0/s\n")


@pytest.mark.e2e
def test_watch_ends_with_its_graph(tmp_path: Path) -> None:
    async def fill(address: str) -> None:
        async with Recorder(address) as scheduler:
            run = c.AddTasks("g", 0, [key("x"), key("y")], [b"s"] * 2, [1, 1])
            await scheduler.ask(c.BeginGraph("g", "bob", 1.0, 2_000.0, ""), run, c.SealGraph("g"), c.Credit(2, 2, 0))
            await scheduler.durable()
            watching = asyncio.create_task(asyncio.to_thread(invoke, daemon, "watch", "g", "--interval", "0.05"))
            await scheduler.ask(scheduler.finish([1]))
            await scheduler.ask(c.Fail(2, b"payload", "no"))
            done = await watching
            assert done.exit_code == 1, "it ended with a failed task"
            assert done.stdout.splitlines()[-1].startswith("g: 100%, 2/2 tasks")

    with Daemon(tmp_path) as daemon:
        asyncio.run(fill(daemon.address))
