"""What one peer can take: connections, calls, messages that are too large, broken, or never end. Others are served meanwhile."""

from __future__ import annotations

import asyncio
import random
import resource
import socket
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import grpc
import grpc.aio
import psutil
import pytest

from taskdb import limits
from taskdb.client import Client
from taskdb.errors import InvalidRequest, LimitExceeded, Unavailable
from taskdb.wire import status
from taskdb.wire import taskdb_pb2 as pb
from taskdb.wire import taskdb_pb2_grpc as pb_grpc
from taskdb.wire.channel import CLIENT_OPTIONS
from tests.support.http2 import GOAWAY, HEADERS, PING, PREFACE, RST_STREAM, SETTINGS, Connection, frame
from tests.taskdb.server.procs import PATIENCE_SECONDS, Daemon, Recorder, graph, key, until

pytestmark = pytest.mark.e2e

MIB = 1 << 20
STATUS = "/taskdb.v1.TaskDB/Status"
METHODS = ("Session", "Ingest", "Status", "ListTasks", "Explain", "GetTasks", "Restore")


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    with Daemon(tmp_path_factory.mktemp("limits"), listen="127.0.0.1:0") as daemon:
        yield daemon


@pytest.fixture
def port(daemon: Daemon) -> Iterator[int]:
    """Afterwards it serves as ever, a scheduler too."""
    yield int(daemon.address.rpartition(":")[2])

    async def story() -> None:
        async with Recorder(daemon.address) as scheduler:
            await scheduler.ask(*graph("after", [key("after")]))
            await scheduler.durable()

    asyncio.run(story())
    assert not daemon.ended
    assert "Traceback" not in daemon.words()


def answers(daemon: Daemon) -> None:
    with Client(daemon.address, PATIENCE_SECONDS) as client:
        client.status()


def memory(daemon: Daemon) -> int:
    assert daemon.process is not None
    return psutil.Process(daemon.process.pid).memory_info().rss


# ----------------------------------------------------------------------------------------------------------- messages


@pytest.mark.parametrize("method", METHODS)
def test_a_message_that_is_too_large_is_refused_when_it_is_announced(daemon: Daemon, port: int, method: str) -> None:
    before = memory(daemon)
    with Connection(port, PATIENCE_SECONDS) as connection:
        connection.call(f"/taskdb.v1.TaskDB/{method}")
        connection.message(2**32 - 1, b"x" * 1000)
        connection.until(HEADERS, RST_STREAM)
    assert memory(daemon) - before < 20 * MIB


def test_a_client_is_told_of_a_message_that_is_too_large(daemon: Daemon, port: int) -> None:
    """Both ends have the same bound, so its own client does not send such a message."""
    options = [("grpc.max_send_message_length", 1000)]
    with Client(daemon.address) as client, grpc.insecure_channel(daemon.address, options=options) as small:
        client._stub = pb_grpc.TaskDBStub(small)
        with pytest.raises(LimitExceeded):
            client.get_tasks([b"k" * 100] * 100)


def test_a_message_that_does_not_come_holds_nobody_up(daemon: Daemon, port: int) -> None:
    with ExitStack() as stack:
        slow = [stack.enter_context(Connection(port, PATIENCE_SECONDS)) for _ in range(20)]
        for connection in slow:
            for number, method in enumerate(METHODS):
                stream = 2 * number + 1
                connection.call(f"/taskdb.v1.TaskDB/{method}", stream)
                connection.message(limits.MESSAGE_BYTES_MAX, b"x", stream)
        before = memory(daemon)
        for _ in range(5):
            for connection in slow:
                connection.send(frame(0, 0, 1, b"x"))
            answers(daemon)
        assert memory(daemon) - before < 20 * MIB


@pytest.mark.parametrize("method", METHODS)
def test_a_message_that_cannot_be_read_is_refused(daemon: Daemon, port: int, method: str) -> None:
    junk = random.Random(6).randbytes(200)
    with grpc.insecure_channel(daemon.address) as channel:
        path = f"/taskdb.v1.TaskDB/{method}"
        if method in ("Session", "Ingest"):
            call = channel.stream_stream(path)(iter([junk]), timeout=PATIENCE_SECONDS)
        else:
            call = channel.unary_stream(path)(junk, timeout=PATIENCE_SECONDS)
        with pytest.raises(grpc.RpcError) as caught:
            next(call)
    assert isinstance(status.from_rpc_error(caught.value), InvalidRequest), caught.value


NO_HTTP2 = {
    "nothing of it": b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "TLS": bytes.fromhex("16030100050100000100"),
    "half a preface": PREFACE[:10],
    "zeros": bytes(1000),
    "a frame that is too large": PREFACE + b"\xff\xff\xff" + bytes(6),
    "a frame of no kind": PREFACE + frame(SETTINGS, 0, 0) + frame(200, 255, 0, b"x" * 10),
    "settings that make no sense": PREFACE + frame(SETTINGS, 0, 0, b"\x00\x05\xff\xff\xff\xff"),
    "headers that are not packed": PREFACE + frame(SETTINGS, 0, 0) + frame(HEADERS, 4, 1, b"\xff" * 50),
    "data of no call": PREFACE + frame(SETTINGS, 0, 0) + frame(0, 0, 7, b"x" * 50),
    "a call of the server": PREFACE + frame(SETTINGS, 0, 0) + frame(HEADERS, 4, 2, b"\x82"),
}


@pytest.mark.parametrize("sent", NO_HTTP2.values(), ids=NO_HTTP2)
def test_what_is_no_http2_is_dropped(daemon: Daemon, port: int, sent: bytes) -> None:
    with socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_SECONDS) as connection:
        connection.sendall(sent)
        answers(daemon)


