"""Handlers of taskdb.v1: decode, hand to the writer or a snapshot, encode. No decisions about tasks."""

from __future__ import annotations

import asyncio
import functools
import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, NoReturn, TypeVar

import grpc.aio

import taskdb
from taskdb import commands as c
from taskdb.errors import InvalidRequest, StaleEpoch, TaskDBError, Unavailable
from taskdb.server import histories, reads
from taskdb.server.asks import Asks, Link
from taskdb.server.writer import Writer
from taskdb.store.base import ReadTxn, Store
from taskdb.store.codec import explained
from taskdb.wire import convert, status
from taskdb.wire import taskdb_pb2 as pb
from taskdb.wire import taskdb_pb2_grpc as pb_grpc
from taskdb.wire.convert import Refused, SharedBlobs

logger = logging.getLogger("taskdb.server")

T = TypeVar("T")
Context = grpc.aio.ServicerContext

#: Answers a peer may leave unread before its batches are no longer read: back-pressure.
OUTGOING_PAUSE = 256
#: Answers a peer may leave unread before its Session is closed (what comes by itself is not paused by the above).
OUTGOING_MAX = 4096
#: How long one answer may wait for the peer to take it.
SEND_SECONDS_MAX = 30.0
#: How long a closing Session may take to send the answers it has made.
END_SECONDS_MAX = 1.0
#: Leases are cut into messages of about this size, far below MESSAGE_BYTES_MAX.
LEASES_BYTES_SLICE = 1 << 20
#: Snapshot reads at the same time (more wait), and how long one may take in all.
READS_MAX = 2
READS_WAITING_MAX = 64
READ_SECONDS_MAX = 10.0


class SessionLink:
    """One Session call: the outgoing queue and its end. Everything runs on the daemon's loop."""

    def __init__(self) -> None:
        self.epoch = 0
        self.leases_lost = False
        self.error: TaskDBError | None = None
        self._out: deque[pb.SessionReply] = deque()
        self._durable = 0
        self._finishing = False
        self._wake = asyncio.Event()
        self._room = asyncio.Event()
        self._room.set()
        self._sender: asyncio.Task[None] | None = None
        self._blobs = SharedBlobs()

    # Peer, for the writer

    @property
    def backlog(self) -> int:
        return len(self._out)

    def push(self, result: c.Result, seq: int, refused: Sequence[Refused]) -> None:
        for message in _cut(result, seq, refused, self._blobs):
            self.put(pb.SessionReply(result=message))
        if len(self._out) > OUTGOING_MAX:
            self.end(Unavailable("the peer does not read its answers"))

    def durable(self, seq: int) -> None:
        self._durable = seq
        self._wake.set()

    def end(self, error: TaskDBError) -> None:
        if self.error is None:
            self.error = error
            if isinstance(error, StaleEpoch):
                self._out.clear()
            self._wake.set()
            self._room.set()
            if self._sender is not None:
                asyncio.get_running_loop().call_later(END_SECONDS_MAX, self._sender.cancel)

    # for the handler

    def put(self, message: pb.SessionReply) -> None:
        if self.error is None:
            self._out.append(message)
            self._wake.set()

    def finish(self) -> None:
        """Send what is queued, then end well."""
        self._finishing = True
        self._wake.set()

    async def room(self) -> None:
        """Wait until the peer has read enough of its answers."""
        if len(self._out) > OUTGOING_PAUSE:
            self._room.clear()
            await self._room.wait()

    async def send(self, context: Any) -> None:
        """Write what is queued until the end."""
        self._sender = asyncio.ensure_future(self._send(context))
        try:
            await self._sender
        except asyncio.CancelledError:
            if self.error is None:
                raise
        except TimeoutError:
            self.end(Unavailable("the peer does not read its answers"))
        finally:
            self._sender.cancel()

    async def _send(self, context: Any) -> None:
        out = self._out
        while True:
            if out:
                async with asyncio.timeout(SEND_SECONDS_MAX):
                    await context.write(out.popleft())
                if len(out) < OUTGOING_PAUSE:
                    self._room.set()
            elif self._durable:
                # IMPORTANT: after the Results it covers.
                out.append(pb.SessionReply(durable=pb.Durable(seq=self._durable)))
                self._durable = 0
            elif self._finishing or self.error is not None:
                return
            else:
                self._wake.clear()
                await self._wake.wait()


