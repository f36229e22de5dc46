"""Who wants what: clients and their wants, and how wants end (unwant, drop, cancel).

A want is kept twice, by client and by task, and counted in both records. A graph that is open is a client too (an internal one): it
wants the tasks it found in the database, so that they are still there when the rest of it arrives.
"""

from __future__ import annotations

from collections.abc import Sequence

from taskdb.commands import Cancelled, WantState
from taskdb.engine.refs import client_name, find_client
from taskdb.engine.todo import Todo
from taskdb.engine.transitions import CANCEL_FORCE, CANCEL_LOST, ERRED, MEMORY, cause_of, recheck
from taskdb.engine.work import Work
from taskdb.errors import LimitExceeded
from taskdb.limits import CLIENT_BYTES_MAX
from taskdb.model import TaskState
from taskdb.store.base import WriteTxn
from taskdb.store.codec import ClientRecord, TaskRecord, decode_ids, encode_ids
from taskdb.store.schema import U64, U64_PAIR, Meta, Table, digest


def check_client(name: str) -> None:
    """Raises LimitExceeded."""
    if len(name.encode()) > CLIENT_BYTES_MAX:
        raise LimitExceeded(f"a client's name has more than {CLIENT_BYTES_MAX} bytes")


def add_name(txn: WriteTxn, table: Table, name: bytes, number: int) -> None:
    key = digest(name)
    txn.put(table, key, (txn.get(table, key) or b"") + U64.pack(number))


def remove_name(txn: WriteTxn, table: Table, name: bytes, number: int) -> None:
    key = digest(name)
    rest = [other for other in decode_ids(txn.get(table, key) or b"") if other != number]
    if rest:
        txn.put(table, key, encode_ids(rest))
    else:
        txn.delete(table, key)


def client_of(work: Work, name: str, internal: bool = False) -> ClientRecord | None:
    """The client of this name, if it wants anything."""
    number = work.client_ids.get((name, internal)) or find_client(work.txn, name, internal)
    if not number:
        return None
    work.client_ids[name, internal] = number
    return work.client(number)


def intern_client(work: Work, name: str, internal: bool = False) -> ClientRecord:
    client = client_of(work, name, internal)
    if client is None:
        client = ClientRecord(work.next(Meta.NEXT_CLIENT), name, internal, False, 0)
        work.add_client(client)
        add_name(work.txn, Table.CLIENT_NAMES, client_name(name, internal), client.id)
        work.client_ids[name, internal] = client.id
    return client


def add_want(work: Work, client: ClientRecord, task: TaskRecord, graph_id: int = 0) -> None:
    """`graph_id`: the submission that brought it; a want that was brought twice stands on its own."""
    key = U64_PAIR.pack(client.id, task.id)
    old = work.txn.get(Table.WANTS, key)
    if old is not None:
        if old != U64.pack(graph_id):
            work.txn.put(Table.WANTS, key, U64.pack(0))
        return
    work.txn.put(Table.WANTS, key, U64.pack(graph_id))
    work.txn.put(Table.WANTED_BY, U64_PAIR.pack(task.id, client.id), b"")
    client.wants += 1
    client.dirty = True
    if not task.wants:
        graph = work.known_graph(task.graph)
        graph.wanted += 1
        graph.dirty = True
    task.wants += 1
    task.dirty = True


def remove_want(work: Work, client: ClientRecord, task: TaskRecord) -> bool:
    """False if there was none. A client without wants is gone."""
    if not work.txn.delete(Table.WANTS, U64_PAIR.pack(client.id, task.id)):
        return False
    work.txn.delete(Table.WANTED_BY, U64_PAIR.pack(task.id, client.id))
    client.wants -= 1
    client.dirty = True
    if not client.wants:
        remove_client(work, client)
    task.wants -= 1
    task.dirty = True
    if not task.wants:
        graph = work.known_graph(task.graph)
        graph.wanted -= 1
        graph.dirty = True
    recheck(work, task)
    return True


def remove_client(work: Work, client: ClientRecord) -> None:
    if not client.dropped:
        _unname(work, client)
    work.remove_client(client)


def _unname(work: Work, client: ClientRecord) -> None:
    remove_name(work.txn, Table.CLIENT_NAMES, client_name(client.name, client.internal), client.id)
    work.client_ids.pop((client.name, client.internal), None)


def drop_client(work: Work, client: ClientRecord) -> None:
    """End all its wants, in steps. From now on its name means a new client."""
    if not client.dropped:
        _unname(work, client)
        client.dropped = True
        client.dirty = True
        work.push(Todo.DROP, client.id)


