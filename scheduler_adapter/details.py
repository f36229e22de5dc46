"""What a client sends along with a graph."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from taskdb.model import GraphFlag


@dataclass
class Details:
    """What came with an update-graph message."""

    client: str
    keys: set[Any]
    span_metadata: Any
    internal_priority: dict[Any, float] | None
    submitting_task: Any
    user_priority: Any
    actors: Any
    fifo_timeout: Any
    code: Any
    annotations: dict[str, Any] | None
    stimulus_id: str
    start: float
    #: The message's number, 0 if it has none.
    number: int = 0
    resent: bool = False
    #: Nothing is leased until it is known what workers have of it.
    holds: bool = False
    #: Name of the submission in the database.
    name: str = ""
    #: The scheduler can only hold it whole, also after a restart.
    whole: bool = False

    @property
    def flags(self) -> int:
        return (GraphFlag.RESENT if self.resent else 0) | (GraphFlag.WHOLE if self.whole else 0)
