"""The writer alone, on a store in memory: credit, group commit, failing commits, fencing."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from taskdb import commands as c
from taskdb.config import ServerConfig, StoreConfig
from taskdb.engine.engine import Engine
from taskdb.errors import InvalidRequest, InvariantBroken, StaleEpoch, StoreFull, TaskDBError, Unavailable
from taskdb.server import unsealed
from taskdb.server.credit import LEASES_SLICE_MAX, CreditLine
from taskdb.server.writer import Writer
from taskdb.store.memory_store import MemoryStore
from taskdb.wire.convert import Refused
from tests.taskdb.server.procs import begin, graph, key, run_of, until_async


class Peer:
    """A Session that writes down what it is told."""

    def __init__(self) -> None:
        self.epoch = 0
        self.leases_lost = False
        self.backlog = 0
        self.results: list[tuple[int, c.Result]] = []
        self.durables: list[int] = []
        self.ends: list[TaskDBError] = []

    def push(self, result: c.Result, seq: int, refused: Sequence[Refused]) -> None:
        self.results.append((seq, result))

    def durable(self, seq: int) -> None:
        self.durables.append(seq)

    def end(self, error: TaskDBError) -> None:
        self.ends.append(error)

    @property
    def leases(self) -> list[c.Lease]:
        return [lease for _, result in self.results for lease in result.leases]


class Bench:
    def __init__(self, store: MemoryStore, interval_ms: int = 60_000, commands_max: int = 1_000_000):
        self.fatal: list[BaseException] = []
        self.store = store
        config = ServerConfig(StoreConfig(Path("unused")), commit_interval_ms=interval_ms, commit_commands_max=commands_max)
        self.engine = Engine()
        self.writer = Writer(store, self.engine, config, self.fatal.append)
        self.writer.start()

    async def attach(self, epoch: int = 0, held: Sequence[int] = (), seen: int = 0) -> Peer:
        peer = Peer()
        self.writer.attach(peer, "scheduler", epoch)
        if epoch:
            self.writer.resync(peer, held, seen)
        return peer

    def tasks(self) -> int:
        """On disk."""
        from taskdb.store.schema import Table

        with self.store.read() as txn:
            return txn.count(Table.TASKS)


def story(test: Callable[[], Any]) -> None:
    asyncio.run(test())


def keys_of(count: int) -> list[bytes]:
    return [key("x", i) for i in range(count)]


def fail_commits(store: MemoryStore, error: BaseException, monkeypatch: pytest.MonkeyPatch) -> None:
    write = store.write

    def failing() -> Any:
        txn = write()

        def commit() -> None:
            txn.abort()
            raise error

        monkeypatch.setattr(txn, "commit", commit, raising=False)
        return txn

    monkeypatch.setattr(store, "write", failing)


# ----------------------------------------------------------------------------------------------------------- credit


def test_credit_is_absolute_and_leases_under_way_are_subtracted() -> None:
    line = CreditLine()
    line.renew(c.Credit(4, 6, 0))
    assert line.room() == (4, 6)
    line.spend(5)
    assert line.room() == (0, 1)
    line.renew(c.Credit(4, 6, 2))  # three of the five are under way
    assert line.room() == (1, 3)
    line.renew(c.Credit(0, 2, 2))
    assert line.room() == (0, 0)
    line.renew(c.Credit(4, 6, 5))
    assert line.room() == (4, 6)


def test_a_slice_of_leases_is_bounded() -> None:
    line = CreditLine()
    line.renew(c.Credit(10_000, 10_000, 0))
    assert line.room() == (LEASES_SLICE_MAX, LEASES_SLICE_MAX)


def test_credit_stands_for_what_arrives_later() -> None:
    async def test() -> None:
        bench = Bench(MemoryStore())
        peer = await bench.attach()
        bench.writer.batch(peer, 1, [c.Credit(1000, 1000, 0)])
        bench.writer.batch(peer, 2, graph("s", keys_of(2000)))
        await until_async(lambda: len(peer.leases) >= 1000, "leases")
        bench.writer.batch(peer, 3, [c.Credit(1000, 1000, 1000)])
        await until_async(lambda: len(peer.leases) >= 2000, "leases")
        assert len({x.id for x in peer.leases}) == len(peer.leases) == 2000

    story(test)


def test_after_a_broken_link_credit_counts_from_what_arrived() -> None:
    async def test() -> None:
        bench = Bench(MemoryStore())
        peer = await bench.attach()
        bench.writer.batch(peer, 1, [*graph("s", keys_of(10)), c.Credit(4, 4, 0)])
        # Two of the four arrived, with ids 1 and 2; the others are said again and are under way again.
        again = Peer()
        assert bench.writer.attach(again, "scheduler", peer.epoch) == (peer.epoch, 1)
        assert isinstance(peer.ends[0], Unavailable)
        bench.writer.batch(again, 2, [c.Credit(4, 4, 2)])
        assert again.leases == [], "it has not said what it holds"
        bench.writer.resync(again, [1, 2], 2)
        assert [x.id for x in again.leases] == [3, 4]
        bench.writer.batch(again, 3, [c.Credit(2, 2, 2)])
        assert [x.id for x in again.leases] == [3, 4]
        bench.writer.batch(again, 4, [c.Credit(2, 2, 4)])
        assert [x.id for x in again.leases] == [3, 4, 5, 6]

    story(test)


# ----------------------------------------------------------------------------------------------------- group commit


def test_a_batch_is_answered_before_it_is_on_disk_and_durable_after() -> None:
    async def test() -> None:
        bench = Bench(MemoryStore(), interval_ms=30)
        peer = await bench.attach()
        bench.writer.batch(peer, 1, graph("s", keys_of(3)))
        bench.writer.batch(peer, 2, graph("t", [key("t")]))
        assert [seq for seq, _ in peer.results] == [1, 2]
        assert (peer.durables, bench.tasks()) == ([], 0)
        await until_async(lambda: peer.durables, "Durable")
        assert (peer.durables, bench.tasks()) == ([2], 4)

    story(test)


def test_many_commands_are_committed_at_once() -> None:
    async def test() -> None:
        bench = Bench(MemoryStore(), commands_max=6)
        peer = await bench.attach()
        bench.writer.batch(peer, 1, graph("s", keys_of(3)))
        assert peer.durables == []
        bench.writer.batch(peer, 2, graph("t", [key("t")]))
        assert peer.durables == [2]

    story(test)


def test_a_failed_commit_ends_the_session_and_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        bench = Bench(MemoryStore())
        peer = await bench.attach()
        bench.writer.flush()
        with monkeypatch.context() as patch:
            fail_commits(bench.store, StoreFull("no space"), patch)
            bench.writer.batch(peer, 1, graph("s", keys_of(3)))
            bench.writer.flush()
        assert [x.retryable for x in peer.ends] == [True]
        assert (peer.durables, bench.tasks(), bench.fatal) == ([], 0, [])
        # What is still in the stream of the ended Session changes nothing.
        bench.writer.batch(peer, 2, graph("t", [key("t")]))
        again = await bench.attach(peer.epoch)
        bench.writer.batch(again, 1, graph("s", keys_of(3)))
        bench.writer.flush()
        assert (again.durables, bench.tasks()) == ([1], 3)

    story(test)


def test_a_broken_invariant_stops_the_daemon(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        bench = Bench(MemoryStore())
        peer = await bench.attach()

        def broken(*args: object) -> None:
            raise InvariantBroken("counted wrong")

        monkeypatch.setattr(bench.engine, "apply", broken)
        bench.writer.batch(peer, 1, graph("s", keys_of(3)))
        assert [type(x) for x in bench.fatal] == [InvariantBroken]
        assert len(peer.ends) == 1

    story(test)


# ---------------------------------------------------------------------------------------------------- seq and epoch


def test_a_repeated_batch_is_answered_empty_and_a_gap_refused() -> None:
    async def test() -> None:
        bench = Bench(MemoryStore())
        peer = await bench.attach()
        bench.writer.batch(peer, 1, graph("s", keys_of(3)))
        bench.writer.batch(peer, 1, graph("s", keys_of(3)))
        assert [(seq, len(x.added)) for seq, x in peer.results] == [(1, 1), (1, 0)]
        bench.writer.batch(peer, 3, [])
        assert [type(x) for x in peer.ends] == [InvalidRequest]

    story(test)


def test_a_new_epoch_ends_the_older_session_and_its_ingests() -> None:
    async def test() -> None:
        bench = Bench(MemoryStore())
        old = await bench.attach()
        new = await bench.attach()
        assert (old.epoch, new.epoch) == (1, 2)
        assert [type(x) for x in old.ends] == [StaleEpoch]
        with pytest.raises(StaleEpoch):
            bench.writer.ingest(1, begin("i"))
        with pytest.raises(StaleEpoch):
            bench.writer.attach(Peer(), "scheduler", 1)
        assert new.ends == []

    story(test)


def test_nothing_changes_before_a_new_scheduler_has_said_something() -> None:
    """It reads what is stored, and is not ready to hear of anything else."""

    async def test() -> None:
        bench = Bench(MemoryStore())
        old = await bench.attach()
        bench.writer.batch(old, 1, graph("s", keys_of(3)))
        bench.writer.ingest(old.epoch, begin("open"))
        bench.writer.ingest(old.epoch, run_of("open", [key("o", i) for i in range(3)]))
        new = await bench.attach()
        tasks = bench.tasks()
        for _ in range(10):
            await asyncio.sleep(0)
        assert (new.results, bench.tasks()) == ([], tasks)
        bench.writer.batch(new, 1, [c.Credit(3, 3, 0)])
        await until_async(lambda: len(new.leases) == 3, "leases")
        bench.writer.flush()
        assert bench.tasks() == 3, "the aborted graph is forgotten"
        new.results.clear()
        # One that says nothing and goes.
        bench.writer.ingest(new.epoch, begin("again"))
        bench.writer.ingest(new.epoch, run_of("again", [key("a", i) for i in range(3)]))
        silent = await bench.attach()
        bench.writer.flush()
        bench.writer.detach(silent)
        await until_async(lambda: (bench.writer.flush(), bench.tasks())[1] == 3, "the other one, too")

    story(test)


# ------------------------------------------------------------------------------------------------------------ ingest


def test_an_ingest_that_finds_the_store_full_costs_the_session_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        bench = Bench(MemoryStore())
        peer = await bench.attach()
        bench.writer.batch(peer, 1, graph("s", keys_of(3)))
        bench.writer.ingest(peer.epoch, begin("i"))
        assert peer.durables == [1]  # committed before, so that the abort cannot take it along
        with monkeypatch.context() as patch:
            fail_commits(bench.store, StoreFull("no space"), patch)
            with pytest.raises(StoreFull):
                bench.writer.ingest(peer.epoch, run_of("i", [key("i")]))
        assert (peer.ends, bench.tasks()) == ([], 3)

    story(test)


def test_a_stream_that_broke_goes_on() -> None:
    async def test() -> None:
        bench = Bench(MemoryStore())
        peer = await bench.attach()
        bench.writer.ingest(peer.epoch, begin("i"))
        bench.writer.ingest(peer.epoch, run_of("i", keys_of(3)))
        bench.writer.ended(peer.epoch, "i")
        bench.writer.ingest(peer.epoch, begin("i"))
        assert bench.writer.added("i") == 3
        bench.writer.ingest(peer.epoch, run_of("i", keys_of(3)))
        _, sealed = bench.writer.ingest(peer.epoch, c.SealGraph("i"))
        assert (sealed, bench.tasks()) == (True, 3)

    story(test)


def test_a_stream_that_broke_and_does_not_come_again_is_aborted(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        monkeypatch.setattr(unsealed, "PATIENCE_SECONDS", 0.01)
        bench = Bench(MemoryStore(), interval_ms=1)
        peer = await bench.attach()
        bench.writer.ingest(peer.epoch, begin("i"))
        bench.writer.ingest(peer.epoch, run_of("i", keys_of(3)))
        bench.writer.ended(peer.epoch, "i")
        await until_async(lambda: bench.tasks() == 0, "it to be forgotten")

    story(test)


def test_a_stream_whose_daemon_died_goes_on() -> None:
    async def test() -> None:
        store = MemoryStore()
        first = Bench(store)
        peer = await first.attach()
        first.writer.ingest(peer.epoch, begin("i"))
        first.writer.ingest(peer.epoch, run_of("i", keys_of(3)))
        store.crash()
        second = Bench(store)
        again = await second.attach(peer.epoch)
        second.writer.ingest(again.epoch, begin("i"))
        assert second.writer.added("i") == 3
        second.writer.ingest(again.epoch, run_of("i", keys_of(3)))
        _, sealed = second.writer.ingest(again.epoch, c.SealGraph("i"))
        assert sealed
        assert second.tasks() == 3

    story(test)


def test_a_new_scheduler_hears_that_leases_may_be_lost() -> None:
    """A daemon that was started knows not what it leased last, until the scheduler it leased to has said what it holds."""

    async def test() -> None:
        store = MemoryStore()
        bench = Bench(store)
        first = await bench.attach()
        assert not (await bench.attach()).leases_lost, "the daemon lived all the time"
        started = Bench(store)
        assert (await started.attach()).leases_lost
        assert not (await started.attach()).leases_lost
        resumed = Bench(store)
        went_on = await resumed.attach(epoch=4)
        assert went_on.epoch == first.epoch + 3
        assert not (await resumed.attach()).leases_lost, "the one before had said what it held"

    story(test)


def test_a_closed_writer_takes_nothing() -> None:
    async def test() -> None:
        bench = Bench(MemoryStore())
        peer = await bench.attach()
        bench.writer.batch(peer, 1, graph("s", keys_of(3)))
        bench.writer.close()
        assert (peer.durables, bench.tasks()) == ([1], 3)
        assert [type(x) for x in peer.ends] == [Unavailable]
        with pytest.raises(Unavailable):
            bench.writer.ingest(peer.epoch, begin("i"))
        with pytest.raises(Unavailable):
            bench.writer.attach(Peer(), "scheduler", peer.epoch)

    story(test)


def test_background_work_waits_for_a_peer_that_has_much_to_read() -> None:
    """Or the answer to its next batch would stand behind all of it."""

    async def test() -> None:
        bench = Bench(MemoryStore())
        peer = await bench.attach()
        bench.writer.batch(peer, 1, graph("s", keys_of(2_000)))
        bench.writer.batch(peer, 2, [])
        peer.backlog = 100
        bench.writer.batch(peer, 3, [c.DropClient("client-1")])
        bench.writer.flush()
        left = bench.tasks()
        assert left > 1_000
        for _ in range(20):
            await asyncio.sleep(0)
        bench.writer.flush()
        assert bench.tasks() == left
        peer.backlog = 0
        await until_async(lambda: bench.writer.flush() or bench.tasks() == 0, "all is forgotten")

    story(test)
