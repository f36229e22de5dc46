"""A loop in virtual time, and processes on it that can be killed.

Waiting costs nothing: when nothing is ready, time jumps to the next timer. The order of everything follows from the seed alone.
"""

from __future__ import annotations

import asyncio
import functools
import heapq
import sys
import time
import uuid
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from contextvars import Context, ContextVar
from random import Random
from types import ModuleType
from typing import Any

#: What `time.time()` says when the loop begins.
BEGAN = 1_700_000_000.0
#: Turns of the loop in which time may stand still before it is called a livelock.
TURNS_MAX = 20_000


class Hung(Exception):
    """Nothing can happen any more, or it goes on for ever."""


class Killed(BaseException):
    """Unwinds the code in which a process was killed. Nothing handles it."""


class Process:
    """Code that lives and dies together. Once killed, nothing of it runs any more: no callback, no `finally`."""

    def __init__(self, name: str, world: Any) -> None:
        self.name = name
        self.world = world
        self.alive = True
        self._context = Context()
        self._context.run(PROCESS.set, self)
        #: Kept, so that the collector does not run the rest of those that are killed.
        self._tasks: list[asyncio.Task[Any]] = []

    @property
    def context(self) -> Context:
        """In which a callback belongs to this process."""
        return self._context.copy()

    def run(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return self.context.run(function, *args, **kwargs)

    def spawn(self, coroutine: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        task = asyncio.get_running_loop().create_task(coroutine, context=self.context)
        task.add_done_callback(self._ended, context=Context())
        self._tasks.append(task)
        return task

    def _ended(self, task: asyncio.Task[Any]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None and not isinstance(error, Killed):
            self.world.failed(f"{self.name}: {task.get_name()} ended with {error!r}", error, fatal=True)


PROCESS: ContextVar[Process] = ContextVar("process")


class VirtualLoop(asyncio.BaseEventLoop):
    """`limit_seconds` of virtual time; then `Hung`. Work for executors is done on the loop, a little later."""

    def __init__(self, chance: Random, limit_seconds: float) -> None:
        super().__init__()
        self._now = 0.0
        self._chance = chance
        self._limit = limit_seconds
        self._still = 0

    def time(self) -> float:
        return self._now

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:  # type: ignore[override]
        future = self.create_future()

        def run() -> None:
            if future.cancelled():
                return
            try:
                future.set_result(func(*args))
            except Exception as error:
                future.set_exception(error)

        self.call_later(self._chance.choice((0.0, 0.0005, 0.005)), run)
        return future

    def _write_to_self(self) -> None:
        pass

    def _process_events(self, event_list: Any) -> None:
        pass

    def _run_once(self) -> None:
        ready, timers = self._ready, self._scheduled
        self._still += 1
        if not ready:
            while timers and timers[0]._cancelled:
                heapq.heappop(timers)._scheduled = False
            if not timers:
                raise Hung("nothing is left to happen")
            if timers[0]._when > self._now:
                self._now, self._still = timers[0]._when, 0
        if self._still > TURNS_MAX:
            raise Hung(f"time stands still at {self._now:.3f} s")
        if self._now > self._limit:
            raise Hung(f"not over after {self._limit:.0f} s")
        while timers and timers[0]._when <= self._now:
            timer = heapq.heappop(timers)
            timer._scheduled = False
            ready.append(timer)
        for _ in range(len(ready)):
            handle = ready.popleft()
            if handle._cancelled:
                continue
            process = handle._context.get(PROCESS)
            if process is None or process.alive:
                handle._run()


# ------------------------------------------------------------------------------------------------------------- clocks


def _now() -> float:
    return asyncio.get_running_loop().time()


def _wall() -> float:
    return BEGAN + _now()


class _Time(ModuleType):
    """The module `time`, with clocks that say the loop's time."""

    def __init__(self) -> None:
        super().__init__("time")
        self.time = _wall
        self.monotonic = self.perf_counter = _now

    def __getattr__(self, name: str) -> Any:
        return getattr(time, name)


#: Whose clocks are replaced.
PATCHED = ("distributed", "taskdb", "scheduler_adapter", "tornado")


@functools.cache
def _clocks(modules: int, clocks: frozenset[int]) -> list[tuple[Any, str, Any]]:
    """Where the clocks with these ids are looked up. `modules`: how many there are; a search takes as long as a fifth of a run."""
    return [
        (module, attribute, value)
        for name, module in list(sys.modules.items())
        if name.split(".")[0] in PATCHED
        for attribute, value in list(vars(module).items())
        if id(value) in clocks
    ]


@contextmanager
def virtual_clocks(chance: Random) -> Iterator[None]:
    """Every clock the system looks at is that of the running loop, and every uuid comes from `chance`."""
    import distributed.metrics

    shim = _Time()
    replaced: list[tuple[Any, str, Any]] = []
    clocks = {
        id(time.time): _wall,
        id(time.monotonic): _now,
        id(time.perf_counter): _now,
        id(distributed.metrics.time): _wall,
        id(distributed.metrics.monotonic): _now,
        id(time): shim,
    }
    for module, attribute, value in _clocks(len(sys.modules), frozenset(clocks)):
        replaced.append((module, attribute, value))
        setattr(module, attribute, clocks[id(value)])
    replaced.append((uuid, "uuid4", uuid.uuid4))
    uuid.uuid4 = lambda: uuid.UUID(int=chance.getrandbits(128), version=4)
    try:
        yield
    finally:
        for module, attribute, value in replaced:
            setattr(module, attribute, value)