def _cut(result: c.Result, seq: int, refused: Sequence[Refused], blobs: SharedBlobs) -> list[pb.Result]:
    """One Result, and more with seq 0 if there are too many bytes of leases for one message: what was adopted before, leases after."""
    *before, result.adopted = _slices(result.adopted, lambda x: x.lease)
    result.leases, *after = _slices(result.leases, lambda x: x)
    queued, ready = result.queued, result.ready
    return [
        *(convert.result_to_proto(c.Result(adopted=x, queued=queued, ready=ready), 0, blobs) for x in before),
        convert.result_to_proto(result, seq, blobs, refused),
        *(convert.result_to_proto(c.Result(leases=x, queued=queued, ready=ready), 0, blobs) for x in after if x),
    ]


def _slices(items: list[T], lease_of: Callable[[T], c.Lease | None]) -> list[list[T]]:
    """At least one; of about LEASES_BYTES_SLICE each."""
    cuts, start, size = [], 0, 0
    for index, item in enumerate(items):
        lease = lease_of(item)
        if lease is not None:
            size += len(lease.spec) + len(lease.key) + len(lease.shared) + 8 * len(lease.deps) + 64
        if size > LEASES_BYTES_SLICE:
            cuts.append(items[start : index + 1])
            start, size = index + 1, 0
    cuts.append(items[start:])
    return cuts


async def _abort(context: Any, error: TaskDBError) -> NoReturn:
    code, details, metadata = status.to_status(error)
    await context.abort(code, details, metadata)
    raise AssertionError("abort raises")


