"""What the database names for release, and is needed here for a while."""

from __future__ import annotations

import asyncio
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
from taskdb.commands import Lease
from taskdb.model import Rank
from tests.e2e import functions as f


def lease(id: int, key: str, func: Any, *args: Any, deps: list[int] | None = None) -> Lease:
    spec = pickle_spec(Task(key, func, *args))
    return Lease(id, pack_key(key), spec, 0, Rank(0.0, 0.0, float(id)), deps or [], "g", "s", b"", -1, 0, [], dependents=1)


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
        async with (
            Scheduler(host="127.0.0.1", port=0, dashboard_address=":0", validate=True) as scheduler,
            Worker(scheduler.address, nthreads=1),
        ):
            pager = Pager(scheduler, AdapterConfig.load())
            scheduler.add_plugin(pager)
            residency = pager.residency
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
