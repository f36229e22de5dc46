"""Puts what a worker has from an earlier scheduler into this one: results, and tasks it runs. All of it as paged tasks."""

from __future__ import annotations

from distributed.scheduler import Scheduler, WorkerState

from scheduler_adapter import dask_internals as internals
from scheduler_adapter import dask_recovery
from scheduler_adapter.keys import unpack_key
from scheduler_adapter.outbox import FIRE_AND_FORGET
from scheduler_adapter.pager import Pager
from scheduler_adapter.window import Resident
from taskdb.commands import Lease
from taskdb.model import Level, TaskFlag


class Adoption:
    def __init__(self, scheduler: Scheduler, pager: Pager):
        self.scheduler = scheduler
        self.pager = pager
        self.residency = pager.residency

    def result(self, lease: Lease, ws: WorkerState, nbytes: int, type_name: str) -> bool:
        """A finished task. False: the worker's copy is not wanted, as the task is being computed again."""
        scheduler, residency = self.scheduler, self.residency
        key = unpack_key(lease.key)
        resident = residency.by_key(key, lease.key)
        if ws.address not in scheduler.workers:
            if resident is None:
                # It left while the database was asked, which believes that we have it: give it back.
                residency.give_back(lease, Level.MEMORY)
            return False
        if resident is not None and not resident.stub:
            if resident.task.state == "memory":
                dask_recovery.add_replica(scheduler, resident.task, ws)
            return bool(resident.task.state == "memory")
        data = bool(lease.flags & TaskFlag.DATA)
        if resident is None:
            spec, _ = residency.spec(lease)
            submission = residency.submissions.get(lease.submission)
            computation = submission.computation if submission else None
            ts = dask_recovery.new_in_memory(scheduler, key, None if data else spec, ws, nbytes, type_name, computation)
            resident = Resident(key, lease.id, ts, paged=not data, told=Level.MEMORY, submission=lease.submission)
            residency.ledger.enters(ts)
            residency.window.add(resident)
            # One of another worker's may have been here, and have left while the database was asked: it hears of that after this.
            residency.window.tell_again([resident])
        else:
            ts = resident.task
            resident.stub = False
            resident.told = Level.MEMORY
            residency.window.identify(resident, lease.id)
            dask_recovery.into_memory(scheduler, ts, ws, nbytes, type_name)
        # Stock itself forgets it if it is lost, and the database says whether it runs again.
        ts.has_lost_dependencies = not data
        residency.count_dependents(resident, lease)
        residency.rank(resident, lease)
        internals.hold(ts, residency.holder)
        internals.observe(scheduler, [ts], None, ())
        for client in residency.want(ts, lease.key, lease.clients):
            scheduler.report_on_key(ts=ts, client=client)
        if resident.paged:
            residency.cooling.finished(resident)
        if FIRE_AND_FORGET in lease.clients or key in self.pager.fire_and_forget:
            self.pager.forgotten.end(key)
        return True

    def running(self, lease: Lease, ws: WorkerState, run_id: int, *, seceded: bool, failed: bool) -> bool:
        """A task the worker runs. False: it is let go of, and runs elsewhere, or again.

        `failed`: it has, which is to be said next. What it was computed from may have been let go of, and is not needed.
        """
        scheduler, residency = self.scheduler, self.residency
        key = unpack_key(lease.key)
        resident = residency.by_key(key, lease.key)
        if resident is not None and not resident.stub:
            return False
        deps = residency.dependencies(lease)
        complete = deps is not None and all(dep.task.state == "memory" for dep in deps)
        spec, annotations = residency.spec(lease)
        allowed = annotations.get("retries", 0)
        # None is stored before its first failure. Once there was one, this may be that: it is not counted twice, but runs again.
        counted = failed and 0 <= lease.retries < allowed
        is_over = failed and allowed <= 0
        if counted or not (complete or is_over) or ws not in scheduler.running:
            residency.give_back(lease, Level.HELD)
            return False
        ts = residency.enter(key, lease, resident, spec, annotations)
        residency.window.tell_again([residency.window.by_key[key]])  # see `result`
        internals.relink(ts, [dep.task for dep in deps or ()] if complete else [])
        internals.observe(scheduler, [ts], None, ())
        dask_recovery.set_processing(scheduler, ts, ws, run_id, seceded)
        if FIRE_AND_FORGET in lease.clients:
            self.pager.fire_and_forget.add(key)
        return True
