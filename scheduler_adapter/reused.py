"""Keys that come to mean new tasks. A worker that comes back to the next scheduler may still have the old task's result under such a key,
if the scheduler before died as it let go of it: the id of its run tells which it is.

So the first run id that a new task can have is kept with it, until it is done: by then what was let go of before has gone.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Any

from scheduler_adapter import dask_recovery
from scheduler_adapter.keys import pack_key, unpack_key
from taskdb.commands import Keep

#: Section of kept items: by packed key, the first run id of the task that it means.
REUSED = b"reused\0"
_BYTES = 8
#: Keys that are remembered when they leave: what was let go of longer ago has gone from the workers.
RECENT = 10_000


class Reused:
    def __init__(self) -> None:
        self._send: Callable[[Keep], None] = lambda keep: None
        self._first_run: dict[Any, int] = {}
        #: Not a dict, in which what is deleted in front is passed over ever again to find the first.
        self._recent: OrderedDict[Any, None] = OrderedDict()

    def restore(self, send: Callable[[Keep], None], kept: dict[bytes, bytes]) -> None:
        self._send = send
        for name, value in kept.items():
            if name.startswith(REUSED):
                self._first_run[unpack_key(name.removeprefix(REUSED))] = int.from_bytes(value)

    def left(self, key: Any) -> None:
        """A task under this key has left the scheduler."""
        self._recent[key] = None
        self._recent.move_to_end(key)
        if len(self._recent) > RECENT:
            self._recent.popitem(last=False)

    def comes(self, keys: Iterable[Any], may_be_over: Callable[[Any], bool]) -> None:
        """A graph has tasks under these keys. To be called before it is sent."""
        again = [key for key in keys if key in self._recent or may_be_over(key)]
        if again:
            first = dask_recovery.next_run_id()
            self._first_run.update(dict.fromkeys(again, first))
            self._keep(again, first.to_bytes(_BYTES))

    def ends(self, keys: Iterable[Any]) -> None:
        """The task is done; or the key still means the task that was there."""
        if self._first_run and (done := [key for key in keys if self._first_run.pop(key, None) is not None]):
            self._keep(done, b"")

    def is_old(self, key: Any, run_id: int) -> bool:
        """Whether this run was of another task."""
        return run_id < self._first_run.get(key, run_id)

    def _keep(self, keys: list[Any], value: bytes) -> None:
        self._send(Keep([REUSED + pack_key(key) for key in keys], [value] * len(keys)))
