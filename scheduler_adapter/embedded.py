"""The embedded daemon: `taskdb serve` as a child on a Unix socket, for a scheduler that was given no address."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from taskdb.cli.exits import LOCKED_OR_FORMAT
from taskdb.errors import Unavailable

#: Pause until a store that is in use is tried again.
LOCKED_PAUSE_SECONDS = 0.25


class EmbeddedDaemon:
    """Started with the scheduler, ended with it. Its store is kept only if a folder was given."""

    def __init__(self, data: str | None):
        self._folder = Path(tempfile.mkdtemp(prefix="taskdb-"))
        self._data = Path(data) if data else self._folder / "data"
        self._temporary = data is None
        self.address = f"unix:{self._folder / 'socket'}"
        self._process: asyncio.subprocess.Process | None = None
        self._log: list[bytes] = []

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    async def start(self, timeout_seconds: float) -> None:
        """Return once it serves. Raises Unavailable with its last words if it ends, or is not ready in time."""
        deadline = time.monotonic() + timeout_seconds
        while not await self._try(deadline - time.monotonic()):
            # The daemon of a scheduler that has just died may still be writing: it ends with it, a moment later.
            locked = self._process is not None and self._process.returncode == LOCKED_OR_FORMAT
            if not locked or time.monotonic() + LOCKED_PAUSE_SECONDS > deadline:
                words = b"".join(self._log).decode(errors="replace").strip().splitlines()
                await self.close()
                raise Unavailable(words[-1] if words else "the embedded daemon (`taskdb serve`) did not get ready in time")
            await asyncio.sleep(LOCKED_PAUSE_SECONDS)

    async def _try(self, timeout_seconds: float) -> bool:
        command = [sys.executable, "-m", "taskdb", "serve", "--data", str(self._data), "--listen", self.address]
        # If we are killed, it removes what we would have.
        command += ["--exit-with-parent", "--temporary", str(self._folder)]
        if self._temporary:
            # What is thrown away at the end need not survive a power cut.
            command += ["--durability", "os"]
        self._log = []
        self._process = await asyncio.create_subprocess_exec(*command, stdin=subprocess.PIPE, stderr=subprocess.PIPE)
        ready = asyncio.Event()
        self._reader = asyncio.get_running_loop().create_task(self._read(ready))
        waiting = asyncio.ensure_future(ready.wait())
        await asyncio.wait([waiting, self._reader], timeout=timeout_seconds, return_when="FIRST_COMPLETED")
        waiting.cancel()
        if not ready.is_set() and self._reader.done():
            await self._process.wait()
        return ready.is_set()

    async def _read(self, ready: asyncio.Event) -> None:
        assert self._process is not None and self._process.stderr is not None
        async for line in self._process.stderr:
            if b"serving" in line:
                ready.set()
            else:
                sys.stderr.buffer.write(line)
            self._log = [*self._log[-20:], line]

    async def close(self) -> None:
        process = self._process
        if process is not None and process.returncode is None:
            process.terminate()
            try:
                await asyncio.wait_for(process.wait(), 10)
            except TimeoutError:
                process.kill()
                await process.wait()
        shutil.rmtree(self._folder, ignore_errors=True)
