"""Answers the scheduler may not have heard: kept, on disk with what they tell, until it says that it has.

Not kept are leases and releases, which follow from what the scheduler holds (`Engine.resync`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from taskdb import commands as c
from taskdb.store.base import ReadTxn, WriteTxn
from taskdb.store.schema import U64, Meta, Table, meta_key
from taskdb.wire import convert
from taskdb.wire import taskdb_pb2 as pb
from taskdb.wire.convert import Refused, SharedBlobs

#: Numbers left out when a daemon starts: those it told before, in a transaction that was lost, are not told again.
SKIPPED_AT_START = 2**32

Answer = tuple[c.Result, int, Sequence[Refused]]


class Answers:
    def __init__(self) -> None:
        self._next = 0

    def opened(self, txn: WriteTxn) -> None:
        """The store was opened, or a transaction was dropped."""
        key = meta_key(Meta.NEXT_ANSWER)
        stored = txn.get(Table.META, key)
        self._next = max(self._next, U64.unpack(stored)[0] if stored else 1) + SKIPPED_AT_START
        txn.put(Table.META, key, U64.pack(self._next))

    def keep(self, txn: WriteTxn, result: c.Result, seq: int, refused: Sequence[Refused] = ()) -> None:
        """Before it is pushed. It gets its number, if it is to be kept."""
        kept = c.Result(
            added=result.added,
            wants=result.wants,
            erred=result.erred,
            cancelled=result.cancelled,
            forgotten=result.forgotten,
            adopted=result.adopted,
            whole=result.whole,
        )
        if kept or refused:
            result.number = kept.number = self._next
            self._next += 1
            message = convert.result_to_proto(kept, seq, SharedBlobs(), refused)
            txn.put(Table.ANSWERS, U64.pack(kept.number), message.SerializeToString())

    def heard(self, txn: WriteTxn, number: int) -> None:
        """The scheduler has heard all up to this one."""
        while (first := txn.first(Table.ANSWERS)) is not None and U64.unpack(first[0])[0] <= number:
            txn.delete(Table.ANSWERS, first[0])

    def unheard(self, txn: ReadTxn, answered: int, last_seq: int, heard: int) -> Iterator[Answer]:
        """Those after number `heard`, in order; empty ones for batches from `answered` on of which nothing was kept."""
        seq = answered + 1
        for answer in self._kept(txn, heard):
            while seq < answer[1]:
                yield c.Result(), seq, ()
                seq += 1
            seq = max(seq, answer[1] + 1)
            yield answer
        for rest in range(seq, last_seq + 1):
            yield c.Result(), rest, ()

    def _kept(self, txn: ReadTxn, number: int) -> Iterator[Answer]:
        for _, data in txn.scan(Table.ANSWERS, U64.pack(number + 1)):
            message = pb.Result.FromString(data)
            result, refused = convert.result_from_proto(message, SharedBlobs())
            yield result, message.seq, refused


def merge(into: c.Result, more: c.Result) -> None:
    if more:
        into.added += more.added
        into.leases += more.leases
        into.release += more.release
        into.wants += more.wants
        into.erred += more.erred
        into.cancelled += more.cancelled
        into.forgotten += more.forgotten
        into.adopted += more.adopted
        into.whole += more.whole