# -------------------------------------------------------------------------------------------------------------- calls


def test_calls_have_a_limit_and_the_rest_may_come_again(daemon: Daemon, port: int) -> None:
    async def story() -> None:
        begun: list[Any] = []
        async with Channels(daemon.address, 1 + limits.CALLS_MAX // limits.CONNECTION_CALLS_MAX) as channels:
            for channel in channels:
                stub = pb_grpc.TaskDBStub(channel)
                begun += [stub.Ingest(timeout=PATIENCE_SECONDS) for _ in range(limits.CONNECTION_CALLS_MAX)]
            # A call begins with its first message, but for its headers, which are sent at once.
            waiting = [asyncio.ensure_future(call.code()) for call in begun]
            while sum(x.done() for x in waiting) < len(begun) - limits.CALLS_MAX:
                await asyncio.sleep(0.01)
            over = [call for call, code in zip(begun, waiting) if code.done()]
            for call in over:
                assert await call.code() is grpc.StatusCode.UNAVAILABLE
                error = grpc.aio.AioRpcError(await call.code(), grpc.aio.Metadata(), await call.trailing_metadata(), await call.details())
                assert status.from_rpc_error(error).retryable
            with pytest.raises(Unavailable, match="calls are under way"):
                await asyncio.to_thread(answers, daemon)
            for call in begun:
                call.cancel()
        await asyncio.to_thread(until, lambda: _free(daemon), "calls that were cancelled to end")

    asyncio.run(story())


def _free(daemon: Daemon) -> bool:
    try:
        answers(daemon)
    except Unavailable:
        return False
    return True


class Channels:
    """So many connections."""

    def __init__(self, address: str, count: int) -> None:
        self._channels = [grpc.aio.insecure_channel(address, options=CLIENT_OPTIONS) for _ in range(count)]

    async def __aenter__(self) -> list[Any]:
        return self._channels

    async def __aexit__(self, *details: object) -> None:
        for channel in self._channels:
            await channel.close()


def test_one_connection_does_not_take_all_calls(daemon: Daemon, port: int) -> None:
    async def story() -> None:
        async with Channels(daemon.address, 1) as (greedy,):
            calls = [pb_grpc.TaskDBStub(greedy).Ingest(timeout=PATIENCE_SECONDS) for _ in range(2 * limits.CALLS_MAX)]
            await asyncio.to_thread(answers, daemon)
            for call in calls:
                call.cancel()

    asyncio.run(story())


# -------------------------------------------------------------------------------------------------------- connections


def idle(daemon: Daemon, port: int, count: int) -> None:
    """So many connections that say that they are there, and no more. A scheduler works meanwhile."""

    async def story() -> None:
        async with Recorder(daemon.address) as scheduler:
            for number in range(20):
                await scheduler.ask(*graph(f"idle-{count}-{number}", [key("idle", number)]))
            await scheduler.durable()

    before = memory(daemon)
    with ExitStack() as stack:
        connections = [stack.enter_context(Connection(port, PATIENCE_SECONDS)) for _ in range(count)]
        for connection in connections:
            connection.until(SETTINGS)
        answers(daemon)
        asyncio.run(story())
        assert memory(daemon) - before < 20 * MIB + count * 100 * 1024
        for connection in connections:
            connection.send(frame(PING, 0, 0, b"12345678"))
            connection.until(PING)
    answers(daemon)


def test_a_thousand_idle_connections(daemon: Daemon, port: int) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    try:
        idle(daemon, port, 1000)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.slow
def test_one_that_says_nothing_is_hung_up_on(port: int) -> None:
    with socket.create_connection(("127.0.0.1", port), timeout=3 * limits.HANDSHAKE_MS_MAX / 1000) as connection:
        got = b""
        while more := connection.recv(1000):
            got += more
    assert frame(GOAWAY, 0, 0)[3:4] in got


def test_a_connection_too_many_is_closed_and_the_others_stay(daemon: Daemon, tmp_path_factory: pytest.TempPathFactory) -> None:
    """With a smaller number than the real one, on a server of the same options."""

    async def story() -> None:
        from taskdb.wire.channel import SERVER_OPTIONS

        options = [(name, 3 if name == "grpc.max_allowed_incoming_connections" else value) for name, value in SERVER_OPTIONS]
        assert options != SERVER_OPTIONS
        server = grpc.aio.server(options=options)
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        await asyncio.to_thread(connect, port)
        await server.stop(0)

    def connect(port: int) -> None:
        with ExitStack() as stack:
            kept = [stack.enter_context(Connection(port, PATIENCE_SECONDS)) for _ in range(3)]
            for connection in kept:
                connection.until(SETTINGS)
            # Sending or receiving, whichever comes first after it is closed.
            with pytest.raises(ConnectionError):
                stack.enter_context(Connection(port, PATIENCE_SECONDS)).until(SETTINGS)
            for connection in kept:
                connection.send(frame(PING, 0, 0, b"12345678"))
                connection.until(PING)

    asyncio.run(story())


def test_a_request_of_no_method_and_of_none_of_ours(daemon: Daemon, port: int) -> None:
    with grpc.insecure_channel(daemon.address) as channel:
        for path in ("/", "/taskdb.v1.TaskDB/", "/taskdb.v1.TaskDB/Drop", "/a/b/c"):
            with pytest.raises(grpc.RpcError) as caught:
                channel.unary_unary(path)(pb.StatusRequest().SerializeToString(), timeout=PATIENCE_SECONDS)
            assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
