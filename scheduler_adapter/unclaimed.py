"""Results and running tasks that workers brought from an earlier scheduler and the database does not know: they may be of a submission that
never reached the disk. Its client says it again, and then they are taken over; until that, for some time, their workers keep them.

Keys are used again: what is kept here is let go of as soon as anybody submits another task under its key.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from distributed.scheduler import Scheduler, WorkerState

from scheduler_adapter import dask_recovery
from scheduler_adapter.keys import unpack_key
from taskdb.commands import Adopt, Adopted, Lease
from taskdb.model import Level

logger = logging.getLogger("distributed.taskdb")

#: Keys of one claim: some 20 µs each of the daemon's time.
CLAIM_KEYS = 2_000


@dataclass
class Brought:
    """One key that one worker has."""

    level: Level
    nbytes: int = -1
    type_name: str = ""
    run_id: int = 0
    seceded: bool = False
    #: It has failed: what its worker said.
    failure: dict[str, Any] | None = None


class Unclaimed:
    """`take(lease, worker, brought)` puts one into the scheduler, and says whether it could; `give_back(lease, level)` says that it is not
    there."""

    def __init__(self, scheduler: Scheduler, give_back: Callable[[Lease, Level], None]) -> None:
        self.scheduler = scheduler
        self.give_back = give_back
        self.take: Any = lambda lease, ws, brought: False
        self._by_key: dict[Any, dict[WorkerState, Brought]] = {}
        self._timer: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        return len(self._by_key)

    def __contains__(self, key: Any) -> bool:
        return key in self._by_key

    def add(self, key: Any, ws: WorkerState, brought: Brought, seconds: float) -> None:
        """Keep it for so long, at most."""
        self._by_key.setdefault(key, {})[ws] = brought
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(seconds, self._give_up)

    def _give_up(self) -> None:
        self._timer = None
        if self._by_key:
            logger.warning("taskdb: %d results of workers that nobody has asked for are let go of", len(self._by_key))
            self.drop(list(self._by_key))

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._by_key.clear()

    def drop(self, keys: Iterable[Any]) -> None:
        """Let go of these, if they are here."""
        going: dict[WorkerState, list[Any]] = {}
        for key in keys:
            for ws in self._by_key.pop(key, ()):
                going.setdefault(ws, []).append(key)
        for ws, theirs in going.items():
            dask_recovery.free_on(self.scheduler, ws, theirs)

    def drop_worker(self, address: str) -> None:
        """It is gone."""
        for key, ws in [(key, ws) for key, holders in self._by_key.items() for ws in holders if ws.address == address]:
            self._lost(key, ws)

    def _lost(self, key: Any, ws: WorkerState) -> None:
        holders = self._by_key[key]
        del holders[ws]
        if not holders:
            del self._by_key[key]

    # --------------------------------------------------------------------------------------------------------- claims

    def claims(self, keys: Iterable[bytes], most: int = CLAIM_KEYS) -> Iterator[Adopt]:
        """Commands that claim those of these (packed) keys that are here, once their submission, said again, is in the database."""
        rows: list[tuple[bytes, Level, int]] = []
        for packed in keys:
            holders = self._by_key.get(unpack_key(packed))
            if holders:
                best = min(holders.values(), key=lambda brought: brought.level is not Level.MEMORY)
                rows.append((packed, best.level, best.nbytes))
        for start in range(0, len(rows), most):
            some, levels, nbytes = zip(*rows[start : start + most], strict=True)
            # Of no epoch: a task of that name is claimed only if it is of a submission that was said again.
            yield Adopt(0, list(some), list(levels), list(nbytes))

    def answered(self, answer: Adopted) -> None:
        """To a claim."""
        if answer.lease is not None and unpack_key(answer.key) not in self._by_key:
            self.give_back(answer.lease, answer.level)  # its worker went meanwhile
        elif answer.lease is not None:
            self.leased(answer.lease)
        elif answer.level is not Level.OUT:
            self.drop([unpack_key(answer.key)])

    def leased(self, lease: Lease) -> bool:
        """The task is this scheduler's now. False: it has to be computed."""
        holders = self._by_key.pop(unpack_key(lease.key), {})
        taken = False
        for ws, brought in sorted(holders.items(), key=lambda item: item[1].level is not Level.MEMORY):
            if self.take(lease, ws, brought):
                taken = True
            else:
                dask_recovery.free_on(self.scheduler, ws, [unpack_key(lease.key)])
        return taken

    # ------------------------------------------------------------------------------------------------ what workers say

    def told(self, op: str, key: Any, worker: str, message: dict[str, Any]) -> bool:
        """What a worker says of a task it runs. True: it is of one that is here, and no business of stock's."""
        if not self._by_key:
            return False
        ws = self.scheduler.workers.get(worker)
        brought = self._by_key.get(key, {}).get(ws) if ws is not None else None
        if ws is None or brought is None or brought.level is Level.MEMORY:
            return False
        if op == "task-finished":
            brought.level, brought.nbytes, brought.type_name = Level.MEMORY, message["nbytes"], message["typename"]
        elif op == "long-running":
            brought.seceded = True
        elif op == "task-erred":
            brought.failure = message
        else:
            self._lost(key, ws)
            return False
        return True
