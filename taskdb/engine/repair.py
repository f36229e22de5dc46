"""Recovery without a scheduler: what `taskdb recover` does to a store whose whole cluster is gone, and what it means in tasks and seconds.

Rule: what is written is the engine's own doing (a new epoch, EndRecovery, background work), but for entries of indexes. So a scheduler that
starts on the store instead comes to the same.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain, islice
from math import isfinite
from struct import Struct

import numpy as np
import numpy.typing as npt
from numpy.lib import recfunctions as rfn

from taskdb.commands import DURATIONS, EndRecovery
from taskdb.engine.engine import Engine, current_epoch
from taskdb.engine.indexes import faults
from taskdb.engine.recovery import kept
from taskdb.engine.refs import unmade_by_group
from taskdb.errors import InvariantBroken
from taskdb.limits import RECOVER_STEP_ITEMS
from taskdb.model import TaskFlag, TaskState
from taskdb.store.base import ReadTxn, WriteTxn
from taskdb.store.codec import NO_GROUP, RULED, GraphStatus, decode_client, decode_graph, decode_group
from taskdb.store.columns import TASK, task_slices
from taskdb.store.schema import GRAPH_PART, U64_PAIR, Meta, Table, meta_key

_SECONDS = Struct(">d")
_COLUMNS = ["state", "flags", "need", "expected", "wants", "graph", "group"]
_COMING = (TaskState.WAITING, TaskState.QUEUED)
#: In the place of a state: the task is not there any more.
_GONE = 0


class Survey:
    """All tasks at one time, as columns of ascending ids (34 bytes a task), and the numbers of what else there is."""

    def __init__(self, txn: ReadTxn) -> None:
        ids: list[np.ndarray] = [np.zeros(0, np.uint64)]
        columns: list[np.ndarray] = [np.zeros(0, TASK)[_COLUMNS]]
        for some, tasks in task_slices(txn):
            ids.append(some)
            columns.append(rfn.repack_fields(tasks[_COLUMNS]))
        self.ids: npt.NDArray[np.uint64] = np.concatenate(ids)
        self.tasks = np.concatenate(columns)
        graphs = [decode_graph(int.from_bytes(key), data) for key, data in txn.scan(Table.GRAPHS)]
        self.graphs = sum(graph.status in GraphStatus.COMPLETE for graph in graphs)
        self.open_graphs = [graph.id for graph in graphs if graph.status == GraphStatus.OPEN]
        clients = [decode_client(int.from_bytes(key), data) for key, data in txn.scan(Table.CLIENTS)]
        named = {client.id for client in clients if not client.internal and not client.dropped}
        self.clients = len(named)
        wants = (U64_PAIR.unpack(key) for key, _ in txn.scan(Table.WANTS))
        #: Ids of the tasks that clients want, ascending.
        self.wanted = np.unique(np.fromiter((task_id for client, task_id in wants if client in named), np.uint64))
        self.kept = txn.count(Table.KEPT)
        self.held = txn.count(Table.HOLDS)

    @property
    def by_state(self) -> dict[str, int]:
        counts = np.bincount(self.tasks["state"].astype(np.intp), minlength=len(TaskState) + 1)
        return {state.name.lower(): int(counts[state]) for state in TaskState}

    def states_in(self, later: Survey) -> npt.NDArray[np.intp]:
        """State of each of its tasks in a later survey, or _GONE. No id comes to name another task."""
        if not len(later.ids):
            return np.zeros(len(self.ids), np.intp)
        at = np.minimum(np.searchsorted(later.ids, self.ids), len(later.ids) - 1)
        return np.where(later.ids[at] == self.ids, later.tasks["state"][at], _GONE).astype(np.intp)


def clean(txn: ReadTxn) -> bool:
    """Nothing of a cluster that is gone is left."""
    if txn.count(Table.HOLDS) or txn.count(Table.TODO) or txn.get(Table.META, meta_key(Meta.RECOVERING)) is not None:
        return False
    return all(decode_graph(0, data).status in GraphStatus.COMPLETE for _, data in txn.scan(Table.GRAPHS))


@dataclass(frozen=True, slots=True)
class Cost:
    """What tasks take that are to run, in seconds of one thread each, as far as tasks of their prefix have been measured."""

    seconds: float
    known: int
    unknown: int
    #: (group, tasks, seconds or None), the longest first, then those that are unknown.
    groups: list[tuple[str, int, float | None]]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a recovery does, or would do, in numbers of tasks unless said otherwise."""

    before: Survey
    after: Survey
    #: The cluster that is gone had left something, and it was put right.
    changed: bool
    #: Epoch of the store after it: every earlier scheduler is fenced.
    epoch: int
    #: Entries of indexes put right.
    entries: int
    #: To run: not finished before; of these, given to a scheduler; results that are lost and needed; and what they are computed from.
    unfinished: int
    begun: int
    lost_results: int
    released_inputs: int
    #: Of rules, yet to be made.
    unmade: int
    #: Scattered data that is lost and needed; and what clients wanted that cannot be computed without it.
    lost_data: int
    cancelled: int
    #: Results that are lost and that nobody needs; tasks of submissions that were not complete; tasks forgotten for other reasons.
    unneeded: int
    dropped: int
    forgotten: int
    cost: Cost

    @property
    def to_run(self) -> int:
        return self.unfinished + self.lost_results + self.released_inputs + self.unmade


