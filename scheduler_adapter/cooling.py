"""Finished results that nothing resident needs leave the scheduler, and come back as tasks when something does.

Their data stays where it is, and to the database they are as before: in memory, and held. What is kept of them stands in `cold.py`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from itertools import islice
from typing import TYPE_CHECKING, Any

from distributed.core import Status
from distributed.diagnostics.plugin import SchedulerPlugin

from scheduler_adapter import dask_cold, dask_recovery
from scheduler_adapter import dask_internals as internals
from scheduler_adapter.cold import Cold, Kind
from scheduler_adapter.keys import pack_key, pack_keys, unpack_key
from scheduler_adapter.window import Resident
from taskdb.model import Level

if TYPE_CHECKING:
    from scheduler_adapter.pager import Pager

logger = logging.getLogger("distributed.taskdb")

#: Pause between two looks at what may go cold, and how many results are looked at each time: some 10 µs each.
LOOK_SECONDS = 0.02
LOOK_RESULTS = 1_000


class Cooling(SchedulerPlugin):
    """Lets the oldest results go cold while more than `warm_max` are resident; None: any number may be. Keys are Dask's, unless they are
    called packed."""

    name = "taskdb-cold"

    def __init__(self, pager: Pager):
        self.pager = pager
        self.scheduler = pager.scheduler
        self.residency = pager.residency
        self.window = pager.window
        self.table = self.window.cold
        self.warm_max = pager.config.warm
        #: Calls under way that may hold on to tasks.
        self._held = 0
        self._timer: asyncio.TimerHandle | None = None
        self._loop = asyncio.get_running_loop()
        self.residency.ledger.elsewhere = self.table.has_group

    def install(self, undo: internals.Undo) -> None:
        scheduler = self.scheduler
        dask_cold.remember_restrictions(scheduler, undo, self)
        if self.warm_max is None:
            return  # the table stays empty
        dask_cold.answer_for(scheduler, undo, self)
        dask_cold.warm_before(scheduler, undo, self)
        dask_cold.forgive_finished(scheduler, undo, self)
        dask_cold.validate_with(scheduler, undo, self)
        scheduler.add_plugin(self, name=self.name)

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def restricted(self, key: Any, workers: set[str] | None) -> None:
        """Where a task may run was changed."""
        resident = self.window.by_key.get(key)
        if resident is not None:
            self.residency.restricted.set(key, resident.submission, workers)

    # -------------------------------------------------------------------------------------------------------- questions

    def __len__(self) -> int:
        return len(self.table)

    def __contains__(self, key: Any) -> bool:
        return len(self.table) > 0 and self._kind(key) is not None

    def _kind(self, key: Any) -> Kind | None:
        for packed in pack_keys([key]):  # none, if it cannot be packed: then the database cannot have it
            return self.table.kind_of(packed)
        return None

    def worker_of(self, key: Any) -> str | None:
        kind = self._kind(key)
        return None if kind is None else kind.worker

    def nbytes_of(self, key: Any) -> int:
        return self.table.nbytes_of(pack_key(key))

    def items(self, worker: str | None = None) -> Iterator[tuple[Any, str, int]]:
        """Key, worker and bytes of all results, or of those of one worker."""
        for kind in self.table.kinds() if worker is None else self.table.of_worker(worker):
            for packed, (_, nbytes, _) in kind.rows.items():
                yield unpack_key(packed), kind.worker, nbytes

    def is_named(self, packed: bytes, id: int) -> bool:
        """Whether it is cold under this id."""
        return self.table.key_of(id) == packed

    def is_unwanted(self, key: Any) -> bool:
        """Whether it is cold, and no client wants it."""
        kind = self._kind(key) if self.table else None
        return kind is not None and not kind.clients

    # ---------------------------------------------------------------------------------------------------------- go cold

    def finished(self, resident: Resident) -> None:
        """The result of a paged task is here."""
        if self.warm_max is None:
            return
        results = self.window.results
        results.pop(resident, None)
        results[resident] = None
        if len(results) > self.warm_max:
            self._look_soon()

    def _look_soon(self) -> None:
        if self._timer is None:
            self._timer = self._loop.call_later(LOOK_SECONDS, self._look)

    @contextmanager
    def held(self) -> Iterator[None]:
        """Nothing goes cold."""
        self._held += 1
        try:
            yield
        finally:
            self._held -= 1

    def _look(self) -> None:
        self._timer = None
        results = self.window.results
        assert self.warm_max is not None
        over = len(results) - self.warm_max
        if over <= 0:
            return
        if not self._held and not dask_cold.sees_all(self.scheduler):
            for resident in list(islice(results, LOOK_RESULTS)):
                if over <= 0:
                    break
                del results[resident]
                if self._may_go(resident):
                    self._chill(resident)
                    over -= 1
                else:
                    results[resident] = None  # after all others
        self._look_soon()

    def _may_go(self, resident: Resident) -> bool:
        """What is told and on disk names the task for good."""
        pager = self.pager
        return (
            resident.told is Level.MEMORY
            and not resident.kept
            and resident not in self.window.changed
            and dask_cold.can_be_cold(resident.task)
            and pager.is_on_disk(resident)
            and not pager.forgotten.knows(resident.key)
        )

    def _chill(self, resident: Resident) -> None:
        ts = resident.task
        clients = frozenset(cs.client_key for cs in ts.who_wants or () if cs is not self.residency.holder)
        worker = dask_cold.chill(self.scheduler, ts)
        kind = Kind(worker, ts.group.name, ts.type, (ts.retries, ts.suspicious), clients)
        self.table.add(Cold(pack_key(resident.key), resident.id, ts.get_nbytes(), resident.submission, kind))
        self.window.drop(resident)

    # -------------------------------------------------------------------------------------------------------- come back

    def warm_packed(self, packed: bytes) -> Resident | None:
        """The result as a resident again; None if it is not cold."""
        row = self.table.take(packed) if self.table else None
        if row is None:
            return None
        key, kind = unpack_key(packed), row.kind
        ts = dask_cold.warm(self.scheduler, key, kind.worker, row.nbytes, kind.type)
        ts.retries, ts.suspicious = kind.failures
        resident = Resident(key, row.id, ts, paged=True, told=Level.MEMORY, submission=row.submission)
        self.window.add(resident)
        internals.hold(ts, self.residency.holder)
        for client in kind.clients:
            if (cs := internals.client_state(self.scheduler, client)) is not None:
                internals.hold(ts, cs)
        self.finished(resident)
        return resident

    def warm_id(self, id: int) -> Resident | None:
        packed = self.table.key_of(id)
        return None if packed is None else self.warm_packed(packed)

    def warm(self, keys: Iterable[Any]) -> None:
        if self.table:
            for packed in pack_keys(keys):
                self.warm_packed(packed)

    def warm_worker(self, address: str) -> None:
        for packed in [packed for kind in self.table.of_worker(address) for packed in kind.rows]:
            self.warm_packed(packed)

    def warm_all(self) -> None:
        for packed in [packed for kind in self.table.kinds() for packed in kind.rows]:
            self.warm_packed(packed)

    # ------------------------------------------------------------------------------------------------------------ wants

    def want(self, client: str, keys: Iterable[Any], *, new: bool = False) -> None:
        """The client wants those of these that are cold, and is told that they are there; `new`: if it did not want them before."""
        if self.table:
            for key in keys:
                for packed in pack_keys([key]):
                    if (is_new := self.table.want(packed, client)) or (is_new is False and not new):
                        dask_cold.tell_in_memory(self.scheduler, key, client)

    def unwant(self, client: str, keys: Iterable[Any]) -> None:
        if self.table:
            for packed in pack_keys(keys):
                self.table.unwant(packed, client)

    def unwant_all(self, keys: Iterable[Any]) -> None:
        if self.table:
            for packed in pack_keys(keys):
                self.table.unwant_all(packed)

    def want_only(self, client: str, keys: Collection[Any]) -> None:
        """The client wants these and no others."""
        if self.table:
            these = set(pack_keys(keys))
            for packed in self.table.wanted_by(client):
                if packed not in these:
                    self.table.unwant(packed, client)
            self.want(client, keys)

    # --------------------------------------------------------------------------------------------------------- the end

    def release(self, ids: Iterable[int]) -> list[Resident]:
        """Let go of those of these that are cold: the database says that nobody needs them. One that a client wants is returned, warm."""
        warm: list[Resident] = []
        going: dict[str, list[Any]] = {}
        for id in ids:
            packed = self.table.key_of(id)
            kind = None if packed is None else self.table.kind_of(packed)
            if packed is None or kind is None:
                continue
            if kind.clients:
                warm.extend(filter(None, (self.warm_packed(packed),)))
            elif (row := self.table.take(packed)) is not None:
                going.setdefault(kind.worker, []).append(self._leave(row, done=True))
        for address, keys in going.items():
            dask_recovery.free_on(self.scheduler, self.scheduler.workers[address], keys)
        return warm

    def remove_worker(self, scheduler: Any, worker: str, **kwargs: Any) -> None:
        """What only this worker had is lost; the database says what of it runs again. A scheduler that closes loses all workers: they are
        there for the next one."""
        if scheduler.status is not Status.running:
            return
        lost = [packed for kind in self.table.of_worker(worker) for packed in kind.rows]
        if not lost:
            return
        logger.warning("taskdb: with worker %s %d results are lost that were not resident", worker, len(lost))
        self.residency.count_no_more()
        for packed in lost:
            row = self.table.take(packed)
            if row is not None:
                key = self._leave(row, done=False)
                resident = Resident(key, row.id, None, paged=True, told=Level.MEMORY, submission=row.submission)
                resident.failures = row.kind.failures
                resident.left_at = self.window.runs
                self.window.changed[resident] = None
        self.pager.schedule()

    def _leave(self, row: Cold, *, done: bool) -> Any:
        key, group = unpack_key(row.key), row.kind.group
        dask_cold.leaves(self.scheduler, key, row.kind.worker, row.nbytes)
        self.residency.ledger.cold_leaves(group, done=done)
        self.residency.maybe_settle(group, row.submission)
        return key
