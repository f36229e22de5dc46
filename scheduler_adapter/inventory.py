"""What a worker says of itself when it comes to a scheduler: what it holds and runs. Plain data, both sides of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgpack

#: Of this message. A scheduler that reads another lets go of what the worker has.
PROTOCOL = 2
#: Its name in `WorkerState.extra`.
NAME = "taskdb"
#: The message with which the scheduler says, on the worker's stream, that it keeps its tasks in taskdb: `epoch` and `store`.
EPOCH = "taskdb-epoch"


@dataclass(frozen=True)
class Inventory:
    """Columns of a kind have one length. Keys are packed (`keys.pack_key`)."""

    #: Epoch of the scheduler it was registered with last; 0: it is new.
    epoch: int = 0
    memory: Sequence[bytes] = ()
    nbytes: Sequence[int] = ()
    types: Sequence[str] = ()
    #: Tasks whose function runs, or has failed.
    running: Sequence[bytes] = ()
    run_ids: Sequence[int] = ()
    #: Those of them, by position, that have left their worker's thread pool.
    seceded: Sequence[int] = field(default=())
    #: Those that have failed, and of each: exception, traceback (or None), as Dask pickles them, and both as text.
    failed: Sequence[int] = field(default=())
    errors: Sequence[Sequence[Any]] = field(default=())
    #: The run each result is of; negative: it was computed elsewhere.
    runs: Sequence[int] = field(default=())

    def failures(self) -> dict[int, dict[str, Any]]:
        """By position among the running ones, what the worker would say of it (`task-erred`)."""
        names = ("exception", "traceback", "exception_text", "traceback_text")
        rest: dict[str, Any] = {"status": "error", "thread": None, "startstops": [], "stimulus_id": "taskdb-return"}
        return {
            at: {"run_id": self.run_ids[at], **dict(zip(names, error, strict=True)), **rest}
            for at, error in zip(self.failed, self.errors, strict=True)
        }

    def write(self) -> dict[str, Any]:
        columns = (self.memory, self.nbytes, self.types, self.running, self.run_ids, self.seceded, self.failed, self.errors, self.runs)
        return {"protocol": PROTOCOL, "data": msgpack.packb([self.epoch, *(list(column) for column in columns)])}

    @classmethod
    def read(cls, message: dict[str, Any]) -> Inventory:
        """Raises ValueError with one line if another release of the preload wrote it."""
        protocol = message.get("protocol")
        if protocol != PROTOCOL:
            raise ValueError(f"its preload speaks protocol {protocol}, this scheduler {PROTOCOL}: install the same dask-taskdb on both")
        return cls(*msgpack.unpackb(message["data"], use_list=False))
