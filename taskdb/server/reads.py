"""Queries of the engine, on a snapshot, as replies of the wire."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from dataclasses import dataclass

from taskdb.engine import failures, listing, queries, stories
from taskdb.engine.listing import Filters
from taskdb.engine.reader import TaskInfo
from taskdb.engine.recovery import clients, graphs, kept
from taskdb.errors import LimitExceeded, StoreCorrupt
from taskdb.limits import RESTORE_BYTES_SLICE, RESTORE_GRAPHS_SLICE
from taskdb.server.recorder import history_bytes
from taskdb.store.base import ReadTxn, Store
from taskdb.store.schema import FORMAT_VERSION, Meta, Table, meta_key
from taskdb.wire import taskdb_pb2 as pb

#: Keys of one GetTasks: some 10 µs each, in a thread that shares the interpreter with the loop.
GET_TASKS_MAX = 100_000


@dataclass(frozen=True, slots=True)
class StoreInfo:
    """What does not change while a store is open."""

    uuid: str
    format_version: int
    bytes_max: int


def store_info(store: Store, bytes_max: int) -> StoreInfo:
    with store.read() as txn:
        data = txn.get(Table.META, meta_key(Meta.STORE_UUID))
    if data is None or len(data) != 16:
        raise StoreCorrupt("the store has no uuid: move it away or restore a copy")
    return StoreInfo(str(uuid.UUID(bytes=data)), FORMAT_VERSION, bytes_max)


def status(txn: ReadTxn) -> pb.StatusReply:
    """What the store knows; the daemon adds the rest."""
    found = queries.status(txn)
    return pb.StatusReply(
        epoch=found.epoch,
        tasks=found.tasks,
        states=found.states,
        todo=found.todo,
        history_bytes=history_bytes(txn),
        graphs=[_graph(graph) for graph in found.graphs],
    )


def _graph(graph: queries.GraphInfo) -> pb.GraphStatus:
    return pb.GraphStatus(
        submission=graph.submission,
        client=graph.client,
        label=graph.label,
        submitted=graph.submitted,
        sealed=graph.sealed,
        tasks=graph.tasks,
        states=graph.states,
        wanted=graph.wanted,
        unmade=graph.unmade,
        total=graph.total,
    )


def prunable(txn: ReadTxn, request: pb.PruneRequest) -> pb.PruneReply:
    """Raises InvalidRequest."""
    return pb.PruneReply(graphs=[_graph(x) for x in queries.finished_graphs(txn, request.submissions, request.submitted_before)])


def restore(txn: ReadTxn) -> Iterator[pb.RestoreReply]:
    """Everything a new scheduler goes on with, in messages of a bounded size."""
    reply, size = pb.RestoreReply(), 0
    for name, value in kept(txn):
        reply.kept.add(name=name, value=value)
        size += len(name) + len(value)
        if size > RESTORE_BYTES_SLICE:
            yield reply
            reply, size = pb.RestoreReply(), 0
    for graph in graphs(txn):
        reply.graphs.add(
            submission=graph.submission,
            client=graph.client,
            flags=graph.flags,
            generation=graph.generation,
            tasks=graph.tasks,
            unfinished=graph.unfinished,
            groups=graph.groups,
            aborted=graph.aborted,
        )
        if len(reply.graphs) == RESTORE_GRAPHS_SLICE:
            yield reply
            reply = pb.RestoreReply()
    reply.clients.extend(clients(txn))
    yield reply


def list_tasks(txn: ReadTxn, request: pb.ListTasksRequest) -> pb.ListTasksReply:
    filters = Filters(request.submission, request.state, request.prefix, request.group, request.pattern, request.wanted, request.worker)
    page = listing.list_tasks(txn, filters, request.cursor, request.limit, request.sort, request.descending, request.after)
    return pb.ListTasksReply(tasks=[_info(x) for x in page.tasks], cursor=page.cursor)


def errors(txn: ReadTxn, request: pb.ErrorsRequest) -> pb.ErrorsReply:
    groups, cursor = failures.errors(txn, request.submission, request.cursor)
    return pb.ErrorsReply(
        groups=[
            pb.ErrorGroup(
                exception=group.exception,
                prefix=group.prefix,
                failed=group.failed,
                key=group.key,
                submission=group.submission,
                text=group.text,
                traceback=group.traceback,
                blamed=group.blamed,
            )
            for group in groups
        ],
        cursor=cursor,
    )


def story(txn: ReadTxn, request: pb.StoryRequest) -> pb.StoryReply:
    found = stories.story(txn, request.key, request.limit)
    events = [
        pb.StoryEvent(time=x.time, id=x.id, what=x.what, submission=x.submission, worker=x.worker, seconds=x.seconds, text=x.text)
        for x in found.events
    ]
    return pb.StoryReply(id=found.id, events=events, since=found.since, more=found.more)


def explain(txn: ReadTxn, request: pb.ExplainRequest) -> pb.ExplainReply:
    found = queries.explain(txn, request.key, request.limit)
    return pb.ExplainReply(
        found=found.task is not None,
        task=None if found.task is None else _info(found.task),
        reason=found.reason,
        waits_for=[_info(x) for x in found.waits_for],
        chain=[_info(x) for x in found.chain],
        ahead_in_queue=found.ahead_in_queue,
        wanted_by=found.wanted_by,
        cause=None if found.cause is None else _info(found.cause),
        path=[pb.PathStep(task=_info(task), seconds=-1.0 if seconds is None else seconds) for task, seconds in found.path.steps],
        path_tasks=found.path.tasks,
        path_whole=found.path.whole,
    )


def get_tasks(txn: ReadTxn, request: pb.GetTasksRequest) -> pb.GetTasksReply:
    """Raises LimitExceeded."""
    if len(request.keys) > GET_TASKS_MAX:
        raise LimitExceeded(f"{len(request.keys)} keys in one GetTasks, at most {GET_TASKS_MAX}")
    found = queries.get_tasks(txn, list(request.keys), request.with_spec)
    return pb.GetTasksReply(tasks=[_stored(x) for x in found])


def _stored(task: queries.StoredTask | None) -> pb.StoredTask:
    if task is None:
        return pb.StoredTask()
    return pb.StoredTask(
        found=True, info=_info(task.info), spec=task.spec, deps=task.deps, cause=task.cause, payload=task.payload, shared=task.shared
    )


def _info(task: TaskInfo) -> pb.TaskInfo:
    return pb.TaskInfo(
        id=task.id,
        key=task.key,
        state=task.state,
        submission=task.submission,
        group=task.group,
        waiting_on=task.waiting_on,
        blocked_on=task.blocked_on,
        need=task.need,
        wants=task.wants,
        nbytes=task.nbytes,
        user=task.user,
        generation=task.generation,
        order=task.order,
        suspicious=task.suspicious,
        error=task.error,
        token=task.token,
    )
