"""Worker restrictions that were set while a task was resident (`Scheduler.set_restrictions`): its spec does not know of them.

A task that leaves and comes back gets them again. They end with its graph, or with the scheduler.
"""

from __future__ import annotations

from typing import Any


class Restricted:
    def __init__(self) -> None:
        #: By Dask's key: the graph the task came with, and where it may run (None: anywhere).
        self._of: dict[Any, tuple[str, set[str] | None]] = {}

    def __bool__(self) -> bool:
        return bool(self._of)

    def set(self, key: Any, submission: str, workers: set[str] | None) -> None:
        self._of[key] = submission, workers

    def apply(self, ts: Any, submission: str) -> None:
        """The task of this graph comes (back)."""
        name, workers = self._of.get(ts.key, ("", None))
        if name == submission:
            ts.worker_restrictions = workers

    def end(self, submission: str) -> None:
        self._of = {key: (name, workers) for key, (name, workers) in self._of.items() if name != submission}
