"""Tasks that come a second time, because the daemon died: of a stream that broke, and begins again; and of a batch that was lost."""

from __future__ import annotations

from collections.abc import Sequence

from taskdb.commands import Added, AddTasks
from taskdb.engine.refs import find_index, find_key
from taskdb.engine.work import Work
from taskdb.errors import SaidOtherwise
from taskdb.store.codec import GraphRecord
from taskdb.store.schema import U64, U64_PAIR, Meta, Table
from taskdb.store.spooled import decode_spooled


def answer_again(work: Work, graph: GraphRecord, command: AddTasks) -> None:
    """A run that is there, said again from the beginning of a stream that broke: the answer is as it was. Raises SaidOtherwise."""
    end = command.first_index + len(command.keys)
    ids: list[int] = []
    known_at: list[int] = []
    index = command.first_index
    while index < end:
        run = find_index(work.txn, graph.id, index) if end <= graph.added else None
        if run is None:
            raise SaidOtherwise(f"{graph.added} tasks of {graph.submission} were added, and {command.first_index} to {end} came again")
        first, last, first_id = run
        spooled = work.txn.get(Table.SPOOL, U64_PAIR.pack(graph.id, first))
        coming = [] if spooled is None else decode_spooled(spooled).columns()[0]
        for at in range(index, min(last + 1, end)):
            position = at - command.first_index
            task_id = first_id + at - first if first_id else 0
            # What has been forgotten has no name any more.
            name = coming[at - first] if coming else work.txn.get(Table.NAMES, U64.pack(task_id)) or command.keys[position]
            if name != command.keys[position]:
                raise SaidOtherwise(f"task {at} of {graph.submission} came again under another key")
            task = work.task(task_id)
            if task is not None and task.graph != graph.id:
                known_at.append(position)
            ids.append(task_id)
        index = last + 1
    work.result.added.append(Added(command.submission, command.first_index, ids, [], known_at))


def ids_told(work: Work, keys: Sequence[bytes], told_ids: Sequence[int], ids_before: dict[int, int]) -> int:
    """The first of the ids that the run's new tasks were told to have before a crash undid it; 0 if they cannot have them again.

    They are free: a daemon that starts leaves a gap. But a key may be known by now that was not, or the other way round.
    """
    older = max(ids_before.values(), default=0)
    new: dict[bytes, int] = {}
    for key, told in zip(keys, told_ids):
        task_id = find_key(work.txn, key)
        older = max(older, task_id)
        if not task_id:
            new.setdefault(key, told)
    ids = list(new.values())
    # Links go to older tasks only.
    if not ids or ids[0] <= older or ids != list(range(ids[0], ids[0] + len(ids))):
        return 0
    if ids[-1] >= work.next(Meta.NEXT_TASK, 0):
        return 0
    taken = work.txn.first(Table.NAMES, U64.pack(ids[0]))
    return 0 if taken is not None and int.from_bytes(taken[0]) <= ids[-1] else ids[0]
