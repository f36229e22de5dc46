"""Clients that outlive their scheduler (see `client.py`): what they say is taken in once, and what they want is what they said last.

Such a client numbers the messages that must not be lost. The number of the last one that took effect stands in the database, written with
that effect; the client is told a number when it is on disk, and says what comes after it again to the next scheduler.

If only its stream breaks, and the scheduler lives, its wants stay for as long as a new scheduler would have waited for it.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections import deque
from collections.abc import Callable, Collection
from typing import Any

from distributed.scheduler import ClientState, Scheduler

from scheduler_adapter import dask_internals as internals
from scheduler_adapter.keys import pack_key
from scheduler_adapter.pager import Pager
from taskdb.commands import Command, DropClient, Keep, Want
from taskdb.errors import LimitExceeded
from taskdb.limits import SUBMISSION_BYTES_MAX
from taskdb.wire import taskdb_pb2 as pb

logger = logging.getLogger("distributed.taskdb")

PROTOCOL = 1
#: Section of kept items: by name of a client, the number of its last message that took effect.
CLIENTS = b"clients\0"
_NUMBER_BYTES = 8
#: Keys of one Want.
WANT_KEYS = 100_000
#: How long, at most, nothing is leased while a client says again what it said before.
AGAIN_SECONDS_MAX = 10.0
#: How long, at most, a graph that is said again waits for the end of what there was of it.
EARLIER_TRY_SECONDS_MAX = 3.0
#: How often it is looked whether what a client said has been taken in, or taken back.
TAKEN_IN_SECONDS = 0.01


def numbered_clients(kept: dict[bytes, bytes]) -> dict[str, int]:
    """The clients that come back, and the number of the last message of each that took effect."""
    return {name.removeprefix(CLIENTS).decode(): int.from_bytes(value) for name, value in kept.items() if name.startswith(CLIENTS)}


class Returning:
    """`on_returned` is told of each client that says again what it wants, `on_gone` of each whose stream broke and that did not come back
    in time. `busy` says whether something of a client's is still being taken in."""

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
        self.grace_seconds = grace_seconds
        self.on_returned: Callable[[str], None] = lambda client: None
        self.on_gone: Callable[[str], None] = lambda client: None
        self.busy: Callable[[str], bool] = lambda client: False
        #: Clients that have asked what this scheduler is: they come back.
        self._ours: set[str] = set()
        #: Data they have scattered since then and want. That is a call, which may overtake what they say of their other wants.
        self._scattered: dict[str, set[Any]] = {}
        #: What their earlier streams wanted, until they say what they want now.
        self._earlier: dict[str, list[ClientState]] = {}
        #: Those whose stream broke, until they say what they want now.
        self._away: dict[str, asyncio.TimerHandle] = {}
        #: Those that are saying their graphs again: nothing is leased until all is said, for so long at most.
        self._again: dict[str, asyncio.TimerHandle] = {}
        #: Keys that graphs said again use anew: what is here under them may be the task from before.
        self._reused: dict[str, set[Any]] = {}
        #: Last number of each client that has taken effect, here or in the scheduler before.
        self._received = numbered_clients(kept)
        #: Submissions that the scheduler before took in.
        self._sealed = {graph.submission for graph in graphs if not graph.aborted}
        #: What is still to be acknowledged: number of the batch, client, number.
        self._unacknowledged: deque[tuple[int, str, int]] = deque()
        self._acknowledging: asyncio.Task[None] | None = None
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(grace_seconds, self._forget_absent) if self._received else None
        self._stock_identity = scheduler.handlers["identity"]
        undo.set_item(scheduler.handlers, "identity", self.identity)
        undo.set_item(scheduler.handlers, "taskdb", self.hello)
        undo.set_item(scheduler.stream_handlers, "taskdb-restate", self.restate)

    def close(self) -> None:
        for timer in (self._timer, *self._away.values(), *self._again.values()):
            if timer is not None:
                timer.cancel()
        if self._acknowledging is not None:
            self._acknowledging.cancel()

    def identity(self, n_workers: int = -1) -> dict[str, Any]:
        """Says that there is a `taskdb` to ask; a scheduler without it would log a warning."""
        return {**self._stock_identity(n_workers=n_workers), "taskdb": PROTOCOL}

    def hello(self, client: str = "") -> Any:
        """Answer to `taskdb`, or a coroutine that returns it: workers and clients ask it to learn what this scheduler is."""
        return self._hello_client(client) if client else self._answer(0)

    def _answer(self, received: int) -> dict[str, Any]:
        session = self.pager.session
        return {"epoch": session.epoch if session else 0, "store": self.pager.store, "protocol": PROTOCOL, "received": received}

    async def _hello_client(self, client: str) -> dict[str, Any]:
        self._ours.add(client)
        self._scattered[client] = set()
        if client in self._received:
            self.pager.residency.unheard.add(client)
        if (cs := internals.client_state(self.scheduler, client)) is not None:
            earlier = self._earlier.setdefault(client, [])
            if cs not in earlier:
                earlier.append(cs)
        # What it said on an earlier stream takes effect first, or it would be said again.
        while self.busy(client) or any(waiting == client for _, waiting, _ in self._unacknowledged):
            await asyncio.sleep(TAKEN_IN_SECONDS)
        return self._answer(self._received.get(client, 0))

    # ----------------------------------------------------------------------------------------------------- submissions

    def says_again(self, client: str) -> None:
        """A client has begun to say its graphs again, inputs first. What was computed from an input may be there, and that is not known
        until it has been said, too: so nothing runs before."""
        if client in self._scattered and client not in self._again:
            self.pager.holding += 1
            self._again[client] = asyncio.get_running_loop().call_later(AGAIN_SECONDS_MAX, self._has_said_again, client)

    def _has_said_again(self, client: str) -> None:
        if (timer := self._again.pop(client, None)) is not None:
            timer.cancel()
            self.pager.hold_less()

    def uses_anew(self, client: str, keys: Collection[Any]) -> None:
        """Keys of a graph that is said again, which the client had let go of before it. Until the client says what it wants."""
        self._reused.setdefault(client, set()).update(keys)

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

    async def earlier_try_is_over(self, submission: str | None) -> None:
        """Wait, but not for long, until what an earlier scheduler had of this graph is taken back."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + EARLIER_TRY_SECONDS_MAX
        while submission in self.pager.residency.submissions and loop.time() < deadline:
            await asyncio.sleep(TAKEN_IN_SECONDS)

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
        while waiting and (durable := await self.pager.on_disk(waiting[0][0])):
            told: dict[str, int] = {}
            while waiting and waiting[0][0] <= durable:
                _, client, number = waiting.popleft()
                told[client] = number
            for client, number in told.items():
                self.scheduler.client_send(client, {"op": "taskdb-acknowledged", "number": number})
        self._acknowledging = None

    def forget(self, client: str) -> None:
        """It is gone, and so is what it wanted."""
        self.leaves(client)
        self._scattered.pop(client, None)
        for cs in self._earlier.pop(client, ()):
            self._end_wants(cs)
        if self._received.pop(client, None) is not None:
            self.pager.send(Keep([CLIENTS + client.encode()], [b""]))

    def _forget_absent(self) -> None:
        for client in [c for c in self._received if c not in self.scheduler.clients]:
            self.forget(client)

    # ------------------------------------------------------------------------------------------------------ broken streams

    def leaves(self, client: str) -> None:
        """It said that it goes for good."""
        self._ours.discard(client)
        self.pager.residency.unheard.discard(client)
        if (timer := self._away.pop(client, None)) is not None:
            timer.cancel()
        self._has_said_again(client)

    def may_return(self, client: str) -> bool:
        """Its stream has ended. True: it is not to be taken for gone yet."""
        if client not in self._ours:
            return False
        if client not in self._away:
            self._away[client] = asyncio.get_running_loop().call_later(self.grace_seconds, self._grace_over, client)
        return True

    def _grace_over(self, client: str) -> None:
        del self._away[client]
        if client in self.scheduler.client_comms:
            self.may_return(client)  # it is back, and has yet to say what it wants
            return
        logger.warning("taskdb: client %s did not come back; what only it wanted is let go of", client)
        self.leaves(client)
        self.on_gone(client)

    def _end_wants(self, cs: ClientState) -> None:
        keys = [ts.key for ts in cs.wants_what]
        if keys:
            internals.release_wants(self.scheduler, keys, cs, "taskdb-returned")
            self.pager.residency.needed_less(keys)

    # ----------------------------------------------------------------------------------------------------------- wants

    def scattered(self, client: str, keys: Collection[Any]) -> None:
        if client in self._scattered:
            self._scattered[client].update(keys)

    def released(self, client: str, keys: Collection[Any]) -> None:
        if client in self._scattered:
            self._scattered[client].difference_update(keys)

    def restate(self, client: str, keys: Collection[Any]) -> None:
        """`taskdb-restate`: the client wants just these, whatever it wanted before."""
        self.pager.residency.unheard.discard(client)
        cs = internals.client_state(self.scheduler, client)
        if cs is None:
            self._has_said_again(client)  # it left again
            return
        keys = set(keys) | self._scattered.pop(client, set())
        self.on_returned(client)
        if (timer := self._away.pop(client, None)) is not None:
            timer.cancel()
        scheduler, pager = self.scheduler, self.pager
        pager.residency.wanted_again(client, keys)
        released = [ts.key for ts in cs.wants_what if ts.key not in keys]
        if released:
            type(scheduler).client_releases_keys(scheduler, keys=released, client=client)
            pager.residency.needed_less(released)
        # Of keys that are used anew the answer to Want says what they are.
        reused = self._reused.pop(client, ())
        here = [key for key in keys if key in scheduler.tasks and key not in reused]
        if here:
            type(scheduler).client_desires_keys(scheduler, keys=here, client=client)
        pager.cooling.want_only(client, keys.difference(reused))
        for earlier in self._earlier.pop(client, ()):
            if earlier is not cs:
                self._end_wants(earlier)
        packed, strange = [], []
        for key in keys:
            try:
                packed.append(pack_key(key))
            except (LimitExceeded, TypeError):
                strange.append(key)
        # IMPORTANT: in one batch: dropping the client ends the wants it had in the background, and by then the new ones stand. Of what
        # nobody knows the pager tells the client.
        wants = [Want(client, packed[at : at + WANT_KEYS]) for at in range(0, len(packed), WANT_KEYS)]
        drop = DropClient(client)
        pager.residency.restated[client] = drop, set(packed)
        pager.send(drop, *wants, urgent=True)
        self._has_said_again(client)
        if unknown := [key for key in strange if key not in scheduler.tasks]:
            pager.tell_unknown(client, unknown)
