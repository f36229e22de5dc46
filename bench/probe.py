"""What is measured inside the scheduler: a plugin and a ticker, put into both sides alike after they have started.

The functions at the end run in the scheduler through `client.run_on_scheduler`. A transition costs the probe about a
microsecond. It reads only public attributes.
"""

from __future__ import annotations

import asyncio
import gc
import os
import time
from typing import Any, NamedTuple

from distributed import Scheduler
from distributed.diagnostics.plugin import SchedulerPlugin

#: Name under which the plugin is registered.
NAME = "bench-probe"
#: Time between two ticks of the loop, seconds.
TICK_S = 0.005


class Readings(NamedTuple):
    """What the probe saw since it was last reset."""

    #: Transitions from processing to memory.
    tasks_finished: int
    #: Transitions to erred.
    tasks_erred: int
    #: Largest len(scheduler.tasks).
    tasks_resident_max: int
    #: Largest sum of the bytes that workers hold, replicas included.
    worker_bytes_max: int
    #: Longest time between two ticks beyond the tick itself, seconds.
    stall_max_s: float
    #: Wall time at which a worker began the first task; None before one has finished.
    first_start: float | None


class Probe(SchedulerPlugin):
    """Counts transitions, and keeps the largest of what can only be seen inside the scheduler."""

    name = NAME

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.ticker: asyncio.Task[None] = asyncio.get_running_loop().create_task(self._tick())
        self.reset()

    def reset(self) -> None:
        """Forget what was seen."""
        self.tasks_finished = 0
        self.tasks_erred = 0
        self.tasks_resident_max = 0
        self.worker_bytes_max = 0
        self.stall_max_s = 0.0
        self.first_start: float | None = None
        # What blocked the loop before now, such as the collection of garbage before a reset, is not the run's stall.
        self.last_tick = time.perf_counter()

    def readings(self) -> Readings:
        """What was seen since the last reset."""
        return Readings(
            self.tasks_finished,
            self.tasks_erred,
            self.tasks_resident_max,
            self.worker_bytes_max,
            self.stall_max_s,
            self.first_start,
        )

    def transition(self, key: Any, start: str, finish: str, *args: Any, **kwargs: Any) -> None:
        """Called by the scheduler after every transition."""
        resident = len(self.scheduler.tasks)
        if resident > self.tasks_resident_max:
            self.tasks_resident_max = resident
        if finish == "memory":
            # Only here does what workers hold grow, but for replicas, which the ticker sees.
            self._see_worker_bytes()
            if start == "processing":
                self.tasks_finished += 1
                self._see_start(kwargs.get("startstops", ()))
        elif finish == "erred":
            self.tasks_erred += 1

    def _see_worker_bytes(self) -> None:
        held = 0
        for worker in self.scheduler.workers.values():
            held += worker.nbytes
        if held > self.worker_bytes_max:
            self.worker_bytes_max = held

    def _see_start(self, startstops: Any) -> None:
        for span in startstops:
            if span["action"] == "compute" and (self.first_start is None or span["start"] < self.first_start):
                self.first_start = span["start"]

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            now = time.perf_counter()
            self.stall_max_s = max(self.stall_max_s, now - self.last_tick - TICK_S)
            self.last_tick = now
            self._see_worker_bytes()

    async def close(self) -> None:
        """Stop ticking when the scheduler closes."""
        self.ticker.cancel()


def _probe(scheduler: Scheduler) -> Probe:
    plugin = scheduler.plugins[NAME]
    assert isinstance(plugin, Probe)
    return plugin


def install(dask_scheduler: Scheduler) -> int:
    """Put a probe into the scheduler and return the scheduler's process id."""
    dask_scheduler.add_plugin(Probe(dask_scheduler), name=NAME)
    return os.getpid()


def tasks_resident(dask_scheduler: Scheduler) -> int:
    """How many tasks the scheduler holds now."""
    return len(dask_scheduler.tasks)


def reset(dask_scheduler: Scheduler) -> None:
    """Collect garbage and forget what was seen."""
    gc.collect()
    _probe(dask_scheduler).reset()


def read(dask_scheduler: Scheduler) -> tuple[Any, ...]:
    """What was seen, as a plain tuple: it travels as msgpack or pickle alike."""
    return tuple(_probe(dask_scheduler).readings())


def submission_s(after: float, dask_scheduler: Scheduler) -> float | None:
    """How long the scheduler took to take in the graphs that came after a time (seconds since the epoch); None if that is not over."""
    taken = [event for _, event in dask_scheduler.get_events("scheduler") if event.get("action") == "update-graph" and "metrics" in event]
    times = [event["metrics"]["duration_seconds"] for event in taken if event["metrics"]["start_timestamp_seconds"] >= after]
    return sum(times) if times else None
