"""How submissions end, in steps: what a seal lets go of, what an abort takes back, and what is left when the last task is forgotten."""

from __future__ import annotations

from collections.abc import Sequence

from taskdb.engine.refs import next_run
from taskdb.engine.spool import drop_runs
from taskdb.engine.todo import Todo
from taskdb.engine.transitions import CANCEL_FORCE, PROCESSING, put_back, recheck
from taskdb.engine.wants import client_of, end_wants, remove_name, remove_want
from taskdb.engine.work import Work
from taskdb.store.codec import UNGROWN, GraphRecord, GraphStatus, TaskRecord
from taskdb.store.schema import GRAPH_PART, U64, U64_PAIR, Table


def _own_and_met(work: Work, graph_id: int, cursor: int, items_max: int) -> tuple[list[int], int | None]:
    """Ids of tasks that exist, from index `cursor` on, and the index to go on with (None: that was all)."""
    # Of a long run few may be left: they are looked for in the table.
    work.flush_records()
    ids: list[int] = []
    index = cursor
    runs = 0
    while len(ids) + runs < items_max:
        run = next_run(work.txn, graph_id, index)
        if run is None:
            return ids, None
        runs += 1
        first, last, first_id = run
        index = max(index, first)
        if first_id:
            start, stop = U64.pack(first_id + index - first), U64.pack(first_id + last + 1 - first)
            for key, _ in work.txn.scan(Table.TASKS, start, stop):
                task_id = int.from_bytes(key)
                if len(ids) >= items_max:
                    return ids, first + task_id - first_id
                ids.append(task_id)
        index = last + 1
    return ids, index


def unexpect_some(work: Work, graph_id: int, cursor: int, items_max: int) -> int:
    """A sealed submission brings no more dependents. Returns the number of tasks met."""
    graph = work.graph(graph_id)
    if graph is None or not graph.expected:
        return 0
    ids, rest = _own_and_met(work, graph_id, cursor, items_max)
    for task_id in ids:
        task = work.task(task_id)
        if task is not None and task.graph == graph_id:
            _unexpect(work, graph, task)
    if rest is not None:
        work.push(Todo.UNEXPECT, graph_id, 0, rest)
    return len(ids)


def _unexpect(work: Work, graph: GraphRecord, task: TaskRecord) -> None:
    if task.expected:
        graph.expected -= task.expected
        graph.dirty = True
        task.expected = 0
        task.dirty = True
        recheck(work, task)


def abort_some(work: Work, graph_id: int, cursor: int, items_max: int) -> int:
    """Take back what an aborted submission brought: what its tasks expect, and its client's wants. Returns the tasks met.

    What others want or depend on stays, and the graph with it.
    """
    graph = work.graph(graph_id)
    if graph is None:
        return 0
    if dropped := drop_runs(work, graph, items_max):
        work.push(Todo.ABORT, graph_id, 0, cursor)
        return dropped
    ids, rest = _own_and_met(work, graph_id, cursor, items_max)
    client = client_of(work, graph.client)
    for task_id in ids:
        task = work.task(task_id)
        if task is None:
            continue
        if task.graph == graph_id:
            _unexpect(work, graph, task)
        if client is not None and client.wants and task.wants:
            brought = work.txn.get(Table.WANTS, U64_PAIR.pack(client.id, task_id))
            if brought == U64.pack(graph_id):
                remove_want(work, client, task)
        if not task.links:
            recheck(work, task)
        if task.graph == graph_id and task.flags & UNGROWN:
            _need_no_turn(work, task)
    if rest is not None:
        work.push(Todo.ABORT, graph_id, 0, rest)
        return len(ids)
    graph.status = GraphStatus.SEALED
    graph.dirty = True
    if graph.ended:
        work.push(Todo.END, graph_id)
    return len(ids)


def prune_some(work: Work, graph_id: int, cursor: int, items_max: int) -> int:
    """End the wants of a graph's tasks, whoever has them: what nothing else depends on is forgotten. Returns the tasks met."""
    if work.graph(graph_id) is None:
        return 0
    ids, rest = _own_and_met(work, graph_id, cursor, items_max)
    for task_id in ids:
        task = work.task(task_id)
        if task is not None and task.graph == graph_id:
            end_wants(work, CANCEL_FORCE, task)
            recheck(work, task)
    if rest is not None:
        work.push(Todo.PRUNE, graph_id, 0, rest)
    return len(ids)


def _need_no_turn(work: Work, task: TaskRecord) -> None:
    """The turn of an output will not come. If others need it, what it depends on is made as if it had been dropped."""
    if task.state <= PROCESSING:
        put_back(work, task)
    task.flags &= ~UNGROWN
    task.dirty = True


def end_some(work: Work, graph_id: int, items_max: int) -> int:
    """Remove what is left of a graph without tasks. Returns the records removed."""
    graph = work.graph(graph_id)
    if graph is None or not graph.ended:
        return 0
    work.forget_dropped(graph)
    work.report_forgotten()
    removed = 0
    for table, start, stop in (
        (Table.RUNS, U64_PAIR.pack(graph_id, 0), U64_PAIR.pack(graph_id + 1, 0)),
        (Table.BLOBS, GRAPH_PART.pack(graph_id, 0), GRAPH_PART.pack(graph_id + 1, 0)),
        (Table.GROUPS, GRAPH_PART.pack(graph_id, 0), GRAPH_PART.pack(graph_id + 1, 0)),
    ):
        keys: list[bytes] = []
        for key, _ in work.txn.scan(table, start, stop):
            if removed == items_max:
                work.push(Todo.END, graph_id)
                return _delete(work, table, keys, removed)
            keys.append(key)
            removed += 1
        _delete(work, table, keys, removed)
    work.drop_groups(graph_id)
    work.txn.delete(Table.RULES, U64.pack(graph_id))
    # An aborted one has lost its name already; taking it out again does no harm.
    remove_name(work.txn, Table.GRAPH_NAMES, graph.submission.encode(), graph_id)
    work.remove_graph(graph)
    return removed


def _delete(work: Work, table: Table, keys: Sequence[bytes], removed: int) -> int:
    for key in keys:
        work.txn.delete(table, key)
    return removed
