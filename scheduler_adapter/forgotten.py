"""Tasks that are fired and forgotten: nobody waits for them, so nothing but the database shows, after a crash, that one has run.

So a result of one is let go of only when that it is there is on disk. Of other tasks a client's futures, or results of what needed them,
tell as much.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING, Any

from scheduler_adapter import dask_internals as internals
from scheduler_adapter.keys import pack_key
from scheduler_adapter.outbox import FIRE_AND_FORGET
from taskdb.commands import Unwant

if TYPE_CHECKING:
    from scheduler_adapter.pager import Pager
    from scheduler_adapter.window import Resident


class Forgotten:
    def __init__(self, pager: Pager) -> None:
        self._pager = pager
        #: Keys that are wanted so and are not done.
        self.keys: set[Any] = set()
        #: Those that are done, and the number of the batch that tells so.
        self._done_at: dict[Any, int] = {}
        #: To be let go of when that batch is on disk.
        self._later: deque[tuple[int, Resident]] = deque()

    def clear(self) -> None:
        self.keys.clear()
        self._done_at.clear()
        self._later.clear()

    def knows(self, key: Any) -> bool:
        """Whether it is to be let go of at the right time."""
        return key in self.keys or key in self._done_at

    def end(self, key: Any) -> None:
        """It is done."""
        pager = self._pager
        self.keys.discard(key)
        # Stock ends this want only where the task itself ran. Not inside a transition.
        asyncio.get_running_loop().call_soon(self._end_stock_want, key)
        pager.send(Unwant(FIRE_AND_FORGET, [pack_key(key)]))
        if key in pager.window.by_key:
            self._done_at[key] = pager.next_seq()

    def _end_stock_want(self, key: Any) -> None:
        scheduler = self._pager.scheduler
        ts = scheduler.tasks.get(key)
        cs = internals.client_state(scheduler, FIRE_AND_FORGET)
        if cs is not None and ts is not None and ts in cs.wants_what and key not in self.keys:
            internals.release_wants(scheduler, [key], cs, "taskdb-fire-and-forget")

    def release(self, residents: list[Resident]) -> None:
        """The database says that nobody needs these."""
        pager, now = self._pager, []
        for resident in residents:
            seq = self._done_at.pop(resident.key, 0)
            if pager.session is None or seq <= pager.session.durable_seq:
                now.append(resident)
                continue
            if not self._later:
                internals.in_background(pager.scheduler, self._let_go)
            self._later.append((seq, resident))
        pager.residency.release(now)

    async def _let_go(self) -> None:
        pager = self._pager
        while self._later and (durable := await pager.on_disk(self._later[0][0])):
            ready = []
            while self._later and self._later[0][0] <= durable:
                ready.append(self._later.popleft()[1])
            pager.residency.release(ready)
            pager.cooling.release([resident.id for resident in ready if resident.task is None])  # it went cold meanwhile
