"""Session and Ingest against a real daemon: what is said once is applied once, over any number of links."""

from __future__ import annotations

import asyncio
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from taskdb import commands as c
from taskdb import limits
from taskdb.client import Client, Ingest, MissingKeys, Session
from taskdb.errors import InvalidRequest, StaleEpoch, StoreFull, TaskDBError, Unavailable
from taskdb.model import Level, TaskFlag
from taskdb.wire import taskdb_pb2 as pb
from taskdb.wire import taskdb_pb2_grpc as pb_grpc
from tests.taskdb.server.procs import Daemon, Recorder, begin, graph, key, run_of, until_async

pytestmark = pytest.mark.e2e


def keys_of(count: int, name: str = "x") -> list[bytes]:
    return [key(name, i) for i in range(count)]


def test_tasks_are_leased_by_credit_and_finished(tmp_path: Path) -> None:
    async def story() -> None:
        async with Recorder(daemon.address) as scheduler:
            result = await scheduler.ask(*graph("s", keys_of(10)), c.Credit(3, 3, 0))
            assert len(result.added[0].ids) == 10
            assert [x.key for x in result.leases] == keys_of(3)
            # The credit is absolute: saying it again before the leases were seen leases no more.
            assert (await scheduler.ask(c.Credit(3, 3, 0))).leases == []
            result = await scheduler.ask(scheduler.finish([1, 2]), c.Credit(2, 2, 3))
            assert [x.key for x in result.leases] == keys_of(5)[3:]

    with Daemon(tmp_path) as daemon:
        asyncio.run(story())


def test_no_daemon_is_one_clear_line(tmp_path: Path) -> None:
    address = f"unix:{tmp_path / 'sock'}"
    with pytest.raises(Unavailable) as caught:
        asyncio.run(Recorder(address).session.attach(0.3))
    assert address in str(caught.value)
    assert "taskdb serve" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_attach_waits_for_a_daemon_that_is_late(tmp_path: Path) -> None:
    async def story() -> None:
        scheduler = Recorder(daemon.address)
        attaching = asyncio.ensure_future(scheduler.session.attach(10))
        await asyncio.to_thread(daemon.start)
        info = await attaching
        assert (info.epoch, len(info.store_uuid)) == (1, 36)
        await scheduler.session.close()

    with_daemon = Daemon(tmp_path)
    daemon = with_daemon
    try:
        asyncio.run(story())
    finally:
        with_daemon.__exit__()


def test_a_newer_scheduler_fences_the_older(tmp_path: Path) -> None:
    async def story() -> None:
        async with Recorder(daemon.address, "old") as old, Recorder(daemon.address, "new") as new:
            assert new.session.epoch == old.session.epoch + 1
            await old.told("fenced")
            assert not old.session.connected
            await new.ask(*graph("s", keys_of(2)))
            old.session.send(graph("t", keys_of(2, "t")))
            assert new.session.connected
            with pytest.raises(StaleEpoch):
                await asyncio.to_thread(feed, daemon.address, old.session.epoch)

    with Daemon(tmp_path) as daemon:
        asyncio.run(story())


def feed(address: str, epoch: int, submission: str = "i", count: int = 10, spec: bytes = b"spec") -> int:
    with Ingest(address, epoch) as ingest:
        ingest.begin(begin(submission))
        for first in range(0, count, 5):
            keys = keys_of(count, submission)[first : first + 5]
            ingest.add(c.AddTasks(submission, first, keys, [spec] * len(keys), [TaskFlag.WANTED] * len(keys)))
        return ingest.seal()


def test_batches_sent_while_the_daemon_is_dead_arrive(tmp_path: Path) -> None:
    async def story() -> None:
        async with Recorder(daemon.address) as scheduler:
            await scheduler.ask(*graph("s", keys_of(3)), c.Credit(3, 3, 0))
            await scheduler.durable()
            daemon.kill()
            await scheduler.told("lost")
            scheduler.session.send([scheduler.finish([1, 2])])
            scheduler.session.send(graph("t", keys_of(2, "t")))
            assert scheduler.session.in_flight == scheduler.session.unacked == 2
            await asyncio.to_thread(daemon.start)
            await scheduler.told("live")
            await scheduler.durable()
            assert scheduler.session.in_flight == 0
            tasks = await scheduler.session.get_tasks([*keys_of(3), key("t", 0)])
            assert [x.info.state for x in tasks] == ["memory", "memory", "processing", "queued"]
            assert scheduler.states[-1][0] == "live"

    with Daemon(tmp_path) as daemon:
        asyncio.run(story())