class Service(pb_grpc.TaskDBServicer):
    def __init__(self, store: Store, writer: Writer, info: reads.StoreInfo):
        self._store = store
        self._writer = writer
        self._info = info
        self._pool = ThreadPoolExecutor(READS_MAX, "taskdb-read")
        self._reads = 0
        self._asks = Asks()
        self._began = time.monotonic()
        #: The stream that feeds each submission now.
        self._ingests: dict[str, object] = {}

    def close(self) -> None:
        """Wait for the reads that run: they hold snapshots of the store."""
        self._pool.shutdown(wait=True, cancel_futures=True)

    # ------------------------------------------------------------------------------------------------- the Session

    async def Session(self, request_iterator: Any, context: Any) -> None:
        link = SessionLink()
        reader = asyncio.ensure_future(self._read_session(link, context))
        try:
            await link.send(context)
        finally:
            self._writer.detach(link)
            self._asks.lost(link)
            reader.cancel()
            with suppress(asyncio.CancelledError):
                await reader
        if link.error is not None:
            await _abort(context, link.error)

    async def _read_session(self, link: SessionLink, context: Any) -> None:
        try:
            first = await context.read()
            if first is grpc.aio.EOF or first.WhichOneof("kind") != "attach":
                raise InvalidRequest("the first message of a Session is Attach")
            self._attach(link, first.attach)
            while True:
                message = await context.read()
                if message is grpc.aio.EOF:
                    break
                match message.WhichOneof("kind"):
                    case "batch":
                        batch = message.batch
                        self._writer.counters.batches += 1
                        commands = convert.commands_from_proto(batch.commands)
                        await reach(self._writer, commands)
                        self._writer.batch(link, batch.seq, commands, batch.heard)
                    case "resync":
                        self._writer.resync(link, list(message.resync.held), message.resync.leases_seen)
                    case "done":
                        self._asks.done(message.done)
                    case _:
                        raise InvalidRequest("after Attach, a Session carries batches, Resync and Done")
                await link.room()
            self._writer.flush()
            link.finish()
        except TaskDBError as error:
            link.end(error)
        except asyncio.CancelledError:
            raise
        except Exception as error:  # the transport: the peer is gone
            link.end(Unavailable(f"the link broke: {error}"))

    def _attach(self, link: SessionLink, attach: pb.Attach) -> None:
        epoch, last_seq = self._writer.attach(link, attach.scheduler_id, attach.epoch)
        logger.info("scheduler %s attached, epoch %d, seq %d", attach.scheduler_id, epoch, last_seq)
        attached = pb.Attached(
            epoch=epoch,
            store_uuid=self._info.uuid,
            last_seq=last_seq,
            version=taskdb.__version__,
            orphans=0 if attach.epoch else self._writer.held(),
            leases_lost=link.leases_lost,
            history=self._writer.recorder is not None,
        )
        link.put(pb.SessionReply(attached=attached))
        if last_seq:
            link.put(pb.SessionReply(durable=pb.Durable(seq=last_seq)))
        if attach.epoch:
            for result, seq, refused in self._writer.unheard(attach.answered, last_seq, attach.heard):
                link.push(result, seq, refused)

    # --------------------------------------------------------------------------------------------------- the Ingest

    async def Ingest(self, request_iterator: Any, context: Any) -> None:
        stream = IngestStream(self._writer, self._ingests)
        try:
            while (message := await context.read()) is not grpc.aio.EOF:
                await context.write(await stream.handle(message))
        except TaskDBError as error:
            stream.close()
            await _abort(context, error)
        finally:
            stream.close()

    # ---------------------------------------------------------------------------------------------------------- reads

    async def Status(self, request: pb.StatusRequest, context: Any) -> pb.StatusReply:
        reply = await self._read(context, reads.status)
        reply.version = taskdb.__version__
        reply.store_uuid = self._info.uuid
        reply.format_version = self._info.format_version
        reply.scheduler_attached = self._writer.attached
        reply.store_bytes = self._store.size_bytes()
        reply.store_bytes_max = self._info.bytes_max
        reply.used_bytes = self._store.used_bytes()
        reply.uptime_seconds = time.monotonic() - self._began
        reply.commits = self._writer.counters.commits
        reply.commit_seconds_last = self._writer.counters.commit_seconds_last
        return reply

    async def ListTasks(self, request: pb.ListTasksRequest, context: Any) -> pb.ListTasksReply:
        return await self._read(context, lambda txn: reads.list_tasks(txn, request))

    async def Errors(self, request: pb.ErrorsRequest, context: Any) -> pb.ErrorsReply:
        return await self._read(context, lambda txn: reads.errors(txn, request))

    async def Explain(self, request: pb.ExplainRequest, context: Any) -> pb.ExplainReply:
        return await self._read(context, lambda txn: reads.explain(txn, request))

    async def GetTasks(self, request: pb.GetTasksRequest, context: Any) -> pb.GetTasksReply:
        try:
            await reach(self._writer, [c.Want("", list(request.keys))])
        except TaskDBError as error:
            await _abort(context, error)
        self._writer.flush()  # so that a scheduler reads what it has written
        return await self._read(context, lambda txn: reads.get_tasks(txn, request))

    async def Story(self, request: pb.StoryRequest, context: Any) -> pb.StoryReply:
        self._writer.flush()
        return await self._read(context, lambda txn: reads.story(txn, request))

    async def History(self, request: pb.HistoryRequest, context: Any) -> None:
        self._writer.flush()
        number = 0
        while True:
            # A snapshot each: the whole may take long.
            reply, number = await self._read(
                context, functools.partial(histories.stretch, submission=request.submission, number=number, names=request.names)
            )
            if reply is not None:
                await context.write(reply)
            if not number:
                return

    async def Prune(self, request: pb.PruneRequest, context: Any) -> pb.PruneReply:
        self._writer.flush()
        reply: pb.PruneReply = await self._read(context, lambda txn: reads.prunable(txn, request))
        if not request.dry_run:
            try:
                self._writer.prune([graph.submission for graph in reply.graphs], request.history_before)
            except TaskDBError as error:
                await _abort(context, error)
        return reply

    async def Act(self, request: pb.ActRequest, context: Any) -> pb.ActReply:
        peer: Any = self._writer.peer
        link: Link | None = peer
        try:
            return pb.ActReply(count=await self._asks.ask(link, request.action, request.keys))
        except TaskDBError as error:
            await _abort(context, error)

    async def Restore(self, request: pb.RestoreRequest, context: Any) -> None:
        self._writer.flush()
        for reply in await self._read(context, lambda txn: list(reads.restore(txn))):
            await context.write(reply)

    async def _read(self, context: Any, query: Callable[[ReadTxn], T]) -> T:
        """Run a query on a snapshot in the pool. Queries bound their own work; the deadline bounds the waiting."""

        def run() -> T:
            try:
                with self._store.read() as txn:
                    return query(txn)
            except Exception as error:
                raise explained(error) from None

        if self._reads >= READS_WAITING_MAX:
            await _abort(context, Unavailable(f"{self._reads} reads are waiting already"))
        self._reads += 1
        try:
            async with asyncio.timeout(READ_SECONDS_MAX):
                return await asyncio.get_running_loop().run_in_executor(self._pool, run)
        except TimeoutError:
            await _abort(context, Unavailable(f"the read took more than {READ_SECONDS_MAX:.0f} s"))
        except TaskDBError as error:
            await _abort(context, error)
        finally:
            self._reads -= 1


