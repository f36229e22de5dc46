"""One scheduler after another on a real daemon: what is restored, adopted, given back and kept, over the wire."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from taskdb import commands as c
from taskdb.client import Session
from taskdb.errors import Unavailable
from taskdb.model import GraphFlag, Level
from taskdb.wire import taskdb_pb2 as pb
from tests.taskdb.server.procs import PATIENCE_SECONDS, Daemon, Recorder, begin, graph, key, run_of, until_async

pytestmark = pytest.mark.e2e

KEYS = [key("x", i) for i in range(4)]


async def takes_over(address: str) -> tuple[Recorder, int]:
    """Another scheduler, attached, and the orphans it is told of."""
    scheduler = Recorder(address, "scheduler-2")
    info = await scheduler.session.attach(PATIENCE_SECONDS)
    return scheduler, info.orphans


async def restored(session: Session) -> list[pb.RestoreReply]:
    return [reply async for reply in session.restore()]


async def states(scheduler: Recorder) -> list[str]:
    return [x.info.state for x in await scheduler.session.get_tasks(KEYS)]


def test_a_new_scheduler_adopts_what_workers_bring_and_the_rest_is_given_back(tmp_path: Path) -> None:
    async def story() -> None:
        async with Recorder(daemon.address) as first:
            await first.ask(*graph("s", KEYS), c.Credit(3, 3, 0))
            await first.ask(first.finish([1]))
            await first.durable()
        scheduler, orphans = await takes_over(daemon.address)
        assert orphans == 3
        epoch = scheduler.session.epoch - 1
        levels = [Level.HELD, Level.MEMORY, Level.MEMORY]
        result = await scheduler.ask(c.Adopt(epoch, [KEYS[1], KEYS[0], key("unknown")], levels, [-1, 8, 8]))
        answers = [(x.key, x.level, x.lease.id if x.lease else None) for x in result.adopted]
        assert answers == [(KEYS[0], Level.MEMORY, 1), (key("unknown"), Level.OUT, None), (KEYS[1], Level.HELD, 2)]
        await scheduler.ask(c.EndRecovery())

        async def given_back() -> bool:
            return await states(scheduler) == ["memory", "processing", "queued", "queued"]

        async with asyncio.timeout(PATIENCE_SECONDS):
            while not await given_back():
                await asyncio.sleep(0.01)
        result = await scheduler.ask(scheduler.credit(4))
        await until_async(lambda: {x.id for x in scheduler.leases} == {3, 4}, "the leases that were given back")
        await scheduler.session.close()

    with Daemon(tmp_path) as daemon:
        asyncio.run(story())


def test_a_daemon_killed_in_a_recovery_goes_on_with_it(tmp_path: Path) -> None:
    async def story() -> None:
        async with Recorder(daemon.address) as first:
            await first.ask(*graph("s", KEYS), c.Credit(4, 4, 0))
            await first.durable()
        scheduler, _ = await takes_over(daemon.address)
        epoch = scheduler.session.epoch - 1
        await scheduler.ask(c.Adopt(epoch, KEYS[:1], [Level.HELD]))
        scheduler.held.add(1)
        await scheduler.durable()
        daemon.kill()
        await asyncio.to_thread(daemon.start)
        await scheduler.told("live")
        result = await scheduler.ask(c.Adopt(epoch, KEYS[:2], [Level.HELD] * 2))
        assert [x.lease.id for x in result.adopted if x.lease] == [1, 2]
        # What nobody has claimed is not leased again by itself.
        await scheduler.ask(scheduler.credit(4))
        assert scheduler.leases == []
        await scheduler.ask(c.EndRecovery(), scheduler.credit(4))
        await until_async(lambda: {x.id for x in scheduler.leases} == {3, 4}, "the leases that were given back")
        await scheduler.session.close()

    with Daemon(tmp_path) as daemon:
        asyncio.run(story())


def test_what_is_kept_and_what_is_there_is_restored(tmp_path: Path) -> None:
    async def story() -> None:
        big = b"v" * 2_000_000
        async with Recorder(daemon.address) as first:
            whole = c.BeginGraph("s", "alice", 2.0, 1.0, flags=GraphFlag.WHOLE)
            await first.ask(whole, run_of("s", KEYS), c.SealGraph("s"), c.Want("bob", KEYS[:1]))
            await first.ask(begin("open", "carol"), run_of("open", [key("y")]))
            await first.ask(c.Keep([b"files\0a", b"files\0b", b"datasets\0a"], [big, big, b"1"]), c.Keep([b"datasets\0a"], [b""]))
            await first.durable()
        scheduler, orphans = await takes_over(daemon.address)
        assert orphans == 0
        replies = await restored(scheduler.session)
        assert len(replies) > 1  # in messages of a bounded size
        assert {item.name: item.value for reply in replies for item in reply.kept} == {b"files\0a": big, b"files\0b": big}
        graphs = [
            (x.submission, x.client, x.flags, x.generation, x.tasks, x.unfinished)
            for reply in replies
            for x in reply.graphs
            if not x.aborted
        ]
        assert graphs == [("s", "alice", GraphFlag.WHOLE, 2.0, 4, 4)]
        assert [x.submission for reply in replies for x in reply.graphs if x.aborted] == ["open"], "nothing changes while it is read"
        assert {name for reply in replies for name in reply.clients} >= {"alice", "bob"}
        await scheduler.session.close()

    with Daemon(tmp_path) as daemon:
        asyncio.run(story())


def test_nothing_is_restored_without_a_daemon(tmp_path: Path) -> None:
    async def story() -> None:
        session = Recorder(daemon.address).session
        with pytest.raises(Unavailable):
            await restored(session)
        scheduler, _ = await takes_over(daemon.address)
        await asyncio.to_thread(daemon.kill)
        with pytest.raises(Unavailable, match="unix:"):
            await restored(scheduler.session)
        await scheduler.session.close()

    with Daemon(tmp_path) as daemon:
        asyncio.run(story())
