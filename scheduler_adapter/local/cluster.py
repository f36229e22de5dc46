"""A cluster on this machine: daemon, scheduler and workers, each started by the command a user would type, also again after a kill."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Self

from scheduler_adapter.local.processes import ProcessDied, Processes, Spawned, await_port, lasting_port
from taskdb.client import Client as Reader

#: Seconds until a process must be ready. A cold start of a few Python processes on a busy machine takes some.
START_SECONDS_MAX = 60.0
#: What goes wrong with a cluster; the text ends with the last lines of a log.
FAILURES = (ProcessDied, TimeoutError)
#: What stock's `validate` and the adapter say in the scheduler's log when they find a fault.
_FAULT = re.compile(
    r"AssertionError|InvalidTransition|Impossible transition|the adapter failed to follow|CRITICAL - (?!Closed comm)"
    r"|Task exception was never|Exception while handling op"
)


class Cluster:
    """Use as a context manager. What is killed and started again has the same command and address, and a log of its own.

    `stock`: without the database, for comparison. `window`: None for the default. `survive`: workers have our preload. `threads`: of each
    worker. `serve`, `scheduler`, `worker`: more words for these commands. `env`: for the scheduler, over the environment.
    """

    def __init__(
        self,
        folder: Path,
        *,
        stock: bool = False,
        window: int | None = None,
        survive: bool = False,
        workers: int = 2,
        threads: int = 1,
        serve: Sequence[str] = (),
        scheduler: Sequence[str] = (),
        worker: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
    ) -> None:
        self.folder = folder
        self.stock = stock
        self.window = window
        self.survive = survive
        self.processes = Processes(folder)
        self.daemon: Spawned | None = None
        self.scheduler: Spawned
        self.workers: list[Spawned] = []
        self._wanted = workers
        self._workers_started = 0
        self._threads = threads
        self._serve = serve
        self._scheduler_words = scheduler
        self._worker_words = worker
        self.env = dict(env or {})
        self._choose_ports()

    def _choose_ports(self) -> None:
        self.port = lasting_port()
        self.address = f"tcp://127.0.0.1:{self.port}"
        self.url = f"127.0.0.1:{lasting_port()}"

    @property
    def data(self) -> Path:
        """Folder of the store."""
        return self.folder / "taskdb-data"

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self.processes.stop()
            raise
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.processes.stop()

    @property
    def has_daemon(self) -> bool:
        """Whether there is a daemon to start, apart from the scheduler."""
        return not self.stock

    def start(self) -> None:
        if self.has_daemon:
            self.start_daemon()
        self.start_scheduler()
        for number in range(self._wanted):
            self.start_worker(*self.words_of_worker(number), wait=False)
        for worker in self.workers:
            self.await_worker(worker)
        # Dask goes on without a preload that failed, and a scheduler without the database would be taken for one with it.
        if self.has_daemon:
            with Reader(self.url) as reader:
                self.wait_for(self.scheduler, lambda: reader.status().scheduler_attached)

    def words_of_worker(self, number: int) -> Sequence[str]:
        """More words for the command of one of the first workers. A name of its own: the one that comes back is known by it."""
        return "--name", f"worker-{number + 1}"

    # ------------------------------------------------------------------------------------------------------- processes

    def daemon_command(self) -> list[str]:
        return ["-m", "taskdb", "serve", "--data", str(self.data), "--listen", self.url, *self._serve]

    def scheduler_command(self, port: int, *more: str) -> list[str]:
        args = ["-m", "dask", "scheduler", "--host", "127.0.0.1", "--port", str(port)]
        args += ["--dashboard-address", "127.0.0.1:0", "--no-dashboard"]
        if not self.stock:
            args += self.preload_words()
        return [*args, *self._scheduler_words, *more]

    def preload_words(self) -> list[str]:
        words = ["--preload", "scheduler_adapter", "--taskdb-url", self.url]
        if self.window is not None:
            words += ["--taskdb-window", str(self.window)]
        return words

    def worker_command(self, *more: str) -> list[str]:
        args = ["-m", "dask", "worker", self.address, "--nthreads", str(self._threads), "--no-dashboard"]
        args += ["--local-directory", str(self.folder)]
        if "--nanny" not in (*self._worker_words, *more):
            args.append("--no-nanny")
        if self.survive:
            args += ["--preload", "scheduler_adapter.worker"]
        return [*args, *self._worker_words, *more]

    def start_daemon(self) -> Spawned:
        self.daemon = self.processes.start("daemon", self.daemon_command())
        self.await_daemon()
        return self.daemon

    def start_scheduler(self) -> Spawned:
        self.scheduler = self.processes.start("scheduler", self.scheduler_command(self.port), self.env)
        self.await_scheduler()
        return self.scheduler

    def start_worker(self, *more: str, wait: bool = True) -> Spawned:
        self._workers_started += 1
        worker = self.processes.start(f"worker-{self._workers_started}", self.worker_command(*more))
        self.workers.append(worker)
        if wait:
            self.await_worker(worker)
        return worker

    def kill(self, spawned: Spawned) -> None:
        """As a crash: SIGKILL, and gone when this returns."""
        self.processes.kill(spawned)

    def start_again(self, spawned: Spawned) -> Spawned:
        """By the same command. Does not wait until it is ready."""
        again = self.processes.again(spawned)
        if spawned is self.daemon:
            self.daemon = again
        elif spawned is self.scheduler:
            self.scheduler = again
        else:
            self.workers[self.workers.index(spawned)] = again
        return again

    def restart_scheduler(self) -> Spawned:
        """Killed as by a crash, and started by the same command."""
        self.kill(self.scheduler)
        self.start_again(self.scheduler)
        self.await_scheduler()
        return self.scheduler

    # ----------------------------------------------------------------------------------------------------------- ready

    def await_daemon(self) -> None:
        assert self.daemon is not None
        await_port(self.daemon, int(self.url.rpartition(":")[2]), START_SECONDS_MAX)

    def await_scheduler(self) -> None:
        """It listens at once, and serves when the preload has had its turn."""
        self.wait_for(self.scheduler, lambda: "Scheduler at:" in self.scheduler.said())

    def await_worker(self, worker: Spawned) -> None:
        self.wait_for(worker, lambda: "Registered to:" in worker.said())

    def wait_for(self, spawned: Spawned, ready: Callable[[], bool]) -> None:
        deadline = time.monotonic() + START_SECONDS_MAX
        while not ready():
            # Only this one: stock workers end with their scheduler.
            spawned.check()
            if time.monotonic() > deadline:
                raise TimeoutError(f"{spawned.name} was not ready within {START_SECONDS_MAX:.0f} s; its log ends:\n{spawned.tail()}")
            time.sleep(0.05)


def faults(log: str) -> list[str]:
    """Faults in a scheduler's log, each with the lines around it."""
    lines = log.splitlines()
    return ["\n".join(lines[max(0, i - 12) : i + 3]) for i, line in enumerate(lines) if _FAULT.search(line)]