# ------------------------------------------------------------------------------------------------------------ commands


def want(work: Work, name: str, keys: Sequence[bytes]) -> None:
    check_client(name)
    for key in keys:
        task = work.find(key)
        if task is None:
            work.result.wants.append(WantState(name, key, 0, None))
            continue
        add_want(work, intern_client(work, name), task)
        recheck(work, task)
        cause, payload = cause_of(work, task.id) if task.state == ERRED else (b"", b"")
        work.result.wants.append(WantState(name, key, task.id, TaskState(task.state), cause, payload))


def unwant(work: Work, name: str, keys: Sequence[bytes]) -> None:
    for key in keys:
        client = client_of(work, name)
        if client is None:
            return
        task = work.find(key)
        if task is not None:
            remove_want(work, client, task)


def cancel(work: Work, name: str, keys: Sequence[bytes], force: bool) -> None:
    """Only notes the tasks; `cancel_task` does the work, in order of ids."""
    number = CANCEL_FORCE
    if not force:
        client = client_of(work, name)
        if client is None:
            # It wants nothing, so there is nothing of it to cancel, here or below.
            return
        number = client.id
    for key in keys:
        task = work.find(key)
        if task is not None:
            work.push(Todo.CANCEL, number, task.id)


# ---------------------------------------------------------------------------------------------------------- background


def cancel_task(work: Work, number: int, task: TaskRecord, cursor: int, items_max: int) -> int:
    """Cancel one task, and note its dependents, from `cursor` on. Returns the number of dependents met."""
    if cursor == 0:
        if number not in (CANCEL_FORCE, CANCEL_LOST):
            if _wanted_by_other(work, number, task):
                return 0
        elif number == CANCEL_LOST and task.state == MEMORY:
            return 0
        end_wants(work, number, task)
    items = 0
    if task.links:
        for first, ids in work.segments(task.id, cursor):
            if items >= items_max:
                work.push(Todo.CANCEL, number, task.id, first)
                break
            items += len(ids)
            for dependent_id in ids:
                if work.task(dependent_id) is not None:
                    work.push(Todo.CANCEL, number, dependent_id)
    return items


def _wanted_by_other(work: Work, number: int, task: TaskRecord) -> bool:
    """Whether another client wants it. Not submissions that protect it, nor clients that are gone (see DROP)."""
    if task.wants <= (work.txn.get(Table.WANTS, U64_PAIR.pack(number, task.id)) is not None):
        return False
    start, stop = U64_PAIR.pack(task.id, 0), U64_PAIR.pack(task.id + 1, 0)
    for key, _ in work.txn.scan(Table.WANTED_BY, start, stop):
        other = int.from_bytes(key[8:])
        client = work.client(other) if other != number else None
        if client is not None and not client.internal and not client.dropped:
            return True
    return False


def end_wants(work: Work, number: int, task: TaskRecord) -> None:
    """Those of one client, or of all (CANCEL_FORCE, CANCEL_LOST). Clients that can be told are."""
    if not task.wants:
        return
    numbers = [number]
    if number in (CANCEL_FORCE, CANCEL_LOST):
        start, stop = U64_PAIR.pack(task.id, 0), U64_PAIR.pack(task.id + 1, 0)
        numbers = [int.from_bytes(key[8:]) for key, _ in work.txn.scan(Table.WANTED_BY, start, stop)]
    told = False
    for client_number in numbers:
        client = work.client(client_number)
        # An open submission keeps what it builds on until it is sealed or aborted.
        if client is not None and not client.internal and remove_want(work, client, task):
            told = told or not client.dropped
    if told:
        work.result.cancelled.append(Cancelled("", work.key(task.id)))


def drop_some(work: Work, client_id: int, items_max: int) -> int:
    """Remove up to `items_max` wants of a dropped client. Returns how many."""
    client = work.client(client_id)
    if client is None:
        return 0
    ids: list[int] = []
    for key, _ in work.txn.scan(Table.WANTS, U64_PAIR.pack(client_id, 0), U64_PAIR.pack(client_id + 1, 0)):
        if len(ids) == items_max:
            work.push(Todo.DROP, client_id)
            break
        ids.append(int.from_bytes(key[8:]))
    for task_id in ids:
        remove_want(work, client, work.known_task(task_id))
    if not ids and not client.wants:
        remove_client(work, client)
    return len(ids)
