"""Runs of tasks on their way to the database: whose ids the answer will bring, and what to do if there is none, or a refusal."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from distributed.scheduler import Scheduler

from scheduler_adapter import dask_internals as internals
from scheduler_adapter.keys import unpack_key
from scheduler_adapter.pager import Pager
from scheduler_adapter.submitted import Submission
from scheduler_adapter.window import Resident
from taskdb.commands import AbortGraph, Added, AddTasks

logger = logging.getLogger("distributed.taskdb")


class GraphRefused(Exception):
    """The database did not take a graph (it is full, or the graph is over a bound)."""


@dataclass
class Arriving:
    """An AddTasks under way."""

    submission: Submission
    #: Group of each task, if they are to be counted on disk.
    groups: list[str]
    #: Who waits for the ids; None for tasks that are not resident.
    residents: Sequence[Resident | None]
    #: Keys the client wants of the whole graph.
    wanted: set[Any]
    #: Packed keys of the run.
    packed: Sequence[bytes]
    #: See `Window.runs`.
    number: int


class Arrivals:
    def __init__(self, scheduler: Scheduler, pager: Pager):
        self.scheduler = scheduler
        self.pager = pager
        self._arriving: dict[tuple[str, int], Arriving] = {}
        #: Answered, but not known to be on disk.
        self._answered: dict[tuple[str, int], Arriving] = {}
        #: Keys that a client names in a later graph already: what is told of an earlier one, it would take for that.
        self.submits_again: Callable[[str], Collection[Any]] = lambda client: ()
        pager.on_added = self._added
        pager.on_refused = self._refused

    def expect(
        self, submission: Submission, run: AddTasks, residents: Sequence[Resident | None], wanted: set[Any], groups: list[str]
    ) -> None:
        """Ids will come with the answer to `run`: for these residents, and to be counted in these groups (empty: not at all)."""
        submission.runs_under_way += 1
        window = self.pager.window
        window.runs += 1
        window.runs_without_ids[window.runs] = None
        self._arriving[submission.name, run.first_index] = Arriving(submission, groups, residents, wanted, run.keys, window.runs)

    def abort(self, name: str) -> None:
        """The submission is given up: nothing of it is to stay. Answers that are under way are still counted, as they will be forgotten."""
        self.pager.send(AbortGraph(name))
        submission = self.pager.residency.submissions.get(name)
        if submission is not None:
            submission.sealed = True
            self.pager.residency.maybe_end(submission)

    def unsent(self, submission: Submission, runs: Iterable[AddTasks], residents: Iterable[Resident]) -> None:
        """Before `abort`: no answer will come to these runs, nor to what is of no run yet."""
        for run in runs:
            del self.pager.window.runs_without_ids[self._arriving.pop((submission.name, run.first_index)).number]
            submission.runs_under_way -= 1
        runs_sent = [arriving for (name, _), arriving in self._arriving.items() if name == submission.name]
        awaited = {resident for arriving in runs_sent for resident in arriving.residents}
        nameless = [resident for resident in residents if not resident.id and resident not in awaited]
        self._disown(nameless)
        self._end_wants(submission.client, {resident.key for resident in nameless})

    def _disown(self, residents: Iterable[Resident | None]) -> None:
        """Those of these without an id never get one: they are the scheduler's alone now, and stock ends them with their clients' wants."""
        window = self.pager.window
        for resident in residents:
            if resident is not None and not resident.id:
                if resident.task is not None:
                    internals.unhold(resident.task, self.pager.residency.holder)
                window.changed.pop(resident, None)
                window.drop(resident)

    def lost(self, client: str, wanted: set[Any]) -> None:
        """As stock does for a graph whose inputs are gone."""
        told = list(wanted.difference(self.submits_again(client)))
        self.scheduler.report({"op": "cancelled-keys", "keys": told, "reason": "lost dependencies"}, client=client)
        self._end_wants(client, wanted)

    def _added(self, added: Added) -> None:
        at = (added.submission, added.first_index)
        arriving = self._arriving.pop(at, None)
        if arriving is None:
            # Said again, after the daemon died: only the ids can be others.
            if (arriving := self._answered.get(at)) is not None:
                self._identify(arriving, added)
            return
        assert self.pager.session is not None
        if self.pager.session.unacked <= 1:
            self._answered.clear()
        self._answered[at] = arriving
        self.pager.window.runs_without_ids.pop(arriving.number, None)
        submission = arriving.submission
        known = set(added.known)
        self.pager.residency.arrived(submission, len(added.ids) - len(known))
        submission.runs_under_way -= 1
        self._identify(arriving, added)
        self._want_known(arriving, added)
        if arriving.groups:
            counts = Counter(name for i, name in enumerate(arriving.groups) if i not in known)
            for name, count in counts.items():
                self.pager.residency.ledger.announce(name, count, submission.computation)
        if added.missing:
            # Nothing of it was added, and nothing will be.
            self._forget(submission)
            self.lost(submission.client, arriving.wanted)
        self.pager.residency.maybe_end(submission)

    def _want_known(self, arriving: Arriving, added: Added) -> None:
        """The client wants tasks that were known already. Those leased for somebody else by now do not name it."""
        client = arriving.submission.client
        cs = internals.client_state(self.scheduler, client)
        if cs is None:
            return
        self.pager.residency.reused.ends(unpack_key(arriving.packed[i]) for i in added.known if added.ids[i])
        is_old = self.pager.residency.is_old
        keys = []
        for i in added.known:
            packed = arriving.packed[i]
            key = unpack_key(packed)
            if not added.ids[i] or key not in arriving.wanted or is_old(client, packed):
                continue
            ts = self.scheduler.tasks.get(key)
            if ts is None:
                self.pager.cooling.want(client, [key], new=True)
            elif cs not in (ts.who_wants or ()):
                keys.append(key)
        if keys:
            type(self.scheduler).client_desires_keys(self.scheduler, keys=keys, client=client)

    def _identify(self, arriving: Arriving, added: Added) -> None:
        window = self.pager.window
        for id, resident in zip(added.ids, arriving.residents, strict=True):
            if resident is not None and id and resident.id != id:
                told_before = resident.id != 0
                window.identify(resident, id)
                window.changed[resident] = None
                if told_before:
                    # Under an id that never came to be.
                    window.tell_again([resident])

    def _refused(self, refused: tuple[int, str, str, str]) -> None:
        """The daemon refused a command, and aborted the graph it belonged to: its client is told why."""
        _, name, _, text = refused
        runs = [a for (other, _), a in self._arriving.items() if other == name]
        if not runs:
            return  # it was aborted already, and this is what was still under way
        submission = runs[0].submission
        logger.error("the database refused a graph: %s", text)
        self._forget(submission)
        for arriving in runs:
            self._disown(arriving.residents)
        wanted = runs[0].wanted
        internals.failed_submission(self.scheduler, GraphRefused(text), wanted, submission.client)
        self._end_wants(submission.client, wanted)

    def _end_wants(self, client: str, wanted: set[Any]) -> None:
        if client in self.scheduler.clients:
            self.scheduler.client_releases_keys(keys=list(wanted), client=client, stimulus_id="taskdb-refused")

    def _forget(self, submission: Submission) -> None:
        """No answer will come any more."""
        for at in [at for at in self._arriving if at[0] == submission.name]:
            self.pager.window.runs_without_ids.pop(self._arriving.pop(at).number, None)
        submission.sealed = True
        submission.runs_under_way = 0
        self.pager.residency.maybe_end(submission)
