"""What a change of state does to its neighbours. Nothing else assigns a state or changes a counter that follows from states.

The counters waiting_on and blocked_on are kept for ACTIVE tasks only (0 otherwise) and counted anew when a task becomes ACTIVE: so a
result that nobody needs can be let go without touching its dependents.
"""

from __future__ import annotations

from taskdb.commands import Erred
from taskdb.engine.ruled import restore
from taskdb.engine.tables import remove_records
from taskdb.engine.todo import Todo
from taskdb.engine.work import Work
from taskdb.model import TaskFlag, TaskState
from taskdb.store.codec import PARKED, REVIVED, RULED, UNGROWN, ErrorRecord, GraphRecord, TaskRecord, decode_error, encode_error
from taskdb.store.schema import U64, U64_PAIR, Table

WAITING = int(TaskState.WAITING)
QUEUED = int(TaskState.QUEUED)
PROCESSING = int(TaskState.PROCESSING)
MEMORY = int(TaskState.MEMORY)
RELEASED = int(TaskState.RELEASED)
ERRED = int(TaskState.ERRED)

#: By state: not in memory; neither in memory nor leased.
_WAITED_FOR = (0, 1, 1, 1, 0, 1, 1)
_BLOCKS = (0, 1, 1, 0, 0, 1, 1)

_DATA = int(TaskFlag.DATA)

#: In the place of the client in Todo.CANCEL: every client's want ends; the same, but what has a result is spared.
CANCEL_FORCE = 0
CANCEL_LOST = 2**64 - 1


def needed(task: TaskRecord) -> bool:
    """Somebody needs its result."""
    return bool(task.need or task.expected or task.wants)


def linked(task: TaskRecord) -> bool:
    """Somebody may still need it: else it is forgotten."""
    return bool(task.links or task.expected or task.wants)


def move(work: Work, task: TaskRecord, state: int) -> None:
    """Put a task into a state (QUEUED and WAITING stand for each other: which one follows from blocked_on).

    Touches its dependencies if it becomes ACTIVE or ceases to be, and its dependents if any is ACTIVE.
    """
    old = task.state
    if old <= PROCESSING:
        if state > PROCESSING:
            _leave_active(work, task)
    elif state <= PROCESSING:
        _enter_active(work, task)
    if state <= QUEUED:
        state = WAITING if task.blocked_on else QUEUED
    task.dirty = True
    if state == old:
        return
    graph = work.known_graph(task.graph)
    graph.counts[old - 1] -= 1
    graph.counts[state - 1] += 1
    graph.dirty = True
    task.state = state
    if old == QUEUED:
        task.flags &= ~PARKED
    if PROCESSING <= state <= MEMORY:
        task.reclaim = work.recovering
        if state == PROCESSING:
            task.flags &= ~REVIVED
    if state == QUEUED and work.newly_queued is not None:
        work.newly_queued.append((task.rank, task.id))
    if task.need:
        waited = _WAITED_FOR[state] - _WAITED_FOR[old]
        blocks = _BLOCKS[state] - _BLOCKS[old]
        if waited or blocks:
            left = task.need
            done: set[int] = set()
            for _, ids in work.segments(task.id):
                for dependent_id in ids:
                    dependent = work.task(dependent_id)
                    # Forgotten ones may still be named, and some be named twice.
                    if dependent is not None and dependent.state <= PROCESSING and dependent_id not in done:
                        done.add(dependent_id)
                        left -= 1
                        _adjust(work, dependent, waited, blocks)
                if not left:
                    break
    if task.flags & RULED and (state == MEMORY or (state == RELEASED and not needed(task))):
        cut(work, task)


def _adjust(work: Work, task: TaskRecord, waited: int, blocks: int) -> None:
    """A dependency of an ACTIVE task changed."""
    task.dirty = True
    # If another dependency is an orphan, the next lease parks it again.
    task.flags &= ~PARKED
    task.waiting_on += waited
    if not blocks:
        return
    task.blocked_on += blocks
    old = task.state
    if old == PROCESSING:
        return
    state = WAITING if task.blocked_on else QUEUED
    if state != old:
        # WAITING and QUEUED are the same to every neighbour.
        task.state = state
        graph = work.known_graph(task.graph)
        graph.counts[old - 1] -= 1
        graph.counts[state - 1] += 1
        graph.dirty = True
        if state == QUEUED and work.newly_queued is not None:
            work.newly_queued.append((task.rank, task.id))


def _enter_active(work: Work, task: TaskRecord) -> None:
    restore(work, task)
    waiting_on = blocked_on = 1 if task.flags & UNGROWN else 0
    for dep_id in work.deps(task):
        dep = work.known_task(dep_id)
        waiting_on += _WAITED_FOR[dep.state]
        blocked_on += _BLOCKS[dep.state]
        dep.need += 1
        dep.dirty = True
        if dep.state == RELEASED:
            work.push(Todo.UP, dep_id)
    task.waiting_on = waiting_on
    task.blocked_on = blocked_on


