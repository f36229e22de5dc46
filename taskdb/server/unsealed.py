"""Submissions whose stream ended before their seal. Another stream may go on with them, or their scheduler aborts them; if nobody does
either, they are aborted here."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress

from taskdb import commands as c
from taskdb.engine.engine import Engine
from taskdb.engine.refs import is_open
from taskdb.errors import StaleEpoch
from taskdb.server.answers import merge
from taskdb.store.base import WriteTxn

#: How long is waited.
PATIENCE_SECONDS = 30.0


class Unsealed:
    """`on_due` is called when there is something to abort."""

    def __init__(self, on_due: Callable[[], None]):
        self._on_due = on_due
        #: To be aborted: name and epoch. Stays until the store has taken it.
        self.due: dict[str, int] = {}
        self._waiting: dict[str, asyncio.TimerHandle] = {}

    def ended(self, epoch: int, submission: str) -> None:
        self._waiting[submission] = asyncio.get_running_loop().call_later(PATIENCE_SECONDS, self._give_up, epoch, submission)

    def _give_up(self, epoch: int, submission: str) -> None:
        del self._waiting[submission]
        self.due[submission] = epoch
        self._on_due()

    def goes_on(self, submission: str) -> None:
        """A stream carries it, perhaps again."""
        self.due.pop(submission, None)
        if (timer := self._waiting.pop(submission, None)) is not None:
            timer.cancel()

    def close(self) -> None:
        for timer in self._waiting.values():
            timer.cancel()

    def abort(self, engine: Engine, txn: WriteTxn) -> c.Result:
        """Abort those that are due."""
        result = c.Result()
        for submission, epoch in list(self.due.items()):
            # Aborted and begun again, it may be a sealed one by now.
            if is_open(txn, submission):
                with suppress(StaleEpoch):  # the new epoch has ended it already
                    done, _ = engine.apply(txn, epoch, 0, [c.AbortGraph(submission)])
                    merge(result, done)
            del self.due[submission]
        return result
