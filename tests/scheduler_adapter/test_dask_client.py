"""Pins of everything private or replaced in `distributed.Client`. A failure here after an upgrade names the touch point to read again."""

from __future__ import annotations

import ast
import asyncio
import inspect
import json
import threading
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from distributed import Client, Scheduler
from distributed.batched import BatchedSend
from distributed.client import FutureState
from distributed.core import CommClosedError, ConnectionPool, PooledRPCCall

from scheduler_adapter import dask_client as internals
from scheduler_adapter.dask_client import Call, NotAnswered, NotConnected
from tests.e2e import functions as f

#: Parameters of what is called or replaced.
SIGNATURES: dict[tuple[type, str], list[str]] = {
    (Client, "_reconnect"): [],
    (Client, "_send_to_scheduler_safe"): ["msg"],
    (Client, "_send_to_scheduler"): ["msg"],
    (Client, "_ensure_connected"): ["timeout"],
    (Client, "_close"): ["fast"],
    (BatchedSend, "send"): ["msgs"],
    (BatchedSend, "abort"): [],
    (ConnectionPool, "connect"): ["addr", "timeout"],
    (ConnectionPool, "reuse"): ["addr", "comm"],
    (ConnectionPool, "remove"): ["addr", "reason"],
    (PooledRPCCall, "__init__"): ["addr", "pool", "serializers", "deserializers"],
    (FutureState, "cancel"): ["reason", "msg"],
    (Scheduler, "identity"): ["n_workers"],
}


@pytest.mark.parametrize(("owner", "name"), SIGNATURES, ids=lambda x: getattr(x, "__name__", x))
def test_signatures(owner: type, name: str) -> None:
    found = list(inspect.signature(inspect.unwrap(getattr(owner, name))).parameters)
    assert found[1:] == SIGNATURES[owner, name]


def test_every_private_name_is_pinned_here() -> None:
    """Names with an underscore that the module uses of distributed's objects stand in this file."""
    tree = ast.parse(Path(internals.__file__).read_text())
    own = {"_rpc", "_patience"}
    used = {n.attr for n in ast.walk(tree) if isinstance(n, ast.Attribute) and n.attr.startswith("_") and not n.attr.startswith("__")}
    here = Path(__file__).read_text()
    assert [name for name in sorted(used - own) if f'"{name}"' not in here and f".{name}" not in here] == []


def test_order_in_stock() -> None:
    """The reader sets the status, then reconnects; a submission's futures and message are made under one lock; all that is said passes one
    method, looked up on the instance, on the loop."""
    reader = inspect.getsource(Client._handle_report)
    assert reader.index('self.status = "connecting"') < reader.index("await self._reconnect()") < reader.index("continue")
    assert "self._stream_handlers[op]" in reader
    submission = inspect.getsource(Client._graph_to_futures)
    assert submission.index("with self._refcount_lock:") < submission.index("Future(key, self)") < submission.index("_send_to_scheduler(")
    assert submission.rindex("            return futures") > submission.index("_send_to_scheduler(")
    assert "self.loop.add_callback(self._send_to_scheduler_safe, msg)" in inspect.getsource(Client._send_to_scheduler)
    start = inspect.getsource(Client._start)
    assert start.index("self._ensure_connected(") < start.index("self.preloads.start()") < start.index("self._handle_report()")
    assert "self.preloads.teardown()" in inspect.getsource(Client._close)
    source = inspect.getsource(Client)
    assert source.count("scheduler_comm.send(") == 2, "only the heartbeat goes another way"


# ----------------------------------------------------------------------------------------- a client and its scheduler


def played(test: Callable[[Scheduler, Client], Awaitable[None]]) -> Callable[[], None]:
    """Run a test on an asynchronous client and the scheduler it is connected to, on one loop."""

    async def play() -> None:
        async with Scheduler(port=0, host="127.0.0.1", dashboard=False) as s, Client(s.address, asynchronous=True) as client:
            await asyncio.wait_for(test(s, client), 30)

    def run() -> None:
        asyncio.run(play())

    run.__name__, run.__doc__ = test.__name__, test.__doc__
    return run


