"""Runs of tasks that are stored as they come, and carried out when their tasks are about to be needed.

To the rest of the engine a submission with spooled runs is one whose sender is slow. What is known of such a run is its indices, its ids,
and which keys it will bring; whoever names one of these has the run carried out first, and with it those before it, so nobody can tell the
difference. Ids told before a crash undid that come true again: they were kept when the run came.

A run is spooled only if all of its keys are new. It stays so: nothing else brings a key of it. Rules make tasks where nobody asks, so
there are no spooled runs beside them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from itertools import takewhile

from taskdb.commands import Added, AddRule, AddTasks, Adopt, Cancel, Cancelled, Command, Retry, Unwant, Want
from taskdb.engine.hunger import is_hungry
from taskdb.engine.ingest import Run, abort_graph, add_names, add_runs, bring, check_room, checked, complete, resolve_old
from taskdb.engine.refs import find_graph, spooled_runs
from taskdb.engine.spooled_keys import Place, SpooledKeys
from taskdb.engine.work import Work
from taskdb.errors import InvalidRequest
from taskdb.limits import CHUNK_TASKS, SPOOL_TASKS_MAX, TASK_BYTES_ESTIMATE
from taskdb.model import GraphFlag, TaskFlag
from taskdb.store.base import ReadTxn
from taskdb.store.codec import UNWANTED, GraphRecord, GraphStatus, decode_graph
from taskdb.store.schema import U64, U64_PAIR, Meta, Table, digest
from taskdb.store.spooled import SpooledRun, decode_spooled, pack_columns

#: Behind every run of a graph.
_ALL = 2**64 - 1
_PLAIN = int(TaskFlag.WANTED | TaskFlag.DATA_PRODUCER)
_WANTED = int(TaskFlag.WANTED)
_SPOOLED = int(GraphFlag.SPOOLED)
_NOT_SPOOLED = int(GraphFlag.WHOLE | GraphFlag.RESENT)


# ------------------------------------------------------------------------------------------------------------ arrival


def spool_tasks(work: Work, command: AddTasks, free_bytes: Callable[[], int] | None) -> bool:
    """Take in a run without carrying it out. False: that cannot be, and nothing stands in the way of its being added now.

    Raises InvalidRequest, LimitExceeded, NoRoom; then nothing of it was written.
    """
    graph = work.graph(find_graph(work.txn, command.submission))
    if graph is None or graph.status != GraphStatus.OPEN or _comes_again(graph, command):
        return False
    digests = _spoolable(work, graph, command)
    if digests is None:
        carry_graph(work, graph.id)
        return False
    run = checked(graph, command, free_bytes)
    while work.spooled.tasks + len(digests) > SPOOL_TASKS_MAX and (oldest := _first_graph(work)):
        carry_first(work, oldest)
        work.trim()
    add_names(work, graph, command.new_groups, command.new_shared)
    count = len(digests)
    first_id = work.next(Meta.NEXT_TASK, count)
    ids = list(range(first_id, first_id + count))
    stored = SpooledRun(first_id, dict(Counter(run.groups)), pack_columns(run.columns))
    work.spooled.add(work.txn, (graph.id, command.first_index), stored, digests)
    add_runs(work, graph, command.first_index, ids)
    graph.added += count
    graph.dirty = True
    work.result.added.append(Added(command.submission, command.first_index, ids, [], []))
    return True


def _spoolable(work: Work, graph: GraphRecord, command: AddTasks) -> list[bytes] | None:
    """Digests of the keys of a run that can be spooled."""
    if not graph.flags & _SPOOLED or graph.flags & _NOT_SPOOLED or command.told_ids or not command.keys:
        return None
    if any(flag & ~_PLAIN for flag in command.flags) or work.txn.count(Table.RULES):
        return None
    get, place_of = work.txn.get, work.spooled.place_of
    digests = [digest(key) for key in command.keys]
    if len(set(digests)) < len(digests) or any(place_of(each) is not None or get(Table.KEYS, each) is not None for each in digests):
        return None
    return digests


# --------------------------------------------------------------------------------------------------------- carrying out


def carry_out(work: Work, place: Place) -> None:
    """The tasks of the first run of a graph come."""
    graph_id, first_index = place
    graph = work.known_graph(graph_id)
    stored = decode_spooled(work.txn.get(Table.SPOOL, U64_PAIR.pack(*place)) or b"")
    run = Run(*stored.columns())
    try:
        ids_before = resolve_old(work, graph, first_index, run.deps)
    except InvalidRequest:
        # Its sender has declared fewer dependents than there are, and one of them is missed too late to tell it.
        give_up(work, graph)
        return
    work.spooled.remove(work.txn, place, run.keys)
    bring(work, graph, first_index, run, ids_before, stored.first_id, not graph.flags & UNWANTED)
    graph.dirty = True
    if graph.status == GraphStatus.GROWING and not has_runs(work.txn, graph_id):
        complete(work, graph)


def carry_if_there(work: Work, place: Place) -> None:
    """The same, unless it has come, or its graph is taken back."""
    there = work.txn.get(Table.SPOOL, U64_PAIR.pack(*place)) is not None
    if there and work.known_graph(place[0]).status != GraphStatus.ABORTED:
        carry_out(work, place)


def carry_first(work: Work, graph_id: int) -> None:
    for key, _ in spooled_runs(work.txn, graph_id):
        carry_out(work, U64_PAIR.unpack(key))
        break


def carry_to(work: Work, place: Place) -> None:
    """Carry out a run, and those before it."""
    for before in _up_to(work.txn, place):
        carry_if_there(work, before)


def carry_graph(work: Work, graph_id: int) -> None:
    carry_to(work, (graph_id, _ALL))
    work.trim()


def reach(work: Work, command: Command) -> None:
    """Before a command is carried out: what it names is there."""
    if not work.spooled.tasks:
        return
    for place in needed_by(work.txn, work.spooled, [command], lambda name: work.graph(find_graph(work.txn, name))):
        carry_if_there(work, place)
        work.trim()


def needed_by(
    txn: ReadTxn, spooled: SpooledKeys, commands: Iterable[Command], graph_of: Callable[[str], GraphRecord | None]
) -> list[Place]:
    """Runs that these commands name tasks of, and those before them, in the order in which they have to be carried out. All, if what is to
    come depends on links that are not there yet. `graph_of`: the graph of a submission."""
    last: dict[int, int] = {}
    for command in commands:
        if isinstance(command, AddRule | Cancel):
            last = {int.from_bytes(key[:8]): _ALL for key, _ in txn.scan(Table.SPOOL)}
            break
        if isinstance(command, AddTasks) and (graph := graph_of(command.submission)) is not None and _comes_again(graph, command):
            continue
        if isinstance(command, AddTasks | Want | Unwant | Retry | Adopt):
            for key in command.keys:
                place = spooled.place_of(digest(key))
                if place is not None:
                    last[place[0]] = max(last.get(place[0], 0), place[1])
    return [place for up_to in sorted(last.items()) for place in _up_to(txn, up_to)]


def _comes_again(graph: GraphRecord, command: AddTasks) -> bool:
    """An open submission has this run: it is answered as before, and what is spooled stays so."""
    return graph.status == GraphStatus.OPEN and command.first_index < graph.added


def reach_id(work: Work, task_id: int) -> bool:
    """The scheduler names a task that is not there. Perhaps it had come when the daemon died: then it is there on return, and this True."""
    place = work.spooled.place_of_id(task_id)
    if place is not None:
        carry_to(work, place)
    return place is not None


def end_wants_of(work: Work, client: str) -> None:
    """A client is dropped: what it wants of spooled runs, too."""
    if not work.spooled.tasks:
        return
    for key, data in work.txn.scan(Table.GRAPHS):
        if decode_graph(0, data).client == client and has_runs(work.txn, int.from_bytes(key)):
            graph = work.known_graph(int.from_bytes(key))
            graph.flags |= UNWANTED
            graph.dirty = True


def _first_graph(work: Work) -> int:
    """The first graph whose runs can be carried out, or 0."""
    start = 0
    while (pair := work.txn.first(Table.SPOOL, U64_PAIR.pack(start, 0))) is not None:
        graph_id = int.from_bytes(pair[0][:8])
        if work.known_graph(graph_id).status != GraphStatus.ABORTED:
            return graph_id
        start = graph_id + 1
    return 0


def _up_to(txn: ReadTxn, place: Place) -> list[Place]:
    """A run, and those before it, of its graph."""
    graph_id, first_index = place
    places: Iterator[Place] = (U64_PAIR.unpack(key) for key, _ in spooled_runs(txn, graph_id))
    return list(takewhile(lambda other: other[1] <= first_index, places))


def has_runs(txn: ReadTxn, graph_id: int) -> bool:
    return next(spooled_runs(txn, graph_id), None) is not None


# -------------------------------------------------------------------------------------------------------------- growing


def hungry_graphs(txn: ReadTxn) -> list[int]:
    """Graphs with spooled runs that have few tasks queued."""
    found = []
    start = 0
    while (pair := txn.first(Table.SPOOL, U64_PAIR.pack(start, 0))) is not None:
        graph_id = int.from_bytes(pair[0][:8])
        if _wants_more(decode_graph(graph_id, txn.get(Table.GRAPHS, U64.pack(graph_id)) or b"")):
            found.append(graph_id)
        start = graph_id + 1
    return found


def _wants_more(graph: GraphRecord) -> bool:
    return graph.status != GraphStatus.ABORTED and is_hungry(graph)


def carry_some(work: Work, free_bytes: Callable[[], int] | None) -> bool:
    """One run of the first graph that has few tasks queued. True if there is more to carry out now. Raises NoRoom."""
    graphs = [graph for graph in map(work.known_graph, hungry_graphs(work.txn)) if _wants_more(graph)]
    if not graphs:
        return False
    graph = min(graphs, key=lambda graph: graph.generation)
    if free_bytes is not None:
        check_room(free_bytes(), CHUNK_TASKS * TASK_BYTES_ESTIMATE, "tasks of a run that came before")
    carry_first(work, graph.id)
    return True


# ----------------------------------------------------------------------------------------------------------- giving up


def give_up(work: Work, graph: GraphRecord) -> None:
    """It cannot be carried out: what has come is taken back, and its client is told that all of it is cancelled."""
    for _, data in spooled_runs(work.txn, graph.id):
        keys, _, flags, *_ = decode_spooled(data).columns()
        for key, flag in zip(keys, flags, strict=True):
            if flag & _WANTED and not graph.flags & UNWANTED:
                work.result.cancelled.append(Cancelled("", key))
    abort_graph(work, graph)


def drop_runs(work: Work, graph: GraphRecord, tasks_max: int) -> int:
    """Runs of a graph that is taken back will not be carried out. Returns the tasks dropped: 0 if there are no more."""
    dropped = 0
    for key, data in spooled_runs(work.txn, graph.id):
        run = decode_spooled(data)
        _, first_index = U64_PAIR.unpack(key)
        work.spooled.remove(work.txn, (graph.id, first_index), run.columns()[0])
        for group, count in run.groups.items():
            work.count_forgotten(graph.id, group, count)
        dropped += run.tasks
        if dropped >= tasks_max:
            break
    return dropped
