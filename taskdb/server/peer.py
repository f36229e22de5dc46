"""The scheduler that is attached, as the writer sees it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from taskdb import commands as c
from taskdb.errors import TaskDBError
from taskdb.wire.convert import Refused


class Peer(Protocol):
    """The Session a scheduler is attached by, as the writer sees it."""

    epoch: int
    #: See `Writer`.
    leases_lost: bool

    @property
    def backlog(self) -> int:
        """Messages to it that have yet to be sent."""

    def push(self, result: c.Result, seq: int, refused: Sequence[Refused]) -> None:
        """Send a Result. Never blocks."""

    def durable(self, seq: int) -> None:
        """Send Durable."""

    def end(self, error: TaskDBError) -> None:
        """Close the Session with this error. The writer has let go of it already."""