def _leave_active(work: Work, task: TaskRecord) -> None:
    for dep_id in work.deps(task):
        dep = work.known_task(dep_id)
        dep.need -= 1
        dep.dirty = True
        if not dep.need and not dep.expected and not dep.wants:
            work.push(Todo.DOWN, dep_id)
    task.waiting_on = task.blocked_on = 0


# ------------------------------------------------------------------------------------------------------ what may happen


def activate(work: Work, task: TaskRecord) -> None:
    """A RELEASED task is needed: it waits or is queued, or fails if a dependency has failed, or is lost if it is data."""
    if task.flags & _DATA:
        lose_data(work, task)
        return
    restore(work, task)
    cause = erred_dependency(work, task)
    if cause:
        fail_blamed(work, task, cause)
    else:
        move(work, task, QUEUED)


def hold(work: Work, task: TaskRecord) -> None:
    """The scheduler holds it, unfinished: it is leased, whatever it was."""
    if task.state == PROCESSING:
        claim(work, task)
        return
    was_erred = task.state == ERRED
    if was_erred:
        clear_error(work, task)
    move(work, task, PROCESSING)
    if was_erred:
        work.push(Todo.REVIVE, task.id)
    recheck(work, task)


def finish(work: Work, task: TaskRecord, nbytes: int) -> None:
    """Workers of the scheduler hold its result."""
    if task.state == MEMORY:
        claim(work, task)
        return
    was_erred = task.state == ERRED
    if was_erred:
        clear_error(work, task)
    task.nbytes = nbytes
    move(work, task, MEMORY)
    if was_erred:
        work.push(Todo.REVIVE, task.id)
    recheck(work, task)


def claim(work: Work, task: TaskRecord) -> None:
    """The scheduler has what an earlier one held, in the same state: what was parked for it can be leased."""
    if not work.is_orphan(task):
        return
    task.reclaim = task.dirty = True
    if task.need:
        for _, ids in work.segments(task.id):
            for dependent_id in ids:
                dependent = work.task(dependent_id)
                if dependent is not None and dependent.flags & PARKED:
                    dependent.flags &= ~PARKED
                    dependent.dirty = True


def put_back(work: Work, task: TaskRecord) -> None:
    """The scheduler holds neither it nor its result: RELEASED, and active again if it is needed."""
    if task.state == ERRED:
        clear_error(work, task)
        work.push(Todo.REVIVE, task.id)
        task.flags |= REVIVED
    task.nbytes = -1
    move(work, task, RELEASED)
    recheck(work, task)


def recheck(work: Work, task: TaskRecord) -> None:
    """Put off what its need, or the lack of it, asks for."""
    if not needed(task):
        if task.state not in (RELEASED, ERRED) or not task.links:
            work.push(Todo.DOWN, task.id)
    elif task.state == RELEASED:
        work.push(Todo.UP, task.id)


def release_unneeded(work: Work, task: TaskRecord) -> None:
    """Nobody needs its result: let go of it, or do not begin it. Named to the scheduler if it holds it."""
    if task.state in (RELEASED, ERRED):
        return
    if task.state in (PROCESSING, MEMORY) or task.flags & REVIVED:
        work.result.release.append(task.id)
        task.flags &= ~REVIVED
    task.nbytes = -1
    move(work, task, RELEASED)


# ----------------------------------------------------------------------------------------------------------- failing


def fail(work: Work, task: TaskRecord, record: ErrorRecord) -> None:
    """The scheduler says that it failed. What it says first stands; but a payload completes a report without one."""
    if task.state == ERRED:
        old = error_of(work, task.id)
        if old.cause or old.payload or old.text or record.cause:
            return
        work.txn.put(Table.ERRORS, U64.pack(task.id), encode_error(record))
        return
    work.txn.put(Table.ERRORS, U64.pack(task.id), encode_error(record))
    if work.moves is not None and not record.cause:
        work.moves.failures.append((task.id, record.text))
    if record.cause:
        # What takes the error from the cause goes down to it.
        restore(work, task)
    task.nbytes = -1
    move(work, task, ERRED)
    if task.need:
        work.push(Todo.FAIL, task.id)
    if not linked(task):
        work.push(Todo.DOWN, task.id)


def fail_blamed(work: Work, task: TaskRecord, dependency: int) -> None:
    """It fails because a dependency did, and the scheduler does not hold it: tell those who want it."""
    cause = root_cause(work, dependency)
    fail(work, task, ErrorRecord(cause))
    tell_erred(work, task)


