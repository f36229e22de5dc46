"""Graphs the scheduler can only hold whole (P2P shuffles): after a restart, what is left to do of them is taken in again as one unit.

Nothing an earlier scheduler did of them counts, as a shuffle's parts lie on workers' disks under a run that is over.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Any

from distributed.scheduler import Scheduler

from scheduler_adapter import dask_internals as internals
from scheduler_adapter.keys import unpack_key
from scheduler_adapter.outbox import FIRE_AND_FORGET
from scheduler_adapter.pager import Pager
from scheduler_adapter.specs import looked_into
from scheduler_adapter.submitted import Submission
from scheduler_adapter.window import Resident
from taskdb.commands import TakenWhole, TakeWhole
from taskdb.model import Level
from taskdb.wire import taskdb_pb2 as pb

logger = logging.getLogger("distributed.taskdb")

#: How often inputs that are not resident are looked for.
LOOK_SECONDS = 0.02
#: After so long the graph is asked for again, as an input may have failed; each time after twice as long.
AGAIN_SECONDS = 2.0


class Wholes:
    def __init__(self, scheduler: Scheduler, pager: Pager):
        self.scheduler = scheduler
        self.pager = pager
        #: Graphs that were asked for and have not come, and how long the inputs of each will be waited for, seconds.
        self._asked: dict[str, float] = {}
        pager.on_whole = self._taken

    def take(self, graph: pb.StoredGraph) -> None:
        """Ask for what is left of a stored graph. IMPORTANT: before the first credit, or parts of it would be leased one by one."""
        submission = Submission(
            graph.submission, graph.client, followed=True, remaining=graph.tasks, total=graph.tasks, sealed=True, groups=set(graph.groups)
        )
        self.pager.residency.begins(submission)
        self.pager.coming_whole.add(graph.submission)
        self._ask(graph.submission, AGAIN_SECONDS)

    def _ask(self, submission: str, patience_seconds: float) -> None:
        self._asked[submission] = patience_seconds
        self.pager.send(TakeWhole(submission), urgent=True)

    def _taken(self, whole: TakenWhole) -> None:
        patience_seconds = self._asked.pop(whole.submission, 0.0)
        if not patience_seconds:
            return  # said again: the daemon died before it was on disk
        logger.info("taskdb: %d tasks of graph %s begin anew", len(whole.leases), whole.submission)
        if whole.leases:
            internals.graph_update_begins(self.scheduler)
            internals.in_background(self.scheduler, self._take_in, whole, patience_seconds)
        else:
            self.pager.coming_whole.discard(whole.submission)

    async def _take_in(self, whole: TakenWhole, patience_seconds: float) -> None:
        """Once all it needs from elsewhere is resident. If that takes too long it is asked for again."""
        residency = self.pager.residency
        own = {lease.id for lease in whole.leases}
        elsewhere = {dep for lease in whole.leases for dep in lease.deps if dep not in own}
        deadline = time.monotonic() + patience_seconds
        try:
            while any((r := residency.by_id(dep)) is None or r.task is None or r.stub for dep in elsewhere):
                if time.monotonic() > deadline:
                    self._ask(whole.submission, 2 * patience_seconds)
                    return
                await asyncio.sleep(LOOK_SECONDS)
        finally:
            internals.graph_update_ends(self.scheduler)
        self.pager.coming_whole.discard(whole.submission)
        self._create(whole)

    def _create(self, whole: TakenWhole) -> None:
        scheduler, residency = self.scheduler, self.pager.residency
        window = residency.window
        submission = residency.submissions.get(whole.submission)
        tasks = []
        for lease in whole.leases:
            key = unpack_key(lease.key)
            spec, annotations = residency.spec(lease)
            stub = window.by_key.get(key)
            if stub is not None:
                ts, resident = stub.task, stub
                ts.run_spec = looked_into(spec)
                ts.has_lost_dependencies = False
                resident.stub = resident.paged = False
                resident.told = Level.HELD
                window.identify(resident, lease.id)
            else:
                ts = internals.new_task(scheduler, key, looked_into(spec), submission.computation if submission else None)
                resident = Resident(key, lease.id, ts, paged=False, told=Level.HELD, submission=whole.submission)
                window.add(resident)
            for dep in lease.deps:
                ts.add_dependency(window.by_id[dep].task)
            if annotations:
                internals.annotate(scheduler, ts, annotations)
            residency.rank(resident, lease)
            tasks.append((ts, lease))
        internals.observe(scheduler, [ts for ts, _ in tasks], None, ())
        wanted: dict[Any, Any] = {}
        for ts, lease in reversed(tasks):
            if lease.clients:
                # Those who want it may not be back yet: the holder wants it for them, until the database says that nobody does.
                internals.hold(ts, residency.holder)
                residency.want(ts, lease.key, lease.clients)
                if FIRE_AND_FORGET in lease.clients:
                    self.pager.fire_and_forget.add(ts.key)
                wanted[ts.key] = "waiting"
        residency.move(wanted, "taskdb-whole")
