"""The history as messages, a stretch of blocks at a time."""

from __future__ import annotations

import numpy as np

from taskdb.limits import HISTORY_ROWS_SLICE
from taskdb.store.base import ReadTxn
from taskdb.store.codec import NO_GROUP
from taskdb.store.history import StoredBlock
from taskdb.store.schema import U64, Table
from taskdb.wire import taskdb_pb2 as pb

#: Blocks looked at for one message: most may be of other graphs.
_BLOCKS_MAX = 64


def stretch(txn: ReadTxn, submission: str, number: int, names: bool = False) -> tuple[pb.HistoryReply | None, int]:
    """What blocks from `number` on say of submissions that begin so (or only which there are), and the number to go on with (0: that was
    all)."""
    reply = pb.HistoryReply()
    rows = last = 0
    for blocks, (key, data) in enumerate(txn.scan(Table.HISTORY, U64.pack(number))):
        if rows >= HISTORY_ROWS_SLICE or blocks >= _BLOCKS_MAX:
            return (reply if rows else None), last + 1
        last = U64.unpack(key)[0]
        rows += _add(reply, StoredBlock(data), submission, names)
    return (reply if rows else None), 0


def _add(reply: pb.HistoryReply, block: StoredBlock, submission: str, only_names: bool) -> int:
    """Rows added."""
    columns = block.columns()
    chosen = [graph for graph, names in columns.graphs.items() if names[0].startswith(submission)]
    if not chosen:
        return 0
    places = {graph: _graph(reply, graph, columns.graphs[graph]) for graph in chosen}
    if only_names:
        return 1
    rows = np.flatnonzero(np.isin(columns.of_graph, np.array(chosen, np.uint64)))
    names = {name: place for place, name in enumerate(reply.groups)}
    graphs, ids = columns.of_graph[rows].tolist(), columns.ids[rows].tolist()
    groups: list[int] = []
    for part in zip(graphs, columns.of_group[rows].tolist()):
        name = columns.groups.get(part, "") if part[1] != NO_GROUP else ""
        if name not in names:
            names[name] = len(reply.groups)
            reply.groups.append(name)
        groups.append(names[name])
    reply.times.extend(columns.times[rows].tolist())
    reply.ids.extend(ids)
    reply.states.extend(columns.states[rows].tolist())
    reply.of_graph.extend([places[graph] for graph in graphs])
    reply.of_group.extend(groups)
    mine = set(ids)
    for task_id, key in block.keys().items():
        if task_id in mine:
            reply.key_ids.append(task_id)
            reply.keys.append(key)
    workers = {name: place for place, name in enumerate(reply.workers)}
    for task_id, worker, began, seconds in columns.runs:
        if task_id in mine:
            if worker not in workers:
                workers[worker] = len(reply.workers)
                reply.workers.append(worker)
            reply.ran_ids.append(task_id)
            reply.ran_on.append(workers[worker])
            reply.began.append(began)
            reply.seconds.append(seconds)
    for task_id, text in columns.failures:
        if task_id in mine:
            reply.failed_ids.append(task_id)
            reply.failed_texts.append(text)
    return len(rows)


def _graph(reply: pb.HistoryReply, graph: int, names: tuple[str, str, str, float]) -> int:
    for place, known in enumerate(reply.graphs):
        if known.id == graph:
            return place
    submission, client, label, submitted = names
    reply.graphs.add(id=graph, submission=submission, client=client, label=label, submitted=submitted)
    return len(reply.graphs) - 1
