"""A fork server of daemons: a connection says `DATA SOCKET`, hears the pid, and is the daemon's life. Ends with its stdin, and all with it.

A scheduler of the suite lives for a second; starting Python and gRPC for each would take longer than its test.
"""

from __future__ import annotations

import logging
import os
import selectors
import signal
import socket
import sys
from contextlib import suppress
from pathlib import Path

from taskdb.config import ServerConfig, StoreConfig
from taskdb.server import daemon


def main(path: str) -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    selector = selectors.DefaultSelector()
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen(64)
    pids: dict[socket.socket, int] = {}
    selector.register(listener, selectors.EVENT_READ)
    selector.register(sys.stdin, selectors.EVENT_READ)
    while True:
        for event, _ in selector.select():
            end = event.fileobj
            if end is sys.stdin:
                for pid in pids.values():
                    _end(pid)
                return
            if end is listener:
                connection, _ = listener.accept()
                data, address = connection.makefile().readline().split()
                pids[connection] = pid = os.fork()
                if not pid:
                    _serve(data, address)
                connection.sendall(f"{pid}\n".encode())
                selector.register(connection, selectors.EVENT_READ)
            elif isinstance(end, socket.socket):
                selector.unregister(end)
                _end(pids.pop(end))
                end.close()


def _end(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGTERM)


def _serve(data: str, address: str) -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    os.dup2(null, 1)
    os.closerange(3, 1024)
    logging.basicConfig(level="WARNING", format="taskdb: %(levelname)s %(message)s")
    try:
        daemon.run(ServerConfig(StoreConfig(Path(data), durability="os", bytes_max=2**33), listen=f"unix:{address}"))
    finally:
        os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1])