def test_what_was_applied_but_not_durable_is_sent_again(tmp_path: Path) -> None:
    """The daemon dies with an answered batch in its open transaction: nothing of it was written, all of it comes again."""

    async def story() -> None:
        async with Recorder(daemon.address) as scheduler:
            await scheduler.ask(*graph("s", keys_of(3)))
            assert scheduler.session.unacked == 1
            daemon.kill()
            await asyncio.to_thread(daemon.start)
            await scheduler.told("live")
            # Answered twice, applied once as far as the disk knows.
            await until_async(lambda: [x[0] for x in scheduler.results].count(1) == 2, "the second answer")
            assert [x.found for x in await scheduler.session.get_tasks(keys_of(4))] == [True] * 3 + [False]

    with Daemon(tmp_path, "--commit-interval-ms", "10000") as daemon:
        asyncio.run(story())


def test_credit_survives_the_daemon(tmp_path: Path) -> None:
    """A standing credit that was durable is said again by the Session: a restarted daemon has forgotten it."""

    async def story() -> None:
        async with Recorder(daemon.address) as scheduler:
            await scheduler.ask(c.Credit(2, 2, 0))
            await scheduler.durable()
            daemon.kill()
            await asyncio.to_thread(daemon.start)
            await scheduler.told("live")
            await asyncio.to_thread(feed, daemon.address, scheduler.session.epoch)
            await until_async(lambda: len(scheduler.leases) >= 2, "leases")
            await scheduler.ask(c.Unwant("nobody", [b"x"]))
            assert len(scheduler.leases) == 2

    with Daemon(tmp_path) as daemon:
        asyncio.run(story())


class Cut:
    """A Unix socket in front of the daemon whose answers can be thrown away, and whose links can be cut."""

    def __init__(self, path: Path, target: str):
        self.address = f"unix:{path}"
        self._path, self._target = str(path), target.removeprefix("unix:")
        self.deaf = False
        self._links: list[asyncio.StreamWriter] = []
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        self._server = await asyncio.start_unix_server(self._accept, self._path)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_unix_connection(self._target)
        self._links += [writer, back]
        for source, sink, answers in ((reader, back, False), (there, writer, True)):
            task = asyncio.ensure_future(self._copy(source, sink, answers))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _copy(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter, answers: bool) -> None:
        try:
            while data := await source.read(1 << 16):
                if not (answers and self.deaf):
                    sink.write(data)
                    await sink.drain()
        except OSError:
            pass
        sink.close()

    def cut(self) -> None:
        for link in self._links:
            link.close()
        self._links.clear()

    def close(self) -> None:
        self.cut()
        self._server.close()


def test_a_lost_answer_does_not_apply_the_batch_twice(tmp_path: Path) -> None:
    async def story() -> None:
        link = Cut(tmp_path / "cut", daemon.address)
        await link.start()
        async with Recorder(link.address) as scheduler:
            await scheduler.ask(*graph("s", keys_of(8)), c.Credit(2, 2, 0))
            link.deaf = True
            seq = scheduler.session.send([scheduler.finish([1, 2]), c.Credit(2, 2, 2)])
            async with Session2(daemon.address) as watcher:
                await watcher.until_state(keys_of(8)[0], "memory")
            link.cut()
            link.deaf = False
            await scheduler.told("live")
            await scheduler.durable()
            # The batch is answered, though the answer itself was lost; and its leases come again, once.
            assert [x[0] for x in scheduler.results].count(seq) == 1
            await until_async(lambda: len(scheduler.leases) == 4, "the leases that were lost")
            result = await scheduler.ask(scheduler.credit(1))
            assert len({x.id for x in scheduler.leases}) == len(scheduler.leases) == 5
            assert len(result.leases) == 1
        link.close()

    with Daemon(tmp_path) as daemon:
        asyncio.run(story())


class Session2:
    """Reads beside a Session, without an epoch of its own."""

    def __init__(self, address: str):
        self._client = Client(address)

    async def __aenter__(self) -> Session2:
        return self

    async def __aexit__(self, *details: object) -> None:
        self._client.__exit__()

    async def until_state(self, task: bytes, state: str) -> None:
        async def matches() -> bool:
            (found,) = await asyncio.to_thread(self._client.get_tasks, [task])
            return bool(found.info.state == state)

        async with asyncio.timeout(15):
            while not await matches():
                await asyncio.sleep(0.01)


def test_a_frozen_peer_is_no_reason_to_block(tmp_path: Path) -> None:
    async def story() -> None:
        async with Recorder(daemon.address) as scheduler:
            daemon.freeze()
            for number in range(500):
                scheduler.session.send([scheduler.finish([number + 1])])
            assert scheduler.session.in_flight == 500
            await asyncio.sleep(0)
            daemon.thaw()
            await scheduler.durable()
            assert scheduler.session.in_flight == 0
            assert [x[0] for x in scheduler.results] == list(range(1, 501))

    with Daemon(tmp_path) as daemon:
        asyncio.run(story())


