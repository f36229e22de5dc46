"""What a client sends along with a graph."""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from distributed.protocol.pickle import dumps

from taskdb.model import GraphFlag

#: Keys that are packed at once (about 1 ms).
SLICE_KEYS = 2_000


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

    async def packed(self) -> list[bytes]:
        """What the ingest process needs of it. Others have the loop in between: there may be a million keys."""
        slices = [dumps((self.annotations, self.internal_priority is not None))]
        for i, piece in enumerate(self._slices()):
            slices.append(pickle.dumps(piece))
            if i % 2:
                await asyncio.sleep(0)
        return slices

    def _slices(self) -> Iterator[tuple[list[Any], dict[Any, float]]]:
        keys, priorities = iter(self.keys), iter((self.internal_priority or {}).items())
        while (some := list(islice(keys, SLICE_KEYS))) or (more := dict(islice(priorities, SLICE_KEYS))):
            yield (some, {}) if some else ([], more)


def unpack(slices: Sequence[bytes]) -> tuple[set[Any], dict[Any, float] | None, dict[str, Any] | None]:
    """Of `Details.packed`: keys, priorities by key, annotations."""
    annotations, has_priorities = pickle.loads(slices[0])
    keys: set[Any] = set()
    priorities: dict[Any, float] = {}
    for piece in slices[1:]:
        some, more = pickle.loads(piece)
        keys.update(some)
        priorities.update(more)
    return keys, priorities if has_priorities else None, annotations
