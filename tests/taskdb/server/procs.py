"""Real daemons for tests: started, killed, started again on the same folder. Nothing waits without a deadline."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Self

import msgpack
from click.testing import CliRunner, Result

from taskdb import commands as c
from taskdb.access import Daemon as Known
from taskdb.cli.main import cli
from taskdb.client import Session
from taskdb.model import Level, TaskFlag

ROOT = Path(__file__).parents[3]
#: For every single thing a test waits for.
PATIENCE_SECONDS = 15.0


def until(condition: Callable[[], object], what: str) -> None:
    stop = time.monotonic() + PATIENCE_SECONDS
    while not condition():
        assert time.monotonic() < stop, f"waited {PATIENCE_SECONDS:.0f} s for: {what}"
        time.sleep(0.005)


async def until_async(condition: Callable[[], object], what: str) -> None:
    stop = time.monotonic() + PATIENCE_SECONDS
    while not condition():
        assert time.monotonic() < stop, f"waited {PATIENCE_SECONDS:.0f} s for: {what}"
        await asyncio.sleep(0.005)


def command(*args: str) -> list[str]:
    return [sys.executable, "-m", "taskdb", *args]


def environment() -> dict[str, str]:
    path = os.environ.get("PYTHONPATH")
    return {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{path}" if path else str(ROOT)}


def run(*args: str, **env: str) -> subprocess.CompletedProcess[str]:
    """A command of the command line, to its end."""
    return subprocess.run(
        command(*args), capture_output=True, text=True, timeout=PATIENCE_SECONDS, env={**environment(), **env}, check=False
    )


def invoke(daemon: Daemon, *args: str) -> Result:
    """The same, asked of a daemon, in this process: it takes no second to start."""
    return CliRunner().invoke(cli, args, env={"TASKDB_URL": daemon.address})


class Daemon:
    """`taskdb serve` on `folder`/data, listening on `folder`/sock unless told otherwise."""

    def __init__(self, folder: Path, *args: str, listen: str = ""):
        self.data = folder / "data"
        self.ready = folder / "ready"
        self.log = folder / "log"
        self.address = listen or f"unix:{folder / 'sock'}"
        self.args = args
        self.process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *details: object) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.wait()

    def start(self) -> None:
        self.ready.unlink(missing_ok=True)
        args = ("serve", "--data", str(self.data), "--listen", self.address, "--ready-file", str(self.ready), *self.args)
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(command(*args), stderr=log, stdin=subprocess.DEVNULL, env=environment())
        until(lambda: self.ready.exists() or self.ended, "the daemon to serve")
        assert not self.ended, self.words()
        self.address = self.ready.read_text().strip()

    @property
    def ended(self) -> bool:
        return self.process is not None and self.process.poll() is not None

    def words(self) -> str:
        return self.log.read_text()

    def send(self, number: signal.Signals) -> int:
        """Send a signal; the exit code."""
        assert self.process is not None
        self.process.send_signal(number)
        return self.process.wait(PATIENCE_SECONDS)

    def kill(self) -> None:
        self.send(signal.SIGKILL)

    def freeze(self) -> None:
        assert self.process is not None
        self.process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        assert self.process is not None
        self.process.send_signal(signal.SIGCONT)


class Recorder:
    """A Session with all it heard. It holds what was leased and not given back, as a scheduler does."""

    def __init__(self, address: str | Known, name: str = "scheduler-1"):
        self.results: list[tuple[int, c.Result, list[tuple[int, str, str, str]]]] = []
        self.states: list[tuple[str, str]] = []
        self.held: set[int] = set()
        self.leases: list[c.Lease] = []
        self.session = Session(
            address, name, on_result=self._on_result, on_state=lambda *x: self.states.append(x), held=lambda: sorted(self.held)
        )

    def _on_result(self, result: c.Result, seq: int, refused: list[tuple[int, str, str, str]]) -> None:
        self.results.append((seq, result, refused))
        self.leases += result.leases
        self.held |= {lease.id for lease in result.leases}
        self.held -= set(result.release)

    async def __aenter__(self) -> Self:
        await self.session.attach(PATIENCE_SECONDS)
        return self

    async def __aexit__(self, *details: object) -> None:
        await self.session.close()

    async def ask(self, *commands: c.Command) -> c.Result:
        """Send a batch and wait for its Result."""
        result, refused = await self.ask_refused(*commands)
        assert refused == []
        return result

    async def ask_refused(self, *commands: c.Command) -> tuple[c.Result, list[tuple[int, str, str, str]]]:
        seq = self.session.send(commands)
        await until_async(lambda: any(x[0] == seq for x in self.results), f"the Result of batch {seq}")
        _, result, refused = next(x for x in self.results if x[0] == seq)
        return result, refused

    async def durable(self) -> None:
        await until_async(lambda: self.session.unacked == 0, "Durable")

    async def told(self, state: str) -> str:
        await until_async(lambda: any(x == state for x, _ in self.states), f"state {state}, got {self.states}")
        return next(detail for x, detail in self.states if x == state)

    def credit(self, total: int) -> c.Credit:
        return c.Credit(total, total, self.session.leases_seen)

    def finish(self, ids: Iterable[int]) -> c.Report:
        done = list(ids)
        return c.Report(done, [Level.MEMORY] * len(done), [8] * len(done))


def key(name: str, *index: int) -> bytes:
    packed: bytes = msgpack.packb((name, *index) if index else name)
    return packed


def begin(submission: str, client: str = "client-1") -> c.BeginGraph:
    return c.BeginGraph(submission, client, generation=1.0, submitted=1.0, label="a test")


def run_of(submission: str, keys: Sequence[bytes], first: int = 0, wanted: bool = True) -> c.AddTasks:
    """Independent tasks."""
    flags = [int(TaskFlag.WANTED)] * len(keys) if wanted else []
    return c.AddTasks(submission, first, keys, [b"spec"] * len(keys), flags)


def graph(submission: str, keys: Sequence[bytes], client: str = "client-1") -> list[c.Command]:
    """A whole submission of independent, wanted tasks."""
    return [begin(submission, client), run_of(submission, keys), c.SealGraph(submission)]