def recover(engine: Engine, txn: WriteTxn, turn: Callable[[WriteTxn], WriteTxn], tick: Callable[[int], None]) -> tuple[WriteTxn, Outcome]:
    """Put right what a cluster left that is gone: workers and scheduler, with all they held.

    Every transaction but the last, which is returned, is handed to `turn` after RECOVER_STEP_ITEMS at most; `turn` commits it and opens the
    next, or goes on with it. If it is interrupted, doing it again goes on where it stopped. `tick` is told the items of work done. Raises
    StoreFull, StoreError, StoreCorrupt; InvariantBroken if the store breaks a rule.
    """
    before = Survey(txn)
    entries = 0
    while wrong := list(islice(faults(txn), RECOVER_STEP_ITEMS)):
        for table, key, value in wrong:
            if value is None:
                txn.delete(table, key)
            else:
                txn.put(table, key, value)
        entries += len(wrong)
        txn = turn(txn)
    began = not clean(txn)
    if began:
        epoch = engine.begin_epoch(txn, "taskdb recover")
        engine.apply(txn, epoch, 1, [EndRecovery()])
        done, more = 0, True
        while more:
            txn = turn(txn)
            _, more = engine.step(txn, RECOVER_STEP_ITEMS)
            done += RECOVER_STEP_ITEMS
            tick(done)
        txn = turn(txn)
    after = Survey(txn)
    if not clean(txn):
        raise InvariantBroken(f"after recovery {after.held} tasks are still held and {txn.count(Table.TODO)} items of work wait")
    return txn, _outcome(txn, before, after, entries, began)


def _count(mask: npt.NDArray[np.bool_]) -> int:
    return int(np.count_nonzero(mask))


