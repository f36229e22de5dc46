"""Ordered streams between processes, in place of sockets: late, cut at any moment, and then short of what was under way."""

from __future__ import annotations

import asyncio
from collections import deque
from contextvars import Context
from random import Random
from typing import Any

from distributed.comm.core import CommClosedError

from tests.simulation.loop import Process

#: Most seconds until the end of a stream is noticed.
NOTICE_SECONDS = 0.3


class Network:
    """`chance` decides how late what arrives, and what is lost."""

    def __init__(self, chance: Random) -> None:
        self.chance = chance
        self._ends: dict[End, None] = {}

    def pair(self, a: Process, b: Process, label: str) -> tuple[End, End]:
        one, two = End(self, a, label), End(self, b, label)
        one.peer, two.peer = two, one
        self._ends.update({one: None, two: None})
        return one, two

    def latency(self) -> float:
        chance = self.chance
        return chance.choice((0.0002, 0.0005, 0.001)) if chance.random() < 0.9 else chance.uniform(0, 0.05)

    def cut(self, end: End) -> None:
        """A suffix of what is under way is lost, in each direction; the two ends notice at different times."""
        if not end.cut:
            for side in (end, end.peer):
                side.cut = True
                side._lose_suffix()
                side._later(NOTICE_SECONDS * self.chance.random() ** 3, side.peer._end)
            self._ends.pop(end, None)
            self._ends.pop(end.peer, None)

    def kill(self, process: Process) -> None:
        """It runs no more, and its peers see its streams end."""
        process.alive = False
        for end in [end for end in self._ends if end.process is process]:
            self.cut(end)

    def ends(self, label: str) -> list[End]:
        """One end of each stream of this kind that is not cut."""
        return [end for end in self._ends if end.label == label and end.peer in self._ends][::2]


class End:
    """One end of a stream. Also what `distributed` takes for a Comm."""

    name = "simulated"
    peer_address = local_address = "tcp://simulated:1"
    peer: End

    def __init__(self, network: Network, process: Process, label: str) -> None:
        self._network = network
        self.process = process
        self.label = label
        self._inbox: deque[Any] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self._under_way: deque[asyncio.TimerHandle] = deque()
        self._last = 0.0
        #: Nothing passes any more, whether it has been noticed or not.
        self.cut = False
        #: Noticed, or closed by us.
        self.ended = False
        #: Called when the end is noticed.
        self.on_end: Any = None

    # ---------------------------------------------------------------------------------------------------------- sending

    def send(self, item: Any) -> None:
        """Raises CommClosedError once the end has been noticed; until then what is sent may be lost."""
        if self.ended:
            raise CommClosedError("the stream has ended")
        if not self.cut:
            self._under_way.append(self._later(self._network.latency(), self._arrive, item))

    def _later(self, delay: float, callback: Any, *args: Any) -> asyncio.TimerHandle:
        loop = asyncio.get_running_loop()
        # Timers of one time are in no order.
        self._last = max(self._last + 1e-9, loop.time() + delay)
        return loop.call_at(self._last, callback, *args, context=Context())

    def _arrive(self, item: Any) -> None:
        self._under_way.popleft()
        peer = self.peer
        if not peer.ended:
            peer._inbox.append(item)
            peer._wake()

    def _lose_suffix(self) -> None:
        kept = self._network.chance.randint(0, len(self._under_way))
        while len(self._under_way) > kept:
            self._under_way.pop().cancel()

    # -------------------------------------------------------------------------------------------------------- receiving

    async def receive(self) -> Any:
        """The next item. Raises CommClosedError at the end."""
        while not self._inbox:
            if self.ended:
                raise CommClosedError("the stream has ended")
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        return self._inbox.popleft()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _end(self) -> None:
        if not self.ended:
            self.ended = True
            self._wake()
            if self.on_end is not None and self.process.alive:
                self.process.run(self.on_end)

    # ---------------------------------------------------------------------------------------------------------- as a Comm

    async def read(self, deserializers: Any = None) -> Any:
        return await self.receive()

    async def write(self, message: Any, serializers: Any = None, on_error: str = "") -> int:
        self.send(message)
        return 1

    def closed(self) -> bool:
        return self.ended

    def abort(self) -> None:
        """What was sent arrives, then the other side sees the end."""
        if not self.ended:
            self.ended = True
            self._wake()
            if not self.cut:
                self.cut = self.peer.cut = True
                self._network._ends.pop(self, None)
                self._network._ends.pop(self.peer, None)
                self._later(0.0, self.peer._end)

    async def close(self) -> None:
        self.abort()


class Sender:
    """In place of `BatchedSend`: nothing is gathered, what is sent is on its way."""

    def __init__(self, interval: Any = None, loop: Any = None, serializers: Any = None) -> None:
        self.comm: End | None = None
        self.buffer: list[Any] = []
        self.batch_count = 0

    def start(self, comm: End) -> None:
        self.comm = comm
        early, self.buffer = self.buffer, []
        self.send(*early)

    def send(self, *messages: Any) -> None:
        if self.comm is None:
            self.buffer.extend(messages)
        elif messages or self.comm.ended:
            self.batch_count += 1
            self.comm.send(list(messages))

    def closed(self) -> bool:
        return self.comm is not None and self.comm.ended

    async def close(self, timeout: Any = None) -> None:
        if self.comm is not None:
            self.comm.abort()

    def abort(self) -> None:
        if self.comm is not None:
            self.comm.abort()
