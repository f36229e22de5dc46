"""Handing tasks out: by rank, first those that can run at once, then look-ahead."""

from __future__ import annotations

from collections.abc import Iterator
from heapq import heappop, heappush

from taskdb.commands import DEPENDENTS_UNKNOWN, Lease
from taskdb.engine.transitions import PROCESSING, move, wanted_by
from taskdb.engine.work import Work
from taskdb.errors import InvariantBroken
from taskdb.limits import LEASE_PARKED_MAX, LEASE_PASSED_MAX
from taskdb.store.codec import PARKED, REVIVED, RULED, UNGROWN, GraphStatus, TaskRecord, decode_rank
from taskdb.store.schema import RANK_BYTES, Table

_QUEUED = 2


def lease_of(work: Work, task: TaskRecord) -> Lease:
    graph = work.known_graph(task.graph)
    return Lease(
        task.id,
        work.key(task.id),
        work.spec(task),
        task.flags & ~(RULED | UNGROWN | PARKED | REVIVED),
        decode_rank(task.rank),
        list(work.deps(task)),
        work.group_name(task.graph, task.group),
        graph.submission,
        work.blob(task.graph, task.annotation),
        task.retries,
        task.suspicious,
        wanted_by(work, task) if task.wants else [],
        # What is still to be activated will count in `need`, and does not yet.
        DEPENDENTS_UNKNOWN if work.has_todo else min(task.need + task.expected, DEPENDENTS_UNKNOWN),
        graph.id << 32 | task.annotation if task.annotation else 0,
    )


def _queue(work: Work, table: Table) -> Iterator[tuple[bytes, int]]:
    for key, _ in work.txn.scan(table):
        yield key[:RANK_BYTES], int.from_bytes(key[RANK_BYTES:])


def lease(work: Work, ready: int, total: int) -> tuple[list[Lease], bool]:
    """Up to `ready` tasks whose dependencies are in memory, then any up to `total` in all, in rank order. True if there may be more,
    behind those that had to be passed over.

    Reads the queues from the store, which must be as last flushed: nothing may be pending in `work`.
    """
    parked = passed = 0
    leases: list[Lease] = []
    newly = work.newly_queued = []
    #: Tasks that became QUEUED here. They wait for a task leased here, so they belong to the ahead queue.
    new: list[tuple[bytes, int]] = []

    def take(item: tuple[bytes, int]) -> None:
        task = work.known_task(item[1])
        if task.state != _QUEUED:
            raise InvariantBroken(f"task {task.id} stands in a queue in state {task.state}")
        nonlocal parked, passed
        if work.known_graph(task.graph).status == GraphStatus.ABORTED:
            # It is being taken back. What is left of it, because others need it, is leased once that is over.
            passed += 1
            return
        if work.recovering and any(work.is_orphan(work.known_task(dep)) for dep in work.deps(task)):
            # The scheduler has not got its inputs (yet). Whoever claims them, or gives them back, puts it into a queue again.
            task.flags |= PARKED
            task.dirty = True
            parked += 1
            return
        move(work, task, PROCESSING)
        leases.append(lease_of(work, task))
        while newly:
            heappush(new, newly.pop())

    def goes_on(limit: int) -> bool:
        return len(leases) < limit and parked < LEASE_PARKED_MAX and passed < LEASE_PASSED_MAX

    ready_queue = _queue(work, Table.READY)
    ahead_queue = _queue(work, Table.AHEAD)
    while goes_on(min(ready, total)) and (item := next(ready_queue, None)) is not None:
        take(item)
    if goes_on(total):
        ready_next, ahead_next = next(ready_queue, None), next(ahead_queue, None)
        while goes_on(total):
            heads = [item for item in (ready_next, ahead_next, new[0] if new else None) if item is not None]
            if not heads:
                break
            item = min(heads)
            if item is ready_next:
                ready_next = next(ready_queue, None)
            elif item is ahead_next:
                ahead_next = next(ahead_queue, None)
            else:
                heappop(new)
            take(item)
    work.newly_queued = None
    return leases, parked >= LEASE_PARKED_MAX or passed >= LEASE_PASSED_MAX
