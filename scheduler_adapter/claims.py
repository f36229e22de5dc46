"""Claims under way: what workers have of an earlier scheduler's tasks, until the database has said whether it is needed."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from scheduler_adapter.keys import unpack_key
from scheduler_adapter.residency import Residency
from taskdb.commands import Adopt, Adopted, Lease


@dataclass(eq=False)
class Claim:
    """An Adopt under way."""

    command: Adopt
    on_answer: Callable[[Adopted], None]
    done: asyncio.Future[None]
    #: Keys that are not answered.
    left: int
    #: The link has broken since.
    again: bool = False


class Claims:
    def __init__(self, residency: Residency) -> None:
        self._residency = residency
        self._by_key: dict[bytes, deque[Claim]] = {}
        #: Leases of what a worker may be running, by key: the answer says which it is. (The link broke between them.)
        self._aside: dict[bytes, Lease] = {}

    def expect(self, command: Adopt, on_answer: Callable[[Adopted], None]) -> Claim:
        """Of a command that goes out. `on_answer` is called before any lease that comes with the answers is taken in."""
        claim = Claim(command, on_answer, asyncio.get_running_loop().create_future(), len(command.keys))
        for key in command.keys:
            self._by_key.setdefault(key, deque()).append(claim)
        return claim

    def set_aside(self, lease: Lease) -> bool:
        """Whether its key is claimed: then the lease waits for the answer."""
        if lease.key not in self._by_key:
            return False
        self._aside[lease.key] = lease
        return True

    def answered(self, answer: Adopted) -> None:
        waiting = self._by_key.get(answer.key)
        if not waiting:
            return
        claim = waiting.popleft()
        if not waiting:
            del self._by_key[answer.key]
        lease = self._aside.pop(answer.key, None)
        claim.on_answer(answer)
        if lease is not None and answer.lease is None:
            self._residency.page_in([lease])
        window = self._residency.window
        if claim.again and (resident := window.by_key.get(unpack_key(answer.key))) is not None:
            window.tell_again([resident])  # that nobody needs it (any more) may have been said while the link was broken
        claim.left -= 1
        if not claim.left and not claim.done.done():
            claim.done.set_result(None)

    def link_restored(self) -> None:
        for waiting in self._by_key.values():
            for claim in waiting:
                claim.again = True

    def close(self) -> None:
        for waiting in self._by_key.values():
            for claim in waiting:
                claim.done.cancel()