def _outcome(txn: ReadTxn, before: Survey, after: Survey, entries: int, began: bool) -> Outcome:
    tasks, was, became = before.tasks, before.tasks["state"], before.states_in(after)
    is_coming = np.isin(after.tasks["state"], _COMING)
    coming = after.tasks[is_coming]
    #: Of rules, made again.
    again = _count(~np.isin(after.ids[is_coming], before.ids))
    runs = np.isin(became, _COMING)
    held = (was == TaskState.PROCESSING) | (was == TaskState.MEMORY)
    needed = (tasks["need"] > 0) | (tasks["expected"] > 0) | (tasks["wants"] > 0)
    incomplete = np.isin(tasks["graph"], before.open_graphs)
    gone = became == _GONE
    lost_data = (tasks["flags"] & TaskFlag.DATA > 0) & held & needed & ~incomplete & (gone | (became == TaskState.ERRED))
    unwanted = np.isin(before.ids, np.setdiff1d(before.wanted, after.wanted))

    unneeded = (was == TaskState.MEMORY) & ((became == TaskState.RELEASED) | (gone & (tasks["flags"] & RULED > 0) & ~needed & ~incomplete))
    unmade = list(_unmade(txn))
    return Outcome(
        before,
        after,
        began or entries > 0,
        current_epoch(txn),
        entries,
        unfinished=_count(runs & (was <= TaskState.PROCESSING)),
        begun=_count(runs & (was == TaskState.PROCESSING)),
        lost_results=_count(runs & (was == TaskState.MEMORY)),
        released_inputs=_count(runs & (was >= TaskState.RELEASED)) + again,
        unmade=sum(count for _, count in unmade),
        lost_data=_count(lost_data),
        cancelled=_count(unwanted & ~incomplete & ~lost_data),
        unneeded=_count(unneeded),
        dropped=_count(gone & incomplete),
        forgotten=_count(gone & ~incomplete & ~lost_data & ~unwanted & ~unneeded),
        cost=cost(txn, chain(_pairs(coming["graph"], coming["group"]), unmade)),
    )


def _pairs(high: npt.NDArray[np.generic], low: npt.NDArray[np.generic]) -> Iterator[tuple[tuple[int, int], int]]:
    """Distinct pairs of numbers below 2**32, and how often each occurs."""
    both, counts = np.unique(high.astype(np.uint64) << np.uint64(32) | low.astype(np.uint64), return_counts=True)
    for pair, count in zip(both.tolist(), counts.tolist()):
        yield (pair >> 32, pair & 2**32 - 1), count


def _unmade(txn: ReadTxn) -> Iterator[tuple[tuple[int, int], int]]:
    """(graph, group) and how many of its tasks are yet to be made from a rule, or carried out."""
    for key, _ in txn.scan(Table.GRAPHS):
        graph = int.from_bytes(key)
        yield from (((graph, group), count) for group, count in unmade_by_group(txn, graph).items() if count)


def cost(txn: ReadTxn, tasks: Iterator[tuple[tuple[int, int], int]]) -> Cost:
    """Of so many tasks of each (graph, index of the group in it)."""
    by_group: Counter[str] = Counter()
    for part, count in tasks:
        data = None if part[1] == NO_GROUP else txn.get(Table.GROUPS, GRAPH_PART.pack(*part))
        by_group["" if data is None else decode_group(data)[1]] += count
    recorded = durations(txn)
    found = [(group, count, duration(recorded, group)) for group, count in by_group.items()]
    groups = [(group, count, None if each is None else count * each) for group, count, each in found]
    groups.sort(key=lambda group: (-1.0 if group[2] is None else group[2], group[1]), reverse=True)
    known = sum(count for _, count, seconds in groups if seconds is not None)
    return Cost(sum(seconds or 0.0 for _, _, seconds in groups), known, sum(by_group.values()) - known, groups)


def durations(txn: ReadTxn) -> dict[str, float]:
    """Recorded average seconds of a task, by prefix. What makes no sense is left out."""
    found = {}
    for name, value in kept(txn, DURATIONS):
        if len(value) == _SECONDS.size:
            (seconds,) = _SECONDS.unpack(value)
            if isfinite(seconds) and seconds >= 0:
                found[name[len(DURATIONS) :].decode(errors="replace")] = seconds
    return found


def duration(recorded: dict[str, float], group: str) -> float | None:
    """Of the longest recorded prefix that is the group, or that the group continues after a "-"; None if there is none."""
    while group not in recorded:
        group, dash, _ = group.rpartition("-")
        if not dash:
            return None
    return recorded[group]
