"""From names to ids and back: keys, submissions, clients, indices of a submission; what is yet to be made of its rule, or was dropped.
Reads only."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator
from typing import NamedTuple

from taskdb.store.base import ReadTxn
from taskdb.store.codec import (
    GraphRecord,
    GraphStatus,
    Growth,
    RuleHead,
    decode_client,
    decode_dropped,
    decode_graph,
    decode_growth,
    decode_ids,
    decode_rule_head,
)
from taskdb.store.schema import RULE_PLACE, U64, U64_PAIR, Table, digest
from taskdb.store.spooled import decode_spooled


def _find(txn: ReadTxn, table: Table, name: bytes, matches: Callable[[int], bool]) -> int:
    data = txn.get(table, digest(name))
    if data is None:
        return 0
    for number in decode_ids(data):
        # A digest is only a hint.
        if matches(number):
            return number
    return 0


class KeyPlace(NamedTuple):
    """Where a packed key stands, or would."""

    key: bytes
    digest: bytes
    #: Ids of all keys with this digest; None: there are none.
    ids: bytes | None
    #: The id under the key, or 0.
    id: int


def look_up(txn: ReadTxn, key: bytes) -> KeyPlace:
    key_digest = digest(key)
    ids = txn.get(Table.KEYS, key_digest)
    for start in range(0, len(ids or b""), 8):
        assert ids is not None
        number = ids[start : start + 8]
        # A digest is only a hint.
        if txn.get(Table.NAMES, number) == key:
            return KeyPlace(key, key_digest, ids, int.from_bytes(number))
    return KeyPlace(key, key_digest, ids, 0)


def find_key(txn: ReadTxn, key: bytes) -> int:
    """The id under a packed key, or 0."""
    return look_up(txn, key).id


def rule_place(txn: ReadTxn, task_id: int) -> tuple[int, int]:
    """Layer and element of a task of a rule."""
    layer, element = RULE_PLACE.unpack(txn.get(Table.SPECS, U64.pack(task_id)) or b"")
    return layer, element


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


def next_run(txn: ReadTxn, graph_id: int, index: int) -> tuple[int, int, int] | None:
    """The first run of a submission that ends at an index or later: (first index, last index, first id), or None. First id 0: all are
    missing."""
    pair = txn.first(Table.RUNS, U64_PAIR.pack(graph_id, index))
    if pair is None:
        return None
    graph, last = U64_PAIR.unpack(pair[0])
    first, first_id = U64_PAIR.unpack(pair[1])
    return (first, last, first_id) if graph == graph_id else None


def find_index(txn: ReadTxn, graph_id: int, index: int) -> tuple[int, int, int] | None:
    """The run that holds an index of a submission, as `next_run`, or None."""
    run = next_run(txn, graph_id, index)
    return run if run is not None and run[0] <= index else None


def spooled_runs(txn: ReadTxn, graph_id: int) -> Iterator[tuple[bytes, bytes]]:
    """Those of a graph, in order. Safe against writes meanwhile."""
    start = U64_PAIR.pack(graph_id, 0)
    while (pair := txn.first(Table.SPOOL, start)) is not None and pair[0][:8] == start[:8]:
        yield pair
        start = pair[0][:8] + U64.pack(int.from_bytes(pair[0][8:]) + 1)


def unmade(head: RuleHead, growth: Growth) -> list[int]:
    """Tasks of each layer that are yet to be made; outputs are there, or were."""
    return [
        count - cursor - (len(outputs) - bisect_left(outputs, cursor))
        for count, cursor, outputs in zip(head.counts, growth.cursors, head.outputs, strict=True)
    ]


def unmade_by_group(txn: ReadTxn, graph_id: int) -> dict[int, int]:
    """Number of group -> tasks of a graph that are yet to be made, or carried out."""
    data = txn.get(Table.GROWTH, U64.pack(graph_id))
    if data is None:
        coming: Counter[int] = Counter()
        for _, run in spooled_runs(txn, graph_id):
            coming.update(decode_spooled(run).groups)
        return dict(coming)
    head = decode_rule_head(txn.get(Table.RULES, U64.pack(graph_id)) or b"")
    return dict(enumerate(unmade(head, decode_growth(data)), head.first_group))


def ruled_tasks(txn: ReadTxn, graph_id: int) -> int:
    """Tasks of a graph's rule that are no outputs: they have no index in the submission."""
    data = txn.get(Table.RULES, U64.pack(graph_id))
    if data is None:
        return 0
    head = decode_rule_head(data)
    return sum(head.counts) - sum(len(outputs) for outputs in head.outputs)


def dropped_by_group(txn: ReadTxn, graph_id: int) -> dict[int, int]:
    """Number of group -> tasks of a graph that were made from its rule and dropped: they count as released."""
    data = txn.get(Table.DROPPED, U64.pack(graph_id))
    if data is None:
        return {}
    head = decode_rule_head(txn.get(Table.RULES, U64.pack(graph_id)) or b"")
    return dict(enumerate(decode_dropped(data), head.first_group))


def stored_graph(txn: ReadTxn, submission: str) -> GraphRecord | None:
    """As it stands in the store."""
    number = find_graph(txn, submission)
    data = txn.get(Table.GRAPHS, U64.pack(number))
    return None if data is None else decode_graph(number, data)


def graph_status(txn: ReadTxn, submission: str) -> int | None:
    graph = stored_graph(txn, submission)
    return None if graph is None else graph.status


def tasks_added(txn: ReadTxn, submission: str) -> int:
    graph = stored_graph(txn, submission)
    return 0 if graph is None else graph.added


def is_open(txn: ReadTxn, submission: str) -> bool:
    return graph_status(txn, submission) == GraphStatus.OPEN


def is_sealed(txn: ReadTxn, submission: str) -> bool:
    return graph_status(txn, submission) in GraphStatus.COMPLETE
