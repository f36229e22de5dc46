"""The handlers: what a peer may not do, and what a peer that does not listen costs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import grpc
import pytest

from taskdb import commands as c
from taskdb.client import Client
from taskdb.errors import LimitExceeded, StaleEpoch, TaskDBError, Unavailable
from taskdb.model import Level, Rank
from taskdb.server import reads, service
from taskdb.server.service import SessionLink
from taskdb.wire import convert, status
from taskdb.wire import taskdb_pb2 as pb
from taskdb.wire import taskdb_pb2_grpc as pb_grpc
from tests.taskdb.server.procs import PATIENCE_SECONDS, Daemon, begin, graph, key, run_of, until

# ------------------------------------------------------------------------------------------------ one daemon, raw calls


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    with Daemon(tmp_path_factory.mktemp("service")) as daemon:
        yield daemon


@pytest.fixture
def stub(daemon: Daemon) -> Iterator[Any]:
    with grpc.insecure_channel(daemon.address) as channel:
        yield pb_grpc.TaskDBStub(channel)


class Stream:
    """A stream whose messages are sent one by one."""

    def __init__(self, method: Callable[..., Any], *messages: Any):
        from queue import SimpleQueue

        self._queue: SimpleQueue[Any] = SimpleQueue()
        self.call = method(iter(self._queue.get, None), timeout=PATIENCE_SECONDS)
        for message in messages:
            self._queue.put(message)

    def ask(self, message: Any) -> Any:
        self._queue.put(message)
        return next(self.call)

    def end(self) -> None:
        self._queue.put(None)

    def fails(self) -> TaskDBError:
        with pytest.raises(grpc.RpcError) as caught:
            for _ in self.call:
                pass
        self.end()
        return status.from_rpc_error(caught.value)


def attach(epoch: int = 0) -> pb.SessionRequest:
    return pb.SessionRequest(attach=pb.Attach(scheduler_id="raw", epoch=epoch))


def ingest(epoch: int, command: c.Command) -> pb.IngestRequest:
    message = convert.command_to_proto(command)
    kind = message.WhichOneof("kind")
    assert kind is not None
    return pb.IngestRequest(epoch=epoch, **{kind: getattr(message, kind)})


def test_a_session_begins_with_attach(stub: Any) -> None:
    assert Stream(stub.Session, convert.batch_to_proto(1, [])).fails().kind == "invalid_request"


def test_a_session_attaches_once(stub: Any) -> None:
    assert Stream(stub.Session, attach(), attach()).fails().kind == "invalid_request"


@pytest.mark.parametrize("seq", [0, 2])
def test_batches_are_numbered_without_gap(stub: Any, seq: int) -> None:
    assert Stream(stub.Session, attach(), convert.batch_to_proto(seq, [])).fails().kind == "invalid_request"


def test_an_epoch_that_never_was_is_refused(stub: Any) -> None:
    assert Stream(stub.Session, attach(10**6)).fails().kind == "stale_epoch"


def test_a_second_session_of_the_epoch_closes_the_first(stub: Any) -> None:
    first = Stream(stub.Session)
    epoch = first.ask(attach()).attached.epoch
    second = Stream(stub.Session)
    assert second.ask(attach(epoch)).attached.epoch == epoch
    assert first.fails().kind == "unavailable"
    assert second.ask(convert.batch_to_proto(1, [])).result.seq == 1
    second.end()


def test_a_session_that_is_ended_hears_durable_first(stub: Any) -> None:
    stream = Stream(stub.Session)
    stream.ask(attach())
    assert stream.ask(convert.batch_to_proto(1, graph("ended", [key("ended")]))).result.seq == 1
    stream.end()
    assert [x.durable.seq for x in stream.call if x.WhichOneof("kind") == "durable"] == [1]
    assert stream.call.code() is grpc.StatusCode.OK


def test_an_ingest_keeps_to_one_submission(stub: Any) -> None:
    session = Stream(stub.Session)
    epoch = session.ask(attach()).attached.epoch
    assert Stream(stub.Ingest, ingest(0, begin("i"))).fails().kind == "invalid_request"
    assert Stream(stub.Ingest, ingest(epoch, c.SealGraph("i"))).fails().kind == "invalid_request"
    assert Stream(stub.Ingest, ingest(epoch, begin("i")), ingest(epoch, c.SealGraph("j"))).fails().kind == "invalid_request"
    assert Stream(stub.Ingest, ingest(epoch, begin("i")), ingest(epoch + 1, c.SealGraph("i"))).fails().kind == "invalid_request"
    assert Stream(stub.Ingest, ingest(epoch - 1, begin("i"))).fails().kind == "stale_epoch"
    session.end()


def test_a_submission_is_sent_by_one_stream_at_a_time(stub: Any) -> None:
    session = Stream(stub.Session)
    epoch = session.ask(attach()).attached.epoch
    first = Stream(stub.Ingest)
    first.ask(ingest(epoch, begin("twice")))
    assert Stream(stub.Ingest, ingest(epoch, begin("twice"))).fails().kind == "unavailable"
    assert first.ask(ingest(epoch, run_of("twice", [key("twice")]))).tasks == 1
    assert first.ask(ingest(epoch, c.SealGraph("twice"))).durable
    first.end()
    session.end()


def test_another_ingest_may_go_on_where_one_was_cut_off(stub: Any) -> None:
    session = Stream(stub.Session)
    epoch = session.ask(attach()).attached.epoch
    first = Stream(stub.Ingest)
    first.ask(ingest(epoch, begin("cut")))
    assert first.ask(ingest(epoch, run_of("cut", [key("cut")]))).tasks == 1
    first.call.cancel()
    streams: list[Stream] = []

    def goes_on() -> bool:
        streams.append(Stream(stub.Ingest))
        try:
            return bool(streams[-1].ask(ingest(epoch, begin("cut"))).tasks == 1)
        except grpc.RpcError:  # it has not seen yet that the first one is gone
            return False

    until(goes_on, "the daemon to let another stream go on")
    assert streams[-1].ask(ingest(epoch, run_of("cut", [key("cut")]))).known == []
    assert streams[-1].ask(ingest(epoch, c.SealGraph("cut"))).tasks == 1
    streams[-1].end()
    session.end()


def test_a_read_has_a_limit(daemon: Daemon) -> None:
    with Client(daemon.address) as client, pytest.raises(LimitExceeded):
        client.get_tasks([b"k"] * (reads.GET_TASKS_MAX + 1))


# ------------------------------------------------------------------------------------------------- peers that are deaf


class Context:
    """A call whose peer reads `room` answers and no more."""

    def __init__(self, room: int):
        self.room = room
        self.written: list[pb.SessionReply] = []

    async def write(self, message: pb.SessionReply) -> None:
        if len(self.written) >= self.room:
            await asyncio.sleep(3600)
        self.written.append(message)


def test_a_peer_that_does_not_read_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    async def story() -> None:
        monkeypatch.setattr(service, "SEND_SECONDS_MAX", 0.05)
        link, context = SessionLink(), Context(2)
        for seq in range(5):
            link.push(c.Result(), seq, ())
        await asyncio.wait_for(link.send(context), 5)
        assert isinstance(link.error, Unavailable)
        assert [x.result.seq for x in context.written] == [0, 1]

    asyncio.run(story())


def test_answers_that_pile_up_close_the_session(monkeypatch: pytest.MonkeyPatch) -> None:
    async def story() -> None:
        monkeypatch.setattr(service, "OUTGOING_MAX", 10)
        link = SessionLink()
        for _ in range(11):
            link.push(c.Result(release=[1]), 0, ())
        assert isinstance(link.error, Unavailable)

    asyncio.run(story())


def test_a_peer_that_reads_slowly_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    async def story() -> None:
        monkeypatch.setattr(service, "OUTGOING_PAUSE", 3)
        link, context = SessionLink(), Context(100)
        for seq in range(5):
            link.push(c.Result(), seq, ())
        waiting = asyncio.ensure_future(link.room())
        await asyncio.sleep(0)
        assert not waiting.done()
        sending = asyncio.ensure_future(link.send(context))
        await asyncio.wait_for(waiting, 5)
        link.finish()
        await asyncio.wait_for(sending, 5)
        assert len(context.written) == 5

    asyncio.run(story())


def test_a_fenced_peer_hears_no_more_and_others_hear_all() -> None:
    async def story(error: TaskDBError) -> int:
        link, context = SessionLink(), Context(100)
        link.push(c.Result(), 1, ())
        link.durable(1)
        link.end(error)
        await asyncio.wait_for(link.send(context), 5)
        return len(context.written)

    assert asyncio.run(story(Unavailable("daemon is shutting down"))) == 2
    assert asyncio.run(story(StaleEpoch("over"))) <= 1


def test_durable_comes_after_its_results() -> None:
    async def story() -> None:
        link, context = SessionLink(), Context(100)
        link.push(c.Result(), 1, ())
        link.durable(1)
        link.push(c.Result(), 2, ())
        link.finish()
        await asyncio.wait_for(link.send(context), 5)
        assert [x.WhichOneof("kind") for x in context.written] == ["result", "result", "durable"]

    asyncio.run(story())


def leases(sizes: Iterable[int]) -> list[c.Lease]:
    return [c.Lease(number, b"k", b"s" * size, 0, Rank(0, 0, 0), [], "", "", b"", 0, 0, []) for number, size in enumerate(sizes)]


@pytest.mark.parametrize("sizes", [[], [10], [600_000] * 5, [2_000_000, 1, 1], [1, 1, 2_000_000]])
def test_leases_are_cut_into_messages(sizes: list[int]) -> None:
    result = c.Result(leases=leases(sizes), release=[7], queued=3)
    messages = service._cut(result, 4, [(0, "", "kind", "words")], convert.SharedBlobs())
    assert [x.seq for x in messages] == [4] + [0] * (len(messages) - 1)
    assert [list(x.release) for x in messages] == [[7]] + [[]] * (len(messages) - 1)
    assert [lease.id for x in messages for lease in x.leases] == list(range(len(sizes)))
    assert all(x.leases for x in messages[1:])
    assert {x.queued for x in messages} == {3}
    assert max(x.ByteSize() for x in messages) < service.LEASES_BYTES_SLICE + max(sizes, default=0) + 1000


def test_what_was_adopted_is_cut_and_comes_before_what_is_released() -> None:
    adopted = [c.Adopted(b"k", Level.MEMORY, lease) for lease in leases([600_000] * 5)] + [c.Adopted(b"n", Level.HELD, None)]
    result = c.Result(leases=leases([10, 10]), adopted=adopted, release=[7], queued=3)
    messages = service._cut(result, 4, [], convert.SharedBlobs())
    assert len(messages) > 1
    assert [x.seq for x in messages] == [0] * (len(messages) - 1) + [4]
    assert [len(x.release) for x in messages] == [0] * (len(messages) - 1) + [1]
    assert [answer.key for x in messages for answer in x.adopted] == [b"k"] * 5 + [b"n"]
    assert [len(x.leases) for x in messages] == [0] * (len(messages) - 1) + [2]
    assert max(x.ByteSize() for x in messages) < service.LEASES_BYTES_SLICE + 600_000 + 1000
