"""Clients that outlive their scheduler (see `client.py`): what they say is taken in once, and what they want is what they said last.

Such a client numbers the messages that must not be lost. The number of the last one that took effect stands in the database, written with
that effect; the client is told a number when it is on disk, and says what comes after it again to the next scheduler.
"""

from __future__ import annotations

import asyncio
import uuid
from collections import deque
from collections.abc import Callable, Collection
from typing import Any

from distributed.scheduler import Scheduler

from scheduler_adapter import dask_internals as internals
from scheduler_adapter.keys import pack_key
from scheduler_adapter.pager import Pager
from taskdb.commands import Command, DropClient, Keep, Want
from taskdb.errors import LimitExceeded
from taskdb.limits import SUBMISSION_BYTES_MAX
from taskdb.wire import taskdb_pb2 as pb

PROTOCOL = 1
#: Section of kept items: by name of a client, the number of its last message that took effect.
CLIENTS = b"clients\0"
_NUMBER_BYTES = 8
#: Keys of one Want.
WANT_KEYS = 100_000
#: How often it is looked whether what was said is on disk.
ON_DISK_SECONDS = 0.01


class Returning:
    """`on_returned` is told of each client that says again what it wants."""

    def __init__(
        self,
        scheduler: Scheduler,
        pager: Pager,
        undo: internals.Undo,
        kept: dict[bytes, bytes],
        graphs: Collection[pb.StoredGraph],
        grace_seconds: float,
    ):
        self.scheduler = scheduler
        self.pager = pager
        self.on_returned: Callable[[str], None] = lambda client: None
        #: Last number of each client that has taken effect, here or in the scheduler before.
        self._received = {
            name.removeprefix(CLIENTS).decode(): int.from_bytes(value) for name, value in kept.items() if name.startswith(CLIENTS)
        }
        #: Submissions that the scheduler before took in.
        self._sealed = {graph.submission for graph in graphs}
        #: What is still to be acknowledged: number of the batch, client, number.
        self._unacknowledged: deque[tuple[int, str, int]] = deque()
        self._acknowledging: asyncio.Task[None] | None = None
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(grace_seconds, self._forget_absent) if self._received else None
        undo.set_item(scheduler.handlers, "taskdb", self.hello)
        undo.set_item(scheduler.stream_handlers, "taskdb-restate", self.restate)

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._acknowledging is not None:
            self._acknowledging.cancel()

    def hello(self, client: str = "") -> dict[str, Any]:
        """Answer to `taskdb`: workers and clients ask it to learn what this scheduler is."""
        session = self.pager.session
        return {
            "epoch": session.epoch if session else 0,
            "store": self.pager.store,
            "protocol": PROTOCOL,
            "received": self._received.get(client, 0),
        }

    # ----------------------------------------------------------------------------------------------------- submissions

    def was_taken(self, submission: str | None) -> bool:
        """Whether the scheduler before took in this graph, though its number may not say so."""
        return submission in self._sealed

    def name(self, submission: str | None) -> str:
        """The name of a graph in the database: what its client calls it, unless an earlier try of it is still there under that name.
        Raises ValueError for one that cannot be a name."""
        if submission is None:
            return uuid.uuid4().hex
        if not isinstance(submission, str) or not 0 < len(submission.encode()) <= SUBMISSION_BYTES_MAX:
            raise ValueError(f"a submission is named by 1 to {SUBMISSION_BYTES_MAX} bytes of text")
        return uuid.uuid4().hex if submission in self.pager.residency.submissions else submission

    # -------------------------------------------------------------------------------------------------------- messages

    def mark(self, client: str, number: int) -> list[Command]:
        """What is to be sent along with the effect of a numbered message (0: it is not numbered)."""
        if number <= self._received.get(client, 0):
            return []
        self._received[client] = number
        return [Keep([CLIENTS + client.encode()], [number.to_bytes(_NUMBER_BYTES)])]

    def handled(self, client: str, number: int) -> None:
        """A numbered message has taken effect here: once that is on disk its client is told."""
        self.pager.send(*self.mark(client, number))
        self._unacknowledged.append((self.pager.next_seq(), client, number))
        if self._acknowledging is None:
            self._acknowledging = asyncio.get_running_loop().create_task(self._acknowledge())

    async def _acknowledge(self) -> None:
        waiting = self._unacknowledged
        while waiting and (session := self.pager.session) is not None:
            told: dict[str, int] = {}
            while waiting and waiting[0][0] <= session.durable_seq:
                _, client, number = waiting.popleft()
                told[client] = number
            for client, number in told.items():
                self.scheduler.client_send(client, {"op": "taskdb-acknowledged", "number": number})
            await asyncio.sleep(ON_DISK_SECONDS)
        self._acknowledging = None

    def forget(self, client: str) -> None:
        """It is gone, and so is what it wanted."""
        if self._received.pop(client, None) is not None:
            self.pager.send(Keep([CLIENTS + client.encode()], [b""]))

    def _forget_absent(self) -> None:
        for client in [c for c in self._received if c not in self.scheduler.clients]:
            self.forget(client)

    # ----------------------------------------------------------------------------------------------------------- wants

    def restate(self, client: str, keys: Collection[Any]) -> None:
        """`taskdb-restate`: the client wants just these, whatever it wanted before."""
        cs = internals.client_state(self.scheduler, client)
        if cs is None:
            return  # it left again
        keys = set(keys)
        self.on_returned(client)
        scheduler, pager = self.scheduler, self.pager
        pager.residency.wanted_again(client, keys)
        released = [ts.key for ts in cs.wants_what if ts.key not in keys]
        if released:
            type(scheduler).client_releases_keys(scheduler, keys=released, client=client)
            pager.residency.needed_less(released)
        here = [key for key in keys if key in scheduler.tasks]
        if here:
            type(scheduler).client_desires_keys(scheduler, keys=here, client=client)
        packed, strange = [], []
        for key in keys:
            try:
                packed.append(pack_key(key))
            except (LimitExceeded, TypeError):
                strange.append(key)
        # IMPORTANT: in one batch: dropping the client ends the wants it had in the background, and by then the new ones stand. Of what
        # nobody knows the pager tells the client.
        wants = [Want(client, packed[at : at + WANT_KEYS]) for at in range(0, len(packed), WANT_KEYS)]
        pager.send(DropClient(client), *wants, urgent=True)
        if unknown := [key for key in strange if key not in scheduler.tasks]:
            pager.tell_unknown(client, unknown)