def test_a_batch_over_the_limit_is_refused_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MESSAGE_BYTES_MAX", 1000)
    session = Recorder("unix:nowhere").session
    with pytest.raises(TaskDBError) as caught:
        session.send([c.Fail(1, b"x" * 2000, "")])
    assert caught.value.kind == "limit_exceeded"
    assert (session.unacked, session.in_flight) == (0, 0)


def test_an_oversized_key_is_refused_and_the_rest_stands(tmp_path: Path) -> None:
    async def story() -> None:
        async with Recorder(daemon.address) as scheduler:
            big = b"k" * (limits.KEY_BYTES_MAX + 1)
            _, refused = await scheduler.ask_refused(*graph("good", keys_of(1)), begin("bad"), run_of("bad", [big]))
            ((position, submission, kind, _),) = refused
            assert (position, submission, kind) == (4, "bad", "limit_exceeded")
            assert [x.found for x in await scheduler.session.get_tasks(keys_of(1))] == [True]
            assert scheduler.session.connected

    with Daemon(tmp_path) as daemon:
        asyncio.run(story())


def test_a_callback_that_raises_stops_the_session(tmp_path: Path) -> None:
    async def story() -> None:
        states: list[tuple[str, str]] = []

        def on_result(result: c.Result, seq: int, refused: object) -> None:
            raise ValueError("lost count")

        session = Session(daemon.address, "s", on_result=on_result, on_state=lambda *x: states.append(x), held=list)
        await session.attach(10)
        session.send([c.Credit(1, 1, 0)])
        await until_async(lambda: states, "a state")
        assert states == [("failed", "ValueError('lost count')")]
        await session.close()

    with Daemon(tmp_path) as daemon:
        asyncio.run(story())


def test_many_loops_in_one_process(tmp_path: Path) -> None:
    """Two threads, a loop in each at a time, one after another: as test suites of Dask make them."""
    errors: list[BaseException] = []

    async def life(address: str) -> None:
        async with Recorder(address) as scheduler:
            for number in range(20):
                await scheduler.ask(c.Unwant("nobody", [key("x", number)]))
            await scheduler.durable()

    def lives(address: str) -> None:
        try:
            for _ in range(5):
                asyncio.run(life(address))
        except BaseException as error:
            errors.append(error)
            raise

    (tmp_path / "one").mkdir()
    (tmp_path / "two").mkdir()
    with Daemon(tmp_path / "one") as one, Daemon(tmp_path / "two") as two:
        thread = threading.Thread(target=lives, args=(one.address,))
        thread.start()
        lives(two.address)
        thread.join()
    assert errors == []


# --------------------------------------------------------------------------------------------------------- Ingest


def test_an_ingest_reaches_the_scheduler(tmp_path: Path) -> None:
    async def story() -> None:
        async with Recorder(daemon.address) as scheduler:
            await scheduler.ask(c.Credit(4, 4, 0))
            assert await asyncio.to_thread(feed, daemon.address, scheduler.session.epoch) == 10
            await until_async(lambda: len(scheduler.leases) == 4, "leases")
            assert {seq for seq, result, _ in scheduler.results if result.leases} == {0}

    with Daemon(tmp_path) as daemon:
        asyncio.run(story())


def test_an_ingest_that_is_not_sealed_may_be_aborted_and_come_again(tmp_path: Path) -> None:
    async def story() -> None:
        async with Recorder(daemon.address) as scheduler:

            def broken() -> None:
                with Ingest(daemon.address, scheduler.session.epoch) as ingest:
                    ingest.begin(begin("i"))
                    ingest.add(run_of("i", keys_of(10, "i")))
                    raise ZeroDivisionError

            with pytest.raises(ZeroDivisionError):
                await asyncio.to_thread(broken)
            await scheduler.ask(c.AbortGraph("i"))
            await until_async_status(scheduler, 0)
            while True:
                with suppress(Unavailable):  # the daemon has not seen yet that the first one is gone
                    assert await asyncio.to_thread(feed, daemon.address, scheduler.session.epoch) == 10
                    break
            await until_async_status(scheduler, 10)

    with Daemon(tmp_path) as daemon:
        asyncio.run(story())


async def until_async_status(scheduler: Recorder, tasks: int) -> None:
    async with asyncio.timeout(15):
        while (await scheduler.session.status()).tasks != tasks:
            await asyncio.sleep(0.01)


