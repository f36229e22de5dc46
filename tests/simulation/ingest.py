"""The ingest process, which is not one here: the same steps as `scheduler_adapter.ingest.process`, without blocking."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, Sequence
from typing import Any
from zlib import crc32

import grpc
import grpc.aio
from distributed.protocol.serialize import Serialized

from scheduler_adapter.dask_internals import load_expr
from scheduler_adapter.details import unpack
from scheduler_adapter.graph import materialise, pack_graph, prepare, runs
from scheduler_adapter.keys import unpack_key
from taskdb.commands import AddTasks, BeginGraph
from taskdb.errors import TaskDBError, Unavailable
from taskdb.model import GraphFlag, TaskFlag
from taskdb.wire import convert, status
from taskdb.wire import taskdb_pb2 as pb
from taskdb.wire import taskdb_pb2_grpc as pb_grpc
from tests.simulation.rpc import Call, Channel

Message = dict[str, Any]


class InlineIngest:
    """In place of `IngestProcess`."""

    def start(self) -> None: ...

    async def close(self) -> None: ...

    async def run(self, job: Message, frames: Sequence[Any]) -> AsyncGenerator[Message, None]:
        """Messages of one submission, ending with `done`, `missing` or `error`."""
        try:
            async for message in _ingest(job, frames):
                yield message
        except TaskDBError as error:
            yield {"op": "error", "exception": error}


async def _ingest(job: Message, frames: Sequence[Any]) -> AsyncGenerator[Message, None]:
    keys, internal_priority, annotations = unpack(job["details"])
    dsk, by_type = materialise(load_expr(Serialized(job["header"], list(frames))))
    graph = prepare(dsk, by_type, keys, internal_priority, annotations)
    sizes, group_deps = graph.groups()
    yield {"op": "graph", "tasks": len(graph.dsk), "external": graph.external, "groups": dict(sizes), "group_deps": group_deps}
    if graph.has_p2p:
        yield {"op": "whole", "graph": pack_graph(graph)}
        return
    submission = job["submission"]
    names: list[str] = []
    call: Call = pb_grpc.TaskDBStub(Channel(job["daemon"])).Ingest()
    try:
        flags = job["flags"]
        if crc32(submission.encode()) % 4:
            # As if it were large: some of its runs wait in the database, until the tasks before them have run.
            flags |= GraphFlag.SPOOLED
        begin = BeginGraph(submission, job["client"], job["generation"], job["submitted"], job["label"], flags=flags)
        there = await _ask(call, pb.IngestRequest(epoch=job["epoch"], begin_graph=convert.begin_graph_to_proto(begin)))
        yield {"op": "begun", "there": there.tasks}
        for run in runs(graph, submission, held=False, consume=True):
            names.extend(run.new_groups)
            reply = await _ask(call, pb.IngestRequest(epoch=job["epoch"], add_tasks=convert.add_tasks_to_proto(run)))
            if reply.missing:
                yield {"op": "missing", "keys": [unpack_key(key) for key in reply.missing]}
                return
            yield _added(run, list(reply.known), names, bool(job["flags"] & GraphFlag.RESENT))
        seal = pb.IngestRequest(epoch=job["epoch"], seal_graph=pb.SealGraph(submission=submission))
        yield {"op": "done", "tasks": (await _ask(call, seal)).tasks}
    finally:
        call.cancel()


def _added(run: AddTasks, known: list[int], names: list[str], resent: bool) -> Message:
    old = [i for i in known if not run.flags[i] & TaskFlag.EXTERNAL]
    new = Counter(names[g] for g, flag in zip(run.groups, run.flags, strict=True) if not flag & TaskFlag.EXTERNAL)
    before = Counter(names[run.groups[i]] for i in old)
    return {
        "op": "run",
        "first": run.first_index,
        "new": dict(new - before),
        "old": dict(before),
        "known": [unpack_key(run.keys[i]) for i in old],
        "keys": run.keys if resent else (),
    }


async def _ask(call: Call, request: pb.IngestRequest) -> pb.IngestReply:
    try:
        await call.write(request)
        reply = await call.read()
    except grpc.RpcError as error:
        raise status.from_rpc_error(error, "simulated") from None
    except (asyncio.InvalidStateError, asyncio.CancelledError):
        raise Unavailable("the call is over") from None
    if reply is grpc.aio.EOF:
        raise Unavailable("the daemon ended the stream")
    return reply
