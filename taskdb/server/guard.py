"""The door: who may call, how many calls there may be, and what is a message. Stands before every handler."""

from __future__ import annotations

import hmac
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

import grpc
import grpc.aio

from taskdb import limits
from taskdb.access import token_of
from taskdb.errors import AccessDenied, InvalidRequest, TaskDBError, Unavailable
from taskdb.wire import status

logger = logging.getLogger("taskdb.server")

#: Anybody may ask whether the daemon is healthy: probes hold no token, and learn nothing else.
_HEALTH = "/grpc.health.v1.Health/"
#: Refused calls are told of so often at most, so that nobody can fill the log.
_TELL_SECONDS = 10.0

Handler = Any
Behaviour = Callable[[Any, Any], Awaitable[Any]]


@dataclass(slots=True)
class _Calls:
    most: int
    now: int = 0


class Guard(grpc.aio.ServerInterceptor):
    """Refuses calls without the token (None: there is none), those of which there are too many, and messages that cannot be read.

    A refused call is answered at once, whatever its peer sends.
    """

    def __init__(self, token: str | None):
        # Digests have one length, so that the time of a comparison says nothing about the token's.
        self._expected = None if token is None else _digest(token)
        #: Calls that are being served. Probes are apart: those who have no token must not be able to take all there are.
        self._calls = _Calls(limits.CALLS_MAX)
        self._probes = _Calls(limits.PROBES_MAX)
        self._refused = 0
        self._told_at = float("-inf")

    async def intercept_service(self, continuation: Callable[[Any], Awaitable[Handler | None]], details: Any) -> Handler | None:
        method: str = details.method
        if self._expected is not None and not method.startswith(_HEALTH):
            token = token_of(details.invocation_metadata)
            if token is None:
                return self._refuse(AccessDenied("the daemon asks for a token: name its file"))
            if not hmac.compare_digest(_digest(token), self._expected):
                return self._refuse(AccessDenied("the token is not the daemon's"))
        handler = await continuation(details)
        return None if handler is None else self._guarded(method, handler)

    def _refuse(self, error: TaskDBError) -> Handler:
        # As a stream whatever the call is: its handler begins before any message is read.
        return grpc.stream_stream_rpc_method_handler(self._refusal(error))

    def _refusal(self, error: TaskDBError) -> Behaviour:
        async def refuse(request: Any, context: Any) -> None:
            self._tell(context.peer(), error)
            await _abort(context, error)

        return refuse

    def _tell(self, peer: str, error: TaskDBError) -> None:
        self._refused += 1
        now = time.monotonic()
        if now - self._told_at >= _TELL_SECONDS:
            logger.warning("refused %s of %s: %s", "a call" if self._refused == 1 else f"{self._refused} calls, the last", peer, error)
            self._told_at, self._refused = now, 0

    def _guarded(self, method: str, handler: Handler) -> Handler:
        kind = f"{'stream' if handler.request_streaming else 'unary'}_{'stream' if handler.response_streaming else 'unary'}"
        behaviour: Behaviour = getattr(handler, kind)
        calls = self._probes if method.startswith(_HEALTH) else self._calls
        read = handler.request_deserializer

        def checked(data: bytes) -> Any:
            """What a peer sends may be anything. gRPC would log it as a fault of ours."""
            try:
                return read(data)
            except Exception:
                error = InvalidRequest(f"a message to {method} cannot be read")
            if handler.request_streaming:
                raise error  # to the handler that reads it
            return error

        async def counted(request: Any, context: Any) -> Any:
            if isinstance(request, InvalidRequest):
                await _abort(context, request)
            if calls.now >= calls.most:
                await _abort(context, Unavailable(f"{calls.now} calls are under way already"))
            calls.now += 1
            try:
                return await behaviour(request, context)
            finally:
                calls.now -= 1

        make = getattr(grpc, f"{kind}_rpc_method_handler")
        counting: Handler = make(counted, checked, handler.response_serializer)
        return counting


def _digest(token: str) -> bytes:
    return sha256(token.encode()).digest()


async def _abort(context: Any, error: TaskDBError) -> None:
    code, words, metadata = status.to_status(error)
    await context.abort(code, words, metadata)
