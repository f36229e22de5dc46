"""What every call of a client shares: the options of its channel, and what a failed call means."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import grpc.aio

from taskdb import limits
from taskdb.errors import TaskDBError, Unavailable
from taskdb.wire import status

#: Default deadline of a read.
READ_SECONDS = 15.0

OPTIONS: list[tuple[str, int]] = [
    ("grpc.max_receive_message_length", limits.MESSAGE_BYTES_MAX),
    ("grpc.max_send_message_length", limits.MESSAGE_BYTES_MAX),
    # Our own backoff decides when to try; the channel's must not be in its way.
    ("grpc.initial_reconnect_backoff_ms", 50),
    ("grpc.min_reconnect_backoff_ms", 50),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.enable_http_proxy", 0),
]


def open_channel(address: str) -> Any:
    """The channel of a scheduler's Session."""
    return grpc.aio.insecure_channel(address, options=OPTIONS)


def unreachable(address: str, detail: str) -> Unavailable:
    return Unavailable(f"no taskdb daemon at {address} ({detail}); start one with `taskdb serve --data DIR --listen {address}`")


async def call_error(call: Any, address: str) -> TaskDBError:
    """The exception of a call that has ended."""
    code, details, trailing = await call.code(), await call.details(), await call.trailing_metadata()
    error = grpc.aio.AioRpcError(code, grpc.aio.Metadata(), trailing or grpc.aio.Metadata(), details)
    return status.from_rpc_error(error, address)


def raise_if_cancelled() -> None:
    """Inside `except CancelledError`: raise it again if the task was cancelled. gRPC raises the same for a call that was."""
    task = asyncio.current_task()
    if task is None or task.cancelling():
        raise asyncio.CancelledError
