"""A cluster of real processes on free local ports: daemon, scheduler, workers, each started by the command a user would type.

`python -m demo.cluster [--window N] [--stock] -- COMMAND … {address} …` runs COMMAND against one.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

from bench.processes import ProcessDied, Processes, Spawned, await_port, free_port

#: Seconds until a process must be ready. A cold start of a few Python processes on a busy machine takes some.
START_SECONDS_MAX = 60.0
#: What goes wrong with a cluster; the text ends with the last lines of a log.
FAILURES = (ProcessDied, TimeoutError)


def command(name: str) -> str:
    """The command of that name in the environment this runs in."""
    return str(Path(sys.executable).with_name(name))


class Cluster:
    """Use as a context manager. `stock` leaves the database out, for comparison."""

    def __init__(self, folder: Path, *, stock: bool = False, window: int | None = None, workers: int = 2) -> None:
        self.data = folder / "taskdb-data"
        #: Where the daemon listens; None with `stock`.
        self.url: str | None = None
        self.address = ""
        self.processes = Processes(folder)
        self.scheduler: Spawned
        self._folder = folder
        self._stock = stock
        self._window = window
        self._workers = workers

    def __enter__(self) -> Cluster:
        try:
            self._start()
        except BaseException:
            self.processes.stop()
            raise
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.processes.stop()

    def _start(self) -> None:
        options: list[str] = []
        if not self._stock:
            port = free_port()
            self.url = f"127.0.0.1:{port}"
            daemon = self.processes.start("taskdb", [command("taskdb"), "serve", "--data", str(self.data), "--listen", self.url])
            await_port(daemon, port, START_SECONDS_MAX)
            options = ["--preload", "scheduler_adapter", "--taskdb-url", self.url]
            if self._window is not None:
                options += ["--taskdb-window", str(self._window)]
        dask = command("dask")
        contact = self._folder / "scheduler.json"
        common = ["--scheduler-file", str(contact), "--no-dashboard"]
        local = ["--host", "127.0.0.1", "--port", "0", "--dashboard-address", "127.0.0.1:0"]
        self.scheduler = self.processes.start("scheduler", [dask, "scheduler", *local, *common, *options])
        # Not written at one stroke.
        self.wait_for(self.scheduler, lambda: contact.exists() and contact.read_text().rstrip().endswith("}"))
        self.address = json.loads(contact.read_text())["address"]
        for number in range(1, self._workers + 1):
            local = ["--local-directory", str(self._folder)]
            worker = self.processes.start(f"worker-{number}", [dask, "worker", "--nthreads", "1", "--no-nanny", *common, *local])
            self.wait_for(worker, lambda log=worker.log: b"Registered to:" in log.read_bytes())
        # Workers are served once the preload has had its turn.
        if self.url is not None and not self.status()["scheduler_attached"]:
            # Dask goes on without a preload that failed; figures of a scheduler without the database would be taken for ours.
            raise ProcessDied(f"the scheduler runs without the database; its log ends:\n{self.scheduler.tail()}")

    def status(self) -> dict[str, Any]:
        """What the daemon says of itself and its store."""
        asked = [sys.executable, command("taskdb"), "status", "--url", str(self.url), "--output", "json"]
        done = subprocess.run(asked, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise ProcessDied(f"taskdb status failed: {done.stderr}")
        return json.loads(done.stdout)

    def wait_for(self, spawned: Spawned, ready: Callable[[], bool]) -> None:
        deadline = time.monotonic() + START_SECONDS_MAX
        while not ready():
            self.processes.check()
            if time.monotonic() > deadline:
                raise TimeoutError(f"{spawned.name} was not ready within {START_SECONDS_MAX:.0f} s; its log ends:\n{spawned.tail()}")
            time.sleep(0.05)


@contextlib.contextmanager
def temporary_cluster(*, stock: bool = False, window: int | None = None) -> Iterator[Cluster]:
    """A cluster in a folder that is removed with it. SIGTERM stops it just as Ctrl-C does."""

    def interrupt(signum: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    previous = signal.signal(signal.SIGTERM, interrupt)
    # A shell that starts us in the background has us ignore it.
    interrupted = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with (
            tempfile.TemporaryDirectory(prefix="taskdb-", ignore_cleanup_errors=True) as folder,
            Cluster(Path(folder), stock=stock, window=window) as cluster,
        ):
            yield cluster
    finally:
        signal.signal(signal.SIGTERM, previous)
        signal.signal(signal.SIGINT, interrupted)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m demo.cluster", description="Run a command against a small cluster.")
    parser.add_argument("--window", type=int, help="tasks the scheduler may hold")
    parser.add_argument("--stock", action="store_true", help="without the database, for comparison")
    parser.add_argument("command", nargs="+", help="{address} stands for the scheduler's address")
    args = parser.parse_args()
    try:
        with temporary_cluster(stock=args.stock, window=args.window) as cluster:
            return subprocess.run([word.replace("{address}", cluster.address) for word in args.command], check=False).returncode
    except FAILURES as failure:
        print(failure, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
