"""What somebody asks of the scheduler through the daemon, until it has answered. The daemon itself does nothing about it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Protocol

from taskdb.errors import InvalidRequest, LimitExceeded, Unavailable
from taskdb.wire import taskdb_pb2 as pb

ACTIONS = ("cancel", "retry")
#: Keys of one ask: some 10 ms of the scheduler's loop.
ASK_KEYS_MAX = 10_000
#: Asks that wait for an answer at a time.
ASKS_MAX = 64
#: How long the scheduler may take: its loop may be held up.
ANSWER_SECONDS_MAX = 60.0


class Link(Protocol):
    """The Session the scheduler is attached by."""

    def put(self, message: pb.SessionReply) -> None: ...


class Asks:
    def __init__(self) -> None:
        self._last = 0
        self._waiting: dict[int, tuple[Link, asyncio.Future[int]]] = {}

    async def ask(self, link: Link | None, action: str, keys: Sequence[bytes]) -> int:
        """Tasks it was done to. Raises InvalidRequest, LimitExceeded, Unavailable (then it is not known whether it was done)."""
        if action not in ACTIONS:
            raise InvalidRequest(f"nobody can be asked to {action or 'do nothing'}: one of {', '.join(ACTIONS)}")
        if len(keys) > ASK_KEYS_MAX:
            raise LimitExceeded(f"{len(keys)} keys in one request, at most {ASK_KEYS_MAX}")
        if link is None:
            raise Unavailable(f"no scheduler is attached, and only it can {action} tasks: start it, and ask again")
        if len(self._waiting) >= ASKS_MAX:
            raise Unavailable(f"{ASKS_MAX} requests wait for the scheduler already: ask again")
        self._last += 1
        number = self._last
        answer: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._waiting[number] = link, answer
        link.put(pb.SessionReply(ask=pb.Ask(number=number, action=action, keys=keys)))
        try:
            async with asyncio.timeout(ANSWER_SECONDS_MAX):
                return await answer
        except TimeoutError:
            raise Unavailable(f"the scheduler did not answer within {ANSWER_SECONDS_MAX:.0f} s; it may still do it") from None
        finally:
            del self._waiting[number]

    def done(self, message: pb.Done) -> None:
        _, answer = self._waiting.get(message.number, (None, None))
        if answer is not None and not answer.done():
            if message.error:
                answer.set_exception(InvalidRequest(message.error))
            else:
                answer.set_result(message.count)

    def lost(self, link: Link) -> None:
        """That Session has ended."""
        for other, answer in self._waiting.values():
            if other is link and not answer.done():
                answer.set_exception(Unavailable("the scheduler went away before it answered: it may have been done, so ask again"))
