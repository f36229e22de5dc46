"""What the scheduler says of tasks: the table of docs/engine.md, level by level; and retry, which undoes failures."""

from __future__ import annotations

from collections.abc import Sequence

from taskdb.commands import Blame, Fail, Report, Retry
from taskdb.engine.growth import made
from taskdb.engine.todo import Todo
from taskdb.engine.transitions import (
    ERRED,
    MEMORY,
    PROCESSING,
    QUEUED,
    RELEASED,
    fail,
    fail_blamed,
    finish,
    hold,
    put_back,
    revive,
    root_cause,
)
from taskdb.engine.work import Work
from taskdb.errors import InvalidRequest
from taskdb.limits import ERROR_TEXT_MAX, TRACEBACK_TEXT_MAX
from taskdb.model import Level
from taskdb.store.codec import ErrorRecord, TaskRecord

_HELD = int(Level.HELD)
_MEMORY = int(Level.MEMORY)
_RELEASED = int(Level.RELEASED)
_ERRED = int(Level.ERRED)
_OUT = int(Level.OUT)

_RETRIES_MAX = 2**15 - 1
_SUSPICIOUS_MAX = 2**16 - 1
_NBYTES_MAX = 2**63 - 1


def check_report(command: Report) -> None:
    """Raises InvalidRequest."""
    count = len(command.ids)
    if len(command.levels) != count:
        raise InvalidRequest(f"{len(command.levels)} levels for {count} ids")
    columns: tuple[tuple[str, Sequence[float]], ...] = (
        ("nbytes", command.nbytes),
        ("retries", command.retries),
        ("suspicious", command.suspicious),
        ("ran_on", command.ran_on),
        ("began", command.began),
        ("seconds", command.seconds),
    )
    for name, values in columns:
        if values and len(values) != count:
            raise InvalidRequest(f"{name} has {len(values)} entries for {count} ids")
    if any(not _HELD <= level <= _OUT for level in command.levels):
        raise InvalidRequest("unknown level")
    if any(place > len(command.workers) for place in command.ran_on):
        raise InvalidRequest(f"ran_on names more than {len(command.workers)} workers")
    if command.ran_on and not (command.began and command.seconds):
        raise InvalidRequest("ran_on comes with began and seconds")


def report(work: Work, command: Report) -> None:
    """Raises InvalidRequest; then nothing of it was applied."""
    check_report(command)
    nbytes, retries, suspicious, ran_on = command.nbytes, command.retries, command.suspicious, command.ran_on
    runs = work.moves.runs if work.moves is not None and ran_on else None
    for i, task_id in enumerate(command.ids):
        task = made(work, task_id) if command.levels[i] != _OUT else work.task(task_id)
        if task is None:
            if command.levels[i] != _OUT:
                # Forgotten meanwhile, or told under an id that a crash undid: it need not be held.
                work.result.release.append(task_id)
            continue
        if retries and task.retries != retries[i]:
            task.retries = max(-1, min(retries[i], _RETRIES_MAX))
            task.dirty = True
        if suspicious and task.suspicious != suspicious[i]:
            task.suspicious = max(0, min(suspicious[i], _SUSPICIOUS_MAX))
            task.dirty = True
        if runs is not None and ran_on[i]:
            runs.append((task_id, command.workers[ran_on[i] - 1], command.began[i], command.seconds[i]))
        _apply_level(work, task, command.levels[i], min(nbytes[i], _NBYTES_MAX) if nbytes else -1)


def _apply_level(work: Work, task: TaskRecord, level: int, nbytes: int) -> None:
    state = task.state
    if level == _MEMORY:
        finish(work, task, nbytes)
    elif level == _HELD:
        hold(work, task)
    elif level == _ERRED:
        if state != ERRED:
            fail(work, task, ErrorRecord())
    elif level == _OUT:
        if state in (PROCESSING, MEMORY):
            put_back(work, task)
    elif state != RELEASED:
        # RELEASED. Whether it is needed still shows once the whole batch is applied: a dependent may be released with it.
        put_back(work, task)


def fail_task(work: Work, command: Fail) -> None:
    task = made(work, command.id)
    if task is None:
        work.result.release.append(command.id)  # as of any report
    else:
        record = ErrorRecord(0, command.text[:ERROR_TEXT_MAX], command.payload, command.traceback[-TRACEBACK_TEXT_MAX:])
        fail(work, task, record)


def blame(work: Work, command: Blame) -> None:
    task = made(work, command.id)
    if task is None:
        work.result.release.append(command.id)
        return
    cause = made(work, command.cause)
    if cause is None or cause is task:
        fail(work, task, ErrorRecord())
    else:
        fail(work, task, ErrorRecord(root_cause(work, cause.id) if cause.state == ERRED else cause.id))


def retry(work: Work, command: Retry) -> None:
    for key in command.keys:
        task = work.find(key)
        if task is not None:
            # Whether it is ERRED is seen when it is done: a failure told in the same batch may still be on its way down.
            work.push(Todo.RETRY, task.id)


# ---------------------------------------------------------------------------------------------------------- background


def retry_task(work: Work, task: TaskRecord) -> None:
    """Clear the error of a task that failed itself; else go up to the dependencies that are ERRED."""
    if task.state != ERRED:
        return
    above = [dep for dep in work.deps(task) if work.known_task(dep).state == ERRED]
    for dep_id in above:
        work.push(Todo.RETRY, dep_id)
    if not above:
        revive(work, task)


def fail_dependents(work: Work, task: TaskRecord, cursor: int, items_max: int) -> int:
    """The dependents of an ERRED task that the scheduler does not hold fail. Returns the number met."""
    items = 0
    if task.state == ERRED and task.need:
        for first, ids in work.segments(task.id, cursor):
            if items >= items_max:
                work.push(Todo.FAIL, task.id, 0, first)
                break
            items += len(ids)
            for dependent_id in ids:
                dependent = work.task(dependent_id)
                if dependent is not None and dependent.state <= QUEUED:
                    fail_blamed(work, dependent, task.id)
    return items


def revive_dependents(work: Work, task: TaskRecord, cursor: int, items_max: int) -> int:
    """The ERRED dependents of a task that is not ERRED any more live again. Returns the number met."""
    items = 0
    if task.links:
        for first, ids in work.segments(task.id, cursor):
            if items >= items_max:
                work.push(Todo.REVIVE, task.id, 0, first)
                break
            items += len(ids)
            for dependent_id in ids:
                dependent = work.task(dependent_id)
                if dependent is not None:
                    revive(work, dependent)
    return items
