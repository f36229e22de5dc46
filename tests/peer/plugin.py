"""A pytest plugin: the adapter in every scheduler that a test starts, and a line of JSON for each test.

TASKDB_PEER_REGIME: stock, default or paged. TASKDB_PEER_RESULTS, TASKDB_PEER_RUNNING: files. Schedulers in the test process get a daemon from a fork server
(`daemons.py`) and share an ingest process; those in processes of their own start both, as shipped. When a scheduler has closed, its store
is verified: a violation fails the test.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import AsyncGenerator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

STOCK, DEFAULT, PAGED = REGIMES = ("stock", "default", "paged")
REGIME = os.environ.get("TASKDB_PEER_REGIME", STOCK)
RESULTS = Path(os.environ.get("TASKDB_PEER_RESULTS", os.devnull))
#: Names the test that runs, for whoever finds this process dead.
RUNNING = Path(os.environ.get("TASKDB_PEER_RUNNING", os.devnull))
#: Longest wait for a daemon to be ready or to end, seconds.
DAEMON_SECONDS = 20.0
#: What is kept of a text.
TEXT_CHARS = 6_000

if REGIME != STOCK:
    os.environ["DASK_DISTRIBUTED__SCHEDULER__PRELOAD"] = '["scheduler_adapter"]'
if REGIME == PAGED:
    os.environ["DASK_TASKDB__WINDOW"] = "0"


class Record:
    """What is known of the test that runs."""

    def __init__(self) -> None:
        self.outcome = "passed"
        self.seconds = 0.0
        self.text = ""
        self.logged: list[str] = []
        self.violations: list[str] = []
        #: Schedulers closed, and tasks leased to them: 0 of an adapter's test means that it shows nothing of paging.
        self.schedulers = self.leases = 0


current = Record()


class _Log(logging.Handler):
    """Warnings of ours, and errors of the scheduler."""

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        if record.exc_info and record.exc_info[0]:
            text += "\n" + "".join(traceback.format_exception(*record.exc_info))
        ours = record.name.startswith(("taskdb", "distributed.taskdb")) or "scheduler_adapter" in text
        if (ours and record.levelno >= logging.WARNING) or (record.levelno >= logging.ERROR and record.name == "distributed.scheduler"):
            current.logged.append(f"{record.levelname} {record.name}: {text[-TEXT_CHARS:]}")


# ------------------------------------------------------------------------------------------------------------ processes


class Farm:
    """The fork server, and the ingest process of all."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="taskdb-peer-"))
        self.ingest_socket = self.folder / "ingest"
        self._numbers = itertools.count()
        self._server = self._start("tests.peer.daemons")
        self._ingest = self._start("scheduler_adapter.ingest.process", str(self.ingest_socket))

    def _start(self, *words: str) -> subprocess.Popen[str]:
        env = dict(os.environ, PYTHONPATH=os.pathsep.join(filter(None, sys.path)))
        return subprocess.Popen([sys.executable, "-m", *words], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env)

    @property
    def ingest_pid(self) -> int:
        return self._ingest.pid

    def daemon(self) -> tuple[Path, int]:
        folder = self.folder / str(next(self._numbers))
        folder.mkdir()
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        self._server.stdin.write(f"{folder / 'data'} {folder / 'socket'}\n")
        self._server.stdin.flush()
        return folder, int(self._server.stdout.readline())

    def close(self) -> None:
        for process in (self._server, self._ingest):
            assert process.stdin is not None
            process.stdin.close()
            process.wait(DAEMON_SECONDS)
        shutil.rmtree(self.folder, ignore_errors=True)


farm: Farm


class ForkedDaemon:
    """In the place of `EmbeddedDaemon`."""

    def __init__(self, data: str | None):
        self._folder, self._pid = farm.daemon()
        self._ended = False
        self.address = f"unix:{self._folder / 'socket'}"

    @property
    def pid(self) -> int:
        return self._pid

    async def start(self, timeout_seconds: float) -> None:
        deadline = time.monotonic() + DAEMON_SECONDS
        while not (self._folder / "socket").exists():
            assert time.monotonic() < deadline, "the daemon did not get ready"
            await asyncio.sleep(0.005)

    async def close(self) -> None:
        if self._ended:
            return
        self._ended = True
        try:
            os.kill(self._pid, signal.SIGTERM)
            deadline = time.monotonic() + DAEMON_SECONDS
            while time.monotonic() < deadline:
                os.kill(self._pid, 0)
                await asyncio.sleep(0.01)
            current.violations.append("the daemon did not end")
            os.kill(self._pid, signal.SIGKILL)
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
                    current.violations.extend(itertools.islice(violations(txn), 5))
            finally:
                store.close()
        except Exception:
            current.violations.append(traceback.format_exc()[-TEXT_CHARS:])


def install() -> None:
    """Replace what the adapter starts, and count what it does."""
    from scheduler_adapter import adapter
    from scheduler_adapter.ingest.client import IngestProcess

    class SharedIngest(IngestProcess):
        def __init__(self) -> None:
            self._socket = farm.ingest_socket
            self._process = None
            self._starting = None

        @property
        def pid(self) -> int:
            return farm.ingest_pid

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
        current.schedulers += 1
        current.leases += self.session.leases_seen if self.session is not None else 0
        await stock_close(self)

    adapter.EmbeddedDaemon = ForkedDaemon  # type: ignore[misc, assignment]
    adapter.IngestProcess = SharedIngest  # type: ignore[misc]
    adapter.Adapter.close = close  # type: ignore[method-assign]


async def _warm_up() -> None:
    """Make gRPC's threads before the first test looks for leaked ones; they are kept."""
    from grpc._cython import cygrpc

    from taskdb.client import Session

    cygrpc.init_grpc_aio()
    daemon = ForkedDaemon(None)
    await daemon.start(DAEMON_SECONDS)
    session = Session(daemon.address, "warm-up", on_result=lambda *_: None, on_state=lambda *_: None, held=list)
    await session.attach(DAEMON_SECONDS)
    await session.close()
    await daemon.close()


# ---------------------------------------------------------------------------------------------------------------- pytest


def pytest_configure(config: pytest.Config) -> None:
    global farm
    # Of pytest-rerunfailures: a flaky test is not run again here.
    config.addinivalue_line("markers", "flaky: may fail")
    if REGIME != STOCK:
        farm = Farm()
        install()
        asyncio.run(_warm_up())
    for name in ("taskdb", "distributed"):
        logging.getLogger(name).addHandler(_Log())


def pytest_unconfigure(config: pytest.Config) -> None:
    if REGIME != STOCK:
        farm.close()


def pytest_runtest_logstart(nodeid: str, location: Any) -> None:
    global current
    current = Record()
    with suppress(FileNotFoundError):
        RUNNING.write_text(nodeid)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    current.seconds += report.duration
    if report.outcome == "failed":
        current.outcome = "hung" if "Timeout (>" in str(report.longreprtext) else "failed"
        current.text += str(report.longreprtext)[-TEXT_CHARS:]
    elif report.outcome == "skipped" and current.outcome == "passed":
        current.outcome = "skipped"


def pytest_runtest_logfinish(nodeid: str, location: Any) -> None:
    if current.violations and current.outcome != "hung":
        current.outcome = "failed"
    line = {"test": nodeid, **vars(current)}
    with suppress(FileNotFoundError), RESULTS.open("a") as file:
        file.write(json.dumps(line) + "\n")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what stands in the results."""
    done = set()
    if RESULTS.is_file():
        done = {json.loads(line)["test"] for line in RESULTS.read_text().splitlines()}
    items[:] = [item for item in items if item.nodeid not in done]
