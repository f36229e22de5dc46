"""The tasks the scheduler holds now, and what the database has been told of each. Pure bookkeeping: reads task states, changes none.

A report is a level, not an event: at each flush the level a task has *now* is compared with the level last told, and only a difference is
sent. So nothing depends on how many transitions happened between, and telling the same again is harmless.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from scheduler_adapter.cold import ColdResults
from taskdb.model import Level, Rank

_LEVEL = {"memory": Level.MEMORY, "erred": Level.ERRED, "released": Level.RELEASED, "forgotten": Level.OUT}
#: Levels that end a result.
_LET_GO = (Level.RELEASED, Level.OUT)
_NO_FAILURES = (-1, 0)


class Resident:
    """One task of the database that is in the scheduler's `tasks`, or has just left."""

    __slots__ = ("key", "id", "paged", "stub", "told", "leaving", "task", "submission", "dependents", "kept", "failures", "left_at", "ran")

    def __init__(self, key: Any, id: int, task: Any, *, paged: bool, told: Level | None, submission: str = ""):
        self.key = key
        #: The graph it came with.
        self.submission = submission
        #: 0 until the database has said it.
        self.id = id
        #: The TaskState; None once it has left.
        self.task = task
        #: True: paged in, its links are cut when it finishes. False: resident whole (followed), stock does everything.
        self.paged = paged
        #: True: only a name for lookups; not leased, not reported, has no links.
        self.stub = False
        #: Level last told to the database; None: must be told again.
        self.told = told
        #: The adapter itself lets it go.
        self.leaving = False
        #: Dependents that have not finished, here or on disk; None: only the database knows.
        self.dependents: int | None = None
        #: The database named it for release, and it was needed here: to be told again when it is not.
        self.kept = False
        #: Where it was computed, when that began, and how long it took, in seconds: to be told with its result.
        self.ran: tuple[str, float, float] | None = None
        #: Runs of tasks that had been sent when it was let go of.
        self.left_at = 0
        #: What the database knows with it: retries left, and how often a worker died of it. A new task's are what its graph says.
        self.failures: tuple[int, int] = _NO_FAILURES if task is None else (task.retries, task.suspicious)

    def level(self) -> Level:
        task = self.task
        return Level.OUT if task is None else _LEVEL.get(task.state, Level.HELD)


class Window:
    """All residents, by key and by id, and those whose level may have changed."""

    def __init__(self) -> None:
        self.by_key: dict[Any, Resident] = {}
        self.by_id: dict[int, Resident] = {}
        self.changed: dict[Resident, None] = {}
        #: Some of that is something the database has to act on.
        self.awaited = False
        #: Paged tasks that are leased and unfinished.
        self.leased: set[Resident] = set()
        #: Paged tasks with results, those that finished first in front; and results without a task.
        self.results: dict[Resident, None] = {}
        self.cold = ColdResults()
        #: Runs of tasks sent so far, and those of them, by number, whose ids have not been told.
        self.runs = 0
        self.runs_without_ids: dict[int, None] = {}

    def add(self, resident: Resident) -> None:
        self.by_key[resident.key] = resident
        if resident.id:
            self.by_id[resident.id] = resident

    def identify(self, resident: Resident, id: int) -> None:
        """The database has named the id of a resident (again, if it died before the first one was on disk)."""
        if resident.id and self.by_id.get(resident.id) is resident:
            del self.by_id[resident.id]
        resident.id = id
        if resident.task is not None:
            self.by_id[id] = resident

    def drop(self, resident: Resident) -> None:
        """It has left the scheduler; its last level (OUT) is still to be told, and how often it has failed by then."""
        if resident.task is not None:
            resident.failures = (resident.task.retries, resident.task.suspicious)
        resident.task = None
        if self.by_key.get(resident.key) is resident:
            del self.by_key[resident.key]
        if self.by_id.get(resident.id) is resident:
            del self.by_id[resident.id]
        self.leased.discard(resident)
        self.results.pop(resident, None)

    def tell_again(self, residents: Iterable[Resident]) -> None:
        for resident in residents:
            resident.told = None
            self.changed[resident] = None
            self.awaited = True

    def changes(self) -> list[tuple[Resident, Level]]:
        """What is to be told now, and is from now on taken as told. Those without an id stay for later; so do those that were let go of
        while a task without an id may have needed them: that it has finished is to be told first."""
        out = []
        later: dict[Resident, None] = {}
        first = next(iter(self.runs_without_ids), self.runs + 1)
        for resident in self.changed:
            if resident.stub:
                continue
            level = resident.level()
            if not resident.id or (level in _LET_GO and resident.left_at >= first):
                later[resident] = None
                continue
            task = resident.task
            failures = resident.failures if task is None else (task.retries, task.suspicious)
            if level is not resident.told or failures != resident.failures:
                resident.told = level
                out.append((resident, level))
            resident.failures = failures
        self.changed = later
        self.awaited = False
        return out

    def held_ids(self) -> list[int]:
        """What is here, or has left without the database having been told."""
        left = [r.id for r in self.changed if r.task is None and r.id]
        return [*left, *(r.id for r in self.by_id.values() if not r.stub), *self.cold.ids()]

    def clear(self) -> None:
        self.by_key.clear()
        self.by_id.clear()
        self.changed.clear()
        self.leased.clear()
        self.results.clear()
        self.cold.clear()


def credit(*, threads: int, runnable: int, leased: int, lookahead: int) -> tuple[int, int]:
    """How many more tasks to ask for: (ready ones at least, in all).

    Enough runnable tasks that no thread idles for a round trip (twice the threads), and look-ahead so that a chain never waits for one.
    With no worker at all one task is asked for: stock then says that there is no worker.
    """
    if threads <= 0:
        ready = max(0, 1 - runnable)
        return ready, max(0, 1 - max(leased, runnable))
    ready = max(0, 2 * threads + 2 - runnable)
    return ready, max(0, leases_max(threads, lookahead) - leased)


def leases_max(threads: int, lookahead: int) -> int:
    """How many tasks to have leased."""
    return max(lookahead, 4 * threads)


def priority_of(rank: Rank) -> tuple[float, float, float]:
    """As Dask has it: whole numbers are ints."""
    user, generation, order = (int(x) if x == int(x) else x for x in rank)
    return user, generation, order
