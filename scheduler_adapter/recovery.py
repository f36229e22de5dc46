"""A scheduler goes on where an earlier one ended: it waits for the workers that were there, and takes in what they hold and run.

Until they are back, or the time for it is over, what they held is left alone (the database leases nothing that depends on it). What then
nobody has claimed is lost, and the database says what runs again.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from distributed.core import Status
from distributed.diagnostics.plugin import SchedulerPlugin
from distributed.scheduler import Scheduler, WorkerState

from scheduler_adapter import dask_internals as internals
from scheduler_adapter import dask_recovery
from scheduler_adapter.adoption import Adoption
from scheduler_adapter.config import AdapterConfig
from scheduler_adapter.inventory import EPOCH, NAME, Inventory
from scheduler_adapter.keys import unpack_key
from scheduler_adapter.outbox import FIRE_AND_FORGET
from scheduler_adapter.pager import Pager
from scheduler_adapter.returning import numbered_clients
from scheduler_adapter.submitted import Submission
from scheduler_adapter.unclaimed import Brought
from scheduler_adapter.whole import Wholes
from taskdb.client import Session
from taskdb.commands import Adopt, Adopted, DropClient, EndRecovery, Keep, Lease
from taskdb.errors import Unavailable
from taskdb.model import GraphFlag, Level
from taskdb.wire import taskdb_pb2 as pb

logger = logging.getLogger("distributed.taskdb")

#: Section of kept items: a name for each worker that is there; the value says whether it outlives a scheduler, and since which epoch what
#: it has is known to the database. What it had before it was given up is not: its keys may mean other tasks since.
WORKERS = b"workers\0"
_SURVIVES, _DIES = b"survives", b"dies"
_EPOCH_BYTES = 8
#: How long, at most, a worker that registers waits until the database knows of it, also while that is away. Less than its own limit
#: (`worker.ATTEMPT_SECONDS`).
KNOWN_SECONDS = 5.0
#: How long, at most, clients are waited for before what nobody has brought is given back.
CLIENTS_BACK_SECONDS_MAX = 5.0
#: Keys of one Adopt: some 20 µs each of the daemon's time.
ADOPT_KEYS = 2_000
#: Pause before what earlier schedulers left is asked for again.
READ_AGAIN_SECONDS = 0.1
#: Wants of these are not dropped when nobody comes back for them.
_NOT_CLIENTS = (FIRE_AND_FORGET, "published-", "variable-", "queue-")


def is_restart(reason: str) -> bool:
    """Whether a scheduler that closes for this reason leaves its workers to the next one: SIGTERM, or another one has taken over."""
    return reason.startswith(("signal-15", "taskdb:"))


@dataclass
class Restored:
    """What the database has for a new scheduler besides tasks."""

    kept: dict[bytes, bytes] = field(default_factory=dict)
    graphs: list[pb.StoredGraph] = field(default_factory=list)
    clients: set[str] = field(default_factory=set)
    #: Tasks that earlier schedulers held.
    orphans: int = 0
    #: The store may not show all of them.
    leases_lost: bool = False

    @classmethod
    async def read(cls, session: Session, orphans: int, timeout_seconds: float) -> Restored:
        """Raises Unavailable if the daemon is away for longer."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_seconds
        while True:
            restored = cls(orphans=orphans)
            try:
                async for reply in session.restore():
                    restored.kept.update((item.name, item.value) for item in reply.kept)
                    restored.graphs.extend(reply.graphs)
                    restored.clients.update(reply.clients)
                return restored
            except Unavailable:
                if loop.time() > deadline:
                    raise
                await asyncio.sleep(READ_AGAIN_SECONDS)


