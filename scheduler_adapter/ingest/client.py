"""The scheduler's side of the ingest process: start it once, give it a job a submission."""

from __future__ import annotations

import asyncio
import os
import pickle
import shutil
import subprocess
import sys
import tempfile
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path
from typing import Any

from scheduler_adapter.ingest.frames import receive_async, send_async


class IngestFailed(Exception):
    """The ingest process ended without saying why."""


class IngestProcess:
    """Owns the process. Used on one loop."""

    def __init__(self) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="taskdb-ingest-"))
        self._socket = self._folder / "socket"
        self._process: asyncio.subprocess.Process | None = None
        self._starting: asyncio.Task[None] | None = None

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    def start(self) -> None:
        """Begin to start it (an import of Dask: a second or more); jobs wait for it."""
        self._starting = asyncio.get_running_loop().create_task(self._start())

    async def _start(self) -> None:
        env = dict(os.environ)
        env["PYTHONPATH"] = os.pathsep.join([p for p in sys.path if p])
        self._socket.unlink(missing_ok=True)
        self._process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "scheduler_adapter.ingest.process",
            str(self._socket),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=env,
        )
        assert self._process.stdout is not None
        line = await self._process.stdout.readline()
        if line.strip() != b"ready":
            raise IngestFailed("the ingest process did not start; its messages stand in the scheduler's log")

    async def run(self, job: dict[str, Any], frames: Sequence[Any]) -> AsyncGenerator[dict[str, Any], None]:
        """Messages of one submission, ending with `done`, `missing`, `whole` or `error`. Closing the iterator stops the work.

        Raises IngestFailed if the process ends in the middle of it.
        """
        running = self._process is not None and self._process.returncode is None
        if not running and (self._starting is None or self._starting.done()):
            self.start()
        assert self._starting is not None
        await asyncio.shield(self._starting)
        writer: asyncio.StreamWriter | None = None
        try:
            reader, writer = await asyncio.open_unix_connection(str(self._socket), limit=2**26)
            job["sys_path"] = [p for p in sys.path if p]
            await send_async(writer, pickle.dumps(job), [memoryview(f) for f in frames])
            while True:
                message = pickle.loads(await receive_async(reader))
                yield message
                if message["op"] in ("done", "missing", "whole", "error"):
                    return
        except (asyncio.IncompleteReadError, ConnectionError, FileNotFoundError) as e:
            raise IngestFailed(
                "the ingest process ended while it took in this graph (out of memory?); the scheduler goes on, submit it again"
            ) from e
        finally:
            if writer is not None:
                writer.close()

    async def close(self) -> None:
        if self._starting is not None and not self._starting.done():
            self._starting.cancel()
        process = self._process
        if process is not None and process.returncode is None:
            assert process.stdin is not None
            process.stdin.close()
            try:
                await asyncio.wait_for(process.wait(), 3)
            except TimeoutError:
                process.kill()
                await process.wait()
        shutil.rmtree(self._folder, ignore_errors=True)
