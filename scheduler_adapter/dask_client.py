"""What the client preload touches of `distributed.Client`: private or replaced names, one function a touch point.

Each docstring names what it relies on. All of it was read in 2026.8.0 and is pinned by `tests/scheduler_adapter/test_dask_client.py`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from contextvars import ContextVar
from typing import Any

from distributed import Client, Future
from distributed.comm import Comm
from distributed.core import CommClosedError, PooledRPCCall, Status, send_recv

from scheduler_adapter.config import address_in

Message = dict[str, Any]

#: In a context in which it is set, calls go straight to the scheduler: they are what finds out whether it is back.
_STRAIGHT: ContextVar[bool] = ContextVar("taskdb-straight", default=False)


# ---------------------------------------------------------------------------------------------------------- the stream


def replace_reconnect(client: Client, reconnect: Callable[[], Awaitable[None]]) -> Callable[[], Awaitable[None]]:
    """`_handle_report` awaits `_reconnect` when the stream breaks, then reads the stream that is there, if any. Returns stock's, which
    cancels all futures first."""
    stock: Callable[[], Awaitable[None]] = client._reconnect
    client._reconnect = reconnect
    return stock


def replace_send(client: Client, send: Callable[[Message], None]) -> Callable[[Message], None]:
    """All messages to the scheduler but the heartbeat pass `_send_to_scheduler_safe`, on the loop. Returns stock's, which loses one that
    comes between the end of the stream and its being noticed."""
    stock: Callable[[Message], None] = client._send_to_scheduler_safe
    client._send_to_scheduler_safe = send
    return stock


def on_message(client: Client, op: str, handler: Callable[..., None]) -> None:
    """A handler for one more message of the scheduler's stream."""
    client._stream_handlers[op] = handler


def is_open(client: Client) -> bool:
    """It is neither closed nor closing: "running" and "connecting" are what is left once it has started."""
    return client.status in ("running", "connecting")


def lost(client: Client) -> None:
    """As `_reconnect` begins; what is under way to the scheduler that was there fails at once."""
    client.status = "connecting"
    comm, client.scheduler_comm = client.scheduler_comm, None
    if comm is not None:
        comm.abort()
    client.rpc.remove(client.scheduler.address, reason="the scheduler is gone")


async def connect(client: Client, timeout_seconds: float) -> None:
    """`_ensure_connected`: opens a stream and registers. Raises OSError, TimeoutError; ImportError if versions do not go together."""
    token = _STRAIGHT.set(True)
    try:
        await client._ensure_connected(timeout=timeout_seconds)
    finally:
        _STRAIGHT.reset(token)
    if client.scheduler_comm is None:
        raise OSError("the client is being closed")


def say(client: Client, *messages: Message) -> None:
    """Put messages on the stream. Raises CommClosedError if there is none."""
    if client.scheduler_comm is None:
        raise CommClosedError("there is no stream to the scheduler")
    client.scheduler_comm.send(*messages)


def topics(client: Client) -> list[str]:
    """What the client has handlers for. Stock does not subscribe again."""
    return list(client._event_handlers)


async def close(client: Client) -> None:
    await client._close()


# ------------------------------------------------------------------------------------------------------------- futures


async def wanted_keys(client: Client) -> set[Any]:
    """Keys of its futures, but for those whose submission may not have passed `_send_to_scheduler_safe` when this returns.

    `_graph_to_futures` makes futures and hands the message to the loop under `_refcount_lock`, and the loop takes what it is handed in
    order.
    """
    with client._refcount_lock:
        keys = set(client.futures)
    passed = asyncio.Event()
    client.loop.add_callback(passed.set)
    await passed.wait()
    return keys


def still_wanted(client: Client, keys: Iterable[Any]) -> list[Any]:
    """Those that have a future that was not cancelled."""
    futures = client.futures
    return [key for key in keys if (state := futures.get(key)) is not None and state.status != "cancelled"]


