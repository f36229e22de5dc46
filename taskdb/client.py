"""The database from outside: `Session` for a scheduler's loop, `Ingest` for an ingest process, `Client` for reading.

Rules:
- `Session.send` never blocks and never fails for a broken link: a batch is kept until it is durable, and sent again.
- Results come in the order of their batches. Callbacks are plain functions, run on the loop the Session was attached in.
- Every error that leaves this module is a `taskdb.errors.TaskDBError`.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio

from taskdb import commands as c
from taskdb import limits
from taskdb.access import Daemon
from taskdb.errors import AccessDenied, InvalidRequest, LimitExceeded, StaleEpoch, TaskDBError, Unavailable
from taskdb.ingest import Ingest, MissingKeys
from taskdb.wire import convert, status
from taskdb.wire import taskdb_pb2 as pb
from taskdb.wire import taskdb_pb2_grpc as pb_grpc
from taskdb.wire.channel import READ_SECONDS, call_error, open_channel, raise_if_cancelled, unreachable
from taskdb.wire.convert import Refused, SharedBlobs
from taskdb.wire.diagnosis import why_closed
from taskdb.wire.reader import Client

__all__ = ["AttachInfo", "Client", "Ingest", "MissingKeys", "Session"]

logger = logging.getLogger("taskdb.client")

#: Pauses between attempts to reconnect.
BACKOFF_SECONDS_MIN = 0.05
BACKOFF_SECONDS_MAX = 2.0
#: How long one attempt waits for the daemon's answer to Attach.
ATTACH_SECONDS = 5.0
#: How long `close` waits for what was sent to become durable.
CLOSE_SECONDS = 2.0
#: How long `restore` may take in all.
RESTORE_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class AttachInfo:
    epoch: int
    store_uuid: str
    #: Version of the daemon.
    version: str
    #: Tasks that earlier schedulers held, and that nobody has claimed.
    orphans: int
    #: The daemon died since the scheduler before said what it held: any task may have been leased to it.
    leases_lost: bool


# ------------------------------------------------------------------------------------------------------- Session


class _Link:
    """One Session call that has been attached: its call, and the sender's wake-up."""

    def __init__(self, call: Any):
        self.call = call
        self.wake = asyncio.Event()
        self.closing = False


