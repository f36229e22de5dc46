"""Clusters of real processes for tests: daemon, scheduler with the adapter, workers. Free ports, stopped by process id, logs on failure."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

from bench.processes import ROOT, ProcessDied, Processes, Spawned, await_port, descendants, free_port

#: For every single thing a test waits for. Machines that run tests are small and shared.
PATIENCE_SECONDS = 30.0
#: What stock's `validate` and the adapter say when they find a fault.
_FAULT = re.compile(
    r"AssertionError|InvalidTransition|Impossible transition|the adapter failed to follow|CRITICAL - (?!Closed comm)"
    r"|Task exception was never|Exception while handling op"
)


def until(condition: Callable[[], Any], what: str, patience: float = PATIENCE_SECONDS) -> Any:
    """The first true value of the condition; fails with `what` and the last value if there is none in time."""
    deadline = time.monotonic() + patience
    while not (value := condition()):
        assert time.monotonic() < deadline, f"waited {patience:.0f} s for: {what}; last seen: {value!r}"
        time.sleep(0.02)
    return value


def dask(*words: str) -> list[str]:
    return ["-m", "dask", *words]


class Cluster:
    """Use as a context manager.

    `window`: None for the default. `embedded`: the scheduler starts its own daemon. `stock`: a scheduler without the adapter, to see
    whether a test asks of ours what stock does. `env`: for the scheduler, over the environment. `survive`: workers have our preload. `data`: the
    embedded daemon keeps its store.
    """

    def __init__(
        self,
        folder: Path,
        *,
        window: int | None = None,
        workers: int = 2,
        embedded: bool = False,
        stock: bool = False,
        serve: tuple[str, ...] = (),
        env: dict[str, str] | None = None,
        worker_args: tuple[tuple[str, ...], ...] = (),
        survive: bool = False,
        data: bool = False,
    ) -> None:
        self.folder = self._first_folder = folder
        self._generation = 0
        self.window = window
        self.processes = Processes(folder)
        self.workers: list[Spawned] = []
        self.daemon: Spawned | None = None
        self.scheduler: Spawned
        self.address = ""
        self._embedded = embedded
        self.stock = stock
        self._serve = serve
        self._wanted = workers
        self._worker_args = worker_args
        self._survive = survive
        self._data = data
        self._count = 0
        self._read = 0
        self._env = {"DASK_DISTRIBUTED__SCHEDULER__VALIDATE": "True", **(env or {})}
        self.port = free_port()
        self.url = f"127.0.0.1:{free_port()}"

    def __enter__(self) -> Cluster:
        try:
            if not self._embedded and not self.stock:
                self.start_daemon()
            self.start_scheduler()
            for i in range(self._wanted):
                self.start_worker(*(self._worker_args[i] if i < len(self._worker_args) else ()), wait=False)
            for worker in self.workers:
                self._await(worker, lambda log=worker.log: b"Registered to:" in log.read_bytes())
        except BaseException:
            self.processes.stop()
            raise
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.processes.stop()

    def start_anew(self) -> None:
        """Other processes and an empty store."""
        self.processes.stop()
        self._generation += 1
        self.folder = self._first_folder / f"again-{self._generation}"
        self.folder.mkdir()
        self.processes = Processes(self.folder)
        self.workers = []
        self._read = 0
        self.port = free_port()
        self.url = f"127.0.0.1:{free_port()}"
        self.__enter__()

    # ------------------------------------------------------------------------------------------------------- processes

    def start_daemon(self) -> Spawned:
        self._count += 1
        args = ["-m", "taskdb", "serve", "--data", str(self.folder / "data"), "--listen", self.url, "--log-level", "info", *self._serve]
        self.daemon = self.processes.start(f"daemon-{self._count}", args)
        await_port(self.daemon, int(self.url.rpartition(":")[2]), PATIENCE_SECONDS)
        return self.daemon

    def scheduler_command(self, port: int, *more: str) -> list[str]:
        args = dask("scheduler", "--host", "127.0.0.1", "--port", str(port), "--dashboard-address", "127.0.0.1:0", "--no-dashboard")
        if self.stock:
            return args
        args += ["--preload", "scheduler_adapter"]
        if not self._embedded:
            args += ["--taskdb-url", self.url]
        elif self._data:
            args += ["--taskdb-data", str(self.folder / "data")]
        if self.window is not None:
            args += ["--taskdb-window", str(self.window)]
        return [*args, *more]

    def start_scheduler(self) -> Spawned:
        with mock.patch.dict(os.environ, self._env):
            self.scheduler = self.processes.start("scheduler", self.scheduler_command(self.port))
        self.address = f"tcp://127.0.0.1:{self.port}"
        # It listens now, and serves once the preload has had its turn.
        self._await(self.scheduler, lambda: "Scheduler at:" in self.scheduler_log())
        return self.scheduler

    def start_worker(self, *args: str, wait: bool = True, nthreads: int = 1) -> Spawned:
        self._count += 1
        # What tests send is plain functions: a worker needs nothing of ours, but finds them by module name.
        local = ["--local-directory", str(self.folder), "--nthreads", str(nthreads), "--no-dashboard"]
        if "--nanny" not in args:
            local.append("--no-nanny")
        if self._survive:
            local += ["--preload", "scheduler_adapter.worker"]
        worker = self.processes.start(f"worker-{self._count}", dask("worker", self.address, *local, *args))
        self.workers.append(worker)
        if wait:
            self._await(worker, lambda: b"Registered to:" in worker.log.read_bytes())
        return worker

    def _await(self, spawned: Spawned, ready: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 2 * PATIENCE_SECONDS
        while not ready():
            spawned.check()
            if time.monotonic() > deadline:
                raise TimeoutError(f"{spawned.name} was not ready; its log ends:\n{spawned.tail()}")
            time.sleep(0.05)

    def restart_scheduler(self) -> Spawned:
        """Killed as by a crash, and started by the same command."""
        self.kill(self.scheduler)
        return self.start_scheduler()

    def kill(self, spawned: Spawned) -> None:
        """As a crash: SIGKILL, and gone when this returns."""
        spawned.popen.send_signal(signal.SIGKILL)
        spawned.popen.wait(PATIENCE_SECONDS)
        self.processes.ended(spawned)

    # ------------------------------------------------------------------------------------------------------------ logs

    def scheduler_log(self) -> str:
        return self.scheduler.log.read_text(errors="replace")

    def faults(self) -> list[str]:
        """Faults in the scheduler's log since the last call, each with the lines around it."""
        lines = self.scheduler_log()[self._read :].splitlines()
        self._read = len(self.scheduler_log())
        return ["\n".join(lines[max(0, i - 12) : i + 3]) for i, line in enumerate(lines) if _FAULT.search(line)]

    # ---------------------------------------------------------------------------------------------------------- daemon

    def taskdb(self, *words: str) -> Any:
        """What `taskdb WORDS --output json` says."""
        args = [sys.executable, "-m", "taskdb", *words, "--url", self.url, "--output", "json"]
        done = subprocess.run(args, capture_output=True, text=True, timeout=PATIENCE_SECONDS, cwd=ROOT, check=False)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)


@contextlib.contextmanager
def cluster(folder: Path, **options: Any) -> Iterator[Cluster]:
    with Cluster(folder, **options) as it:
        yield it


def run(
    args: list[str], *, env: dict[str, str] | None = None, cwd: Path | None = None, timeout: float = 60.0
) -> subprocess.CompletedProcess[str]:
    """`python ARGS` to its end."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    return subprocess.run(
        [sys.executable, *args],
        capture_output=True,
        text=True,
        timeout=timeout,
        env={**os.environ, "PYTHONPATH": path, **(env or {})},
        cwd=cwd,
        check=False,
    )


__all__ = ["PATIENCE_SECONDS", "Cluster", "ProcessDied", "Spawned", "cluster", "descendants", "free_port", "run", "until"]