async def reach(writer: Writer, commands: Sequence[c.Command]) -> None:
    """What these name of spooled runs comes first; others are served meanwhile. Raises StoreFull, StoreError, Unavailable."""
    for place in writer.spooled(commands):
        writer.carry(place)
        await asyncio.sleep(0)


class IngestStream:
    """One submission on its way in. What becomes of it if the stream ends before its seal: see `unsealed.py`."""

    def __init__(self, writer: Writer, ingests: dict[str, object]):
        self._writer = writer
        self._ingests = ingests
        self._epoch = 0
        self._submission = ""
        self._tasks = 0
        self._open = False

    async def handle(self, message: pb.IngestRequest) -> pb.IngestReply:
        kind = message.WhichOneof("kind")
        if not self._submission:
            if kind != "begin_graph" or not message.epoch:
                raise InvalidRequest("the first message of an Ingest names the epoch and begins the graph")
            return self._begin(message)
        if message.epoch not in (0, self._epoch):
            raise InvalidRequest("an Ingest stream has one epoch")
        missing: list[bytes] = []
        known: list[int] = []
        if kind in ("add_tasks", "add_rule"):
            command: c.AddTasks | c.AddRule = (
                convert.add_tasks_from_proto(message.add_tasks) if kind == "add_tasks" else convert.add_rule_from_proto(message.add_rule)
            )
            self._check_name(command.submission)
            await reach(self._writer, [command])
            added, _ = self._writer.ingest(self._epoch, command)
            self._tasks += sum(len(x.ids) for x in added)
            missing = [key for x in added for key in x.missing]
            known = [at for x in added for at in x.known]
        elif kind == "seal_graph":
            self._check_name(message.seal_graph.submission)
            self._writer.ingest(self._epoch, c.SealGraph(self._submission))
            self._done()
        else:
            raise InvalidRequest("after BeginGraph, an Ingest carries AddTasks, AddRule and SealGraph")
        return pb.IngestReply(tasks=self._tasks, missing=missing, durable=True, known=known)

    def _begin(self, message: pb.IngestRequest) -> pb.IngestReply:
        command = convert.begin_graph_from_proto(message.begin_graph)
        if command.submission in self._ingests:
            raise Unavailable(f"submission {command.submission} is being sent by another Ingest stream")
        _, sealed = self._writer.ingest(message.epoch, command)
        self._epoch, self._submission = message.epoch, command.submission
        if not sealed:
            # Sealed before, it is only answered: the end of this stream must not abort it.
            self._open = True
            self._ingests[command.submission] = self
        return pb.IngestReply(durable=True, tasks=self._writer.added(command.submission))

    def _check_name(self, submission: str) -> None:
        if submission != self._submission:
            raise InvalidRequest(f"this Ingest stream carries submission {self._submission}, not {submission}")

    def _done(self) -> None:
        self._open = False
        self._ingests.pop(self._submission, None)

    def close(self) -> None:
        if self._open:
            self._done()
            self._writer.ended(self._epoch, self._submission)
