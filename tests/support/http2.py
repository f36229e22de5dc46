"""Just enough HTTP/2 to be a bad client: what is announced and not sent, sent byte by byte, or no HTTP/2 at all."""

from __future__ import annotations

import socket
import struct
from typing import Self

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, RST_STREAM, SETTINGS, PING, GOAWAY = 0, 1, 3, 4, 6, 7
END_STREAM, ACK, END_HEADERS = 1, 1, 4


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    return len(payload).to_bytes(3) + bytes((kind, flags)) + stream.to_bytes(4) + payload


def _literal(name: bytes, value: bytes) -> bytes:
    """A header that is not compressed."""
    return b"\x00" + bytes((len(name),)) + name + bytes((len(value),)) + value


class Connection:
    """One connection to a port of this machine, with the preface sent."""

    def __init__(self, port: int, timeout_seconds: float) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port), timeout=timeout_seconds)
        self._rest = b""
        self.send(PREFACE + frame(SETTINGS, 0, 0))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *details: object) -> None:
        self.close()

    def close(self) -> None:
        self._socket.close()

    def send(self, data: bytes) -> None:
        self._socket.sendall(data)

    def call(self, path: str, stream: int = 1) -> None:
        """Begin a gRPC call."""
        headers = [
            (b":method", b"POST"),
            (b":scheme", b"http"),
            (b":path", path.encode()),
            (b":authority", b"localhost"),
            (b"te", b"trailers"),
            (b"content-type", b"application/grpc"),
        ]
        self.send(frame(HEADERS, END_HEADERS, stream, b"".join(_literal(*header) for header in headers)))

    def message(self, announced: int, sent: bytes, stream: int = 1) -> None:
        """A message of so many bytes, of which only these are sent."""
        self.send(frame(DATA, 0, stream, struct.pack(">BI", 0, announced) + sent))

    def receive(self) -> tuple[int, int, int, bytes]:
        """(kind, flags, stream, payload). Raises ConnectionError at the end, TimeoutError."""
        head = self._exactly(9)
        return head[3], head[4], int.from_bytes(head[5:9]), self._exactly(int.from_bytes(head[:3]))

    def until(self, *kinds: int) -> tuple[int, int, int, bytes]:
        """The next frame of these kinds."""
        while (got := self.receive())[0] not in kinds:
            pass
        return got

    def _exactly(self, size: int) -> bytes:
        while len(self._rest) < size:
            more = self._socket.recv(65536)
            if not more:
                raise ConnectionError("the other side has closed")
            self._rest += more
        data, self._rest = self._rest[:size], self._rest[size:]
        return data
