"""Clusters of real processes for tests: daemon, scheduler with the adapter, workers. Stopped by process id, logs on failure."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from scheduler_adapter.local import cluster as local
from scheduler_adapter.local.processes import ROOT, ProcessDied, Processes, Spawned, descendants, free_port

#: For every single thing a test waits for. Machines that run tests are small and shared.
PATIENCE_SECONDS = 30.0


def until(condition: Callable[[], Any], what: str, patience: float = PATIENCE_SECONDS) -> Any:
    """The first true value of the condition; fails with `what` and the last value if there is none in time."""
    deadline = time.monotonic() + patience
    while not (value := condition()):
        assert time.monotonic() < deadline, f"waited {patience:.0f} s for: {what}; last seen: {value!r}"
        time.sleep(0.02)
    return value


def dask(*words: str) -> list[str]:
    return ["-m", "dask", *words]


class Cluster(local.Cluster):
    """Use as a context manager. Besides what every local cluster has:

    `embedded`: the scheduler starts its own daemon; `data`: which keeps its store. `stock`: a scheduler without the adapter, to see whether
    a test asks of ours what stock does. `worker_args`: more words for each of the first workers.
    """

    def __init__(
        self,
        folder: Path,
        *,
        embedded: bool = False,
        data: bool = False,
        serve: tuple[str, ...] = (),
        env: dict[str, str] | None = None,
        worker_args: tuple[tuple[str, ...], ...] = (),
        **options: Any,
    ) -> None:
        self._embedded = embedded
        self._keeps = data
        self._worker_args = worker_args
        self._first_folder = folder
        self._generation = 0
        #: Faults seen before, by log.
        self._seen: dict[Path, int] = {}
        super().__init__(
            folder, serve=("--log-level", "info", *serve), env={"DASK_DISTRIBUTED__SCHEDULER__VALIDATE": "True", **(env or {})}, **options
        )

    @property
    def data(self) -> Path:
        return self.folder / "data"

    @property
    def has_daemon(self) -> bool:
        return not self.stock and not self._embedded

    def __exit__(self, *exc_info: object) -> None:
        # What a test looks at, it has looked at; a daemon that is a child removes its own folder.
        self.processes.stop(kill=not self._embedded)

    def start_anew(self) -> None:
        """Other processes and an empty store."""
        self.processes.stop(kill=True)
        self._generation += 1
        self.folder = self._first_folder / f"again-{self._generation}"
        self.folder.mkdir()
        self.processes = Processes(self.folder)
        self.workers = []
        self._seen.clear()
        self._choose_ports()
        self.__enter__()

    def words_of_worker(self, number: int) -> Sequence[str]:
        return self._worker_args[number] if number < len(self._worker_args) else ()

    def preload_words(self) -> list[str]:
        if not self._embedded:
            return super().preload_words()
        words = ["--preload", "scheduler_adapter"]
        if self._keeps:
            words += ["--taskdb-data", str(self.data)]
        if self.window is not None:
            words += ["--taskdb-window", str(self.window)]
        return words

    # ------------------------------------------------------------------------------------------------------------ logs

    def scheduler_log(self) -> str:
        return self.scheduler.said()

    def faults(self) -> list[str]:
        """Faults in the logs of all schedulers since the last call, each with the lines around it."""
        new = []
        for log in sorted(self.folder.glob("scheduler*.log")):
            found = local.faults(log.read_text(errors="replace"))
            new += found[self._seen.get(log, 0) :]
            self._seen[log] = len(found)
        return new

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
    args: list[str], *, env: dict[str, str] | None = None, cwd: Path | None = None, timeout: float = 60.0, input: str | None = None
) -> subprocess.CompletedProcess[str]:
    """`python ARGS` to its end."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    return subprocess.run(
        [sys.executable, *args],
        capture_output=True,
        text=True,
        timeout=timeout,
        input=input,
        env={**os.environ, "PYTHONPATH": path, **(env or {})},
        cwd=cwd,
        check=False,
    )


__all__ = ["PATIENCE_SECONDS", "ROOT", "Cluster", "ProcessDied", "Spawned", "cluster", "descendants", "free_port", "run", "until"]
