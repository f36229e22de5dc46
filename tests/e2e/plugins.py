"""Plugins that tests register on schedulers, workers and nannies. Found there by module name."""

from __future__ import annotations

from typing import Any

from distributed.diagnostics.plugin import NannyPlugin, SchedulerPlugin, WorkerPlugin


def note(path: str, line: str) -> None:
    with open(path, "a") as f:
        f.write(line + "\n")


class Noting(SchedulerPlugin):
    """Notes its start, and the workers that come."""

    def __init__(self, path: str, name: str):
        self.path = path
        self.name = name

    async def start(self, scheduler: Any) -> None:
        note(self.path, f"start {self.name}")

    def add_worker(self, scheduler: Any, worker: str) -> None:
        note(self.path, f"worker {self.name}")


class FailingOn(SchedulerPlugin):
    """Starts only where a file is not there."""

    def __init__(self, path: str):
        self.path = path
        self.name = "failing"

    async def start(self, scheduler: Any) -> None:
        import os

        if os.path.exists(self.path):
            raise OSError("this plugin does not like it here")


class NotingWorker(WorkerPlugin):
    def __init__(self, path: str, name: str):
        self.path = path
        self.name = name

    def setup(self, worker: Any) -> None:
        note(self.path, f"setup {self.name}")


class NotingNanny(NannyPlugin):
    def __init__(self, path: str, name: str):
        self.path = path
        self.name = name

    def setup(self, nanny: Any) -> None:
        note(self.path, f"setup {self.name}")