class Recovery(SchedulerPlugin):
    name = "taskdb-recovery"

    def __init__(self, scheduler: Scheduler, config: AdapterConfig, pager: Pager, undo: internals.Undo, restored: Restored):
        self.scheduler = scheduler
        self.config = config
        self.pager = pager
        #: Results and running tasks of earlier schedulers may still come back.
        self.active = pager.recovering = restored.orphans > 0
        #: Names of workers that are waited for, and since which epoch they are known.
        self.expected = {
            name.removeprefix(WORKERS).decode(): int.from_bytes(value.removeprefix(_SURVIVES))
            for name, value in restored.kept.items()
            if name.startswith(WORKERS) and value.startswith(_SURVIVES)
        }
        #: Clients that want something and have not come back.
        self.absent = {name for name in restored.clients if not name.startswith(_NOT_CLIENTS)}
        #: Those of them that will say at once what they still want: what was held for them alone may not have to be computed again.
        self.coming = self.absent & numbered_clients(restored.kept).keys()
        self._orphans = restored.orphans
        self._leases_lost = restored.leases_lost
        self._ended = asyncio.Event()
        self._timers: list[asyncio.TimerHandle] = []
        #: Names of workers that are here, by address.
        self._names: dict[str, str] = {}
        self.adoption = Adoption(scheduler, pager)
        self.wholes = Wholes(scheduler, pager)
        self.unclaimed = pager.residency.unclaimed
        self.unclaimed.take = self._take
        pager.residency.reused.restore(pager.send, restored.kept)
        self.adopted = self.refused = 0
        dask_recovery.forgive_unknown_spans(scheduler, undo)
        dask_recovery.forget_broken_registrations(scheduler, undo)
        dask_recovery.leave_workers_alone(scheduler, undo, is_restart)
        dask_recovery.watch_runs(scheduler, undo, self.unclaimed.told)
        self._stock_gather = scheduler.handlers["gather"]
        undo.set_item(scheduler.handlers, "gather", self.gather)
        self._show(restored.graphs)
        self._forget_workers(restored)

    # ------------------------------------------------------------------------------------------------------- the start

    def start_waiting(self) -> None:
        """Begin: wait for workers and clients, no longer than the settings say."""
        loop = asyncio.get_running_loop()
        if not self.expected:
            self.pager.workers_back.set()
        elif self._leases_lost:
            self.pager.holding += 1
            internals.in_background(self.scheduler, self._hold)
        if self.absent:
            self._timers.append(loop.call_later(self.config.clients_return_seconds, self._drop_absent))
        if not self.active:
            self._ended.set()
            return
        internals.graph_update_begins(self.scheduler)
        if not self.expected:
            logger.info("taskdb: no worker of the scheduler before keeps its results; %d tasks of it are given back", self._orphans)
            self.end()
            return
        logger.warning(
            "taskdb: the scheduler before held %d tasks; waiting up to %.0f s for %d workers",
            self._orphans,
            self.config.workers_return_seconds,
            len(self.expected),
        )
        self._timers.append(loop.call_later(self.config.workers_return_seconds, self._give_up))
        self._timers.append(loop.call_later(CLIENTS_BACK_SECONDS_MAX, self._wait_for_clients_no_more))

    async def _hold(self) -> None:
        """Any task on disk may be done, or under way."""
        await self.pager.workers_are_back()
        self.pager.hold_less()

    def _show(self, graphs: Sequence[pb.StoredGraph]) -> None:
        """Stored graphs in task groups, before the first lease: how tasks are placed depends on it. Which tasks of a graph are finished
        is not known here, only how many."""
        residency = self.pager.residency
        for graph in graphs:
            if graph.flags & GraphFlag.WHOLE and graph.unfinished and not graph.aborted:
                self.wholes.take(graph)
                continue
            if not graph.tasks:
                continue  # given up before anything of it was there: nothing of it will be forgotten
            submission = Submission(
                graph.submission, graph.client, remaining=graph.tasks, total=graph.tasks, sealed=True, groups=set(graph.groups)
            )
            residency.begins(submission)
            finished = 1 - graph.unfinished / graph.tasks if graph.tasks else 0.0
            for name, count in graph.groups.items():
                residency.ledger.announce(name, count, None)
                residency.ledger.done(name, round(count * finished))

    def _forget_workers(self, restored: Restored) -> None:
        """Those that die with their scheduler."""
        gone = [name for name, value in restored.kept.items() if name.startswith(WORKERS) and not value.startswith(_SURVIVES)]
        if gone:
            self.pager.send(Keep(gone, [b""] * len(gone)))

    # --------------------------------------------------------------------------------------------------------- the end

    def _give_up(self) -> None:
        if not self.active:
            return
        logger.warning("taskdb: %d workers did not come back: %s", len(self.expected), ", ".join(sorted(self.expected)[:10]))
        names = [WORKERS + name.encode() for name in self.expected]
        self.expected.clear()
        self.pager.workers_back.set()
        self.pager.send(Keep(names, [b""] * len(names)))
        self.end()

    def _wait_for_clients_no_more(self) -> None:
        self.coming.clear()
        self._maybe_end()

    def _maybe_end(self) -> None:
        if self.active and not self.expected and not self.coming:
            self.end()

    def end(self) -> None:
        """What nobody has claimed is lost, or not begun."""
        if not self.active:
            return
        self.active = self.pager.recovering = False
        self.pager.send(EndRecovery(), urgent=True)
        internals.graph_update_ends(self.scheduler)
        self._ended.set()
        logger.info("taskdb: recovered; %d results and running tasks taken over, %d let go of", self.adopted, self.refused)

    def close(self) -> None:
        for timer in self._timers:
            timer.cancel()
        self.unclaimed.close()
        if self.active:
            self.active = False
            internals.graph_update_ends(self.scheduler)
        self._ended.set()

    def restart(self, scheduler: Scheduler) -> None:
        self.unclaimed.close()
        self.end()

    # --------------------------------------------------------------------------------------------------------- clients

    def client_returned(self, name: str) -> None:
        self.absent.discard(name)
        self.coming.discard(name)
        # IMPORTANT: once its wants have been sent.
        asyncio.get_running_loop().call_soon(self._maybe_end)

    def _drop_absent(self) -> None:
        """As Dask does when a client disconnects."""
        gone = [name for name in self.absent if name not in self.scheduler.clients]
        self.absent.clear()
        if gone:
            logger.warning("taskdb: %d clients did not come back; what only they wanted is let go of: %s", len(gone), ", ".join(gone[:10]))
            self.pager.send(*[DropClient(name) for name in gone])

    async def gather(self, keys: Collection[Any], serializers: list[str] | None = None) -> Any:
        """`gather`: what a worker may be about to bring is waited for. (Dask looks at the names of the parameters.)"""
        while self.active and any(key not in self.scheduler.tasks and key not in self.pager.cooling for key in keys):
            await asyncio.wait([asyncio.ensure_future(self._ended.wait())], timeout=0.1)
        return await self._stock_gather(keys=keys, serializers=serializers)

    # --------------------------------------------------------------------------------------------------------- workers

    async def add_worker(self, scheduler: Scheduler, worker: str) -> None:
        ws = scheduler.workers[worker]
        self._names[worker] = name = str(ws.name)
        message = dask_recovery.take_extra(ws, NAME)
        assert self.pager.session is not None
        epoch = self.pager.session.epoch
        since = self.expected.get(name, epoch)
        stays = _DIES if message is None else _SURVIVES + since.to_bytes(_EPOCH_BYTES)
        self.pager.send(Keep([WORKERS + name.encode()], [stays]), urgent=True)
        if message is not None:
            # On its stream once that is started; tasks come after.
            scheduler.worker_send(worker, {"op": EPOCH, "epoch": epoch, "store": self.pager.store})
            try:
                inventory = Inventory.read(message)
            except ValueError as e:
                # What it holds is not to be had, and would stay there for ever.
                logger.error("taskdb: worker %s is closed, and what it holds is computed again: %s", name, e)
                internals.in_background(scheduler, scheduler.remove_worker, worker, stimulus_id="taskdb-protocol")
            else:
                if inventory.epoch >= since:
                    await self._take_in(ws, inventory)
                elif inventory.epoch:
                    self._refuse(ws, inventory)
        self.expected.pop(name, None)
        if not self.expected:
            self.pager.workers_back.set()
        self._maybe_end()
        if message is None:
            return  # nobody waits for it
        # IMPORTANT: nothing is sent to it before: the next scheduler waits only for workers it knows of.
        with suppress(TimeoutError):
            async with asyncio.timeout(KNOWN_SECONDS):
                await self.pager.on_disk(self.pager.next_seq())

    def remove_worker(self, scheduler: Scheduler, worker: str, **kwargs: Any) -> None:
        self.unclaimed.drop_worker(worker)
        name = self._names.pop(worker, None)
        # A scheduler that is closing loses them all: they are there for the next one.
        if name is not None and scheduler.status is Status.running:
            self.pager.send(Keep([WORKERS + name.encode()], [b""]))

    def _refuse(self, ws: WorkerState, inventory: Inventory) -> None:
        """It was given up: what it has was computed again, or let go of, and its keys may mean other tasks."""
        keys = [unpack_key(key) for key in (*inventory.memory, *inventory.running)]
        # IMPORTANT: before it hears of this epoch: what it has after that is known.
        dask_recovery.free_on(self.scheduler, ws, keys)
        self.refused += len(keys)
        logger.warning("taskdb: worker %s is back too late; the %d results and running tasks it has are let go of", ws.name, len(keys))

    async def _take_in(self, ws: WorkerState, inventory: Inventory) -> None:
        """Everything the worker has: results first, so that what runs finds its inputs."""
        is_old = self.pager.residency.reused.is_old
        memory = {key: at for at, key in enumerate(inventory.memory) if not is_old(unpack_key(key), inventory.runs[at])}
        running = {key: at for at, key in enumerate(inventory.running) if not is_old(unpack_key(key), inventory.run_ids[at])}
        seceded, failures = set(inventory.seceded), inventory.failures()
        taken: set[bytes] = set()
        kept: set[bytes] = set()

        def answered(answer: Adopted, brought: Brought) -> None:
            if answer.lease is not None:
                if self._take(answer.lease, ws, brought):
                    taken.add(answer.key)
            elif answer.level is Level.OUT:
                kept.add(answer.key)
                self.unclaimed.add(unpack_key(answer.key), ws, brought, self.config.clients_return_seconds)

        def result(answer: Adopted) -> None:
            at = memory[answer.key]
            answered(answer, Brought(Level.MEMORY, inventory.nbytes[at], inventory.types[at]))

        def run(answer: Adopted) -> None:
            at = running[answer.key]
            answered(answer, Brought(Level.HELD, run_id=inventory.run_ids[at], seceded=at in seceded, failure=failures.get(at)))

        for keys in chunks(list(memory)):
            nbytes = [inventory.nbytes[memory[key]] for key in keys]
            await self.pager.adopt(Adopt(inventory.epoch, keys, [Level.MEMORY] * len(keys), nbytes), result)
        known = self.scheduler.tasks, self.pager.cooling
        for keys in chunks([key for key in running if not any(unpack_key(key) in there for there in known)]):
            await self.pager.adopt(Adopt(inventory.epoch, keys, [Level.HELD] * len(keys)), run)
        refused = [unpack_key(key) for key in (*inventory.memory, *inventory.running) if key not in taken and key not in kept]
        dask_recovery.free_on(self.scheduler, ws, refused)
        self.adopted += len(taken)
        self.refused += len(refused)
        logger.info(
            "taskdb: worker %s is back from epoch %d with %d results and %d running tasks; %d of them are not needed, or not known",
            ws.name,
            inventory.epoch,
            len(inventory.memory),
            len(running),
            len(refused),
        )

    def _take(self, lease: Lease, ws: WorkerState, brought: Brought) -> bool:
        if brought.level is Level.MEMORY:
            return self.adoption.result(lease, ws, brought.nbytes, brought.type_name)
        taken = self.adoption.running(lease, ws, brought.run_id, seceded=brought.seceded, failed=brought.failure is not None)
        if taken and brought.failure is not None:
            self.scheduler.stream_handlers["task-erred"](key=unpack_key(lease.key), worker=ws.address, **brought.failure)
        return taken


def chunks(keys: list[bytes]) -> Iterator[list[bytes]]:
    for start in range(0, len(keys), ADOPT_KEYS):
        yield keys[start : start + ADOPT_KEYS]
