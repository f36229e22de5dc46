"""Moves tasks between the database and the scheduler: pages in what was leased, lets go of what nobody needs, reports what changed.

Runs on the scheduler's loop. The scheduler's state machine is stock; the pager only adds tasks to it, ends the holder's wants and listens.
"""

from __future__ import annotations

import asyncio
import logging
import pickle
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from distributed.diagnostics.plugin import SchedulerPlugin
from distributed.protocol.serialize import Serialized
from distributed.scheduler import Scheduler
from distributed.scheduler import TaskState as DaskTask

from scheduler_adapter import dask_internals as internals
from scheduler_adapter.config import AdapterConfig
from scheduler_adapter.keys import pack_key, unpack_key
from scheduler_adapter.specs import StoredSpec
from scheduler_adapter.window import Resident, Window, credit
from taskdb.client import Session
from taskdb.commands import Added, Blame, Cancelled, Command, Credit, Erred, Fail, GroupCount, Lease, Report, Result, Unwant, Want, WantState
from taskdb.model import Level, TaskFlag, TaskState

logger = logging.getLogger("taskdb.adapter")

#: Stock's pseudo client for tasks that nobody waits for. Stock ends its wants itself once a task is done.
FIRE_AND_FORGET = "fire-and-forget"


@dataclass(eq=False)
class Submission:
    """What the scheduler must remember of a graph while tasks of it exist. O(1), whatever the graph's size."""

    name: str
    client: str
    span_metadata: Any = None
    code: Any = ()
    computation: Any = None
    #: Resident whole: stock counts its groups itself, but for the tasks that left for the database.
    followed: bool = False
    #: New tasks that the database has not forgotten yet; None while it is still arriving.
    remaining: int = 0
    #: Names of its groups.
    groups: set[str] = field(default_factory=set)
    arriving: bool = True
    left: Counter[str] = field(default_factory=Counter)


