"""A task comes with a submission: it is new, and is linked and placed; or it is met, because its key is known.

Rules: a new task's dependencies are there; it is linked before it is placed. Nothing else makes a task.
"""

from __future__ import annotations

from collections.abc import Sequence

from taskdb.commands import Erred
from taskdb.engine.todo import Todo
from taskdb.engine.transitions import ERRED, MEMORY, PROCESSING, QUEUED, RELEASED, WAITING, cause_of, fail_blamed, hold, needed, recheck
from taskdb.engine.wants import add_want, intern_client
from taskdb.engine.work import Work
from taskdb.model import TaskFlag
from taskdb.store.codec import UNGROWN, GraphRecord, TaskRecord, encode_ids
from taskdb.store.schema import U64, Table

_HELD = int(TaskFlag.HELD)


def protector(graph: GraphRecord) -> str:
    """The internal client that wants what an open submission found."""
    return f"submission:{graph.id}"


def link(work: Work, graph: GraphRecord, task: TaskRecord, own_deps: Sequence[int]) -> None:
    """Edges of a new task, both ways. Missing dependencies (id 0) are left out."""
    deps = tuple(own_deps) if 0 not in own_deps else tuple(dep for dep in own_deps if dep)
    if not deps:
        return
    task.deps = deps
    work.txn.put(Table.EDGES, U64.pack(task.id), encode_ids(deps))
    new_dependents = work.new_dependents
    for dep_id in deps:
        dep = work.known_task(dep_id)
        dep.links += 1
        dep.dirty = True
        if dep.expected and dep.graph == graph.id:
            dep.expected -= 1
            graph.expected -= 1
        dependents = new_dependents.get(dep_id)
        if dependents is None:
            new_dependents[dep_id] = [task.id]
        else:
            dependents.append(task.id)


def place(work: Work, graph: GraphRecord, task: TaskRecord, held: bool = False) -> None:
    """The first state of a new task, which counts nowhere yet."""
    erred = 0
    waiting_on = blocked_on = 1 if task.flags & UNGROWN else 0
    active = held or needed(task)
    assert task.deps is not None
    if active:
        for dep_id in task.deps:
            state = work.known_task(dep_id).state
            if state != MEMORY:
                waiting_on += 1
                if state != PROCESSING:
                    blocked_on += 1
                    if state == ERRED and not erred:
                        erred = dep_id
    if erred and not held:
        active = False
    for dep_id in task.deps:
        dep = work.known_task(dep_id)
        if active:
            dep.need += 1
            if dep.state == RELEASED:
                work.push(Todo.UP, dep_id)
        elif not needed(dep):
            work.push(Todo.DOWN, dep_id)
    if active:
        task.waiting_on = waiting_on
        task.blocked_on = blocked_on
        task.state = PROCESSING if held else WAITING if blocked_on else QUEUED
    graph.counts[task.state - 1] += 1
    if erred and not held:
        fail_blamed(work, task, erred)
    if not task.wants and not task.expected:
        work.push(Todo.DOWN, task.id)


def meet(work: Work, graph: GraphRecord, task: TaskRecord, flag: int, own_deps: Sequence[int], expected: int) -> None:
    """A key that is there already: it keeps its links; those this submission names will not come."""
    expect_less(work, graph, own_deps)
    if task.graph != graph.id:
        add_want(work, intern_client(work, protector(graph), internal=True), task)
    elif expected:
        # A key that comes twice in one submission: dependents may name either index.
        task.expected += expected
        task.dirty = True
        graph.expected += expected
    if flag & _HELD and (task.state != MEMORY or work.is_orphan(task)):
        work.flush_dependents()
        hold(work, task)


def expect_less(work: Work, graph: GraphRecord, own_deps: Sequence[int]) -> None:
    """A dependent of each of these, which was declared, will not come."""
    for dep_id in own_deps:
        dep = work.task(dep_id)
        if dep is not None and dep.graph == graph.id and dep.expected:
            dep.expected -= 1
            dep.dirty = True
            graph.expected -= 1
            recheck(work, dep)


def tell_one(work: Work, task: TaskRecord, client: str) -> None:
    """Tell one client that a task it has just begun to want is ERRED."""
    cause, payload = cause_of(work, task.id)
    work.result.erred.append(Erred(client, work.key(task.id), cause, payload))
