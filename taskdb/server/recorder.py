"""Writes the history: what became of tasks, and when, in blocks that are written with the commits that made it true.

Bounded: above `bytes_max` the oldest blocks go. A block that is not full is written again with the next commit. What a dropped transaction
held is dropped with it.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from taskdb.engine.moves import Moves
from taskdb.engine.reader import Reader
from taskdb.store.base import ReadTxn, WriteTxn
from taskdb.store.codec import NO_GROUP
from taskdb.store.history import Block, StoredBlock, encode_block
from taskdb.store.schema import U64, Meta, Table, meta_key

#: Moves of a full block: some milliseconds to pack at most, and written again at most so often.
BLOCK_MOVES = 1_024
#: Characters of a failed task's text that are kept.
TEXT_MAX = 400
#: Names of graphs and groups that are remembered.
NAMES_MAX = 20_000
#: Blocks removed by one commit: no more come in by one.
REMOVED_MAX = 16


class Recorder:
    """`moves`: what the engine gathers between two calls of `note`."""

    def __init__(self, bytes_max: int, clock: Callable[[], float] = time.time) -> None:
        self.moves = Moves()
        self._bytes_max = bytes_max
        self._clock = clock
        self._block = Block()
        #: Number of the block, 0: not known yet; and the bytes of it that are stored.
        self._number = 0
        self._stored_bytes = 0
        self._changed = False
        #: Names seen: with its last task a graph may be gone, too.
        self._graphs: dict[int, tuple[str, str, str, float]] = {}
        self._groups: dict[tuple[int, int], str] = {}
        #: Blocks that ended before this are to go; 0: none.
        self.forget_before = 0.0

    def note(self, txn: ReadTxn) -> None:
        """Take over what one call did: it happened now."""
        moves, block = self.moves, self._block
        if not moves.states and not moves.runs:
            moves.keys.clear()
            return
        self._changed = True
        if moves.states:
            ids, states, graphs, groups = zip(*moves.states)
            block.ids += ids
            block.states += states
            block.of_graph += graphs
            block.of_group += groups
            block.times += [self._clock()] * len(ids)
            self._name(txn, set(zip(graphs, groups)))
        block.keys.update(moves.keys)
        block.runs += moves.runs
        block.failures += [(task_id, text[:TEXT_MAX]) for task_id, text in moves.failures]
        moves.clear()

    def _name(self, txn: ReadTxn, parts: set[tuple[int, int]]) -> None:
        """So that the block can be read when graph and groups are gone."""
        block = self._block
        reader = Reader(txn)
        if len(self._graphs) + len(self._groups) > NAMES_MAX:
            self._graphs.clear()
            self._groups.clear()
        for graph, number in parts:
            if graph not in block.graphs:
                if (record := reader.graph(graph)) is not None:
                    self._graphs[graph] = (record.submission, record.client, record.label, record.submitted)
                if graph in self._graphs:
                    block.graphs[graph] = self._graphs[graph]
            if number != NO_GROUP and (graph, number) not in block.groups:
                if name := reader.group(graph, number):
                    self._groups[graph, number] = name
                if (graph, number) in self._groups:
                    block.groups[graph, number] = self._groups[graph, number]

    def write(self, txn: WriteTxn) -> None:
        """Before a commit. Raises StoreFull."""
        if not self._changed:
            return
        self._changed = False
        if not self._number:
            self._number = _last(txn) + 1
        data = encode_block(self._block)
        txn.put(Table.HISTORY, U64.pack(self._number), data)
        total = history_bytes(txn) + len(data) - self._stored_bytes
        self._stored_bytes = len(data)
        for _ in range(REMOVED_MAX):
            oldest = txn.first(Table.HISTORY)
            if total <= self._bytes_max or oldest is None or U64.unpack(oldest[0])[0] == self._number:
                break
            total -= len(oldest[1])
            txn.delete(Table.HISTORY, oldest[0])
        _set_bytes(txn, total)
        if len(self._block) >= BLOCK_MOVES:
            self._begin(self._number + 1)

    def _begin(self, number: int) -> None:
        self._block = Block()
        self._number = number
        self._stored_bytes = 0

    def step(self, txn: WriteTxn) -> bool:
        """Remove some blocks that ended before `forget_before`. True if there may be more."""
        if not self.forget_before:
            return False
        total = history_bytes(txn)
        for _ in range(REMOVED_MAX):
            oldest = txn.first(Table.HISTORY)
            if oldest is None or StoredBlock(oldest[1]).end >= self.forget_before:
                self.forget_before = 0.0
                break
            total -= len(oldest[1])
            txn.delete(Table.HISTORY, oldest[0])
            if U64.unpack(oldest[0])[0] == self._number:
                self._begin(0)
        _set_bytes(txn, total)
        return bool(self.forget_before)

    def dropped(self) -> None:
        """The transaction was dropped. What of the block was committed stays."""
        self.moves.clear()
        self._changed = False
        # What had no record yet may come to be another graph's number.
        self._graphs.clear()
        self._groups.clear()
        self._begin(0)


def history_bytes(txn: ReadTxn) -> int:
    """Bytes of all blocks."""
    data = txn.get(Table.META, meta_key(Meta.HISTORY_BYTES))
    return 0 if data is None else int(U64.unpack(data)[0])


def _set_bytes(txn: WriteTxn, total: int) -> None:
    txn.put(Table.META, meta_key(Meta.HISTORY_BYTES), U64.pack(max(0, total)))


def _last(txn: ReadTxn) -> int:
    """Number of the newest block; 0 if there is none."""
    low, high = 0, 2**63
    if txn.count(Table.HISTORY) == 0:
        return 0
    # By halves: the store only finds what comes first after a key.
    while low < high:
        middle = (low + high + 1) // 2
        if txn.first(Table.HISTORY, U64.pack(middle)) is None:
            high = middle - 1
        else:
            low = middle
    return low
