"""A scheduler that listens to nobody, with the real adapter on it, and what replaces the parts of it that reach outside."""

from __future__ import annotations

import asyncio
import functools
import itertools
from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from distributed.core import Status
from distributed.scheduler import Scheduler, TaskState

from scheduler_adapter.adapter import Adapter
from scheduler_adapter.config import AdapterConfig
from taskdb.client import Session
from taskdb.errors import TaskDBError
from tests.simulation.ingest import InlineIngest
from tests.simulation.loop import PROCESS, Process
from tests.simulation.network import Sender
from tests.simulation.rpc import Channel, why_closed

#: Tasks of a run: few, so that graphs have several.
RUN_TASKS = 6


class SimulatedScheduler(Scheduler):
    def start_http_server(self, *args: Any, **kwargs: Any) -> None: ...

    @property
    def address(self) -> str:
        return "tcp://scheduler:1"

    async def close(self, *args: Any, reason: str = "", **kwargs: Any) -> None:
        """It stops for good (a later one has begun, or the database refused it)."""
        process = PROCESS.get()
        process.world.scheduler_stopped(process, reason)


class Incarnation:
    """One life of the scheduler."""

    def __init__(self, world: Any, number: int, config: AdapterConfig) -> None:
        self.process = Process(f"scheduler-{number}", world)
        self.config = config
        self.began = asyncio.get_running_loop().time()
        #: Serves clients and workers.
        self.ready = False
        self.process.run(self._make)
        self.process.spawn(self._start())

    def _make(self) -> None:
        # A new process counts from the beginning.
        TaskState._run_id_iterator = itertools.count()
        self.scheduler = SimulatedScheduler(validate=True, extensions={}, dashboard=False, local_directory="", allowed_failures=50)
        self.scheduler.status = Status.running
        self.adapter = Adapter(self.scheduler, self.config)

    async def _start(self) -> None:
        world = self.process.world
        try:
            await self.adapter.start()
        except TaskDBError as error:
            # As a scheduler whose preload fails: it ends, and is started again.
            world.scheduler_stopped(self.process, str(error))
            return
        self.ready = True
        world.forgive_unknown()
        world.note("scheduler serves", f"epoch {self.adapter.session.epoch}" if self.adapter.session else "")

    async def answer(self, op: str, **kwargs: Any) -> Any:
        """A call of one of the scheduler's handlers."""
        result = self.scheduler.handlers[op](**kwargs)
        return await result if asyncio.iscoroutine(result) or isinstance(result, asyncio.Future) else result


class _NoDisk:
    """In place of `WorkSpace`: a folder for each scheduler, and the search for old ones, would take a quarter of all time."""

    def __init__(self, base_dir: str) -> None: ...

    def new_work_dir(self, **kwargs: Any) -> Any:
        return SimpleNamespace(dir_path="", release=lambda: None)


class _NoMonitor:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
    def update(self) -> None: ...
    def close(self) -> None: ...


async def _connect(address: str, **kwargs: Any) -> Any:
    """A stream to the scheduler. Raises OSError if none is there."""
    process = PROCESS.get()
    return await process.world.connect(process)


async def _gather_from_workers(
    who_has: Mapping[Any, Collection[str]], rpc: Any, *, serializers: Any = None, who: Any = None
) -> tuple[dict[Any, Any], list[Any], list[Any], list[str]]:
    world = PROCESS.get().world
    data: dict[Any, Any] = {}
    gone: set[str] = set()
    missing = []
    for key, workers in who_has.items():
        for worker in sorted(workers):
            found = await world.fetch(worker, [key])
            if found is None:
                gone.add(worker)
            elif key in found:
                data.update(found)
                break
        else:
            missing.append(key)
    return data, missing, [], list(gone)


@contextmanager
def replaced(session: type[Session] = Session) -> Iterator[None]:
    """The names through which `distributed` and the adapter reach outside."""
    replacements: dict[str, Any] = {
        "distributed.core.WorkSpace": _NoDisk,
        "distributed.scheduler.BatchedSend": Sender,
        "distributed.scheduler.get_handlers": lambda *args, **kwargs: [],
        "distributed.scheduler.setproctitle": lambda title: None,
        "distributed.scheduler.gather_from_workers": _gather_from_workers,
        "distributed.scheduler.version_module": _Versions,
        "distributed.core.SystemMonitor": _NoMonitor,
        "scheduler_adapter.adapter.Session": functools.partial(session, channel=Channel, why_closed=why_closed),
        "scheduler_adapter.adapter.IngestProcess": InlineIngest,
        "taskdb.engine.hunger.GROW_QUEUED": 2,
        "scheduler_adapter.graph.RUN_TASKS": RUN_TASKS,
        "scheduler_adapter.dask_worker.BatchedSend": Sender,
        "scheduler_adapter.dask_worker.connect": _connect,
        "scheduler_adapter.dask_worker.get_versions": dict,
    }
    with ExitStack() as stack:
        for name, value in replacements.items():
            stack.enter_context(patch(name, value))
        yield


class _Versions:
    @staticmethod
    def get_versions(*args: Any, **kwargs: Any) -> dict[str, Any]:
        return {}

    @staticmethod
    def error_message(*args: Any, **kwargs: Any) -> dict[str, str]:
        return {}
