"""Submissions arrive: begin, runs of tasks, seal, abort.

Rules: a run is checked as a whole before anything of it is written. A key the database knows keeps its id, spec and links: so every link
goes from a task to an older one, and there is no cycle. Ids are dense and grow with the index.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from taskdb.commands import Added, AddTasks, BeginGraph
from taskdb.engine.again import answer_again, ids_told
from taskdb.engine.newcomers import link, meet, place, protector, tell_one
from taskdb.engine.refs import find_graph, find_index, find_key, look_up, spooled_runs
from taskdb.engine.tables import new_task
from taskdb.engine.todo import Todo
from taskdb.engine.transitions import ERRED, recheck
from taskdb.engine.wants import add_name, add_want, check_client, client_of, drop_client, intern_client, remove_name
from taskdb.engine.work import Work
from taskdb.errors import InvalidRequest, LimitExceeded, StoreFull
from taskdb.limits import (
    CHUNK_EDGES_MAX,
    CHUNK_TASKS_MAX,
    COUNT_MAX,
    KEY_BYTES_MAX,
    LABEL_BYTES_MAX,
    SPEC_BYTES_MAX,
    STORE_RESERVE_BYTES,
    SUBMISSION_BYTES_MAX,
    TASK_BYTES_ESTIMATE,
)
from taskdb.model import GraphFlag, TaskFlag
from taskdb.store.codec import NO_GROUP, GraphRecord, GraphStatus, encode_rank
from taskdb.store.schema import GRAPH_PART, U64, U64_PAIR, Meta, Table

T = TypeVar("T")

_WANTED = int(TaskFlag.WANTED)
_EXTERNAL = int(TaskFlag.EXTERNAL)
_DATA = int(TaskFlag.DATA)
_HELD = int(TaskFlag.HELD)
_FLAGS = _WANTED | _EXTERNAL | _DATA | _HELD | int(TaskFlag.DATA_PRODUCER)
_GRAPH_FLAGS = int(GraphFlag.WHOLE | GraphFlag.RESENT | GraphFlag.SPOOLED)
#: What is kept of the flags; the others are about the arrival.
_STORED_FLAGS = _DATA | int(TaskFlag.DATA_PRODUCER)


class NoRoom(StoreFull):
    """Seen before anything was written: the command is refused, and the transaction goes on."""


def begin(work: Work, command: BeginGraph) -> None:
    """Raises LimitExceeded, InvalidRequest."""
    size = len(command.submission.encode())
    if not 0 < size <= SUBMISSION_BYTES_MAX:
        raise LimitExceeded(f"a submission's name has 1 to {SUBMISSION_BYTES_MAX} bytes, not {size}")
    if len(command.label.encode()) > LABEL_BYTES_MAX:
        raise LimitExceeded(f"a label has more than {LABEL_BYTES_MAX} bytes")
    if not 0 <= command.flags <= _GRAPH_FLAGS:
        raise InvalidRequest(f"flags of a submission are 0 to {_GRAPH_FLAGS}, not {command.flags}")
    if math.isnan(command.generation):
        raise InvalidRequest("a generation is a number")
    check_client(command.client)
    if find_graph(work.txn, command.submission):
        return
    graph = GraphRecord(
        id=work.next(Meta.NEXT_GRAPH),
        status=GraphStatus.OPEN,
        generation=command.generation,
        submitted=command.submitted,
        added=0,
        expected=0,
        wanted=0,
        counts=[0] * 6,
        groups=0,
        annotations=0,
        submission=command.submission,
        client=command.client,
        label=command.label,
        flags=command.flags,
    )
    work.add_graph(graph)
    add_name(work.txn, Table.GRAPH_NAMES, command.submission.encode(), graph.id)


def named_graph(work: Work, submission: str) -> GraphRecord:
    """Raises InvalidRequest if there is none (never begun, aborted, or done and forgotten)."""
    graph = work.graph(find_graph(work.txn, submission))
    if graph is None:
        raise InvalidRequest(f"submission {submission} is unknown")
    return graph


def seal(work: Work, submission: str) -> None:
    """Raises InvalidRequest."""
    graph = named_graph(work, submission)
    if graph.status != GraphStatus.OPEN:
        return
    growth = work.growth(graph.id)
    if growth is not None:
        graph.status = GraphStatus.GROWING
        graph.dirty = True
        if not growth.ungrown:
            work.push(Todo.GROWN, graph.id)
    elif next(spooled_runs(work.txn, graph.id), None) is not None:
        graph.status = GraphStatus.GROWING
        graph.dirty = True
    else:
        complete(work, graph)


def complete(work: Work, graph: GraphRecord) -> None:
    """No more of its tasks will come."""
    graph.status = GraphStatus.SEALED
    graph.dirty = True
    _drop_protection(work, graph)
    if graph.expected:
        # Dependents that were known already, and kept their links, or that never came.
        work.push(Todo.UNEXPECT, graph.id)
    if graph.ended:
        work.push(Todo.END, graph.id)


def abort(work: Work, submission: str) -> None:
    """Unknown: nothing to do."""
    graph = work.graph(find_graph(work.txn, submission))
    if graph is not None:
        abort_graph(work, graph)


def abort_graph(work: Work, graph: GraphRecord) -> None:
    """From now on its name means a new submission."""
    remove_name(work.txn, Table.GRAPH_NAMES, graph.submission.encode(), graph.id)
    graph.status = GraphStatus.ABORTED
    graph.dirty = True
    if work.growth(graph.id) is not None:
        work.push(Todo.GROWN, graph.id)
    _drop_protection(work, graph)
    work.push(Todo.ABORT, graph.id)


def _drop_protection(work: Work, graph: GraphRecord) -> None:
    client = client_of(work, protector(graph), internal=True)
    if client is not None:
        drop_client(work, client)


# ----------------------------------------------------------------------------------------------------------- add tasks


def _column(name: str, values: Sequence[T], count: int, default: T) -> Sequence[T]:
    if not values:
        return [default] * count
    if len(values) != count:
        raise InvalidRequest(f"{name} has {len(values)} entries for {count} tasks")
    return values


def _check(graph: GraphRecord, command: AddTasks) -> None:
    """All that can be seen without the store. Raises InvalidRequest, LimitExceeded."""
    keys = command.keys
    count = len(keys)
    if count > CHUNK_TASKS_MAX:
        raise LimitExceeded(f"{count} tasks in one AddTasks, at most {CHUNK_TASKS_MAX}")
    if command.first_index != graph.added:
        raise InvalidRequest(f"first_index is {command.first_index}, but {graph.added} tasks were added so far")
    if graph.added + count > COUNT_MAX:
        raise LimitExceeded(f"more than {COUNT_MAX} tasks in one submission")
    if len(command.deps) > CHUNK_EDGES_MAX:
        raise LimitExceeded(f"{len(command.deps)} dependencies in one AddTasks, at most {CHUNK_EDGES_MAX}")
    if count and (shortest := min(map(len, keys))) < 1:
        raise InvalidRequest(f"a key has {shortest} bytes")
    if count and (longest := max(map(len, keys))) > KEY_BYTES_MAX:
        raise LimitExceeded(f"a key has {longest} bytes, at most {KEY_BYTES_MAX}")
    if command.specs and max(map(len, command.specs)) > SPEC_BYTES_MAX:
        raise LimitExceeded(f"a spec has more than {SPEC_BYTES_MAX} bytes")
    for name in command.new_groups:
        if len(name.encode()) > KEY_BYTES_MAX:  # for some keys it is the key
            raise LimitExceeded(f"a group's name has more than {KEY_BYTES_MAX} bytes")
    _check_range("flags", command.flags, _FLAGS)
    _check_range("dependent_counts", command.dependent_counts, COUNT_MAX)
    _check_range("shared", command.shared, graph.annotations + len(command.new_shared))
    if command.groups:
        _check_range("groups", command.groups, graph.groups + len(command.new_groups) - 1)
    for name, ranks in (("orders", command.orders), ("user_priorities", command.user_priorities)):
        if any(rank != rank for rank in ranks):
            raise InvalidRequest(f"{name} holds what is not a number")
    for flags in command.flags:
        if flags & _DATA and not flags & _HELD:
            raise InvalidRequest("data that the scheduler does not hold cannot be computed")


def _check_range(name: str, values: Sequence[int], largest: int) -> None:
    if values and not 0 <= min(values) <= max(values) <= largest:
        raise InvalidRequest(f"{name} are 0 to {largest}, not {min(values)} to {max(values)}")


def _check_deps(graph: GraphRecord, command: AddTasks, dep_counts: Sequence[int]) -> None:
    """Each dependency is older than what depends on it. Raises InvalidRequest."""
    deps = command.deps
    if sum(dep_counts) != len(deps):
        raise InvalidRequest(f"{len(deps)} dependencies, but dep_counts add up to {sum(dep_counts)}")
    at = 0
    for index, dep_count in enumerate(dep_counts, command.first_index):
        if dep_count < 0:
            raise InvalidRequest("dep_counts are not negative")
        if dep_count == 1:
            if not 0 <= deps[at] < index:
                raise InvalidRequest(f"task {index} depends on {deps[at]}, which does not come before it")
        elif dep_count:
            own = deps[at : at + dep_count]
            if min(own) < 0 or max(own) >= index:
                raise InvalidRequest(f"task {index} depends on {max(own)}, which does not come before it")
        at += dep_count


def resolve_old(work: Work, graph: GraphRecord, first_index: int, deps: Sequence[int]) -> dict[int, int]:
    """Ids of the dependencies that came in earlier runs. Raises InvalidRequest if one was forgotten in between."""
    ids: dict[int, int] = {}
    ends: list[int] = []
    runs: list[tuple[int, int]] = []
    for index in sorted({dep for dep in deps if dep < first_index}):
        at = bisect_left(ends, index)
        if at == len(ends):
            run = find_index(work.txn, graph.id, index)
            if run is None:
                raise InvalidRequest(f"index {index} is unknown")
            ends.append(run[1])
            runs.append((run[0], run[2]))
        start, first_id = runs[at]
        if first_id:
            task_id = ids[index] = first_id + index - start
            if work.task(task_id) is None:
                raise InvalidRequest(f"task {index} was forgotten: its dependent was not declared in dependent_counts")
        else:
            ids[index] = 0
    return ids


def names_known(work: Work, command: AddTasks) -> bool:
    """Whether some task that the run brings, or builds on, may be in the database already."""
    return any(find_key(work.txn, key) for key in command.keys)


def _missing(work: Work, command: AddTasks) -> list[bytes]:
    """EXTERNAL keys that are not in the database."""
    found = []
    for key, flag in zip(command.keys, command.flags, strict=False):
        if flag & _EXTERNAL:
            known = find_key(work.txn, key)
            if not known or work.task(known) is None:
                found.append(key)
    return found


@dataclass(slots=True)
class Run:
    """A run that has been looked at: no column is left out."""

    keys: Sequence[bytes]
    specs: Sequence[bytes]
    flags: Sequence[int]
    dep_counts: Sequence[int]
    #: Indices in the submission.
    deps: Sequence[int]
    expected: Sequence[int]
    orders: Sequence[float]
    users: Sequence[float]
    groups: Sequence[int]
    shared: Sequence[int]

    @property
    def columns(self) -> tuple[Sequence[Any], ...]:
        """As `SpooledRun.columns`."""
        return (
            self.keys,
            self.specs,
            self.flags,
            self.dep_counts,
            self.deps,
            self.expected,
            self.orders,
            self.users,
            self.groups,
            self.shared,
        )


def checked(graph: GraphRecord, command: AddTasks, free_bytes: Callable[[], int] | None) -> Run:
    """Raises InvalidRequest, LimitExceeded, NoRoom."""
    _check(graph, command)
    first_index, count = command.first_index, len(command.keys)
    dep_counts = _column("dep_counts", command.dep_counts, count, 0)
    run = Run(
        command.keys,
        _column("specs", command.specs, count, b""),
        _column("flags", command.flags, count, 0),
        dep_counts,
        command.deps,
        _column("dependent_counts", command.dependent_counts, count, 0),
        _column("orders", command.orders, count, 0.0) if command.orders else [float(first_index + i) for i in range(count)],
        _column("user_priorities", command.user_priorities, count, 0.0),
        _column("groups", command.groups, count, 0) if command.groups else [0 if graph.groups or command.new_groups else NO_GROUP] * count,
        _column("shared", command.shared, count, 0),
    )
    _check_deps(graph, command, dep_counts)
    if free_bytes is not None:
        size = sum(map(len, command.keys)) * 2 + sum(map(len, command.specs)) + sum(map(len, command.new_shared))
        size += count * TASK_BYTES_ESTIMATE + len(command.deps) * 16
        check_room(free_bytes(), size, f"{count} tasks")
    return run


def add_tasks(work: Work, command: AddTasks, free_bytes: Callable[[], int] | None) -> None:
    """Raises InvalidRequest, LimitExceeded, StoreFull; then nothing of it was written."""
    graph = named_graph(work, command.submission)
    if graph.status != GraphStatus.OPEN:
        stored = [find_key(work.txn, key) for key in command.keys]
        work.result.added.append(Added(command.submission, command.first_index, stored, [], list(range(len(stored)))))
        return
    if command.first_index < graph.added:
        answer_again(work, graph, command)
        return
    run = checked(graph, command, free_bytes)
    count = len(command.keys)
    told_ids = command.told_ids and _column("told_ids", command.told_ids, count, 0)
    ids_before = resolve_old(work, graph, command.first_index, command.deps)
    missing = _missing(work, command)
    if missing:
        # Without its inputs nothing of it may run.
        work.result.added.append(Added(command.submission, command.first_index, [0] * count, missing, list(range(count))))
        abort_graph(work, graph)
        return
    add_names(work, graph, command.new_groups, command.new_shared)
    told = ids_told(work, command.keys, told_ids, ids_before) if told_ids else 0
    first_new = told or work.next(Meta.NEXT_TASK, count)
    ids, known_at = bring(work, graph, command.first_index, run, ids_before, first_new)
    graph.added += count
    graph.dirty = True
    add_runs(work, graph, command.first_index, ids)
    if not told and known_at:
        # Give back the numbers that known keys did not use. Nobody has seen them.
        work.txn.put(Table.META, bytes((Meta.NEXT_TASK,)), U64.pack(first_new + count - len(known_at)))
    work.result.added.append(Added(command.submission, command.first_index, ids, [], known_at))


def bring(
    work: Work, graph: GraphRecord, first_index: int, run: Run, ids_before: dict[int, int], next_id: int, wanted: bool = True
) -> tuple[list[int], list[int]]:
    """The tasks of a run come, each new one under the next id. Returns their ids, and the positions of those whose keys are known.

    `wanted`: whether the submission's client still wants what it says there.
    """
    txn = work.txn
    put = txn.put
    pack = U64.pack
    generation = graph.generation
    flags, specs, dep_counts, expected = run.flags, run.specs, run.dep_counts, run.expected
    orders, users, groups, shared = run.orders, run.users, run.groups, run.shared
    deps = run.deps
    wanted_flag = _WANTED if wanted else 0
    ids: list[int] = []
    known_at: list[int] = []
    at = 0
    for i, key in enumerate(run.keys):
        flag = flags[i]
        dep_count = dep_counts[i]
        own_deps: Sequence[int] = ()
        if dep_count:
            own_deps = [ids[dep - first_index] if dep >= first_index else ids_before[dep] for dep in deps[at : at + dep_count]]
            if dep_count > 1:
                own_deps = list(dict.fromkeys(own_deps))
            at += dep_count
        place_of = look_up(txn, key)
        task = work.task(place_of.id) if place_of.id else None
        if task is not None:
            ids.append(task.id)
            known_at.append(i)
            meet(work, graph, task, flag, own_deps, expected[i])
            if flag & wanted_flag:
                add_want(work, intern_client(work, graph.client), task, graph.id)
            recheck(work, task)
            if task.state == ERRED and flag & wanted_flag:
                tell_one(work, task, graph.client)
            continue
        ids.append(next_id)
        rank = encode_rank(users[i], generation, orders[i])
        task = new_task(work, graph, next_id, place_of, flag & _STORED_FLAGS, expected[i], groups[i], shared[i], rank)
        next_id += 1
        if specs[i]:
            put(Table.SPECS, pack(task.id), specs[i])
        if own_deps:
            link(work, graph, task, own_deps)
        if flag & wanted_flag:
            add_want(work, intern_client(work, graph.client), task, graph.id)
        place(work, graph, task, bool(flag & _HELD))
    work.flush_dependents()
    return ids, known_at


def check_room(free_bytes: int, size: int, what: str) -> None:
    """Raises NoRoom."""
    if free_bytes - size < STORE_RESERVE_BYTES:
        raise NoRoom(
            f"{free_bytes} bytes are left in the store, and {STORE_RESERVE_BYTES} of them are kept for graphs that are running: "
            f"no room for {what} of about {size} bytes"
        )


def add_names(work: Work, graph: GraphRecord, new_groups: Sequence[str], new_shared: Sequence[bytes]) -> None:
    for name in new_groups:
        work.add_group(graph.id, graph.groups, name)
        graph.groups += 1
    for blob in new_shared:
        graph.annotations += 1
        work.txn.put(Table.BLOBS, GRAPH_PART.pack(graph.id, graph.annotations), blob)


def add_runs(work: Work, graph: GraphRecord, first_index: int, ids: Sequence[int]) -> None:
    """One record for each stretch of indices whose ids follow each other."""
    start = 0
    for end in range(1, len(ids) + 1):
        if end < len(ids) and (ids[end] == ids[end - 1] + 1 if ids[start] else not ids[end]) and bool(ids[end]) == bool(ids[start]):
            continue
        work.txn.put(
            Table.RUNS,
            U64_PAIR.pack(graph.id, first_index + end - 1),
            U64_PAIR.pack(first_index + start, ids[start]),
        )
        start = end
