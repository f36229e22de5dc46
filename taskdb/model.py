"""States, levels and the names both sides share. No logic; imports nothing but the standard library."""

from __future__ import annotations

from enum import IntEnum, IntFlag
from typing import NamedTuple


class TaskState(IntEnum):
    """State of a task in the database. Names are Dask's own; numbers are stored and never change."""

    #: Needed; some dependency is neither in memory nor leased.
    WAITING = 1
    #: Needed; nothing on disk holds it back. In exactly one of the two queues.
    QUEUED = 2
    #: Leased to the scheduler of the current epoch (running, about to run, or look-ahead).
    PROCESSING = 3
    #: The result is held by workers.
    MEMORY = 4
    #: Has no result and needs none now: it ran and was let go, or nobody needs it.
    RELEASED = 5
    #: Failed, or something it depends on failed.
    ERRED = 6


#: States in which a task still needs the results of its dependencies.
ACTIVE = frozenset((TaskState.WAITING, TaskState.QUEUED, TaskState.PROCESSING))


class Level(IntEnum):
    """What a scheduler says of a task now. Reports are levels, not events, so saying one twice changes nothing."""

    #: Held by the scheduler, not finished (any of its waiting, queued, no-worker, processing).
    HELD = 1
    #: Finished; workers hold the result.
    MEMORY = 2
    #: Held by the scheduler without result, and not running (stock `released`).
    RELEASED = 3
    #: Failed in the scheduler.
    ERRED = 4
    #: The scheduler does not hold it any more.
    OUT = 5


class TaskFlag(IntFlag):
    """Bits of a task as it arrives, and as stored."""

    #: The submitting client wants the result.
    WANTED = 1
    #: Names a task that must already be in the database; carries no spec.
    EXTERNAL = 2
    #: Pure data (scattered): has no spec and cannot be computed again.
    DATA = 4
    #: Opaque to the database, handed back with a lease (Dask: `data_producer`).
    DATA_PRODUCER = 8
    #: The scheduler already holds it: arrives leased (PROCESSING) instead of QUEUED or WAITING.
    HELD = 16


class GraphFlag(IntFlag):
    """Bits of a submission."""

    #: The scheduler can only hold it whole (a P2P shuffle, say): a new scheduler takes in all of it again.
    WHOLE = 1
    #: Its client sends it a second time, because the first was not acknowledged: results of it may be there already.
    RESENT = 2
    #: Its runs of tasks may be stored as they came, and be carried out when their tasks are about to be needed. Its `dependent_counts` are
    #: exact.
    SPOOLED = 4


class Rank(NamedTuple):
    """Scheduling order, lowest first: (minus user priority, generation, order within the graph)."""

    user: float
    generation: float
    order: float
