"""The wire's options, of both ends, and what every call of a client shares: its channel, and what a failed call means."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import grpc.aio

from taskdb import limits
from taskdb.access import Access, Daemon, check_ca, parse_address, read_chain
from taskdb.errors import AccessDenied, TaskDBError, Unavailable
from taskdb.wire import status

#: Default deadline of a read.
READ_SECONDS = 15.0

Options = list[tuple[str, int]]

_BOTH_ENDS: Options = [
    # Judged by the length that is announced, before any of it is read.
    ("grpc.max_receive_message_length", limits.MESSAGE_BYTES_MAX),
    ("grpc.max_send_message_length", limits.MESSAGE_BYTES_MAX),
    ("grpc.max_metadata_size", limits.METADATA_BYTES_MAX),
    # A peer that is gone without a word is noticed.
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    # What it says of a ping's answer goes before what keepalive says: a minute, unless told.
    ("grpc.http2.ping_timeout_ms", 10_000),
]

CLIENT_OPTIONS: Options = [
    *_BOTH_ENDS,
    # Our own backoff decides when to try; the channel's must not be in its way.
    ("grpc.initial_reconnect_backoff_ms", 50),
    ("grpc.min_reconnect_backoff_ms", 50),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_http_proxy", 0),
]

SERVER_OPTIONS: Options = [
    *_BOTH_ENDS,
    # Without this a second daemon could share the port, and each would get half of the calls.
    ("grpc.so_reuseport", 0),
    ("grpc.max_allowed_incoming_connections", limits.CONNECTIONS_MAX),
    ("grpc.max_concurrent_streams", limits.CONNECTION_CALLS_MAX),
    # One that connects and does not say what it wants, or has nothing to say any more.
    ("grpc.server_handshake_timeout_ms", limits.HANDSHAKE_MS_MAX),
    ("grpc.max_connection_idle_ms", limits.IDLE_MS_MAX),
    # Peers may ask as often as we do whether we are there.
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 5_000),
    ("grpc.http2.max_ping_strikes", 0),
]


def open_channel(daemon: Daemon) -> Any:
    """The channel of a scheduler's Session. Raises InvalidRequest, AccessDenied (what stands in files); a daemon is not asked yet."""
    return _open(grpc.aio.insecure_channel, grpc.aio.secure_channel, daemon)


def open_blocking_channel(daemon: Daemon) -> Any:
    """The same for threads, and every call through it carries the token."""
    channel = _open(grpc.insecure_channel, grpc.secure_channel, daemon)
    return channel if daemon.access.token_file is None else grpc.intercept_channel(channel, _Token(daemon.access))


class _Token(
    grpc.UnaryUnaryClientInterceptor,
    grpc.UnaryStreamClientInterceptor,
    grpc.StreamUnaryClientInterceptor,
    grpc.StreamStreamClientInterceptor,
):
    def __init__(self, access: Access):
        self._access = access

    def _carry(self, continuation: Any, details: Any, request: Any) -> Any:
        return continuation(_Details(details, (*(details.metadata or ()), *self._access.metadata())), request)

    intercept_unary_unary = intercept_unary_stream = intercept_stream_unary = intercept_stream_stream = _carry


class _Details(grpc.ClientCallDetails):
    def __init__(self, details: Any, metadata: Any):
        self.method = details.method
        self.timeout = details.timeout
        self.metadata = metadata
        self.credentials = details.credentials
        self.wait_for_ready = details.wait_for_ready
        self.compression = details.compression


def _open(insecure: Any, secure: Any, daemon: Daemon) -> Any:
    where, access = parse_address(daemon.address), daemon.access
    if where.scheme != "tls":
        return insecure(where.target, options=CLIENT_OPTIONS)
    if access.ca is None:
        raise AccessDenied(f"{daemon}: tls:// needs the file of the certificate authority that vouches for the daemon")
    chain, key = (None, None) if access.cert is None else read_chain(access.cert, access.key)
    credentials = grpc.ssl_channel_credentials(check_ca(access.ca), key, chain)
    options: list[tuple[str, Any]] = list(CLIENT_OPTIONS)
    if access.name is not None:
        options.append(("grpc.ssl_target_name_override", access.name))
    return secure(where.target, credentials, options=options)


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
