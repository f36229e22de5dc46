"""The last half hour in figures, one row a second; and while somebody looks, what the daemon says of its graphs.

The daemon is asked only then, one question at a time, and for a small part of the time: its answer takes as long as there are graphs.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING

from scheduler_adapter.figures import Figures, figures
from taskdb.errors import TaskDBError
from taskdb.wire import taskdb_pb2 as pb

if TYPE_CHECKING:
    from scheduler_adapter.adapter import Adapter

ROW_SECONDS = 1.0
ROWS_MAX = 1800
#: So long a page that was refreshed is taken to be looked at.
LOOKED_AT_SECONDS = 5.0
#: Most of the time that the daemon may be busy answering.
DAEMON_SHARE_MAX = 0.05
#: How long is waited for its answer.
ANSWER_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class Row:
    """One moment."""

    #: Seconds since 1970.
    time: float
    now: Figures
    #: Of the scheduler's process.
    memory_bytes: float
    #: Tasks a second since the row before.
    taken_in_rate: float
    finished_rate: float
    #: Duration of the daemon's last commit, if it was asked lately. Seconds.
    commit_seconds: float | None


class History:
    """Lives on the scheduler's loop."""

    def __init__(self, adapter: Adapter):
        self._adapter = adapter
        self._loop = asyncio.get_running_loop()
        self._rows: deque[Row] = deque(maxlen=ROWS_MAX)
        self._count = 0
        self._timer: asyncio.TimerHandle | None = None
        self._question: asyncio.Task[None] | None = None
        self._looked_at = 0.0
        self._ask_not_before = 0.0
        #: The daemon's last answer, and when it came (seconds since 1970).
        self.status: pb.StatusReply | None = None
        self.status_time = 0.0
        #: Why there is no newer one.
        self.problem = ""

    def start(self) -> None:
        self._tick()

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._question is not None:
            self._question.cancel()

    def since(self, count: int) -> tuple[list[Row], int]:
        """Rows after the first `count` of all, oldest first, as far as they are kept; and how many there have been by now."""
        new = min(self._count - count, len(self._rows))
        return list(islice(self._rows, len(self._rows) - new, None)), self._count

    def look(self) -> None:
        """Somebody looks."""
        before, self._looked_at = self._looked_at, time.monotonic()
        if self._looked_at - before > LOOKED_AT_SECONDS:
            self._ask()

    def _tick(self) -> None:
        self._timer = self._loop.call_later(ROW_SECONDS, self._tick)
        adapter = self._adapter
        now, moment = figures(adapter), time.time()
        last = self._rows[-1] if self._rows else None
        seconds = max(moment - last.time, 1e-3) if last is not None else 0.0
        fresh = self.status is not None and moment - self.status_time < 2 * LOOKED_AT_SECONDS
        memory = adapter.scheduler.monitor.quantities["memory"]
        self._rows.append(
            Row(
                time=moment,
                now=now,
                memory_bytes=float(memory[-1]) if memory else 0.0,
                taken_in_rate=(now.taken_in - last.now.taken_in) / seconds if last is not None else 0.0,
                # Prefixes that are not used any more leave with their counts.
                finished_rate=max(now.finished - last.now.finished, 0) / seconds if last is not None else 0.0,
                commit_seconds=self.status.commit_seconds_last if fresh and self.status is not None else None,
            )
        )
        self._count += 1
        if time.monotonic() - self._looked_at < LOOKED_AT_SECONDS:
            self._ask()

    def _ask(self) -> None:
        busy = self._question is not None and not self._question.done()
        if not busy and time.monotonic() >= self._ask_not_before:
            self._question = self._loop.create_task(self._answer())

    async def _answer(self) -> None:
        session = self._adapter.session
        if session is None:
            return
        began = time.monotonic()
        try:
            self.status = await session.status(ANSWER_SECONDS)
            self.status_time, self.problem = time.time(), ""
        except TaskDBError as error:
            self.problem = str(error)
        took = time.monotonic() - began
        self._ask_not_before = began + took / DAEMON_SHARE_MAX
