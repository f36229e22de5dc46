"""What the database names for release, and is needed here for a while."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from dask._task_spec import Task, TaskRef
from distributed import Worker
from distributed.scheduler import Scheduler

from scheduler_adapter.config import AdapterConfig
from scheduler_adapter.keys import pack_key
from scheduler_adapter.pager import Pager
from scheduler_adapter.residency import Residency
from scheduler_adapter.specs import pickle_spec
from taskdb.commands import DEPENDENTS_UNKNOWN, Lease
from taskdb.model import Rank
from tests.e2e import functions as f


def lease(id: int, key: str, func: Any, *args: Any, deps: list[int] | None = None) -> Lease:
    spec = pickle_spec(Task(key, func, *args))
    return Lease(id, pack_key(key), spec, 0, Rank(0.0, 0.0, float(id)), deps or [], "g", "s", b"", -1, 0, [], dependents=1)


@asynccontextmanager
async def residency_with_workers(count: int) -> AsyncIterator[tuple[Scheduler, Residency]]:
    """In a real scheduler that validates its state, with no database behind it; each worker has one thread."""
    async with AsyncExitStack() as stack:
        scheduler = await stack.enter_async_context(Scheduler(host="127.0.0.1", port=0, dashboard_address=":0", validate=True))
        for _ in range(count):
            await stack.enter_async_context(Worker(scheduler.address, nthreads=1))
        pager = Pager(scheduler, AdapterConfig.load())
        scheduler.add_plugin(pager)
        yield scheduler, pager.residency


async def until_in(scheduler: Scheduler, key: str, state: str) -> None:
    async with asyncio.timeout(30):
        while scheduler.tasks[key].state != state:
            await asyncio.sleep(0.01)


def told_again(residency: Residency) -> set[Any]:
    return {resident.key for resident in residency.window.changed if resident.told is None}


@pytest.mark.parametrize("how", ["released", "lost"])
def test_what_was_kept_for_a_dependent_that_leaves_undone_is_told_again(how: str, tmp_path: Path) -> None:
    """The database names a result for release once, and no more until it hears of it."""
    stop = tmp_path / "stop"

    async def scene() -> None:
        async with residency_with_workers(1) as (scheduler, residency):
            residency.page_in([lease(1, "kept", f.inc, 1), lease(2, "input", f.inc, 2)])
            await until_in(scheduler, "kept", "memory")
            await until_in(scheduler, "input", "memory")
            runs = lease(3, "runs", f.wait_for_file, str(stop))
            dependent = lease(4, "dependent", f.total_of, *map(TaskRef, ("kept", "input", "runs")), deps=[1, 2, 3])
            residency.page_in([runs, dependent])
            by_id = residency.window.by_id
            residency.window.changes()
            residency.release([by_id[1]])
            assert told_again(residency) == {"kept"}
            residency.window.changes()

            if how == "released":
                residency.release([by_id[4]])
            else:
                scheduler.transitions({"input": "released"}, "test")
            assert "dependent" not in scheduler.tasks
            assert told_again(residency) == {"kept"}
            residency.release([by_id[1]])
            assert "kept" not in scheduler.tasks
            stop.touch()
            await until_in(scheduler, "runs", "memory")

    asyncio.run(scene())


@pytest.mark.parametrize(("dependents", "asked"), [(1, False), (DEPENDENTS_UNKNOWN, True)])
def test_the_database_is_told_soon_only_where_it_alone_knows_what_is_needed(dependents: int, asked: bool, tmp_path: Path) -> None:
    """What has its last dependent finish here is let go of at once, and that can be told when there is more to tell."""
    stop = tmp_path / "stop"

    async def scene() -> None:
        async with residency_with_workers(1) as (scheduler, residency):
            inputs = [replace(lease(id, f"input-{id}", f.inc, id), dependents=dependents) for id in (1, 2)]
            waits = lease(3, "waits", f.wait_for_file, str(stop))
            total = lease(4, "total", f.total_of, *map(TaskRef, ("input-1", "input-2", "waits")), deps=[1, 2, 3])
            residency.page_in([*inputs, waits, total])
            await until_in(scheduler, "input-1", "memory")
            await until_in(scheduler, "input-2", "memory")
            assert not residency.window.awaited
            stop.touch()
            await until_in(scheduler, "total", "memory")
            assert residency.window.awaited is asked
            await asyncio.sleep(0)  # what is unneeded is let go of after the transition
            assert ("input-1" in scheduler.tasks, "input-2" in scheduler.tasks) == (asked, asked)
            residency.window.changes()
            assert not residency.window.awaited

    asyncio.run(scene())


def test_what_cannot_be_taken_in_is_said_soon() -> None:
    async def scene() -> None:
        async with Scheduler(host="127.0.0.1", port=0, dashboard_address=":0") as scheduler:
            residency = Pager(scheduler, AdapterConfig.load()).residency
            residency.page_in([lease(2, "dependent", f.total_of, TaskRef("gone"), deps=[1])])
            assert "dependent" not in scheduler.tasks
            assert residency.window.awaited

    asyncio.run(scene())


def test_a_report_nobody_waits_for_does_not_hold_up_one_that_is_awaited() -> None:
    async def scene() -> None:
        async with Scheduler(host="127.0.0.1", port=0, dashboard_address=":0") as scheduler:
            loop = asyncio.get_running_loop()
            pager = Pager(scheduler, replace(AdapterConfig.load(), flush_interval_ms=10_000))

            def due() -> float:
                assert isinstance(pager._flush, asyncio.TimerHandle)
                return pager._flush.when() - loop.time()

            pager.schedule(idly=True)
            assert due() > 10
            pager.schedule()
            assert due() <= 10
            pager.schedule(idly=True)
            assert due() <= 10
            pager.schedule(urgent=True)
            urgent = pager._flush
            assert not isinstance(urgent, asyncio.TimerHandle)
            pager.schedule()
            assert pager._flush is urgent

    asyncio.run(scene())


def test_a_worker_counts_no_more_what_runs_and_its_input_let_go_of_together(tmp_path: Path) -> None:
    stop = tmp_path / "stop"

    async def scene() -> None:
        async with residency_with_workers(2) as (scheduler, residency):
            residency.page_in([lease(1, "input", f.inc, 1)])
            await until_in(scheduler, "input", "memory")
            (has_it,) = scheduler.tasks["input"].who_has
            scheduler.handle_worker_status_change("paused", has_it, stimulus_id="test")
            residency.page_in([lease(2, "runs", f.wait_for_file, str(stop), 0, TaskRef("input"), deps=[1])])
            assert scheduler.tasks["runs"].processing_on not in (None, has_it)
            by_id = residency.window.by_id
            residency.release([by_id[1], by_id[2]])
            assert not scheduler.tasks
            scheduler.validate_state()
            stop.touch()

    asyncio.run(scene())
