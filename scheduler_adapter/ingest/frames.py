"""Messages between the scheduler and the ingest process: a small head and large frames over a Unix socket, each with its length."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Sequence

_COUNT = struct.Struct("<I")
_LENGTH = struct.Struct("<Q")


def send(connection: socket.socket, head: bytes) -> None:
    """A message without frames."""
    connection.sendall(_COUNT.pack(0) + _LENGTH.pack(len(head)) + head)


def receive(connection: socket.socket) -> tuple[bytes, list[bytes]]:
    """Raises EOFError if the other side is gone."""
    (count,) = _COUNT.unpack(_exactly(connection, _COUNT.size))
    parts = []
    for _ in range(count + 1):
        (length,) = _LENGTH.unpack(_exactly(connection, _LENGTH.size))
        parts.append(_exactly(connection, length))
    return parts[0], parts[1:]


def _exactly(connection: socket.socket, length: int) -> bytes:
    buffer = bytearray(length)
    view = memoryview(buffer)
    while view:
        n = connection.recv_into(view)
        if not n:
            raise EOFError("the other side is gone")
        view = view[n:]
    return bytes(buffer)


async def send_async(writer: asyncio.StreamWriter, head: bytes, frames: Sequence[bytes | memoryview]) -> None:
    """In pieces, so that neither memory nor the loop is taken by a large graph."""
    writer.write(_COUNT.pack(len(frames)))
    for part in (head, *frames):
        view = memoryview(part).cast("B")
        writer.write(_LENGTH.pack(len(view)))
        for i in range(0, len(view), 2**18):
            writer.write(view[i : i + 2**18])
            await writer.drain()
    await writer.drain()


async def receive_async(reader: asyncio.StreamReader) -> bytes:
    """The head of a message without frames. Raises asyncio.IncompleteReadError if the other side is gone."""
    await reader.readexactly(_COUNT.size)
    (length,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
    return await reader.readexactly(length)
