"""One ordered inbox a client: what it sends takes effect in the order it sent it, though taking in a graph takes time.

While a submission is under way, messages that follow wait behind it. Cancel and disconnect do not use the inbox: they overtake.
"""

from __future__ import annotations

import asyncio
import inspect
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(eq=False)
class Message:
    op: str
    handler: Callable[..., Any]
    kwargs: dict[str, Any]


class Inbox:
    """`on_error(message, error)` is told of a handler that raised after it could not be told directly."""

    def __init__(self, on_error: Callable[[Message, Exception], None]):
        self._waiting: deque[Message] = deque()
        self._worker: asyncio.Task[None] | None = None
        self._current: Message | None = None
        self._handling: asyncio.Future[Any] | None = None
        self._on_error = on_error

    @property
    def idle(self) -> bool:
        return self._worker is None

    def put(self, message: Message) -> None:
        """Run the message now if it can be and nothing is before it, else after what is. Never blocks."""
        if self._worker is not None:
            self._waiting.append(message)
        elif inspect.iscoroutinefunction(message.handler):
            self._waiting.append(message)
            self._worker = asyncio.get_running_loop().create_task(self._work())
        else:
            message.handler(**message.kwargs)

    def waiting(self) -> list[Message]:
        """What has not been handled to the end, oldest first."""
        return ([self._current] if self._current else []) + list(self._waiting)

    def drop(self, message: Message) -> None:
        """Do not handle this message; cancel it if it is being handled. Those behind it go on."""
        if message is self._current and self._handling is not None:
            self._handling.cancel()
        elif message in self._waiting:
            self._waiting.remove(message)

    def stop(self) -> None:
        """Drop everything."""
        self._waiting.clear()
        if self._current is not None:
            self.drop(self._current)

    async def _work(self) -> None:
        try:
            while self._waiting:
                self._current = message = self._waiting.popleft()
                try:
                    result = message.handler(**message.kwargs)
                    if inspect.isawaitable(result):
                        self._handling = asyncio.ensure_future(result)
                        await asyncio.wait([self._handling])
                        if not self._handling.cancelled() and (error := self._handling.exception()) is not None:
                            raise error
                except Exception as e:
                    self._on_error(message, e)
                finally:
                    self._handling = self._current = None
        finally:
            self._worker = None
