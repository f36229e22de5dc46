"""One client's messages take effect in order; what overtakes is done by the caller."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import pytest

from scheduler_adapter.inbox import Inbox, Message


class World:
    """Notes what happened; slow messages wait until they are let through."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.errors: list[tuple[str, str]] = []
        self.gates: dict[str, asyncio.Event] = {}
        self.inbox = Inbox(lambda message, error: self.errors.append((message.op, str(error))))

    def quick(self, name: str, *, fails: bool = False) -> Message:
        def handler() -> None:
            self.log.append(name)
            if fails:
                raise ValueError(name)

        return Message(name, handler, {})

    def slow(self, name: str, *, fails: bool = False) -> Message:
        gate = self.gates[name] = asyncio.Event()

        async def handler() -> None:
            self.log.append(f"{name} begins")
            try:
                await gate.wait()
            except asyncio.CancelledError:
                self.log.append(f"{name} cancelled")
                raise
            if fails:
                raise ValueError(name)
            self.log.append(f"{name} ends")

        return Message(name, handler, {})

    async def settle(self) -> None:
        """Let everything run that can."""
        for _ in range(20):
            await asyncio.sleep(0)


def story(test: Callable[[World], Coroutine[Any, Any, None]]) -> Callable[[], None]:
    async def play() -> None:
        await asyncio.wait_for(test(World()), 10)

    def run() -> None:
        asyncio.run(play())

    run.__name__, run.__doc__ = test.__name__, test.__doc__
    return run


@story
async def test_quick_messages_run_at_once(w: World) -> None:
    w.inbox.put(w.quick("a"))
    assert w.log == ["a"]
    assert w.inbox.idle
    assert w.inbox.waiting() == []


@story
async def test_quick_messages_wait_behind_a_slow_one(w: World) -> None:
    w.inbox.put(w.slow("graph"))
    w.inbox.put(w.quick("release"))
    assert not w.inbox.idle
    await w.settle()
    assert w.log == ["graph begins"]
    assert [m.op for m in w.inbox.waiting()] == ["graph", "release"]
    w.gates["graph"].set()
    await w.settle()
    assert w.log == ["graph begins", "graph ends", "release"]
    assert w.inbox.idle


@story
async def test_slow_messages_run_one_by_one_in_order(w: World) -> None:
    for name in "abc":
        w.inbox.put(w.slow(name))
        w.gates[name].set()
    await w.settle()
    assert w.log == ["a begins", "a ends", "b begins", "b ends", "c begins", "c ends"]


@story
async def test_an_error_is_told_and_those_behind_go_on(w: World) -> None:
    w.inbox.put(w.slow("bad", fails=True))
    w.inbox.put(w.quick("worse", fails=True))
    w.inbox.put(w.quick("good"))
    w.gates["bad"].set()
    await w.settle()
    assert w.errors == [("bad", "bad"), ("worse", "worse")]
    assert w.log[-1] == "good"
    assert w.inbox.idle


@story
async def test_error_of_a_message_run_at_once_reaches_the_caller(w: World) -> None:
    with pytest.raises(ValueError, match="a"):
        w.inbox.put(w.quick("a", fails=True))
    w.inbox.put(w.quick("b"))
    assert w.log == ["a", "b"]


@story
async def test_drop_of_a_waiting_message(w: World) -> None:
    w.inbox.put(w.slow("graph"))
    second = w.slow("second")
    w.inbox.put(second)
    w.inbox.put(w.quick("last"))
    await w.settle()
    w.inbox.drop(second)
    w.gates["graph"].set()
    await w.settle()
    assert w.log == ["graph begins", "graph ends", "last"]


@story
async def test_drop_of_the_message_being_handled_cancels_it(w: World) -> None:
    first = w.slow("first")
    w.inbox.put(first)
    w.inbox.put(w.quick("last"))
    await w.settle()
    w.inbox.drop(first)
    await w.settle()
    assert w.log == ["first begins", "first cancelled", "last"]
    assert w.errors == []
    assert w.inbox.idle


@story
async def test_drop_right_after_put(w: World) -> None:
    """Before the worker has had the loop."""
    first = w.slow("first")
    w.inbox.put(first)
    w.inbox.drop(first)
    w.inbox.put(w.quick("last"))
    await w.settle()
    assert w.log == ["last"]


@story
async def test_stop_drops_everything(w: World) -> None:
    w.inbox.put(w.slow("first"))
    w.inbox.put(w.quick("second"))
    await w.settle()
    w.inbox.stop()
    await w.settle()
    assert w.log == ["first begins", "first cancelled"]
    assert w.inbox.idle
    w.inbox.put(w.quick("later"))
    assert w.log[-1] == "later"


@story
async def test_message_put_while_another_is_handled(w: World) -> None:
    """By a handler itself: behind all others."""

    def again() -> None:
        w.log.append("again")
        w.inbox.put(w.quick("from within"))

    w.inbox.put(w.slow("graph"))
    w.inbox.put(Message("again", again, {}))
    w.inbox.put(w.quick("before"))
    w.gates["graph"].set()
    await w.settle()
    assert w.log == ["graph begins", "graph ends", "again", "before", "from within"]


@story
async def test_quick_handler_that_returns_an_awaitable(w: World) -> None:
    """What waits behind it waits for the end of what it returned."""

    def handler() -> Awaitable[None]:
        return w.slow("inner").handler()  # type: ignore[no-any-return]

    w.inbox.put(w.slow("graph"))
    w.inbox.put(Message("outer", handler, {}))
    w.inbox.put(w.quick("last"))
    w.gates["graph"].set()
    await w.settle()
    assert w.log == ["graph begins", "graph ends", "inner begins"]
    w.gates["inner"].set()
    await w.settle()
    assert w.log[-2:] == ["inner ends", "last"]
