"""From names to ids and back: keys, submissions, clients, and the indices of a submission. Reads only."""

from __future__ import annotations

from collections.abc import Callable

from taskdb.store.base import ReadTxn
from taskdb.store.codec import decode_client, decode_graph, decode_ids
from taskdb.store.schema import U64, U64_PAIR, Table, digest


def _find(txn: ReadTxn, table: Table, name: bytes, matches: Callable[[int], bool]) -> int:
    data = txn.get(table, digest(name))
    if data is None:
        return 0
    for number in decode_ids(data):
        # A digest is only a hint.
        if matches(number):
            return number
    return 0


def find_key(txn: ReadTxn, key: bytes) -> int:
    """The id under a packed key, or 0."""
    data = txn.get(Table.KEYS, digest(key))
    if data is None:
        return 0
    for start in range(0, len(data), 8):
        number = data[start : start + 8]
        if txn.get(Table.NAMES, number) == key:
            return int.from_bytes(number)
    return 0


def find_graph(txn: ReadTxn, submission: str) -> int:
    """The graph that has this name now, or 0."""

    def matches(number: int) -> bool:
        data = txn.get(Table.GRAPHS, U64.pack(number))
        return data is not None and decode_graph(number, data).submission == submission

    return _find(txn, Table.GRAPH_NAMES, submission.encode(), matches)


def find_client(txn: ReadTxn, name: str, internal: bool) -> int:
    """The client that has this name now, or 0."""

    def matches(number: int) -> bool:
        data = txn.get(Table.CLIENTS, U64.pack(number))
        return data is not None and decode_client(number, data).name == name

    return _find(txn, Table.CLIENT_NAMES, client_name(name, internal), matches)


def client_name(name: str, internal: bool) -> bytes:
    """What is digested: an internal client never has the name of a real one."""
    return (b"\1" if internal else b"\0") + name.encode()


def find_index(txn: ReadTxn, graph_id: int, index: int) -> tuple[int, int, int] | None:
    """The run that holds an index of a submission: (first index, last index, first id), or None. First id 0: all are missing."""
    pair = txn.first(Table.RUNS, U64_PAIR.pack(graph_id, index))
    if pair is None:
        return None
    graph, last = U64_PAIR.unpack(pair[0])
    first, first_id = U64_PAIR.unpack(pair[1])
    if graph != graph_id or index < first:
        return None
    return first, last, first_id
