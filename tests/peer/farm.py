"""Daemons and an ingest process that all schedulers of a run of the suite share, and what is seen when these close.

Imported by the plugin, and as a preload by schedulers in child processes of the tests: so these do not start two processes each.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import multiprocessing
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
import uuid
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path
from typing import Any

#: Where the farm is, for child processes.
FOLDER = "TASKDB_PEER_FARM"
#: Longest wait for a daemon to be ready or to end, seconds.
DAEMON_SECONDS = 20.0
#: What is kept of a text.
TEXT_CHARS = 6_000
#: Violations told of one store.
VIOLATIONS_MAX = 5


class Farm:
    """Owns the processes. Lives in the process of the tests."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="taskdb-peer-"))
        os.environ[FOLDER] = str(self.folder)
        self._processes = [
            self._start("tests.peer.daemons", str(self.folder / "daemons")),
            self._start("scheduler_adapter.ingest.process", str(self.folder / "ingest")),
        ]
        deadline = time.monotonic() + DAEMON_SECONDS
        while not (self.folder / "daemons").exists():
            assert time.monotonic() < deadline, "the fork server did not get ready"
            time.sleep(0.02)

    def _start(self, *words: str) -> subprocess.Popen[bytes]:
        env = dict(os.environ, PYTHONPATH=os.pathsep.join(filter(None, sys.path)))
        return subprocess.Popen([sys.executable, "-m", *words], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env)

    def told(self) -> list[dict[str, Any]]:
        """What closed schedulers told since the last call."""
        file = self.folder / "told"
        if not file.exists():
            return []
        taken = file.rename(self.folder / "taken")
        return [json.loads(line) for line in taken.read_text().splitlines()]

    def close(self) -> None:
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.close()
            process.wait(DAEMON_SECONDS)
        shutil.rmtree(self.folder, ignore_errors=True)


def _folder() -> Path:
    return Path(os.environ[FOLDER])


def tell(**what: Any) -> None:
    with (_folder() / "told").open("a") as file:
        file.write(json.dumps(what) + "\n")


class ForkedDaemon:
    """In the place of `EmbeddedDaemon`."""

    def __init__(self, data: str | None):
        self._folder = _folder() / uuid.uuid4().hex[:12]
        self._folder.mkdir()
        self.address = f"unix:{self._folder / 'socket'}"
        self._life = socket.socket(socket.AF_UNIX)
        self._life.connect(str(_folder() / "daemons"))
        self._life.sendall(f"{self._folder / 'data'} {self._folder / 'socket'}\n".encode())
        self.pid = int(self._life.makefile().readline())
        self._ended = False

    async def start(self, timeout_seconds: float) -> None:
        deadline = time.monotonic() + DAEMON_SECONDS
        while not (self._folder / "socket").exists():
            assert time.monotonic() < deadline, "the daemon did not get ready"
            await asyncio.sleep(0.005)

    async def close(self) -> None:
        if self._ended:
            return
        self._ended = True
        self._life.close()
        try:
            deadline = time.monotonic() + DAEMON_SECONDS
            while time.monotonic() < deadline:
                os.kill(self.pid, 0)
                await asyncio.sleep(0.01)
            tell(violations=["the daemon did not end"])
            os.kill(self.pid, signal.SIGKILL)
        except ProcessLookupError:
            self._verify()
            shutil.rmtree(self._folder, ignore_errors=True)

    def _verify(self) -> None:
        from taskdb.engine.invariants import violations
        from taskdb.store.lmdb_store import LmdbStore

        try:
            store = LmdbStore(self._folder / "data", sync=False)
            try:
                with store.read() as txn:
                    found = list(itertools.islice(violations(txn), VIOLATIONS_MAX))
            finally:
                store.close()
        except Exception:
            found = [traceback.format_exc()[-TEXT_CHARS:]]
        if found:
            tell(violations=found)


def install() -> None:
    """Replace what the adapter starts, and count what it does."""
    from scheduler_adapter import adapter
    from scheduler_adapter.ingest.client import IngestProcess

    class SharedIngest(IngestProcess):
        def __init__(self) -> None:
            self._socket = _folder() / "ingest"
            self._process = None
            self._starting = None

        @property
        def pid(self) -> None:
            return None

        def start(self) -> None:
            self._starting = asyncio.get_running_loop().create_task(self._ready())

        async def _ready(self) -> None:
            while not self._socket.exists():
                await asyncio.sleep(0.02)

        async def run(self, job: dict[str, Any], frames: Sequence[Any]) -> AsyncGenerator[dict[str, Any], None]:
            if self._starting is None:
                self.start()
            messages = super().run(job, frames)
            try:
                async for message in messages:
                    yield message
            finally:
                await messages.aclose()

        async def close(self) -> None:
            if self._starting is not None:
                self._starting.cancel()

    stock_close = adapter.Adapter.close

    async def close(self: Any) -> None:
        tell(leases=self.session.leases_seen if self.session is not None else 0)
        await stock_close(self)

    adapter.EmbeddedDaemon = ForkedDaemon  # type: ignore[misc, assignment]
    adapter.IngestProcess = SharedIngest  # type: ignore[misc]
    adapter.Adapter.close = close  # type: ignore[method-assign]


if FOLDER in os.environ and multiprocessing.parent_process() is not None:
    install()
