"""The work that is put off, item by item. Each item is done again from its cursor if it is too much for one step."""

from __future__ import annotations

from taskdb.engine.endings import abort_some, end_some, prune_some, unexpect_some
from taskdb.engine.growth import end_growth
from taskdb.engine.reports import fail_dependents, retry_task, revive_dependents
from taskdb.engine.todo import Todo
from taskdb.engine.transitions import RELEASED, activate, forget, linked, needed, put_back, release_unneeded
from taskdb.engine.wants import cancel_task, drop_some
from taskdb.engine.work import Work
from taskdb.store.schema import U64, Table


def drain(work: Work, items_max: int, last: Todo = Todo.PRUNE) -> None:
    """Do up to `items_max` items, those of the table included, of kinds up to `last`. What is left goes back to the table."""
    work.load_todo(items_max)
    while items_max > 0:
        item = work.pop_todo()
        if item is None:
            break
        if item[0] > last:
            work.push(*item)
            break
        items_max -= max(1, _do(work, *item, items_max))
        work.trim()
    work.report_forgotten()


def _do(work: Work, kind: Todo, a: int, b: int, cursor: int, items_max: int) -> int:
    """One item, up to `items_max` pieces of it. Returns the pieces done."""
    if kind == Todo.DROP:
        return drop_some(work, a, items_max)
    if kind == Todo.GROWN:
        end_growth(work, a)
        return 1
    if kind == Todo.UNEXPECT:
        return unexpect_some(work, a, cursor, items_max)
    if kind == Todo.ABORT:
        return abort_some(work, a, cursor, items_max)
    if kind == Todo.GIVE_BACK:
        return _give_back(work, cursor, items_max)
    if kind == Todo.PRUNE:
        return prune_some(work, a, cursor, items_max)
    if kind == Todo.END:
        return end_some(work, a, items_max)
    task = work.task(b if kind == Todo.CANCEL else a)
    if task is None:
        return 1
    if kind == Todo.DOWN:
        if not linked(task):
            forget(work, task)
        elif not needed(task):
            release_unneeded(work, task)
    elif kind == Todo.UP:
        if task.state == RELEASED and needed(task):
            activate(work, task)
    elif kind == Todo.CANCEL:
        return cancel_task(work, a, task, cursor, items_max)
    elif kind == Todo.FAIL:
        return fail_dependents(work, task, cursor, items_max)
    elif kind == Todo.REVIVE:
        return revive_dependents(work, task, cursor, items_max)
    else:
        retry_task(work, task)
    return 1


def _give_back(work: Work, cursor: int, items_max: int) -> int:
    """What earlier epochs held is let go of: it is queued again, if it is needed; data is lost."""
    items = 0
    current = U64.pack(work.epoch)
    # The table is written when the records are flushed, never here: so it may name what has changed since.
    for key, owner in work.txn.scan(Table.HOLDS, U64.pack(cursor)):
        if items == items_max:
            work.push(Todo.GIVE_BACK, work.epoch, 0, int.from_bytes(key))
            return items
        items += 1
        if owner != current:
            task = work.task(int.from_bytes(key))
            if task is not None and work.is_orphan(task):
                put_back(work, task)
    work.end_recovery()
    return items
