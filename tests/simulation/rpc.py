"""gRPC without gRPC: a channel for `taskdb.client.Session`, and calls of the real `Service`, over the streams of `network.py`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
import grpc.aio
from distributed.comm.core import CommClosedError

from taskdb.wire import taskdb_pb2_grpc as pb_grpc
from tests.simulation.loop import PROCESS, Process
from tests.simulation.network import End

Serialize = Callable[[Any], bytes]
_NONE = grpc.aio.Metadata()
#: Labels of streams to the daemon: the scheduler's life, and a graph on its way.
SESSION, INGEST = "Session", "Ingest"


def _error(code: grpc.StatusCode, details: str, trailing: Any = _NONE) -> grpc.aio.AioRpcError:
    return grpc.aio.AioRpcError(code, _NONE, trailing, details)


_LOST = _error(grpc.StatusCode.UNAVAILABLE, "simulated: the connection is gone")


class Call:
    """A call from the client's side."""

    def __init__(self, end: End, serialize: Serialize, deserialize: Callable[[bytes], Any]) -> None:
        self._end = end
        self._serialize = serialize
        self._deserialize = deserialize
        self._status: grpc.aio.AioRpcError | None = None
        self._cancelled = False

    async def write(self, message: Any) -> None:
        if self._cancelled or self._status is not None:
            raise asyncio.InvalidStateError("the call is over")
        try:
            self._end.send(("message", self._serialize(message)))
        except CommClosedError:
            self._status = self._status or _LOST
            raise self._status from None

    async def done_writing(self) -> None:
        if not self._end.ended:
            self._end.send(("done", None))

    async def read(self) -> Any:
        if self._cancelled:
            raise asyncio.CancelledError
        if self._status is None:
            try:
                kind, data = await self._end.receive()
            except CommClosedError:
                if self._cancelled:
                    raise asyncio.CancelledError from None
                kind, data = "status", _LOST
            if kind == "message":
                return self._deserialize(data)
            self._status = self._status or data
            self._end.abort()
        if self._status.code() is not grpc.StatusCode.OK:
            raise self._status
        return grpc.aio.EOF

    def cancel(self) -> None:
        if self._status is None:
            self._cancelled = True
            self._end.abort()

    async def code(self) -> grpc.StatusCode:
        return self._status.code() if self._status else grpc.StatusCode.CANCELLED

    async def details(self) -> str:
        return (self._status.details() if self._status else "") or ""

    async def trailing_metadata(self) -> Any:
        return self._status.trailing_metadata() if self._status else _NONE


class Channel:
    """What the stub needs of a channel."""

    def __init__(self, daemon: object) -> None:
        self._process = PROCESS.get()

    def _call(self, path: str, serialize: Serialize, deserialize: Any, metadata: Any) -> Call:
        daemon = self._process.world.daemon
        ours, theirs = daemon.network.pair(self._process, daemon.process, path.rsplit("/", 1)[-1])
        if daemon.process.alive:
            loop = asyncio.get_running_loop()
            loop.call_later(daemon.network.latency(), daemon.accept, path, metadata or (), theirs, context=daemon.process.context)
        else:
            daemon.network.cut(ours)
        return Call(ours, serialize, deserialize)

    def stream_stream(self, path: str, request_serializer: Serialize, response_deserializer: Any, _registered_method: bool = False) -> Any:
        return lambda metadata=(), timeout=None: self._call(path, request_serializer, response_deserializer, metadata)

    def unary_unary(self, path: str, request_serializer: Serialize, response_deserializer: Any, _registered_method: bool = False) -> Any:
        async def invoke(request: Any, timeout: float | None = None, metadata: Any = ()) -> Any:
            call = self._call(path, request_serializer, response_deserializer, metadata)
            try:
                async with asyncio.timeout(timeout):
                    await call.write(request)
                    return await call.read()
            except TimeoutError:
                raise _error(grpc.StatusCode.DEADLINE_EXCEEDED, "simulated: the deadline is over") from None
            finally:
                call.cancel()

        return invoke

    def unary_stream(self, path: str, request_serializer: Serialize, response_deserializer: Any, _registered_method: bool = False) -> Any:
        async def invoke(request: Any, timeout: float | None = None, metadata: Any = ()) -> AsyncIterator[Any]:
            call = self._call(path, request_serializer, response_deserializer, metadata)
            await call.write(request)
            while (reply := await call.read()) is not grpc.aio.EOF:
                yield reply

        return invoke

    async def close(self) -> None:
        pass


async def why_closed(daemon: object) -> None:
    """Nothing is closed here."""


class Handlers:
    """Catches what `add_TaskDBServicer_to_server` registers."""

    def __init__(self, servicer: Any) -> None:
        self._methods: dict[str, Any] = {}
        pb_grpc.add_TaskDBServicer_to_server(servicer, self)

    def add_generic_rpc_handlers(self, handlers: Any) -> None:
        pass

    def add_registered_method_handlers(self, service: str, handlers: dict[str, Any]) -> None:
        self._methods = {f"/{service}/{name}": handler for name, handler in handlers.items()}

    def start(self, process: Process, path: str, metadata: Any, end: End) -> None:
        """Serve a call. Its handler is cancelled when the stream ends before it."""
        method = self._methods[path]
        task = process.spawn(_serve(method, _Context(method, metadata, end), end))
        task.set_name(path)
        end.on_end = task.cancel
        if end.ended:
            task.cancel()


class _Aborted(Exception):
    """Ends a handler that said why."""


class _Context:
    def __init__(self, method: Any, metadata: Any, end: End) -> None:
        self._method = method
        self._metadata = metadata
        self._end = end

    def invocation_metadata(self) -> Any:
        return self._metadata

    async def read(self) -> Any:
        kind, data = await self._end.receive()
        return self._method.request_deserializer(data) if kind == "message" else grpc.aio.EOF

    async def write(self, message: Any) -> None:
        self._end.send(("message", self._method.response_serializer(message)))

    async def abort(self, code: grpc.StatusCode, details: str, trailing: Any = ()) -> None:
        self._end.send(("status", _error(code, details, grpc.aio.Metadata(*trailing))))
        raise _Aborted


async def _serve(method: Any, context: _Context, end: End) -> None:
    try:
        if method.request_streaming:
            await method.stream_stream(None, context)
        else:
            request = await context.read()
            if method.response_streaming:
                await method.unary_stream(request, context)
            else:
                await context.write(await method.unary_unary(request, context))
        end.send(("status", _error(grpc.StatusCode.OK, "")))
    except (_Aborted, CommClosedError):
        pass
    end.on_end = None