def cancel_futures(client: Client) -> int:
    """As stock's `_reconnect`, with its words. Returns how many."""
    states = list(client.futures.values())
    for state in states:
        state.cancel(
            reason="scheduler-connection-lost",
            msg="Client lost the connection to the scheduler. Please check your connection and re-run your work.",
        )
    client.futures.clear()
    return len(states)


def new_futures(client: Client, keys: list[Any]) -> list[Future]:
    """Futures, and the want of each told to the scheduler, as `get_dataset` does. The future comes first: it must hear the answer."""
    futures = [Future(key, client) for key in keys]
    client._send_to_scheduler({"op": "client-desires-keys", "keys": keys})
    return futures


# --------------------------------------------------------------------------------------------------------------- calls


class NotConnected(Exception):
    """There was no connection to make a call on. The cause says why."""


class NotAnswered(Exception):
    """A call was under way when the connection broke: what became of it is not known. The cause says why."""


class Call:
    """One call of `client.scheduler`."""

    def __init__(self, rpc: PooledRPCCall, op: str, words: Message):
        self._rpc = rpc
        self.op = op
        self.words = words

    async def make(self) -> Any:
        """As `PooledRPCCall` does. Raises NotConnected, NotAnswered, and what the scheduler raised."""
        rpc, words = self._rpc, dict(self.words)
        for name, default in (("serializers", rpc.serializers), ("deserializers", rpc.deserializers)):
            if default is not None and words.get(name) is None:
                words[name] = default
        try:
            comm: Comm = await rpc.pool.connect(rpc.addr)
        except OSError as e:
            raise NotConnected from e
        comm.name, before = f"ConnectionPool.{self.op}", comm.name
        try:
            return await send_recv(comm=comm, op=self.op, **words)
        except OSError as e:
            if not comm.closed():
                raise  # the scheduler raised it
            raise NotAnswered from e
        finally:
            rpc.pool.reuse(rpc.addr, comm)
            comm.name = before


class PatientRPC(PooledRPCCall):
    """`client.scheduler`, with each call handed to `patience`."""

    def __init__(self, rpc: PooledRPCCall, patience: Callable[[Call], Awaitable[Any]]):
        super().__init__(rpc.addr, rpc.pool, rpc.serializers, rpc.deserializers)
        self._patience = patience

    def __getattr__(self, op: str) -> Any:
        straight = super().__getattr__(op)

        async def call(**words: Any) -> Any:
            if _STRAIGHT.get():
                return await straight(**words)
            return await self._patience(Call(self, op, words))

        return call


def make_patient(client: Client, patience: Callable[[Call], Awaitable[Any]]) -> None:
    """All that asks the scheduler something asks `client.scheduler`, an rpc; its address is where the client connects to."""
    client.scheduler = PatientRPC(client.scheduler, patience)


def move_to(client: Client, address: str) -> None:
    """The scheduler is to be looked for at another address."""
    rpc = client.scheduler
    if rpc.address != address:
        client.scheduler = PatientRPC(client.rpc(address), rpc._patience)


def address_now(client: Client, scheduler_file: str | None) -> str:
    """Where the scheduler is to be looked for: the file the client was made from may say another address by now."""
    return address_in(client.scheduler_file or scheduler_file) or str(client.scheduler.address)


def has_closed_cluster(client: Client) -> bool:
    return client.cluster is not None and client.cluster.status in (Status.closed, Status.closing)


async def has_taskdb(client: Client) -> bool:
    """Whether the scheduler there keeps its tasks in taskdb. Does not wait for a scheduler to be back."""
    token = _STRAIGHT.set(True)
    try:
        return "taskdb" in await client.scheduler.identity(n_workers=0)
    finally:
        _STRAIGHT.reset(token)


async def ask_taskdb(client: Client) -> Any:
    """What the scheduler there says of its database. Does not wait for a scheduler to be back."""
    token = _STRAIGHT.set(True)
    try:
        return await client.scheduler.taskdb(client=client.id)
    finally:
        _STRAIGHT.reset(token)
