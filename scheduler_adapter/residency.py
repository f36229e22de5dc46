"""Brings leased tasks into the scheduler, follows what becomes of them there, and lets go of what nobody needs.

The scheduler's state machine is stock. What is done to it from outside: tasks are added with their links, a holder's wants are set and
ended, and a paged task that is done is cut from its dependencies. Says nothing to the database; `pager.py` does.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from distributed.scheduler import Scheduler
from distributed.scheduler import TaskState as DaskTask

from scheduler_adapter import dask_internals as internals
from scheduler_adapter.dask_groups import GroupLedger
from scheduler_adapter.keys import pack_keys, unpack_key
from scheduler_adapter.restricted import Restricted
from scheduler_adapter.reused import Reused
from scheduler_adapter.specs import Specs, StoredSpec
from scheduler_adapter.submitted import Submission
from scheduler_adapter.unclaimed import Unclaimed
from scheduler_adapter.window import Resident, Window, priority_of
from taskdb.commands import DEPENDENTS_UNKNOWN, GroupCount, Lease
from taskdb.model import Level

if TYPE_CHECKING:
    from scheduler_adapter.cooling import Cooling

_UNFINISHED = ("waiting", "processing", "queued", "no-worker")


class Residency:
    #: What goes cold and comes back; set by the pager.
    cooling: Cooling

    def __init__(self, scheduler: Scheduler):
        self.scheduler = scheduler
        self.window = Window()
        self.ledger = GroupLedger(scheduler)
        self.holder = internals.holder()
        self.unclaimed = Unclaimed(scheduler, self.give_back)
        self.reused, self.restricted = Reused(), Restricted()
        self.submissions: dict[str, Submission] = {}
        self.most_resident = 0
        #: New tasks of all graphs so far.
        self.taken_in = 0
        #: Wants whose end the database has not confirmed: what it says of them is old.
        self.ending: dict[tuple[str, bytes], Any] = {}
        #: The same for clients that came back and said all they want: the command that ends the rest, and what they want.
        self.restated: dict[str, tuple[Any, set[bytes]]] = {}
        #: Clients that are back and have yet to say what they want: they may have let go of it, and given its keys to other tasks.
        self.unheard: set[str] = set()
        #: The lease's run spec and annotations.
        self.spec = Specs().of
        #: Some resident has a count of dependents.
        self._counting = False
        #: Groups of graphs that ended while tasks of theirs were resident.
        self._unsettled: set[str] = set()
        #: Called with paged tasks whose last dependent has finished here.
        self.on_unneeded: Callable[[list[Resident]], None] = lambda residents: None

    # --------------------------------------------------------------------------------------------------------- page in

    def page_in(self, leases: list[Lease]) -> None:
        """Create the tasks, link them, and hand them to the stock state machine."""
        scheduler = self.scheduler
        new: dict[str, list[DaskTask]] = {}
        start: list[DaskTask] = []
        erred: list[DaskTask] = []
        for lease in leases:
            key = unpack_key(lease.key)
            if key in self.unclaimed and self._claimed(key, lease):
                continue
            resident = self.by_key(key, lease.key)
            spec, annotations = self.spec(lease)
            if resident is not None and not resident.stub:
                if not self._is_over(resident, lease, spec):
                    self._leased_again(resident, lease)
                    continue
                self._end(resident)
                resident = None
            deps = self.dependencies(lease)
            if deps is None:
                # A dependency left while the lease was under way.
                self.give_back(lease, Level.HELD)
                continue
            ts = self.enter(key, lease, resident, spec, annotations)
            internals.relink(ts, [dep.task for dep in deps])
            new.setdefault(lease.submission, []).append(ts)
            blamed = next((dep.task for dep in deps if dep.task.exception_blame is not None), None)
            if blamed is not None:
                ts.exception_blame = blamed.exception_blame
                erred.append(ts)
            else:
                start.append(ts)
        self.most_resident = max(self.most_resident, len(scheduler.tasks))
        for name, tss in new.items():
            submission = self.submissions.get(name)
            internals.observe(scheduler, tss, submission.span_metadata if submission else None, submission.code if submission else ())
        recommendations: dict[Any, Any] = {ts.key: "erred" for ts in erred}
        # The last recommendation is taken first: so the best rank stands last.
        start.sort(key=lambda ts: ts.priority, reverse=True)
        recommendations.update({ts.key: "waiting" for ts in start})
        self.move(recommendations, "taskdb-page-in")

    def give_back(self, lease: Lease, believed: Level) -> None:
        """What the database believes that the scheduler has, and it has not."""
        resident = Resident(unpack_key(lease.key), lease.id, None, paged=True, told=believed)
        resident.failures = (lease.retries, lease.suspicious)
        self.window.changed[resident] = None
        self.window.awaited = True

    def _claimed(self, key: Any, lease: Lease) -> bool:
        """A worker has what was leased, or something else under its key."""
        submission = self.submissions.get(lease.submission)
        if submission is None or not submission.resent:
            self.unclaimed.drop([key])
        elif self.unclaimed.leased(lease):
            self.window.tell_again([self.window.by_key[key]])
            return True
        return False

    def by_id(self, id: int) -> Resident | None:
        """What is here under this id; a cold result is made a task again."""
        return self.window.by_id.get(id) or self.cooling.warm_id(id)

    def by_key(self, key: Any, packed: bytes) -> Resident | None:
        """The same by key."""
        return self.window.by_key.get(key) or self.cooling.warm_packed(packed)

    def dependencies(self, lease: Lease) -> list[Resident] | None:
        """Residents the task depends on; None if one is not here."""
        deps = []
        for id in lease.deps:
            dep = self.by_id(id)
            if dep is None or dep.task is None or dep.stub:
                return None
            deps.append(dep)
        return deps

    def _is_over(self, resident: Resident, lease: Lease, spec: StoredSpec) -> bool:
        """Whether the lease is of another task, under the key of one that was let go of. (After a crash of the daemon a task may also come
        again under another id: then its spec is the same.)"""
        old = resident.task.run_spec
        return resident.id not in (0, lease.id) and isinstance(old, StoredSpec) and old.data != spec.data

    def _end(self, resident: Resident) -> None:
        """Let go of a task whatever wants it."""
        ts = resident.task
        for cs in list(ts.who_wants or ()):
            if cs is not self.holder:
                internals.unhold(ts, cs)
        self._let_go([resident])

    def enter(self, key: Any, lease: Lease, stub: Resident | None, spec: StoredSpec, annotations: dict[str, Any]) -> DaskTask:
        submission = self.submissions.get(lease.submission)
        if stub is not None:
            resident, ts = stub, stub.task
            resident.stub = False
            resident.told = Level.HELD
            ts.run_spec = spec
            if ts.state == "erred":
                self.scheduler.transitions({key: "released"}, "taskdb-page-in")
            self.window.identify(resident, lease.id)
        else:
            ts = internals.new_task(self.scheduler, key, spec, submission.computation if submission else None)
            resident = Resident(key, lease.id, ts, paged=True, told=Level.HELD, submission=lease.submission)
            self.ledger.enters(ts)
            self.window.add(resident)
        self.count_dependents(resident, lease)
        if annotations:
            internals.annotate(self.scheduler, ts, annotations)
        if self.restricted:
            self.restricted.apply(ts, lease.submission)
        self.rank(resident, lease)
        internals.hold(ts, self.holder)
        if lease.clients:
            self.want(ts, lease.key, lease.clients)
        self.window.leased.add(resident)
        return ts

    def count_dependents(self, resident: Resident, lease: Lease) -> None:
        # One that a client wants that has not come back (yet) is not kept by that client here: only the database knows.
        clients = lease.clients
        absent = clients and any(client in self.unheard or internals.client_state(self.scheduler, client) is None for client in clients)
        resident.dependents = None if absent or lease.dependents == DEPENDENTS_UNKNOWN else lease.dependents
        self._counting = True

    def rank(self, resident: Resident, lease: Lease) -> None:
        """Its place in the order, and how often it may fail and has failed."""
        ts = resident.task
        ts.priority = priority_of(lease.rank)
        if lease.retries >= 0:
            ts.retries = lease.retries
        ts.suspicious = lease.suspicious
        resident.failures = (ts.retries, ts.suspicious)

    def wanted_again(self, client: str, keys: Any) -> None:
        """A client that let go of these wants them again: what the database says of its wants is no longer old."""
        if self.ending or self.restated:
            for key in pack_keys(keys):
                self.wants(client, key)

    def wants(self, client: str, key: bytes) -> None:
        self.ending.pop((client, key), None)
        if client in self.restated:
            self.restated[client][1].add(key)

    def is_old(self, client: str, key: bytes) -> bool:
        """Whether a want that the database names has ended, or may have."""
        return client in self.unheard or (client, key) in self.ending or (client in self.restated and key not in self.restated[client][1])

    def want(self, ts: DaskTask, key: bytes, clients: list[str]) -> list[str]:
        """Let these clients want it. Returns those that did not."""
        new = []
        for client in clients:
            cs = internals.client_state(self.scheduler, client)
            if cs is None or self.is_old(client, key):
                continue
            if cs not in (ts.who_wants or ()):
                new.append(client)
                internals.hold(ts, cs)
        return new

    def _leased_again(self, resident: Resident, lease: Lease) -> None:
        """The database leased what the scheduler has: say what it is now, or, if it rests (erred, released), start it again."""
        ts = resident.task
        if resident.id != lease.id:
            # The daemon died before the first id was on disk; or the task was forgotten and this is another one, which only its spec tells.
            self.window.identify(resident, lease.id)
        for cs in self.want(ts, lease.key, lease.clients):
            self.scheduler.report_on_key(ts=ts, client=cs)
        resident.dependents = None
        # If the database has yet to hear that it rests, that comes first: it may know then that nobody needs it.
        if ts.state in ("erred", "released") and resident.told is resident.level():
            deps = self.dependencies(lease)
            if deps is None:
                # A dependency left while the lease was under way: give it back.
                resident.told = Level.HELD
                ts.has_lost_dependencies = True
                self.move({ts.key: "forgotten"}, "taskdb-retry")
                return
            self._start_again(resident, [dep.task for dep in deps])
        self.window.tell_again([resident])

    def _start_again(self, resident: Resident, deps: list[DaskTask]) -> None:
        ts = resident.task
        resident.leaving = False
        resident.paged = True
        internals.hold(ts, self.holder)
        if ts.state == "erred":
            # Cut first: the database itself revives what depends on it.
            internals.cut_dependents(ts)
            self.scheduler.transitions({ts.key: "released"}, "taskdb-retry")
        internals.relink(ts, deps)
        blamed = next((dep for dep in deps if dep.exception_blame is not None), None)
        if blamed is not None:
            ts.exception_blame = blamed.exception_blame
            self.move({ts.key: "erred"}, "taskdb-retry")
        else:
            self.move({ts.key: "waiting"}, "taskdb-retry")

    def move(self, recommendations: dict[Any, Any], stimulus_id: str) -> None:
        if recommendations:
            self.scheduler.transitions(recommendations, stimulus_id)
            self.scheduler.stimulus_queue_slots_maybe_opened(stimulus_id=stimulus_id)

    # ---------------------------------------------------------------------------------------------------------- follow

    def follow(self, resident: Resident, finish: str) -> None:
        """A resident moved to another of Dask's states. A paged task that starts, finishes or is let go of here is nothing the database has
        to act on soon, unless it alone knows who needs a result."""
        window = self.window
        paged = resident.paged and not resident.stub
        if finish in _UNFINISHED:
            if resident.told is not Level.HELD:
                window.changed[resident] = None
            if paged:
                window.leased.add(resident)
            return
        window.changed[resident] = None
        ts = resident.task
        self._need_less(ts, done=paged and finish == "memory")
        if not paged or finish == "erred" or (finish != "memory" and not resident.leaving):
            window.awaited = True
        if finish in ("memory", "erred"):
            self.reused.ends((resident.key,))
            if paged:
                window.leased.discard(resident)
                if finish == "memory":
                    self.cooling.finished(resident)
                internals.unlink(ts)
            return
        resident.left_at = window.runs
        if finish == "forgotten":
            self.reused.left(resident.key)
            self._left(resident, ts)

    def _need_less(self, ts: DaskTask, *, done: bool) -> None:
        """A task does not need its dependencies (any more, if it is done: then they have one dependent less to wait for, and what nobody
        needs goes at once)."""
        unneeded = []
        by_key = self.window.by_key
        for dts in ts.dependencies:
            dep = by_key.get(dts.key)
            if dep is None:
                continue
            if dep.kept:  # for this alone, it may be
                self.needed_less((dep.key,))
            if not done:
                continue
            if dep.dependents is None:
                self.window.awaited = True
                continue
            dep.dependents -= 1
            if dep.dependents <= 0:
                unneeded.append(dep)
        if unneeded:
            self.on_unneeded(unneeded)

    def _left(self, resident: Resident, ts: DaskTask) -> None:
        lost = ts.has_lost_dependencies and not resident.leaving and ts.run_spec is not None
        if lost:
            self.count_no_more()
        if resident.paged:
            self.ledger.leaves(ts, done=resident.leaving)
        elif lost:
            # A followed task that leaves because its inputs are gone comes back paged.
            self.ledger.leaves(ts, done=False)
            submission = self.submissions.get(resident.submission)
            if submission is not None:
                submission.left[ts.group.name] += 1
        self.window.drop(resident)
        self.maybe_settle(ts.group.name, resident.submission if resident.paged else None)

    def keep_followed(self) -> None:
        """Results are about to be lost: what waits for them leaves, and comes back paged. What else that needs has to be there then."""
        for resident in self.window.by_key.values():
            ts = resident.task
            if not resident.paged and ts.run_spec is not None and any(dts.state in _UNFINISHED for dts in ts.dependents):
                internals.hold(ts, self.holder)
                if ts.state == "memory":
                    self.window.tell_again([resident])  # the database says whether it is needed

    def count_no_more(self) -> None:
        """Results are lost: what runs again is counted by the database alone. Once for all that is lost together."""
        if self._counting:
            self._counting = False
            for other in self.window.by_key.values():
                other.dependents = None

    def maybe_settle(self, group: str, submission: str | None) -> None:
        """One of this group has left, and of this submission, if it was paged."""
        if group in self._unsettled or (submission is not None and submission not in self.submissions):
            # Not inside a transition: stock is still looking at the group.
            asyncio.get_running_loop().call_soon(self._settle, group)

    def runs_again(self, ts: DaskTask) -> bool:
        """Whether a task that stock forgets is only leaving for the database (see `internals.suppress_cancelled`)."""
        resident = self.window.by_key.get(ts.key)
        return resident is not None and not resident.leaving and ts.run_spec is not None

    # ---------------------------------------------------------------------------------------------------------- let go

    def release(self, residents: list[Resident]) -> None:
        """Let go of what nobody needs, unless somebody here has just begun to need it: then say again what it is."""
        going: dict[Any, Resident] = {}
        for resident in residents:
            ts = resident.task
            if ts is None or resident.stub:
                continue
            if not resident.paged:
                # Followed: only the holder's want ends; the rest is stock's.
                if self.holder in (ts.who_wants or ()):
                    internals.let_go(self.scheduler, self.holder, [ts], "taskdb-release")
                continue
            going[resident.key] = resident
        # What stays needs its dependencies, too.
        while stays := [r for r in going.values() if self.needed_here(r.task, going)]:
            for resident in stays:
                del going[resident.key]
                if not resident.kept:  # else it has been told: once is enough
                    resident.kept = True
                    self.window.tell_again([resident])
        self._let_go(going.values())
        # IMPORTANT: not before: what is queued may be one that goes, whose inputs have gone.
        self.scheduler.stimulus_queue_slots_maybe_opened(stimulus_id="taskdb-release")

    def needed_less(self, keys: Iterable[Any]) -> None:
        """A want, or a dependent, of these has ended: the database shall look again at what was kept against its word."""
        for key in keys:
            resident = self.window.by_key.get(key)
            if resident is not None and resident.kept:
                resident.kept = False
                self.window.tell_again([resident])

    def release_unneeded(self, residents: list[Resident]) -> None:
        """The same for what the count of dependents says: the database is told, not asked."""
        self._let_go(
            resident
            for resident in dict.fromkeys(residents)
            if (ts := resident.task) is not None and resident.paged and ts.state == "memory" and not self.needed_here(ts, ())
        )

    def needed_here(self, ts: DaskTask, but: Any) -> bool:
        """Whether a client wants it, or an unfinished resident, other than those named, depends on it."""
        if any(cs is not self.holder for cs in ts.who_wants or ()):
            return True
        return any(d.key not in but and d.state in _UNFINISHED for d in ts.dependents)

    def _let_go(self, residents: Iterable[Resident]) -> None:
        """All together: each transition costs. What runs goes first: by its links its worker counts what it needs no more."""
        there = list(residents)
        for unfinished in (True, False):
            going = [r for r in there if r.task is not None and (r.task.state in _UNFINISHED) is unfinished]
            for resident in going:
                resident.leaving = True
                internals.cut_dependents(resident.task)
                resident.task.has_lost_dependencies = True
            internals.let_go(self.scheduler, self.holder, [resident.task for resident in going], "taskdb-release")
            # Nobody held these any more: stock has no reason to look at them.
            if left := {resident.key: "forgotten" for resident in going if resident.task is not None}:
                self.scheduler.transitions(left, "taskdb-release")

    def may_be_over(self, key: Any) -> bool:
        """A task that only the holder wants may be forgotten by the database, and its key mean another one: `Added.known` will say."""
        resident = self.window.by_key.get(key)
        if resident is None:
            return self.cooling.is_unwanted(key)
        if resident.task is None:
            return False
        wants = resident.task.who_wants or ()
        return all(cs is self.holder for cs in wants) and (resident.paged or bool(wants))

    def shared(self, keys: Any) -> None:
        """Tasks on disk begin to need these: stock must not release them, nor we by an old count."""
        by_key = self.window.by_key
        for key in keys:
            resident = by_key.get(key)
            if resident is None or resident.task is None:
                continue
            resident.dependents = None
            if not resident.paged:
                internals.hold(resident.task, self.holder)

    # ---------------------------------------------------------------------------------------------------------- the end

    def begins(self, submission: Submission) -> None:
        """What is left of a graph of this name that was given up counts with it."""
        earlier = self.submissions.get(submission.name)
        if earlier is not None:
            submission.remaining += earlier.remaining
            submission.total += earlier.total
            submission.groups |= earlier.groups
        self.submissions[submission.name] = submission

    def arrived(self, submission: Submission, count: int) -> None:
        """So many new tasks of a submission are in the database."""
        submission.remaining += count
        submission.total += count
        self.taken_in += count

    def forgotten(self, count: GroupCount) -> None:
        """The database has forgotten tasks of a submission."""
        submission = self.submissions.get(count.submission)
        if submission is None:
            return
        n = min(count.count, submission.left[count.group]) if submission.followed else count.count
        if submission.followed:
            submission.left[count.group] -= n
        if n:
            self.ledger.forgotten(count.group, n)
        submission.remaining -= count.count
        self.maybe_end(submission)

    def maybe_end(self, submission: Submission) -> None:
        if submission.sealed and not submission.runs_under_way and submission.remaining <= 0:
            self.submissions.pop(submission.name, None)
            self.restricted.end(submission.name)
            for name in submission.groups:
                self._settle(name)

    def _settle(self, name: str) -> None:
        """A group no graph on disk has tasks of: its counts end when its last resident leaves."""
        elsewhere = name not in self.scheduler.task_groups or any(name in other.groups for other in self.submissions.values())
        if elsewhere or self.ledger.settle(name):
            self._unsettled.discard(name)
        else:
            self._unsettled.add(name)

    def clear(self) -> None:
        """After `Scheduler.restart` nothing is resident."""
        self.window.clear()
        self.ledger.clear()
        self.ending.clear()
        self.restated.clear()
        self._unsettled.clear()
        self.holder = internals.holder()
