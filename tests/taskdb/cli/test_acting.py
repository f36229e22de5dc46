"""`taskdb cancel` and `retry`, as far as command line and daemon go: a scheduler that writes down what it is asked, and what if there is
none."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from taskdb import commands as c
from taskdb.errors import LimitExceeded, Unavailable
from taskdb.server import asks
from taskdb.server.asks import Asks
from taskdb.wire import taskdb_pb2 as pb
from tests.taskdb.server.procs import Daemon, Recorder, graph, invoke, key


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    """Two queued tasks of "g", and one that failed of "h". No scheduler is attached."""

    async def fill(address: str) -> None:
        async with Recorder(address) as scheduler:
            await scheduler.ask(*graph("g", [key("x", 0), key("x", 1)]), *graph("h", [key("z")]))
            await scheduler.ask(c.Report([3], [1]), c.Fail(3, b"payload", "no"))  # type: ignore[list-item]
            await scheduler.durable()

    with Daemon(tmp_path_factory.mktemp("acting")) as daemon:
        asyncio.run(fill(daemon.address))
        yield daemon


def asked(daemon: Daemon, *args: str, answer: Callable[[Recorder, int, int], None] | None = None) -> tuple[Any, list[Any]]:
    """What the command printed, and what the scheduler was asked."""
    heard: list[Any] = []

    async def run() -> Any:
        async with Recorder(daemon.address) as scheduler:

            def on_ask(number: int, action: str, keys: Any) -> None:
                heard.append((action, list(keys)))
                if answer is None:
                    scheduler.session.done(number, len(keys))
                else:
                    answer(scheduler, number, len(keys))

            scheduler.session.on_ask = on_ask
            return await asyncio.to_thread(invoke, daemon, *args)

    return asyncio.run(run()), heard


@pytest.mark.e2e
@pytest.mark.parametrize(
    ("args", "action", "keys"),
    [
        (["cancel", "--graph", "g", "--yes"], "cancel", [key("x", 0), key("x", 1)]),
        (["cancel", "('x', 1)", "--yes"], "cancel", [key("x", 1)]),
        (["cancel", "--pattern", "*0)", "--yes"], "cancel", [key("x", 0)]),
        (["retry", "--graph", "h", "--yes"], "retry", [key("z")]),
    ],
)
def test_the_scheduler_is_asked(daemon: Daemon, args: list[str], action: str, keys: list[bytes]) -> None:
    done, heard = asked(daemon, *args, "--output", "json")
    assert done.exit_code == 0, done.stderr
    assert heard == [(action, keys)]
    assert json.loads(done.stdout)["found"] == len(keys)


@pytest.mark.e2e
def test_what_the_scheduler_refuses_is_told(daemon: Daemon) -> None:
    done, _ = asked(daemon, "retry", "z", "--yes", answer=lambda scheduler, number, count: scheduler.session.done(number, 0, "not now"))
    assert (done.exit_code, done.stdout, done.stderr) == (1, "", "taskdb: not now\n")


@pytest.mark.e2e
def test_a_scheduler_that_goes_away_may_have_done_it(daemon: Daemon) -> None:
    def leave(scheduler: Recorder, number: int, count: int) -> None:
        asyncio.get_running_loop().create_task(scheduler.session.close())

    done, heard = asked(daemon, "cancel", "--graph", "g", "--yes", answer=leave)
    assert len(heard) == 1
    assert done.exit_code == 3
    assert "may have been done" in done.stderr


@pytest.mark.e2e
def test_without_a_scheduler_nothing_is_done(daemon: Daemon) -> None:
    done = invoke(daemon, "cancel", "--graph", "g", "--yes")
    assert done.exit_code == 3
    assert "no scheduler is attached" in done.stderr
    dry = invoke(daemon, "cancel", "--graph", "g", "--dry-run")
    assert dry.exit_code == 0
    assert "('x', 1)" in dry.stdout
    assert invoke(daemon, "retry", "never", "--yes").exit_code == 1


@pytest.mark.parametrize(
    "args",
    [["cancel", "--yes"], ["cancel", "x", "--state", "queued", "--yes"], ["retry", "--state", "queued", "--yes"], ["cancel", "x"]],
)
def test_usage(daemon: Daemon, args: list[str]) -> None:
    assert invoke(daemon, *args).exit_code == 2


def test_asks_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    class Silent:
        def put(self, message: pb.SessionReply) -> None:
            pass

    async def test() -> None:
        waiting = Asks()
        with pytest.raises(LimitExceeded):
            await waiting.ask(Silent(), "cancel", [b"k"] * (asks.ASK_KEYS_MAX + 1))
        monkeypatch.setattr(asks, "ASKS_MAX", 1)
        monkeypatch.setattr(asks, "ANSWER_SECONDS_MAX", 0.05)
        first = asyncio.create_task(waiting.ask(Silent(), "cancel", [b"k"]))
        await asyncio.sleep(0)
        with pytest.raises(Unavailable, match="wait for the scheduler"):
            await waiting.ask(Silent(), "cancel", [b"k"])
        with pytest.raises(Unavailable, match="did not answer"):
            await first
        waiting.done(pb.Done(number=1, count=1))  # too late: nobody waits

    asyncio.run(test())
