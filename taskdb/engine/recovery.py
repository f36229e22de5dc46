"""A new scheduler goes on where an earlier one ended: it claims what workers still hold, and keeps what else a scheduler needs to know."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from taskdb.commands import Adopt, Adopted, Keep, TakenWhole
from taskdb.engine.background import drain
from taskdb.engine.ingest import check_room
from taskdb.engine.leasing import lease_of
from taskdb.engine.refs import dropped_by_group, find_graph, find_index, unmade_by_group
from taskdb.engine.spool import has_runs
from taskdb.engine.transitions import ERRED, PROCESSING, QUEUED, finish, hold, needed, put_back
from taskdb.engine.work import Work
from taskdb.errors import InvalidRequest, LimitExceeded, StoreCorrupt
from taskdb.limits import GROUPS_RESTORED_MAX, KEY_BYTES_MAX, SPEC_BYTES_MAX
from taskdb.model import GraphFlag, Level, TaskState
from taskdb.store.base import ReadTxn
from taskdb.store.codec import (
    UNGROWN,
    UNWANTED,
    GraphStatus,
    TaskRecord,
    decode_client,
    decode_graph,
    decode_group,
    decode_kept,
    encode_kept,
)
from taskdb.store.schema import GRAPH_PART, U64, Table, digest

_NBYTES_MAX = 2**63 - 1
#: More items of background work than there can be.
ALL_ITEMS = 2**63


def adopt(work: Work, command: Adopt) -> None:
    """Results first, so that what runs finds its inputs. Raises InvalidRequest; then nothing of it was applied."""
    count = len(command.keys)
    if len(command.levels) != count or (command.nbytes and len(command.nbytes) != count):
        raise InvalidRequest(f"{len(command.levels)} levels and {len(command.nbytes)} sizes for {count} keys")
    if any(level not in (Level.MEMORY, Level.HELD) for level in command.levels):
        raise InvalidRequest("what a worker has is MEMORY or HELD")
    limit = _first_id_after(work, command.epoch)
    # IMPORTANT: all of it is taken before any lease is made: a result that proves another unneeded must not come too late.
    taken: list[tuple[int, Level, TaskRecord | None]] = []
    for level in (Level.MEMORY, Level.HELD):
        for i in (i for i, other in enumerate(command.levels) if other is level):
            task = work.find(command.keys[i])
            if task is None:
                taken.append((i, Level.OUT, None))
            elif _adopt(work, task, level, command.nbytes[i] if command.nbytes else -1, limit):
                taken.append((i, level, task))
            else:
                taken.append((i, level, None))
    for i, level, task in taken:
        work.result.adopted.append(Adopted(command.keys[i], level, None if task is None else lease_of(work, task)))


def _first_id_after(work: Work, epoch: int) -> int:
    """The first task id that was free when the epoch after this one began: what has a lower one was there while it lasted. 0 if that is
    not known, or it has not ended."""
    if epoch >= work.epoch:
        return 0
    data = work.txn.get(Table.EPOCHS, U64.pack(epoch + 1))
    return 0 if data is None else int(U64.unpack(data)[0])


def _adopt(work: Work, task: TaskRecord, level: Level, nbytes: int, limit: int) -> bool:
    if task.id >= limit and not work.known_graph(task.graph).flags & GraphFlag.RESENT:
        return False  # another task, of the same name
    if task.state == ERRED or task.flags & UNGROWN or not needed(task):
        return False
    graph = work.known_graph(task.graph)
    if graph.flags & GraphFlag.WHOLE and any(graph.counts[:PROCESSING]):
        return False  # it begins anew, all of it
    if level is Level.MEMORY:
        if task.state == PROCESSING and not work.is_orphan(task):
            return False  # the scheduler is having it computed
        finish(work, task, min(nbytes, _NBYTES_MAX))
    elif task.state in (QUEUED, PROCESSING):
        hold(work, task)
    else:
        # Another worker has the result; or what it is computed from is not there any more, and will be when it is computed again.
        return False
    return True


def take_whole(work: Work, submission: str) -> None:
    graph = work.graph(find_graph(work.txn, submission))
    leases = []
    if graph is not None:
        for state in (TaskState.PROCESSING, TaskState.MEMORY):
            for task in _tasks(work, graph.id):
                if task.state == state:
                    put_back(work, task)
        # What of it is needed shows once all the rest is done.
        drain(work, ALL_ITEMS)
        for task in _tasks(work, graph.id):
            if task.state <= QUEUED:
                hold(work, task)
        leases = [lease_of(work, task) for task in _tasks(work, graph.id) if task.state == PROCESSING]
    work.result.whole.append(TakenWhole(submission, leases))


def _tasks(work: Work, graph_id: int) -> Iterator[TaskRecord]:
    """Its own tasks that exist, dependencies first."""
    index = 0
    # A key may come twice.
    met: set[int] = set()
    while (run := find_index(work.txn, graph_id, index)) is not None:
        first, last, first_id = run
        for task_id in range(first_id, first_id + last + 1 - first) if first_id else ():
            task = work.task(task_id) if task_id not in met else None
            if task is not None and task.graph == graph_id:
                met.add(task_id)
                yield task
        index = last + 1


def keep(work: Work, command: Keep, free_bytes: Callable[[], int] | None) -> None:
    """Raises InvalidRequest, LimitExceeded, NoRoom; then nothing of it was applied."""
    if len(command.names) != len(command.values):
        raise InvalidRequest(f"{len(command.values)} values for {len(command.names)} names")
    for name, value in zip(command.names, command.values, strict=True):
        if not 0 < len(name) <= KEY_BYTES_MAX or len(value) > SPEC_BYTES_MAX:
            raise LimitExceeded(f"a kept item has a name of 1 to {KEY_BYTES_MAX} bytes and a value of at most {SPEC_BYTES_MAX}")
    size = sum(map(len, command.values))
    if size and free_bytes is not None:
        check_room(free_bytes(), size, "kept items")
    for name, value in zip(command.names, command.values, strict=True):
        key = digest(name)
        old = work.txn.get(Table.KEPT, key)
        if old is not None and decode_kept(old)[0] != name:
            raise StoreCorrupt(f"kept items {decode_kept(old)[0]!r} and {name!r} have one digest")
        if value:
            work.txn.put(Table.KEPT, key, encode_kept(name, value))
        elif old is not None:
            work.txn.delete(Table.KEPT, key)


def kept(txn: ReadTxn, section: bytes = b"") -> Iterator[tuple[bytes, bytes]]:
    """Names, with the section, and values; in no order."""
    for _, data in txn.scan(Table.KEPT):
        name, value = decode_kept(data)
        if name.startswith(section):
            yield name, value


@dataclass(frozen=True, slots=True)
class StoredGraph:
    """A submission that is complete, or was given up, as a new scheduler needs to know it."""

    submission: str
    client: str
    #: GraphFlag bits.
    flags: int
    generation: float
    #: Tasks that are not forgotten, and those of them that are to be done.
    tasks: int
    unfinished: int
    #: Tasks that are not forgotten, by group; at most GROUPS_RESTORED_MAX groups.
    groups: dict[str, int]
    #: It was given up. Its name may come to mean a new submission.
    aborted: bool


def graphs(txn: ReadTxn) -> Iterator[StoredGraph]:
    for key, data in txn.scan(Table.GRAPHS):
        number = int.from_bytes(key)
        graph = decode_graph(number, data)
        if graph.status == GraphStatus.OPEN:
            continue
        groups: dict[str, int] = {}
        coming, dropped = unmade_by_group(txn, number), dropped_by_group(txn, number)
        for key, data in txn.scan(Table.GROUPS, GRAPH_PART.pack(number, 0), GRAPH_PART.pack(number + 1, 0)):
            live, name = decode_group(data)
            index = GRAPH_PART.unpack(key)[1]
            live += coming.get(index, 0) + dropped.get(index, 0)
            if live > 0:
                groups[name] = live
            if len(groups) == GROUPS_RESTORED_MAX:
                break
        tasks = graph.alive + sum(coming.values()) + sum(dropped.values())
        unfinished = sum(graph.counts[:PROCESSING]) + sum(coming.values())
        aborted = find_graph(txn, graph.submission) != number
        flags = graph.flags & ~UNWANTED
        yield StoredGraph(graph.submission, graph.client, flags, graph.generation, tasks, unfinished, groups, aborted)


def clients(txn: ReadTxn) -> Iterator[str]:
    """Names of those that want something, each once."""
    named = set()
    for _, data in txn.scan(Table.CLIENTS):
        client = decode_client(0, data)
        if not client.internal and not client.dropped:
            named.add(client.name)
    for key, data in txn.scan(Table.GRAPHS) if txn.count(Table.SPOOL) else ():
        graph = decode_graph(0, data)
        if not graph.flags & UNWANTED and graph.status == GraphStatus.GROWING and has_runs(txn, int.from_bytes(key)):
            named.add(graph.client)
    yield from sorted(named)
