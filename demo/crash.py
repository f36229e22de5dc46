"""What `make demo-crash` does to the demo's cluster: kill -9 in mid-work, and the same command again."""

from __future__ import annotations

import time
from dataclasses import dataclass

from scheduler_adapter.local.cluster import Cluster
from scheduler_adapter.local.processes import Spawned


@dataclass
class Crash:
    """One kill. `at`: part of the tasks that is done then."""

    name: str
    at: float
    #: Tasks done when it was killed; None: not yet.
    done: int | None = None
    killed: float = 0.0
    #: Seconds until it was back; None: it is not.
    down: float | None = None

    def __str__(self) -> str:
        if self.done is None:
            return f"{self.name}: to be killed at {self.at:.0%}"
        back = "starting again" if self.down is None else f"back after {self.down:.1f} s"
        return f"{self.name}: killed with -9 at {self.done:,} tasks, {back}"


class Crashes:
    """The scheduler at one third, the daemon at two thirds."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self.all = [Crash("scheduler", 1 / 3), Crash("daemon", 2 / 3)]

    def kill(self, done: int, total: int) -> Spawned | None:
        """Kill what is due, and start it again. Returns what was started."""
        crash = next((crash for crash in self.all if crash.down is None), None)
        if crash is None or crash.done is not None or done < crash.at * total or not total:
            return None
        process = self._cluster.scheduler if crash.name == "scheduler" else self._cluster.daemon
        assert process is not None
        self._cluster.kill(process)
        crash.done, crash.killed = done, time.monotonic()
        return self._cluster.start_again(process)

    def back(self) -> None:
        """The scheduler has answered, and has its daemon: what was killed is there again."""
        for crash in self.all:
            if crash.done is not None and crash.down is None and self._is_back(crash):
                crash.down = time.monotonic() - crash.killed

    def _is_back(self, crash: Crash) -> bool:
        """The scheduler may not have seen yet that its daemon is gone."""
        daemon = self._cluster.daemon
        return crash.name != "daemon" or (daemon is not None and "serving" in daemon.said())

    @property
    def over(self) -> bool:
        return all(crash.down is not None for crash in self.all)