async def until(condition: Callable[[], Any]) -> None:
    while not condition():
        await asyncio.sleep(0.01)


@played
async def test_all_that_is_said_passes_the_replacement(s: Scheduler, client: Client) -> None:
    said: list[str] = []

    def send(message: dict[str, Any]) -> None:
        said.append(message["op"])
        stock(message)

    stock = internals.replace_send(client, send)
    future = client.submit(f.inc, 1, key="x")
    await until(lambda: "x" in s.tasks)
    client.subscribe_topic("topic", print)
    (found,) = internals.new_futures(client, ["x"])
    assert found.key == "x"
    assert found.status == "pending"
    await client.cancel([future])
    del future, found
    await until(lambda: "client-releases-keys" in said)
    assert {"update-graph", "subscribe-topic", "client-desires-keys", "cancel-keys"} <= set(said)
    assert "topic" in internals.topics(client)


@played
async def test_messages_of_the_scheduler(s: Scheduler, client: Client) -> None:
    heard: list[int] = []
    internals.on_message(client, "of-ours", lambda number: heard.append(number))
    s.client_send(client.id, {"op": "of-ours", "number": 7})
    await until(lambda: heard == [7])


@played
async def test_reconnecting(s: Scheduler, client: Client) -> None:
    """A broken stream calls the replacement, futures stay, and the reader goes on with the stream it finds."""
    called = asyncio.Event()
    go = asyncio.Event()

    async def reconnect() -> None:
        assert client.status == "connecting"
        internals.lost(client)
        with pytest.raises(CommClosedError):
            internals.say(client, {"op": "heartbeat-client"})
        called.set()
        await go.wait()
        await internals.connect(client, 10)

    stock = internals.replace_reconnect(client, reconnect)
    assert stock.__name__ == "_reconnect"
    future = client.submit(f.inc, 1, key="x")
    await until(lambda: "x" in s.tasks)
    client.scheduler_comm.comm.abort()
    await called.wait()
    await until(lambda: client.id not in s.clients)
    assert future.status == "pending"
    assert internals.is_open(client)
    go.set()
    await until(lambda: client.status == "running")
    internals.say(client, {"op": "report-key", "key": "x"})
    # Without a client that wants it the task is gone, and the answer of the new stream says so.
    await until(lambda: future.status == "cancelled")


@played
async def test_cancelling_as_stock_does(s: Scheduler, client: Client) -> None:
    futures = client.map(f.inc, range(3))
    keys = [x.key for x in futures]
    assert internals.still_wanted(client, [*keys, "other"]) == keys
    futures[0]._state.cancel()
    assert internals.still_wanted(client, keys) == keys[1:]
    assert internals.cancel_futures(client) == 3
    assert [x.status for x in futures] == ["cancelled"] * 3
    assert client.futures == {}
    assert internals.still_wanted(client, keys) == []


class SlowToPickle:
    """Says that it is being pickled, and waits."""

    def __init__(self) -> None:
        self.begun = threading.Event()
        self.go = threading.Event()

    def __reduce__(self) -> Any:
        self.begun.set()
        assert self.go.wait(20)
        return int, ()


@pytest.fixture
def synchronous() -> Iterator[Client]:
    with Client(n_workers=0, dashboard_address="127.0.0.1:0", processes=False) as client:
        yield client


def test_no_key_is_named_before_its_submission_is_said(synchronous: Client) -> None:
    """Futures are made before the graph is pickled, in the user's thread."""
    client = synchronous
    said: list[set[str]] = []

    def send(message: dict[str, Any]) -> None:
        if message["op"] == "update-graph":
            said.append(message["keys"])
        stock(message)

    stock = internals.replace_send(client, send)
    slow = SlowToPickle()
    futures: list[Any] = []
    submitting = threading.Thread(target=lambda: futures.append(client.submit(f.first, slow, key="slow")))
    submitting.start()
    assert slow.begun.wait(20)
    assert "slow" in client.futures, "or this tests nothing"
    asked = asyncio.run_coroutine_threadsafe(internals.wanted_keys(client), client.loop.asyncio_loop)
    with pytest.raises(TimeoutError):
        asked.result(timeout=0.2)
    assert said == []
    slow.go.set()
    keys = asked.result(timeout=20)
    assert keys == {"slow"}
    assert said == [{"slow"}]
    submitting.join(20)


