"""Between the scheduler and the database: reports what changed, asks for more, and carries out what the answers say.

Runs on the scheduler's loop. What is done to the scheduler stands in `residency.py`.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any

from distributed.diagnostics.plugin import SchedulerPlugin
from distributed.scheduler import Scheduler

from scheduler_adapter import dask_internals as internals
from scheduler_adapter.claims import Claim, Claims
from scheduler_adapter.config import AdapterConfig
from scheduler_adapter.cooling import Cooling
from scheduler_adapter.errors_payload import read_error, write_error
from scheduler_adapter.forgotten import Forgotten
from scheduler_adapter.keys import pack_keys, unpack_key
from scheduler_adapter.outbox import FIRE_AND_FORGET
from scheduler_adapter.ran import Run, run_columns, run_of
from scheduler_adapter.residency import Residency
from scheduler_adapter.window import Resident, credit, leases_max
from taskdb.client import Session
from taskdb.commands import (
    Added,
    Adopt,
    Adopted,
    Blame,
    Cancelled,
    Command,
    Credit,
    DropClient,
    Erred,
    Fail,
    Lease,
    Report,
    Result,
    TakenWhole,
    Unwant,
    Want,
    WantState,
)
from taskdb.model import Level, TaskState

logger = logging.getLogger("distributed.taskdb")

#: Batches under way at which reports rather gather: the daemon is behind.
BATCHES_UNDER_WAY = 4
#: Intervals that a report waits which changes nothing for anybody: a message costs as much as the tasks it tells of.
IDLY = 5
#: How long, at most, a client that has cancelled waits until all that follows from it is carried out.
CARRIED_OUT_SECONDS_MAX = 10.0
#: How often it is looked whether something is on disk.
ON_DISK_SECONDS = 0.005
#: How long, at most, work that may have been done already waits for workers that may have done it.
WORKERS_BACK_SECONDS_MAX = 5.0


class Pager(SchedulerPlugin):
    name = "taskdb"

    def __init__(self, scheduler: Scheduler, config: AdapterConfig):
        self.scheduler = scheduler
        self.config = config
        self.residency = Residency(scheduler)
        self.window = self.residency.window
        self.residency.on_unneeded = self._unneeded
        self.cooling = self.residency.cooling = Cooling(self)
        self.session: Session | None = None
        #: Called with answers that belong to somebody else.
        self.on_added: Callable[[Added], None] = lambda added: None
        self.on_cancelled: Callable[[list[Cancelled]], None] = lambda cancelled: None
        self.on_refused: Callable[[Any], None] = lambda refused: None
        self.on_whole: Callable[[TakenWhole], None] = lambda whole: None
        #: Called when the adapter itself has failed: what the database believes may not be so.
        self.on_fault: Callable[[str], None] = lambda detail: None
        #: Tasks on disk that are to run, and those of them that could run now, as of the last answer.
        self.backlog = 0
        #: Which store it is: what workers hold for another one means nothing here.
        self.store = ""
        #: Workers may still bring what earlier schedulers held.
        self.recovering = False
        #: Nobody is waited for (any more) who may bring something.
        self.workers_back = asyncio.Event()
        self.ready_on_disk = 0
        #: Reasons to lease nothing: it is not known yet what workers have of it.
        self.holding = 0
        self.forgotten = Forgotten(self)
        #: Keys wanted by FIRE_AND_FORGET that are not done.
        self.fire_and_forget = self.forgotten.keys
        self._not_idle = False
        #: Of what the last answered batch gave rise to, some has yet to be carried out.
        self._busy = False
        self._pending: list[Command] = []
        #: What was last said: ready, total, leases seen.
        self._credit_told = (0, 0, 0)
        self._flush: asyncio.Handle | None = None
        self._flush_is_urgent = self._flush_is_idle = self._gathering = False
        self._unneeded_now: list[Resident] = []
        self._ended_at: deque[tuple[int, Unwant | DropClient]] = deque()
        #: Number of the batch that told last of a task, by id; and the same in order. Until it is on disk.
        self._told_at: dict[int, int] = {}
        self._told: deque[tuple[int, int]] = deque()
        self._waiters: list[tuple[int, asyncio.Future[None]]] = []
        self._asked: dict[tuple[str, bytes], list[asyncio.Future[WantState]]] = {}
        self._claims = Claims(self.residency)
        #: Graphs of which all that is left is about to be taken in as one: none of it comes alone.
        self.coming_whole: set[str] = set()
        self._loop = asyncio.get_running_loop()

    # ------------------------------------------------------------------------------------------------ to the database

    def send(self, *commands: Command, urgent: bool = False) -> None:
        """Queue commands, in order. `urgent`: somebody waits for the answer."""
        if urgent:
            # Who sends this may have seen what the database has not been told: that comes first.
            self._pending.extend(self._reports())
        self._pending.extend(commands)
        ending = self.residency.ending
        for command in commands:
            if type(command) is Unwant:
                ending.update(((command.client, key), command) for key in command.keys)
            elif type(command) is Want and (ending or self.residency.restated):
                for key in command.keys:
                    self.residency.wants(command.client, key)
        self.schedule(urgent=urgent)

    def schedule(self, *, urgent: bool = False, idly: bool = False) -> None:
        """Flush soon: at once if urgent, else after `flush_interval_ms`, or, if nobody waits for what there is to tell, IDLY times that."""
        if self._flush is not None:
            if self._flush_is_urgent or not (urgent or (self._flush_is_idle and not idly)):
                return
            self._flush.cancel()
        self._flush_is_urgent, self._flush_is_idle = urgent, idly
        if urgent:
            self._flush = self._loop.call_soon(self._guarded, self._do_flush)
        else:
            seconds = self.config.flush_interval_ms / 1000 * (IDLY if idly else 1)
            self._flush = self._loop.call_later(seconds, self._guarded, self._do_flush)

    def _guarded(self, act: Callable[[], None]) -> None:
        """For what the loop calls: it would only log what is raised."""
        try:
            act()
        except Exception as e:
            logger.critical("the adapter failed", exc_info=True)
            self.on_fault(repr(e))

    def _do_flush(self) -> None:
        self._flush = None
        session = self.session
        if session is None:
            return
        if session.in_flight >= BATCHES_UNDER_WAY and not self._flush_is_urgent:
            self._gathering = True  # the next answer flushes
            return
        self._flush_is_urgent = False
        commands, self._pending = self._pending, []
        commands.extend(self._reports())
        room = (0, 0)
        if not self.holding:
            room = credit(
                threads=self.scheduler.total_nthreads,
                runnable=internals.runnable_here(self.scheduler),
                leased=len(self.window.leased),
                lookahead=self.config.lookahead,
            )
        told = (*room, session.leases_seen)
        if commands or not session.last_seq or ((self.backlog or self.holding) and told != self._credit_told):
            self._credit_told = told
            commands.append(Credit(*told))
            seq = session.send(commands)
            for command in commands:
                if isinstance(command, Unwant | DropClient):
                    self._ended_at.append((seq, command))

    def is_on_disk(self, resident: Resident) -> bool:
        """Whether all that was told of it is."""
        return resident.id != 0 and self.session is not None and self._told_at.get(resident.id, 0) <= self.session.durable_seq

    def _forget_told(self, durable_seq: int) -> None:
        while self._told and self._told[0][0] <= durable_seq:
            seq, id = self._told.popleft()
            if self._told_at.get(id) == seq:
                del self._told_at[id]

    def _reports(self) -> list[Command]:
        """What changed since the last time. Finished tasks come first, and those that left last: so the database never sees a result gone
        that a finished task, told in the same breath, needed."""
        out: list[Command] = []
        rows: list[tuple[int, Level, int, int, int]] = []
        runs: list[Run | None] = []
        changes = self.window.changes()
        changes.sort(key=lambda change: _REPORT_ORDER[change[1]])
        seq = 0 if self.session is None else self.session.last_seq + 1
        for resident, level in changes:
            self._told_at[resident.id] = seq
            self._told.append((seq, resident.id))
            ts = resident.task
            if level is Level.ERRED and ts.exception_blame is not None:
                out.append(self._failure(resident))
                continue
            nbytes = ts.nbytes if level is Level.MEMORY else -1
            rows.append((resident.id, level, nbytes, *resident.failures))
            runs.append(resident.ran if level is Level.MEMORY else None)
            resident.ran = None
        if rows:
            out.insert(0, Report(*(list(column) for column in zip(*rows, strict=True)), **run_columns(runs)))
        return out

    def _failure(self, resident: Resident) -> Command:
        blame = resident.task.exception_blame
        cause = self.window.by_key.get(blame.key)
        if cause is None or not cause.id or cause is resident:
            payload = write_error(blame.exception, blame.traceback)
            return Fail(resident.id, payload, blame.exception_text or "", blame.traceback_text or "")
        return Blame(resident.id, cause.id)

    def _news(self, leases: list[Lease]) -> list[Lease]:
        """Without tasks of which the database has yet to hear, or had when it said this: after a broken link it leases again whatever it
        has not heard of. Some that have left learn their ids by it."""
        assert self.session is not None
        answered = self.session.last_seq - self.session.in_flight
        left = [r for r in self.window.changed if r.task is None]
        untold = {r.id for r in left}
        nameless = {r.key: r for r in left if not r.id}
        out = []
        for lease in leases:
            resident = nameless.get(unpack_key(lease.key)) if nameless else None
            if resident is not None and resident.submission == lease.submission:
                self.window.identify(resident, lease.id)
            elif self._claims.set_aside(lease):
                pass  # the answer to the claim says which it is
            elif lease.submission not in self.coming_whole and lease.id not in untold and self._told_at.get(lease.id, 0) <= answered:
                out.append(lease)
        return out

    async def answered(self) -> None:
        """Return once everything queued so far has been applied by the database."""
        self._flush_now()
        if self.session is not None and self.session.in_flight:
            self._waiters.append((self.session.last_seq, waiter := self._loop.create_future()))
            await waiter

    async def carried_out(self) -> None:
        """The same, with all that follows from it, in however many steps it is done; not for long: the database may do other things."""
        deadline = self._loop.time() + CARRIED_OUT_SECONDS_MAX
        await self.answered()
        while self.session is not None and self._busy and self._loop.time() < deadline:
            await asyncio.sleep(ON_DISK_SECONDS)
            self.send(Unwant("", []))  # says nothing: only the answer counts
            await self.answered()

    def _flush_now(self) -> None:
        if self._flush is not None:
            self._flush.cancel()
        self._flush_is_urgent = True
        self._do_flush()

    async def workers_are_back(self) -> None:
        """Wait until all that an earlier scheduler had have come, but not for long."""
        with suppress(TimeoutError):
            await asyncio.wait_for(self.workers_back.wait(), WORKERS_BACK_SECONDS_MAX)

    def hold_less(self) -> None:
        self.holding -= 1
        self.schedule(urgent=True)

    def next_seq(self) -> int:
        """Number of the batch that carries, or carried, what has been queued so far."""
        return 0 if self.session is None else self.session.last_seq + bool(self._pending)

    async def durable(self) -> None:
        """Return once everything queued so far is on disk, where reads see it (or the link is lost)."""
        await self.answered()
        seq = self.session.last_seq if self.session is not None else 0
        while self.session is not None and self.session.durable_seq < seq and self.session.connected:
            await asyncio.sleep(ON_DISK_SECONDS)

    async def on_disk(self, seq: int) -> int:
        """Return once the batch of this number is on disk, however often the link is lost: the last that is. 0: the scheduler closes."""
        while self.session is not None and self.session.durable_seq < seq:
            await asyncio.sleep(ON_DISK_SECONDS)
        return 0 if self.session is None else self.session.durable_seq

    async def want(self, client: str, keys: Iterable[Any]) -> list[WantState]:
        """Want keys and hear what they are, as the database sees them after everything sent so far."""
        packed = pack_keys(keys)
        waiters: list[asyncio.Future[WantState]] = [self._loop.create_future() for _ in packed]
        for key, waiter in zip(packed, waiters, strict=True):
            self._asked.setdefault((client, key), []).append(waiter)
        self.send(Want(client, packed), urgent=True)
        return list(await asyncio.gather(*waiters))

    async def ensure(self, keys: Iterable[Any], client: str) -> None:
        """Have these keys in the scheduler's `tasks`, if the database knows them, wanted by `client`."""
        keys = list(keys)
        self.cooling.warm(keys)
        absent = [k for k in keys if k not in self.scheduler.tasks]
        if not absent:
            return
        internals.ensure_client_state(self.scheduler, client)
        for want in await self.want(client, absent):
            key = unpack_key(want.key)
            if want.state is None or key in self.scheduler.tasks:
                continue
            erred = read_error(want.payload) if want.state is TaskState.ERRED else None
            ts = internals.new_stub(self.scheduler, key, erred)
            self.residency.ledger.enters(ts)
            stub = Resident(key, want.id, ts, paged=True, told=None)
            stub.stub = True
            self.window.add(stub)

    def link_restored(self) -> None:
        """The daemon is back. IMPORTANT: at once: what was finished meanwhile must be told before what is held, and the next credit."""
        self._claims.link_restored()
        self._flush_now()

    def close(self) -> None:
        if self._flush is not None:
            self._flush.cancel()
        self._do_flush()
        self.session = None
        for _, waiter in self._waiters:
            waiter.cancel()
        self._claims.close()

    async def adopt(self, command: Adopt, on_answer: Callable[[Adopted], None]) -> None:
        """Claim what a worker has. `on_answer` is called before any lease that comes with the answers is taken in."""
        asked = self.expect_adopted(command, on_answer)
        self.send(command, urgent=True)
        if command.keys:
            await asked.done

    def expect_adopted(self, command: Adopt, on_answer: Callable[[Adopted], None]) -> Claim:
        """The same, for a command that goes out with others."""
        return self._claims.expect(command, on_answer)

    # -------------------------------------------------------------------------------------------- from the scheduler

    def transition(self, key: Any, start: str, finish: str, *args: Any, stimulus_id: str, **kwargs: Any) -> None:
        resident = self.window.by_key.get(key)
        if resident is None:
            return
        try:
            self.residency.follow(resident, finish)
        except Exception as e:  # stock ignores a plugin that raises
            logger.critical("the adapter failed to follow %r from %s to %s", key, start, finish, exc_info=True)
            self.on_fault(repr(e))
            raise
        if finish in ("memory", "erred"):
            if "startstops" in kwargs and self.session is not None and self.session.history and finish == "memory":
                resident.ran = run_of(kwargs)
            if key in self.fire_and_forget:
                self.forgotten.end(key)
            self.schedule(urgent=self._hungry(), idly=not self.window.awaited)
        elif self._flush is None or (self._flush_is_idle and self.window.awaited):
            self.schedule(idly=not self.window.awaited)

    def _hungry(self) -> bool:
        """Whether more work should be asked for without waiting: there is some on disk, and little or nothing runnable here."""
        if not self.backlog or (self.session is not None and self.session.in_flight):
            return False
        if 2 * len(self.window.leased) < leases_max(self.scheduler.total_nthreads, self.config.lookahead):
            return True
        return not self.scheduler.queued and internals.slots_open(self.scheduler)

    def _unneeded(self, residents: list[Resident]) -> None:
        """Not inside a transition: stock is still looking at these."""
        if not self._unneeded_now:
            self._loop.call_soon(self._guarded, self._release_unneeded)
        self._unneeded_now.extend(residents)

    def _release_unneeded(self) -> None:
        self._unneeded_now, residents = [], self._unneeded_now
        self.residency.release_unneeded(residents)

    def restart(self, scheduler: Scheduler) -> None:
        self.residency.clear()
        self.forgotten.clear()

    # --------------------------------------------------------------------------------------------- from the database

    def on_result(self, result: Result, seq: int, refused: list[Any]) -> None:
        if self.session is None:
            return  # closed: what comes is the answer to the last reports
        self._note_backlog(result)
        for added in result.added:
            self.on_added(added)
        for item in refused:
            self.on_refused(item)
        if result.cancelled:
            self.on_cancelled(result.cancelled)
        for whole in result.whole:
            self.on_whole(whole)
        for answer in result.adopted:
            self._claims.answered(answer)
        if result.release:
            by_id = self.window.by_id
            self.forgotten.release([r for id in result.release if (r := by_id.get(id)) is not None] + self.cooling.release(result.release))
        if result.leases:
            # What an earlier scheduler knew of.
            self.fire_and_forget.update(unpack_key(lease.key) for lease in result.leases if FIRE_AND_FORGET in lease.clients)
            news = self._news(result.leases)
            self.residency.page_in(news)
            if len(news) < len(result.leases):
                self.schedule()  # the daemon takes these for under way until it hears that they have come
        unknown: dict[str, list[Any]] = {}
        for want in result.wants:
            self._on_want(want, unknown)
        for client, keys in unknown.items():
            self.tell_unknown(client, keys)
        for erred in result.erred:
            self.tell_erred(erred)
        for count in result.forgotten:
            self.residency.forgotten(count)
        if seq:
            self._busy = result.busy
        if seq and self._waiters:
            for _, waiter in [w for w in self._waiters if w[0] <= seq]:
                if not waiter.done():
                    waiter.set_result(None)
            self._waiters = [w for w in self._waiters if w[0] > seq]
        self._forget_told(self.session.durable_seq)
        # A daemon that dies before that says again what it knew before.
        while self._ended_at and self._ended_at[0][0] <= self.session.durable_seq:
            _, command = self._ended_at.popleft()
            self._ended(command)
        if self._gathering or self._pending or self.window.changed:
            idly = not (self._gathering or self._pending or self.window.awaited or result.added)
            self._gathering = False
            self.schedule(idly=idly)

    def _ended(self, command: Unwant | DropClient) -> None:
        residency = self.residency
        if isinstance(command, DropClient):
            if residency.restated.get(command.client, (None,))[0] is command:
                del residency.restated[command.client]
        else:
            for key in command.keys:
                if residency.ending.get((command.client, key)) is command:
                    del residency.ending[command.client, key]

    def _note_backlog(self, result: Result) -> None:
        """While work is on disk the scheduler is not idle, though nothing of it is in its tables."""
        self.backlog, self.ready_on_disk = result.queued, result.ready
        if (self.backlog > 0) != self._not_idle:
            self._not_idle = not self._not_idle
            (internals.graph_update_begins if self._not_idle else internals.graph_update_ends)(self.scheduler)
            if self._not_idle:
                self.schedule()

    def _on_want(self, want: WantState, unknown: dict[str, list[Any]]) -> None:
        for waiter in self._asked.pop((want.client, want.key), ()):
            if not waiter.done():
                waiter.set_result(want)
        resident = self.window.by_key.get(unpack_key(want.key))
        if resident is not None and resident.task is not None and resident.id in (0, want.id):
            cs = internals.client_state(self.scheduler, want.client)
            if cs is not None and cs not in (resident.task.who_wants or ()) and not self.residency.is_old(want.client, want.key):
                internals.hold(resident.task, cs)
                self.scheduler.report_on_key(ts=resident.task, client=want.client)
            if want.client == FIRE_AND_FORGET and resident.task.state in ("memory", "erred"):
                self.forgotten.end(resident.key)  # a worker has brought it since that was said
        elif self.cooling.is_named(want.key, want.id):
            if want.client in self.scheduler.clients and not self.residency.is_old(want.client, want.key):
                self.cooling.want(want.client, [unpack_key(want.key)], new=True)
        elif want.state is TaskState.ERRED:
            self.tell_erred(Erred(want.client, want.key, want.cause, want.payload))
        elif want.state is None and unpack_key(want.key) not in self.scheduler.tasks:
            unknown.setdefault(want.client, []).append(unpack_key(want.key))

    def tell_unknown(self, client: str, keys: list[Any]) -> None:
        """Stock leaves a future of a key that nobody knows pending for ever."""
        if client in self.scheduler.client_comms:
            names = ", ".join(repr(key) for key in keys[:5])
            logger.warning("client %s wants %d tasks nobody knows; they are cancelled for it: %s", client, len(keys), names)
            self.scheduler.client_send(client, {"op": "cancelled-keys", "keys": keys, "reason": "unknown key"})

    def tell_erred(self, erred: Erred) -> None:
        """A wanted task failed on disk: its client hears of it from us."""
        if erred.client == FIRE_AND_FORGET:
            self.forgotten.end(unpack_key(erred.key))
            return
        if not erred.payload:
            # Scattered data it depends on was lost: stock calls that cancelled.
            self.scheduler.client_send(erred.client, {"op": "cancelled-keys", "keys": [unpack_key(erred.key)], "reason": "lost data"})
            return
        exception, traceback = read_error(erred.payload)
        message = {"op": "task-erred", "key": unpack_key(erred.key), "exception": exception, "traceback": traceback}
        self.scheduler.client_send(erred.client, message)


_REPORT_ORDER = {Level.MEMORY: 0, Level.ERRED: 1, Level.RELEASED: 2, Level.HELD: 3, Level.OUT: 4}