class Pager(SchedulerPlugin):  # type: ignore[misc]
    name = "taskdb"

    def __init__(self, scheduler: Scheduler, config: AdapterConfig):
        self.scheduler = scheduler
        self.config = config
        self.window = Window()
        self.ledger = internals.GroupLedger(scheduler)
        self.holder = internals.holder()
        self.submissions: dict[str, Submission] = {}
        self.session: Session | None = None
        #: Called with answers that belong to somebody else.
        self.on_added: Callable[[Added], None] = lambda added: None
        self.on_cancelled: Callable[[list[Cancelled]], None] = lambda cancelled: None
        self.on_refused: Callable[[Any], None] = lambda refused: None
        self.most_resident = 0
        #: Tasks on disk that are to run, and those of them that could run now, as of the last answer.
        self.backlog = 0
        self.ready_on_disk = 0
        self._raised = False
        #: Keys wanted by FIRE_AND_FORGET that are not done.
        self.fire_and_forget: set[Any] = set()
        self._pending: list[Command] = []
        self._leases_seen = 0
        self._credit_told: tuple[int, int] = (0, 0)
        self._flush: asyncio.Handle | None = None
        self._flush_is_urgent = False
        self._annotations: dict[bytes, dict[str, Any]] = {}
        self._busy = False
        self._waiters: list[tuple[int, asyncio.Future[None]]] = []
        self._asked: dict[tuple[str, bytes], list[asyncio.Future[WantState]]] = {}
        self._loop = asyncio.get_running_loop()

    # ------------------------------------------------------------------------------------------------ to the database

    def send(self, *commands: Command, urgent: bool = False) -> None:
        """Queue commands, in order. `urgent`: somebody waits for the answer."""
        self._pending.extend(commands)
        self.schedule(urgent=urgent)

    def schedule(self, *, urgent: bool = False) -> None:
        """Flush soon: at once if urgent, else when a report has waited for `flush_interval_ms`."""
        if self._flush is not None:
            if not urgent or self._flush_is_urgent:
                return
            self._flush.cancel()
        self._flush_is_urgent = urgent
        if urgent:
            self._flush = self._loop.call_soon(self._do_flush)
        else:
            self._flush = self._loop.call_later(self.config.flush_interval_ms / 1000, self._do_flush)

    def _do_flush(self) -> None:
        self._flush = None
        session = self.session
        if session is None:
            return
        if session.in_flight >= 4 and not self._flush_is_urgent:
            # The daemon is behind: let reports gather, the next answer flushes.
            self._busy = True
            return
        self._flush_is_urgent = False
        commands = self._pending
        self._pending = []
        commands.extend(self._reports())
        ready, total = credit(
            threads=self.scheduler.total_nthreads,
            runnable=internals.runnable_here(self.scheduler),
            leased=len(self.window.leased),
            lookahead=self.config.lookahead,
        )
        if not self.backlog and not commands:
            return
        if commands or (ready, total) != self._credit_told:
            self._credit_told = ready, total
            commands.append(Credit(ready, total, self._leases_seen))
        if commands:
            session.send(commands)

    async def answered(self) -> None:
        """Return once everything queued so far has been applied by the database."""
        if self._flush is not None:
            self._flush.cancel()
        self._flush_is_urgent = True
        self._do_flush()
        assert self.session is not None
        if self.session.in_flight:
            waiter = self._loop.create_future()
            self._waiters.append((self.session.last_seq, waiter))
            await waiter

    async def want(self, client: str, keys: Iterable[Any]) -> list[WantState]:
        """Want keys and hear what they are, as the database sees them after everything sent so far."""
        packed = [pack_key(k) for k in keys]
        waiters: list[asyncio.Future[WantState]] = []
        for key in packed:
            waiter = self._loop.create_future()
            self._asked.setdefault((client, key), []).append(waiter)
            waiters.append(waiter)
        self.send(Want(client, packed), urgent=True)
        return list(await asyncio.gather(*waiters))

    async def durable(self) -> None:
        """Return once everything queued so far is on disk, where reads see it (or the link is lost)."""
        await self.answered()
        assert self.session is not None
        while self.session.unacked and self.session.connected:
            await asyncio.sleep(0.005)

    async def ensure(self, keys: Iterable[Any], client: str) -> None:
        """Have these keys in the scheduler's `tasks`, if the database knows them, wanted by `client`."""
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
            self.ledger.enters(ts)
            stub = Resident(key, want.id, ts, paged=True, told=None)
            stub.stub = True
            self.window.add(stub)

    def close(self) -> None:
        if self._flush is not None:
            self._flush.cancel()
        self._do_flush()
        self.session = None

    def _on_want(self, want: WantState) -> None:
        waiters = self._asked.pop((want.client, want.key), None)
        for waiter in waiters or ():
            if not waiter.done():
                waiter.set_result(want)
        resident = self.window.by_key.get(unpack_key(want.key))
        cs = internals.client_state(self.scheduler, want.client)
        if resident is not None and resident.task is not None:
            if cs is not None and (resident.task.who_wants is None or cs not in resident.task.who_wants):
                internals.hold(resident.task, cs)
                self.scheduler.report_on_key(ts=resident.task, client=want.client)
        elif want.state is TaskState.ERRED:
            self.tell_erred(Erred(want.client, want.key, want.cause, want.payload))

    def _reports(self) -> list[Command]:
        changes = self.window.changes()
        if not changes:
            return []
        out: list[Command] = []
        ids, levels, nbytes, retries, suspicious = [], [], [], [], []
        for resident, level in changes:
            ts = resident.task
            if level is Level.ERRED and ts is not None and ts.exception_blame is not None:
                blame = ts.exception_blame
                if blame is ts:
                    out.append(Fail(resident.id, _error_payload(ts), ts.exception_text or ""))
                    continue
                cause = self.window.by_key.get(blame.key)
                if cause is not None and cause.id:
                    out.append(Blame(resident.id, cause.id))
                    continue
                out.append(Fail(resident.id, _error_payload(blame), blame.exception_text or ""))
                continue
            ids.append(resident.id)
            levels.append(level)
            nbytes.append(ts.nbytes if ts is not None and level is Level.MEMORY else -1)
            retries.append(-1 if ts is None else ts.retries)
            suspicious.append(0 if ts is None else ts.suspicious)
        if ids:
            out.append(Report(ids, levels, nbytes, retries, suspicious))
        return out

    # -------------------------------------------------------------------------------------------- from the scheduler

    def transition(self, key: Any, start: str, finish: str, *args: Any, stimulus_id: str, **kwargs: Any) -> None:
        resident = self.window.by_key.get(key)
        if resident is None:
            return
        try:
            self._transition(resident, start, finish)
        except Exception:
            # Stock ignores a plugin that raises: then the database would believe what is not so.
            logger.critical("the adapter failed to follow %r from %s to %s", key, start, finish, exc_info=True)
            raise

    def _transition(self, resident: Resident, start: str, finish: str) -> None:
        self.window.changed[resident] = None
        ts = resident.task
        if finish in ("memory", "erred") and resident.key in self.fire_and_forget:
            self.end_fire_and_forget(resident.key)
        if finish == "forgotten":
            self._left(resident, ts)
        elif resident.paged and not resident.stub:
            if finish in ("memory", "erred"):
                self.window.leased.discard(resident)
                internals.unlink(ts)
            elif finish in ("waiting", "processing"):
                self.window.leased.add(resident)
        scheduler = self.scheduler
        hungry = (
            finish != "processing" and self.backlog > 0 and internals.runnable_here(scheduler) < max(scheduler.total_nthreads, 1)
        )
        self.schedule(urgent=hungry)

    def end_fire_and_forget(self, key: Any) -> None:
        self.fire_and_forget.discard(key)
        self.send(Unwant(FIRE_AND_FORGET, [pack_key(key)]))

    def _left(self, resident: Resident, ts: DaskTask) -> None:
        submission = self.submissions.get(resident.submission)
        lost = ts.has_lost_dependencies and not resident.leaving and ts.run_spec is not None
        if resident.paged:
            self.ledger.leaves(ts, done=resident.leaving)
        elif lost:
            # A followed task that leaves because its inputs are gone comes back paged.
            self.ledger.leaves(ts, done=False)
            if submission is not None:
                submission.left[ts.group.name] += 1
        self.window.drop(resident)

    def runs_again(self, ts: DaskTask) -> bool:
        """Whether a task that stock forgets is only leaving for the database (see `internals.suppress_cancelled`)."""
        resident = self.window.by_key.get(ts.key)
        return resident is not None and not resident.leaving and ts.run_spec is not None

    # --------------------------------------------------------------------------------------------- from the database

    def on_result(self, result: Result, seq: int, refused: list[Any]) -> None:
        self.backlog, self.ready_on_disk = result.queued, result.ready
        if (self.backlog > 0) != self._raised:
            # While work is on disk the scheduler is not idle, though nothing of it is in its tables.
            self._raised = not self._raised
            (internals.graph_update_begins if self._raised else internals.graph_update_ends)(self.scheduler)
        for added in result.added:
            self.on_added(added)
        for item in refused:
            self.on_refused(item)
        if result.cancelled:
            self.on_cancelled(result.cancelled)
        if result.release:
            self._release(result.release)
        if result.leases:
            self._leases_seen += len(result.leases)
            self._page_in(result.leases)
        for want in result.wants:
            self._on_want(want)
        for erred in result.erred:
            self.tell_erred(erred)
        for count in result.forgotten:
            self._forgotten(count)
        if seq and self._waiters:
            for _, waiter in [w for w in self._waiters if w[0] <= seq]:
                if not waiter.done():
                    waiter.set_result(None)
            self._waiters = [w for w in self._waiters if w[0] > seq]
        if self._busy or self._pending or self.window.changed:
            self._busy = False
            self.schedule()

    def _page_in(self, leases: list[Lease]) -> None:
        """Create the tasks, link them, and hand them to the stock state machine."""
        scheduler = self.scheduler
        new: dict[str, list[DaskTask]] = {}
        start: list[DaskTask] = []
        errs: list[DaskTask] = []
        for lease in leases:
            key = unpack_key(lease.key)
            resident = self.window.by_key.get(key)
            if resident is not None and not resident.stub:
                self._leased_again(resident, lease)
                continue
            deps = []
            for id in lease.deps:
                dep = self.window.by_id.get(id)
                if dep is None or dep.task is None or dep.stub:
                    break
                deps.append(dep.task)
            if len(deps) < len(lease.deps):
                # A dependency left while the lease was under way: give it back.
                back = Resident(key, lease.id, None, paged=True, told=Level.HELD)
                self.window.changed[back] = None
                continue
            submission = self.submissions.get(lease.submission)
            if resident is not None:
                ts = resident.task
                resident.stub = False
                resident.told = Level.HELD
                ts.run_spec = self._spec(lease)
                self.window.identify(resident, lease.id)
            else:
                ts = internals.new_task(scheduler, key, self._spec(lease), submission.computation if submission else None)
                resident = Resident(key, lease.id, ts, paged=True, told=Level.HELD, submission=lease.submission)
                self.ledger.enters(ts)
                self.window.add(resident)
            self._dress(ts, lease)
            internals.relink(ts, deps)
            self.window.leased.add(resident)
            new.setdefault(lease.submission, []).append(ts)
            blamed = next((d for d in deps if d.exception_blame is not None), None)
            if blamed is not None:
                ts.exception_blame = blamed.exception_blame
                errs.append(ts)
            else:
                start.append(ts)
        self.most_resident = max(self.most_resident, len(scheduler.tasks))
        for name, tss in new.items():
            submission = self.submissions.get(name)
            internals.observe(
                scheduler, tss, submission.span_metadata if submission else None, submission.code if submission else ()
            )
        recommendations: dict[Any, Any] = {ts.key: "erred" for ts in errs}
        # The last recommendation is taken first: so the best rank stands last.
        start.sort(key=lambda ts: ts.priority, reverse=True)
        recommendations.update({ts.key: "waiting" for ts in start})
        if recommendations:
            scheduler.transitions(recommendations, "taskdb-page-in")
            scheduler.stimulus_queue_slots_maybe_opened(stimulus_id="taskdb-page-in")

    def _spec(self, lease: Lease) -> StoredSpec:
        return StoredSpec(lease.spec, data_producer=bool(lease.flags & TaskFlag.DATA_PRODUCER))

    def _dress(self, ts: DaskTask, lease: Lease) -> None:
        rank = lease.rank
        ts.priority = (_plain(rank.user), _plain(rank.generation), _plain(rank.order))
        if lease.annotations:
            annotations = self._annotations.get(lease.annotations)
            if annotations is None:
                if len(self._annotations) > 1000:
                    self._annotations.clear()
                annotations = self._annotations[lease.annotations] = pickle.loads(lease.annotations)
            internals.annotate(self.scheduler, ts, annotations)
        if lease.retries >= 0:
            ts.retries = lease.retries
        ts.suspicious = lease.suspicious
        internals.hold(ts, self.holder)
        for client in lease.clients:
            cs = internals.client_state(self.scheduler, client)
            if cs is not None:
                internals.hold(ts, cs)

    def _leased_again(self, resident: Resident, lease: Lease) -> None:
        """The database leased what the scheduler has: say what it is now, or, if it rests (erred, released), start it again."""
        ts = resident.task
        if not resident.id:
            self.window.identify(resident, lease.id)
        for client in lease.clients:
            cs = internals.client_state(self.scheduler, client)
            if cs is not None:
                internals.hold(ts, cs)
        deps = [dep.task for id in lease.deps if (dep := self.window.by_id.get(id)) is not None and not dep.stub and dep.task is not None]
        if ts.state in ("erred", "released") and len(deps) == len(lease.deps):
            resident.leaving = False
            internals.hold(ts, self.holder)
            if ts.state == "erred":
                # Cut first: the database itself revives what depends on it.
                internals.cut_dependents(ts)
                self.scheduler.transitions({ts.key: "released"}, "taskdb-retry")
            internals.relink(ts, deps)
            resident.paged = True
            self.scheduler.transitions({ts.key: "waiting"}, "taskdb-retry")
            self.scheduler.stimulus_queue_slots_maybe_opened(stimulus_id="taskdb-retry")
        self.window.tell_again([resident])

    def _release(self, ids: list[int]) -> None:
        """Let go of what the database says nobody needs, unless somebody here has just begun to need it."""
        going = []
        for id in ids:
            resident = self.window.by_id.get(id)
            if resident is None or resident.task is None or resident.stub:
                continue
            going.append(resident)
        keys = {r.key for r in going}
        for resident in going:
            ts = resident.task
            if ts is None:
                continue
            if not resident.paged:
                # Followed: only the holder's want ends; the rest is stock's.
                if self.holder in (ts.who_wants or ()):
                    internals.let_go(self.scheduler, self.holder, [ts], "taskdb-release")
                continue
            wanted_here = any(cs is not self.holder for cs in ts.who_wants or ())
            needed_here = any(d.key not in keys and d.state in ("waiting", "processing", "queued", "no-worker") for d in ts.dependents)
            if wanted_here or needed_here:
                self.window.tell_again([resident])
                continue
            resident.leaving = True
            internals.cut_dependents(ts)
            ts.has_lost_dependencies = True
            internals.let_go(self.scheduler, self.holder, [ts], "taskdb-release")
            if resident.task is not None:
                # Nobody held it any more: stock has no reason to look at it.
                self.scheduler.transitions({ts.key: "forgotten"}, "taskdb-release")

    def tell_erred(self, erred: Erred) -> None:
        """A wanted task failed on disk: its client hears of it from us."""
        if erred.client == FIRE_AND_FORGET:
            self.end_fire_and_forget(unpack_key(erred.key))
            return
        exception, traceback = read_error(erred.payload)
        self.scheduler.client_send(
            erred.client, {"op": "task-erred", "key": unpack_key(erred.key), "exception": exception, "traceback": traceback}
        )

    def _forgotten(self, count: GroupCount) -> None:
        submission = self.submissions.get(count.submission)
        if submission is None:
            return
        if submission.followed:
            n = min(count.count, submission.left[count.group])
            submission.left[count.group] -= n
        else:
            n = count.count
        if n:
            self.ledger.forgotten(count.group, n)
        submission.remaining -= count.count
        self.maybe_end(submission)

    def maybe_end(self, submission: Submission) -> None:
        if not submission.arriving and submission.remaining <= 0:
            self.submissions.pop(submission.name, None)

    def reset(self) -> None:
        """After `Scheduler.restart` nothing is resident."""
        self.window.clear()
        self.ledger.clear()
        self.fire_and_forget.clear()
        self.holder = internals.holder()
        self._annotations.clear()

    def restart(self, scheduler: Scheduler) -> None:
        self.reset()


def _plain(x: float) -> float:
    return int(x) if x == int(x) else x


def _bytes(x: Any) -> Any:
    """A Serialized with frames that can be stored."""
    if isinstance(x, Serialized):
        return Serialized(dict(x.header), [bytes(f) for f in x.frames])
    return x


def _error_payload(ts: DaskTask) -> bytes:
    return pickle.dumps((_bytes(ts.exception), _bytes(ts.traceback)))


def read_error(payload: bytes) -> tuple[Any, Any]:
    """Exception and traceback as stock puts them into a `task-erred` message. The exception itself stays serialised."""
    exception, traceback = pickle.loads(payload) if payload else (None, None)
    return exception, traceback