def test_a_sealed_submission_that_comes_again_changes_nothing(tmp_path: Path) -> None:
    async def story() -> None:
        async with Recorder(daemon.address) as scheduler:
            await asyncio.to_thread(feed, daemon.address, scheduler.session.epoch)

            def again(seal: bool) -> None:
                with Ingest(daemon.address, scheduler.session.epoch) as ingest:
                    ingest.begin(begin("i"))
                    ingest.add(run_of("i", keys_of(5, "i")))
                    if seal:
                        ingest.seal()

            await asyncio.to_thread(again, True)
            await asyncio.to_thread(again, False)
            await scheduler.ask(c.Credit(0, 0, 0))
            status = await scheduler.session.status()
            assert (status.tasks, [x.sealed for x in status.graphs]) == (10, [True])

    with Daemon(tmp_path) as daemon:
        asyncio.run(story())


def test_missing_keys_are_named_and_the_submission_aborted(tmp_path: Path) -> None:
    async def story() -> None:
        async with Recorder(daemon.address) as scheduler:

            def outside() -> None:
                with Ingest(daemon.address, scheduler.session.epoch) as ingest:
                    ingest.begin(begin("i"))
                    ingest.add(c.AddTasks("i", 0, [key("gone"), key("new")], [b"", b"spec"], [TaskFlag.EXTERNAL, TaskFlag.WANTED]))
                    ingest.seal()

            with pytest.raises(MissingKeys) as caught:
                await asyncio.to_thread(outside)
            assert caught.value.keys == [key("gone")]
            await until_async_status(scheduler, 0)

    with Daemon(tmp_path) as daemon:
        asyncio.run(story())


def test_a_full_store_refuses_that_submission_only(tmp_path: Path) -> None:
    async def story() -> None:
        async with Recorder(daemon.address) as scheduler:
            await scheduler.ask(*graph("small", keys_of(3)), c.Credit(3, 3, 0))
            with pytest.raises(StoreFull):
                await asyncio.to_thread(feed, daemon.address, scheduler.session.epoch, "big", 1000, b"s" * 100_000)
            await until_async_status(scheduler, 3)
            # The daemon is up, the Session lives, and the graph that was there can finish.
            await scheduler.ask(scheduler.finish([1, 2, 3]))
            await scheduler.durable()
            assert [x.info.state for x in await scheduler.session.get_tasks(keys_of(3))] == ["memory"] * 3
            assert scheduler.states == []

    with Daemon(tmp_path, "--store-bytes-max", "80M") as daemon:
        asyncio.run(story())


def test_an_ingest_ahead_of_its_rules_is_refused(tmp_path: Path) -> None:
    ingest = Ingest("unix:nowhere", 1)
    with pytest.raises(InvalidRequest), ingest:
        ingest.add(run_of("i", keys_of(1)))


def test_levels_have_the_numbers_of_the_wire() -> None:
    assert [int(x) for x in Level] == [1, 2, 3, 4, 5]


# ------------------------------------------------------------------------------------------------ what daemons may do


class Stub(pb_grpc.TaskDBServicer):
    """A daemon that attaches, and then ends each Session as the test says."""

    def __init__(self, *endings: grpc.StatusCode | None):
        self.endings = list(endings)
        self.attached: list[pb.Attach] = []
        self.held: list[list[int]] = []

    async def Session(self, request_iterator: object, context: Any) -> None:
        message = await context.read()
        self.attached.append(message.attach)
        await context.write(pb.SessionReply(attached=pb.Attached(epoch=7, last_seq=0)))
        if message.attach.epoch:
            self.held.append(list((await context.read()).resync.held))
        ending = self.endings.pop(0)
        if ending is None:
            await asyncio.sleep(3600)
        elif ending is not grpc.StatusCode.OK:
            await context.abort(ending, "ended by the test")


@pytest.mark.parametrize(
    "ending",
    [grpc.StatusCode.CANCELLED, grpc.StatusCode.OK, grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN, grpc.StatusCode.UNAVAILABLE],
)
def test_however_a_link_ends_the_session_comes_back(ending: grpc.StatusCode, tmp_path: Path) -> None:
    async def story() -> None:
        stub = Stub(ending, ending, None)
        server = grpc.aio.server()
        pb_grpc.add_TaskDBServicer_to_server(stub, server)
        address = f"unix:{tmp_path / 'sock'}"
        server.add_insecure_port(address)
        await server.start()
        scheduler = Recorder(address)
        scheduler.held = {3, 4}
        await scheduler.session.attach(10)
        await until_async(lambda: len(stub.attached) == 3, "the third Attach")
        assert [x.epoch for x in stub.attached] == [0, 7, 7]
        await until_async(lambda: stub.held == [[3, 4], [3, 4]], "what is held")
        await until_async(lambda: [x for x, _ in scheduler.states] == ["lost", "live"] * 2, "live")
        assert scheduler.session.connected
        stopping = asyncio.ensure_future(server.stop(None))
        await scheduler.session.close()
        await stopping

    asyncio.run(story())