# --------------------------------------------------------------------------------------------------------------- calls


@played
async def test_calls_are_handed_over_and_can_be_made(s: Scheduler, client: Client) -> None:
    asked: list[str] = []

    async def patience(call: Call) -> Any:
        asked.append(call.op)
        return await call.make()

    internals.make_patient(client, patience)
    await client.set_metadata("x", 1)
    assert await client.get_metadata("x") == 1
    assert asked == ["set_metadata", "get_metadata"]
    assert isinstance(client.scheduler, PooledRPCCall)
    assert client.scheduler.address == s.address
    with pytest.raises(KeyError):
        await client.get_metadata("y")
    # What the scheduler raises is not taken for a broken connection.
    with pytest.raises(OSError, match="from there"):
        await client.run_on_scheduler(raise_os_error)
    asked.clear()
    assert not await internals.has_taskdb(client)
    s.handlers["taskdb"] = lambda client: {"client": client}
    s.handlers["identity"] = lambda n_workers: {**s.identity(n_workers=n_workers), "taskdb": 1}
    assert await internals.has_taskdb(client)
    assert await internals.ask_taskdb(client) == {"client": client.id}
    assert asked == [], "asked straight"


def raise_os_error() -> None:
    raise ConnectionError("from there")


@played
async def test_calls_that_fail(s: Scheduler, client: Client) -> None:
    internals.make_patient(client, lambda call: call.make())

    async def hang_up(comm: Any) -> None:
        comm.abort()

    s.handlers["hang_up"] = hang_up
    with pytest.raises(NotAnswered) as caught:
        await client.scheduler.hang_up()
    assert isinstance(caught.value.__cause__, CommClosedError)
    client.rpc.timeout = 0.1
    internals.move_to(client, "tcp://127.0.0.1:1")
    assert client.scheduler.address == "tcp://127.0.0.1:1"
    with pytest.raises(NotConnected) as nobody:
        await client.scheduler.identity()
    assert isinstance(nobody.value.__cause__, OSError)
    internals.move_to(client, s.address)
    assert (await client.scheduler.identity())["type"] == "Scheduler"


@played
async def test_losing_the_scheduler_ends_calls_that_are_under_way(s: Scheduler, client: Client) -> None:
    internals.make_patient(client, lambda call: call.make())
    begun = asyncio.Event()

    async def never() -> None:
        begun.set()
        await asyncio.sleep(60)

    s.handlers["never"] = never
    call = asyncio.ensure_future(client.scheduler.never())
    await begun.wait()
    internals.lost(client)
    with pytest.raises(NotAnswered):
        await call


def test_where_the_scheduler_is(tmp_path: Path) -> None:
    class Stand:
        """As much of a client as is looked at."""

        scheduler_file: str | None = None
        scheduler = type("rpc", (), {"address": "tcp://here:1"})

    client: Any = Stand()
    assert internals.address_now(client, None) == "tcp://here:1"
    path = tmp_path / "scheduler.json"
    assert internals.address_now(client, str(path)) == "tcp://here:1"
    path.write_text('{"addr')
    assert internals.address_now(client, str(path)) == "tcp://here:1"
    path.write_text(json.dumps({"address": "tcp://there:2"}))
    assert internals.address_now(client, str(path)) == "tcp://there:2"
    client.scheduler_file = str(path)
    assert internals.address_now(client, None) == "tcp://there:2"


@played
async def test_scheduler_file_is_where_it_is_looked_for(s: Scheduler, client: Client) -> None:
    assert client.scheduler_file is None
    assert client.cluster is None
    assert not internals.has_closed_cluster(client)
    for name in ("_event_handlers", "_stream_handlers", "_refcount_lock", "futures", "rpc", "scheduler_comm", "generation"):
        assert hasattr(client, name), name


@played
async def test_closing(s: Scheduler, client: Client) -> None:
    await internals.close(client)
    assert client.status == "closed"
    assert not internals.is_open(client)
