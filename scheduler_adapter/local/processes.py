"""Starts the processes of one run, kills and starts them again, and stops each of them by its id, however the run ends.

Nothing else starts or signals a process. Every process writes to a log file of its own in the run's folder.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import FrameType, TracebackType

import psutil

#: Folder that holds these packages; put first on the path of every process.
ROOT = Path(__file__).resolve().parents[2]
#: Time between asking a process to end and killing it, seconds.
STOP_GRACE_S = 5.0
#: Time a killed process has to be gone, seconds.
KILL_S = 30.0
#: Lines of a log that are shown when its process died.
TAIL_LINES = 40
#: Where `lasting_port` looks: below what systems give to outgoing connections.
_PORTS = range(10_000, 32_000)


class ProcessDied(RuntimeError):
    """A process of the run ended before it was asked to."""


def free_port() -> int:
    """A TCP port nobody listens on at the moment."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def lasting_port() -> int:
    """The same for a server that ends and comes back: meanwhile no outgoing connection gets the port as its own."""
    while True:
        port = random.choice(_PORTS)
        with contextlib.suppress(OSError), socket.socket() as sock:
            sock.bind(("127.0.0.1", port))
            return port


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """SIGTERM, and Ctrl-C even if a shell started us in the background, raise KeyboardInterrupt, so that contexts end what they began."""

    def interrupt(signum: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = {number: signal.signal(number, interrupt) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class Spawned:
    """One process that we started: `python ARGS`."""

    def __init__(self, name: str, args: list[str], folder: Path, env: Mapping[str, str]) -> None:
        #: Also of its log. No dots but the one before a number.
        self.name = name
        self.args = args
        self.env = env
        self.log = folder / f"{name}.log"
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
        with self.log.open("wb") as log:
            # A session of its own: Ctrl-C reaches only us, and we stop the others in order.
            self.popen = subprocess.Popen(
                [sys.executable, *args],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=folder,
                env={**os.environ, "PYTHONPATH": path, **env},
                start_new_session=True,
            )
        self.pid = self.popen.pid

    @property
    def alive(self) -> bool:
        """Whether it still runs."""
        return self.popen.poll() is None

    def said(self) -> str:
        """Its log so far."""
        return self.log.read_text(errors="replace")

    def tail(self) -> str:
        """The last lines of its log."""
        return "\n".join(self.said().splitlines()[-TAIL_LINES:])

    def check(self) -> None:
        """Raise ProcessDied, with the tail of the log, if it has ended."""
        if not self.alive:
            raise ProcessDied(f"{self.name} (pid {self.pid}) ended with code {self.popen.returncode}; its log ends:\n{self.tail()}")


def descendants(pid: int) -> list[psutil.Process]:
    """Children of the process and theirs; none if it is gone."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).children(recursive=True)
    return []


class Processes:
    """The processes of one run, as a context: on leaving it the last started is stopped first."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._spawned: list[Spawned] = []
        #: How often each name was used.
        self._lives: Counter[str] = Counter()
        #: Children of processes that were killed.
        self._orphans: list[psutil.Process] = []

    def __enter__(self) -> Processes:
        return self

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None) -> None:
        self.stop()

    def __iter__(self) -> Iterator[Spawned]:
        return iter(self._spawned)

    def start(self, name: str, args: list[str], env: Mapping[str, str] | None = None) -> Spawned:
        """Start `python ARGS` under this name; `env` goes over our environment. When a name is used again it gets a number."""
        self._lives[name] += 1
        spawned = Spawned(name if self._lives[name] == 1 else f"{name}.{self._lives[name]}", args, self.folder, env or {})
        self._spawned.append(spawned)
        return spawned

    def again(self, spawned: Spawned) -> Spawned:
        """Start what has ended by the same command."""
        return self.start(spawned.name.partition(".")[0], spawned.args, spawned.env)

    def kill(self, spawned: Spawned) -> None:
        """As a crash: SIGKILL, and gone when this returns."""
        self._orphans.extend(descendants(spawned.pid))
        spawned.popen.send_signal(signal.SIGKILL)
        spawned.popen.wait(KILL_S)
        self.ended(spawned)

    def ended(self, spawned: Spawned) -> None:
        """It has ended as it was meant to."""
        self._spawned.remove(spawned)

    def check(self) -> None:
        """Raise ProcessDied if any of them has ended."""
        for spawned in self._spawned:
            spawned.check()

    def stop(self, *, kill: bool = False) -> None:
        """Ask each to end, last started first, and kill what has not after the grace time; children of theirs too. `kill`: do not ask."""
        children = self._orphans + [child for spawned in self._spawned for child in descendants(spawned.pid)]
        for spawned in reversed(self._spawned):
            if kill:
                spawned.popen.kill()
            elif spawned.alive:
                spawned.popen.terminate()
                deadline = time.monotonic() + STOP_GRACE_S
                # Poll instead of wait(): a child that ignores the signal must not hold up the others for ever.
                while spawned.alive and time.monotonic() < deadline:
                    time.sleep(0.02)
                if spawned.alive:
                    spawned.popen.kill()
            spawned.popen.wait()
        for child in children:
            # psutil compares start times, so a process id that was given to somebody else is left alone.
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
        self._spawned.clear()
        self._orphans.clear()


def await_port(spawned: Spawned, port: int, timeout_s: float) -> None:
    """Return once the process listens on the port. Raises ProcessDied or TimeoutError."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        spawned.check()
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1.0):
            return
        time.sleep(0.1)
    raise TimeoutError(f"{spawned.name} does not listen on port {port} after {timeout_s:.0f} s:\n{spawned.tail()}")