def tell_erred(work: Work, task: TaskRecord) -> None:
    """Tell every client that wants an ERRED task."""
    if not task.wants:
        return
    key = work.key(task.id)
    cause, payload = cause_of(work, task.id)
    for client in wanted_by(work, task):
        work.result.erred.append(Erred(client, key, cause, payload))


def error_of(work: Work, task_id: int) -> ErrorRecord:
    data = work.txn.get(Table.ERRORS, U64.pack(task_id))
    return ErrorRecord() if data is None else decode_error(data)


def root_cause(work: Work, task_id: int) -> int:
    """The task that failed itself, of one that is ERRED."""
    return error_of(work, task_id).cause or task_id


def cause_of(work: Work, task_id: int) -> tuple[bytes, bytes]:
    """(key of the task that failed, payload) of an ERRED task."""
    cause = root_cause(work, task_id)
    return work.key(cause), error_of(work, cause).payload


def erred_dependency(work: Work, task: TaskRecord) -> int:
    """The first of its dependencies that is ERRED, or 0."""
    for dep_id in work.deps(task):
        if work.known_task(dep_id).state == ERRED:
            return dep_id
    return 0


def clear_error(work: Work, task: TaskRecord) -> None:
    work.txn.delete(Table.ERRORS, U64.pack(task.id))


def revive(work: Work, task: TaskRecord) -> None:
    """An ERRED task whose error is gone, or the dependent of one: it is active again if it is needed."""
    if task.state == ERRED and not task.flags & _DATA:
        put_back(work, task)


def lose_data(work: Work, task: TaskRecord) -> None:
    """Data cannot be computed again: it is ERRED for whoever comes, and all that depends on it and has no result is cancelled."""
    # The cancel first: it runs before the failing, so nobody hears both.
    work.push(Todo.CANCEL, CANCEL_LOST, task.id)
    fail(work, task, ErrorRecord(0, "scattered data was lost"))


# --------------------------------------------------------------------------------------------------------- forgetting


def forget(work: Work, task: TaskRecord) -> None:
    """Remove a task that nothing links. Its dependencies may be next. One of a rule is only dropped, if others of the rule depend on it:
    they may have to run again, and it is made again for them (`ruled.restore`)."""
    # Whether the scheduler holds one that is or was ERRED is not known: it ignores what it does not hold.
    if task.state in (PROCESSING, MEMORY, ERRED) or task.flags & REVIVED:
        work.result.release.append(task.id)
    _unlink(work, task)
    remove_records(work, task)
    graph = work.known_graph(task.graph)
    graph.dirty = True
    graph.counts[task.state - 1] -= 1
    work.count_group(task.graph, task.group, -1)
    if not _drop(work, graph, task):
        work.count_forgotten(task.graph, task.group, 1)
    if graph.ended:
        work.push(Todo.END, graph.id)
    if task.flags & UNGROWN and (growth := work.growth(task.graph)) is not None:
        growth.ungrown -= 1
        growth.dirty = True
        if not growth.ungrown:
            work.push(Todo.GROWN, task.graph)


def cut(work: Work, task: TaskRecord) -> None:
    """A task of a rule that is finished, or that nobody needs, keeps no edges: they follow from the rule, and are made again if it runs
    again. So what only such tasks depend on can be dropped."""
    if work.deps(task):
        _unlink(work, task)
        task.deps = ()
        work.txn.delete(Table.EDGES, U64.pack(task.id))


def _unlink(work: Work, task: TaskRecord) -> None:
    active = task.state <= PROCESSING
    for dep_id in work.deps(task):
        dep = work.known_task(dep_id)
        dep.dirty = True
        dep.links -= 1
        if active:
            dep.need -= 1
        if not dep.links:
            work.drop_dependents(dep_id)
        if not needed(dep) and (not dep.links or dep.state != RELEASED):
            work.push(Todo.DOWN, dep_id)


def _drop(work: Work, graph: GraphRecord, task: TaskRecord) -> bool:
    """Count a task of a rule as dropped, unless nothing of the rule can need it again."""
    if not task.flags & RULED or task.flags & UNGROWN:
        return False
    stored = work.rule(graph)
    layer = task.group - stored.first_group
    if not stored.rule.dependents[layer]:
        return False
    work.count_dropped(graph, layer, 1)
    return True


def wanted_by(work: Work, task: TaskRecord) -> list[str]:
    """Names of the clients that want it, as far as they may be named."""
    names = []
    if task.wants:
        for key, _ in work.txn.scan(Table.WANTED_BY, U64_PAIR.pack(task.id, 0), U64_PAIR.pack(task.id + 1, 0)):
            client = work.client(int.from_bytes(key[8:]))
            if client is not None and not client.internal and not client.dropped:
                names.append(client.name)
    return names
