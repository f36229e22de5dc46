"""A fork server of daemons: one line in, `DATA SOCKET`; one line out, the pid. Ends with its stdin, and its children with it.

A scheduler of the suite lives for a second; starting Python and gRPC for each would take longer than its test.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
from contextlib import suppress
from pathlib import Path

from taskdb.config import ServerConfig, StoreConfig
from taskdb.server import daemon


def main() -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    pids = []
    for line in sys.stdin:
        data, socket = line.split()
        pid = os.fork()
        if not pid:
            _serve(data, socket)
        pids.append(pid)
        print(pid, flush=True)
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)


def _serve(data: str, socket: str) -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    os.dup2(null, 1)
    logging.basicConfig(level="WARNING", format="taskdb: %(levelname)s %(message)s")
    try:
        daemon.run(ServerConfig(StoreConfig(Path(data), durability="os", bytes_max=2**33), listen=f"unix:{socket}"))
    finally:
        os._exit(0)


if __name__ == "__main__":
    main()