class Session:
    """A scheduler's life with the database, over as many links as it takes.

    States told by `on_state`: "live" (attached again, and batches after the daemon's last seq are being sent again; report what has changed
    before returning, as then the daemon is told what is `held`, and says what was missed), "lost" (the link broke, or the daemon that is
    back does not let us in; connecting again for ever), "fenced" (a newer scheduler owns the store: stop), "failed" (the daemon refused
    us for good, or a callback raised: stop). After "fenced" and "failed" nothing is sent or delivered any more.
    """

    def __init__(
        self,
        daemon: str | Daemon,
        scheduler_id: str,
        *,
        on_result: Callable[[c.Result, int, list[Refused]], None],
        on_state: Callable[[str, str], None],
        held: Callable[[], Sequence[int]],
        channel: Callable[[Daemon], Any] = open_channel,
        why_closed: Callable[[Daemon], Awaitable[AccessDenied | None]] = why_closed,
    ):
        self.daemon = Daemon.at(daemon)
        self.address = self.daemon.address
        self.scheduler_id = scheduler_id
        self.epoch = 0
        #: Leases received in this epoch: what belongs into `Credit.leases_seen`.
        self.leases_seen = 0
        self._on_result = on_result
        self._on_state = on_state
        self._held = held
        #: Makes a gRPC channel, or what behaves like one, to a daemon.
        self._open_channel = channel
        #: Says why such a channel does not come about.
        self._why_closed = why_closed
        self._denied = ""
        self._seq = 0
        #: Last seq whose Result was delivered, and the highest number of a Result.
        self._answered = 0
        self._heard = 0
        #: Last seq that is on disk.
        self.durable_seq = 0
        #: Called with (number, action, keys) of what somebody asks through the daemon: answer with `done`.
        self.on_ask: Callable[[int, str, Sequence[bytes]], None] = lambda number, action, keys: self.done(
            number, 0, f"this scheduler cannot {action} tasks for others"
        )
        #: The daemon keeps a history: reports may say where and when tasks ran.
        self.history = False
        #: Batches that are not durable, oldest first.
        self._unacked: deque[tuple[int, pb.SessionRequest]] = deque()
        #: Batches to be written to the link, oldest first.
        self._outgoing: deque[pb.SessionRequest] = deque()
        self._credit: c.Credit | None = None
        self._blobs = SharedBlobs()
        self._link: _Link | None = None
        self._channel: grpc.aio.Channel | None = None
        self._task: asyncio.Task[None] | None = None
        self._backoff = BACKOFF_SECONDS_MIN
        self._ended = False
        #: One batch that is followed, and when it was sent: (0, 0.0) for none; and how long the last took until it was on disk.
        self._followed = (0, 0.0)
        self._durable_seconds = 0.0

    # ---------------------------------------------------------------------------------------------------- properties

    @property
    def in_flight(self) -> int:
        """Batches whose Result has not been delivered."""
        return self._seq - self._answered

    @property
    def unacked(self) -> int:
        """Batches that are not durable."""
        return len(self._unacked)

    @property
    def durable_seconds(self) -> float:
        """How long it took, last, until a batch was on disk; or has taken so far, if that is longer."""
        seq, sent = self._followed
        return max(self._durable_seconds, time.monotonic() - sent) if seq else self._durable_seconds

    @property
    def connected(self) -> bool:
        return self._link is not None

    @property
    def last_seq(self) -> int:
        """Seq of the last batch sent."""
        return self._seq

    # ------------------------------------------------------------------------------------------------------ lifetime

    async def attach(self, timeout_seconds: float) -> AttachInfo:
        """Begin an epoch. Raises Unavailable (naming address and remedy) if there is no daemon in time, AccessDenied if there is one
        that does not let us in."""
        if self._channel is not None:
            raise InvalidRequest("a Session is attached once")
        self._channel = self._open_channel(self.daemon)
        deadline = time.monotonic() + timeout_seconds
        pause = BACKOFF_SECONDS_MIN
        try:
            while True:
                left = deadline - time.monotonic()
                try:
                    link, attached = await self._open(max(left, 0.01))
                    break
                except (Unavailable, TimeoutError) as error:
                    denied = await self._why_closed(self.daemon)
                    if denied is not None:
                        raise denied from None
                    if time.monotonic() + pause >= deadline:
                        detail = str(error) if not isinstance(error, TimeoutError) else "no answer"
                        raise unreachable(self.address, detail) from None
                    await asyncio.sleep(pause)
                    pause = min(2 * pause, 0.5)
        except BaseException:
            await self._channel.close()
            raise
        self.epoch = attached.epoch
        self._link = link
        self._task = asyncio.ensure_future(self._run(link))
        return AttachInfo(attached.epoch, attached.store_uuid, attached.version, attached.orphans, attached.leases_lost)

    async def close(self) -> None:
        """Wait (not for long) until what was sent is durable, then end the link. The epoch stays ours until another begins."""
        if self._task is not None and not self._task.done():
            link = self._link
            if link is not None:
                link.closing = True
                link.wake.set()
                await asyncio.wait([self._task], timeout=CLOSE_SECONDS)
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task
        self._ended = True
        self._link = None
        if self._channel is not None:
            await self._channel.close()

    # ------------------------------------------------------------------------------------------------------- sending

    def send(self, commands: Sequence[c.Command]) -> int:
        """Queue a batch and return its seq. Never blocks. Raises LimitExceeded if it is too large for one message."""
        message = convert.batch_to_proto(self._seq + 1, commands, self._heard)
        size = message.ByteSize()
        if size > limits.MESSAGE_BYTES_MAX:
            raise LimitExceeded(f"a batch of {size} bytes is over the limit of {limits.MESSAGE_BYTES_MAX}: split it")
        self._seq += 1
        for command in commands:
            if type(command) is c.Credit:
                self._credit = command
        self._queue(message)
        return self._seq

    def _queue(self, message: pb.SessionRequest) -> None:
        if self._ended:
            return
        self._unacked.append((message.batch.seq, message))
        if not self._followed[0]:
            self._followed = message.batch.seq, time.monotonic()
        if self._link is not None:
            self._outgoing.append(message)
            self._link.wake.set()

    def done(self, number: int, count: int, error: str = "") -> None:
        """Answer what was asked, on the link it came by: one that broke meanwhile has told the asker so."""
        if self._link is not None:
            self._outgoing.append(pb.SessionRequest(done=pb.Done(number=number, count=count, error=error)))
            self._link.wake.set()

    async def _send(self, link: _Link) -> None:
        outgoing, write = self._outgoing, link.call.write
        while True:
            while outgoing:
                await write(outgoing.popleft())
            if link.closing:
                await link.call.done_writing()
                return
            link.wake.clear()
            await link.wake.wait()

    # ----------------------------------------------------------------------------------------------------- receiving

    async def _receive(self, link: _Link) -> None:
        """Deliver what comes until the link ends. Raises TaskDBError when it does, unless we ended it."""
        call, read = link.call, link.call.read
        try:
            while (reply := await read()) is not grpc.aio.EOF:
                kind = reply.WhichOneof("kind")
                if kind == "result":
                    self._deliver(reply.result)
                elif kind == "durable":
                    self._durable(reply.durable.seq)
                elif kind == "ask":
                    self.on_ask(reply.ask.number, reply.ask.action, reply.ask.keys)
            code = await call.code()
            if code is grpc.StatusCode.OK:
                if link.closing:
                    return
                raise Unavailable("the daemon ended the Session")
            raise await call_error(call, self.address)
        except grpc.RpcError as error:
            raise status.from_rpc_error(error, self.address) from None
        except asyncio.CancelledError:
            raise_if_cancelled()
            raise Unavailable(f"{self.address}: the call was cancelled") from None

    def _deliver(self, message: pb.Result) -> None:
        result, refused = convert.result_from_proto(message, self._blobs)
        self.leases_seen += len(result.leases)
        self._heard = max(self._heard, message.number)
        seq = message.seq
        if seq:
            self._answered = seq
            if self._unacked and (at := seq - self._unacked[0][0]) >= 0:
                convert.note_ids(self._unacked[at][1].batch, message)
        self._on_result(result, seq, refused)

    def _durable(self, seq: int) -> None:
        self.durable_seq = max(self.durable_seq, seq)
        followed, sent = self._followed
        if 0 < followed <= seq:
            self._followed, self._durable_seconds = (0, 0.0), time.monotonic() - sent
        unacked = self._unacked
        while unacked and unacked[0][0] <= seq:
            unacked.popleft()

    # ------------------------------------------------------------------------------------------------------- linking

    async def _open(self, timeout_seconds: float) -> tuple[_Link, pb.Attached]:
        """A call, attached. Raises TaskDBError or TimeoutError."""
        assert self._channel is not None
        stub = pb_grpc.TaskDBStub(self._channel)
        self._blobs = SharedBlobs()
        call = stub.Session(metadata=self.daemon.access.metadata())
        try:
            async with asyncio.timeout(timeout_seconds):
                attach = pb.Attach(scheduler_id=self.scheduler_id, epoch=self.epoch, answered=self._answered, heard=self._heard)
                await call.write(pb.SessionRequest(attach=attach))
                reply = await call.read()
            if reply is grpc.aio.EOF:
                raise await call_error(call, self.address)
        except grpc.RpcError as error:
            raise status.from_rpc_error(error, self.address) from None
        except asyncio.InvalidStateError:  # the call ended before it could be written to
            raise await call_error(call, self.address) from None
        except asyncio.CancelledError:
            call.cancel()
            raise_if_cancelled()
            raise Unavailable(f"{self.address}: the call was cancelled") from None
        except BaseException:
            call.cancel()
            raise
        self.history = reply.attached.history
        return _Link(call), reply.attached

    async def _run(self, link: _Link) -> None:
        """Serve link after link until the end."""
        try:
            while True:
                began = time.monotonic()
                try:
                    await self._serve(link)
                    return
                except TaskDBError as error:
                    if time.monotonic() - began > BACKOFF_SECONDS_MAX:
                        self._backoff = BACKOFF_SECONDS_MIN
                    self._link = None
                    self._outgoing.clear()
                    if self._stops(error):
                        return
                    self._on_state("lost", str(error))
                again = await self._connect_again()
                if again is None:
                    return
                link = again
        except asyncio.CancelledError:
            link.call.cancel()
            raise
        except Exception as error:  # a callback raised: what the scheduler knows is no longer certain
            logger.exception("a callback of the taskdb session raised")
            link.call.cancel()
            self._end()
            self._on_state("failed", repr(error))

    async def _serve(self, link: _Link) -> None:
        sender = asyncio.ensure_future(self._send(link))
        # A link that cannot be written to is no link.
        sender.add_done_callback(lambda task: None if task.cancelled() or task.exception() is None else link.call.cancel())
        try:
            await self._receive(link)
        finally:
            sender.cancel()
            # A failed write says nothing the receiver does not say better.
            with suppress(asyncio.CancelledError, grpc.RpcError, asyncio.InvalidStateError):
                await sender

    def _stops(self, error: TaskDBError) -> bool:
        if isinstance(error, StaleEpoch):
            self._end()
            self._on_state("fenced", str(error))
            return True
        if isinstance(error, InvalidRequest | LimitExceeded):
            self._end()
            self._on_state("failed", str(error))
            return True
        return False

    def _end(self) -> None:
        self._ended = True
        self._link = None
        self._outgoing.clear()

    async def _connect_again(self) -> _Link | None:
        while True:
            await asyncio.sleep(self._backoff)
            self._backoff = min(2 * self._backoff, BACKOFF_SECONDS_MAX)
            try:
                link, attached = await self._open(ATTACH_SECONDS)
            except TimeoutError:
                continue
            except TaskDBError as error:
                if self._stops(error):
                    return None
                await self._may_be_denied(error)
                continue
            self._denied = ""
            self._resume(link, attached.last_seq)
            return link

    async def _may_be_denied(self, error: TaskDBError) -> None:
        """Said once, and tried again all the same: the files of our access may be put right."""
        denied = error if isinstance(error, AccessDenied) else await self._why_closed(self.daemon)
        if denied is None and not self._denied:
            return
        if denied is not None and str(denied) != self._denied:
            self._denied = str(denied)
            self._on_state("lost", str(denied))
        with suppress(AccessDenied):
            renewed = self._open_channel(self.daemon)  # with certificates as they are now
            former, self._channel = self._channel, renewed
            if former is not None:
                await former.close()

    def _resume(self, link: _Link, last_seq: int) -> None:
        """Say again what the daemon does not know. Its answers to what it does know, and that were not heard, come first."""
        self._durable(last_seq)
        self._answered = min(self._answered, last_seq)
        self._link = link
        self._outgoing.extend(message for _, message in self._unacked)
        self._on_state("live", "")
        # IMPORTANT: after all reports, or the daemon would give out again what is finished, and let go of what it has yet to hear of.
        self._outgoing.append(pb.SessionRequest(resync=pb.Resync(held=self._held(), leases_seen=self.leases_seen)))
        if self._credit is not None:
            self._seq += 1
            self._queue(convert.batch_to_proto(self._seq, [self._credit]))
        link.wake.set()

    # --------------------------------------------------------------------------------------------------------- reads

    async def get_tasks(self, keys: Sequence[bytes], with_spec: bool = False, timeout_seconds: float = READ_SECONDS) -> list[pb.StoredTask]:
        """The tasks under these keys, in order; `found` is False for unknown ones. Raises Unavailable while the link is lost."""
        request = pb.GetTasksRequest(keys=keys, with_spec=with_spec)
        reply: pb.GetTasksReply = await self._read("GetTasks", request, timeout_seconds)
        return list(reply.tasks)

    async def status(self, timeout_seconds: float = READ_SECONDS) -> pb.StatusReply:
        reply: pb.StatusReply = await self._read("Status", pb.StatusRequest(), timeout_seconds)
        return reply

    async def restore(self, timeout_seconds: float = RESTORE_SECONDS) -> AsyncIterator[pb.RestoreReply]:
        """What earlier schedulers left, besides tasks. Raises Unavailable."""
        if self._channel is None:
            raise Unavailable("the Session is not attached")
        try:
            stub, metadata = pb_grpc.TaskDBStub(self._channel), self.daemon.access.metadata()
            async for reply in stub.Restore(pb.RestoreRequest(), timeout=timeout_seconds, metadata=metadata):
                yield reply
        except grpc.RpcError as error:
            raise status.from_rpc_error(error, self.address) from None

    async def _read(self, method: str, request: Any, timeout_seconds: float) -> Any:
        if self._channel is None:
            raise Unavailable("the Session is not attached")
        try:
            call = getattr(pb_grpc.TaskDBStub(self._channel), method)
            return await call(request, timeout=timeout_seconds, metadata=self.daemon.access.metadata())
        except grpc.RpcError as error:
            raise status.from_rpc_error(error, self.address) from None
        except asyncio.CancelledError:
            raise_if_cancelled()
            raise Unavailable(f"{self.address}: the link is being made anew") from None
