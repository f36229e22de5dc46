"""Where the keys of spooled runs are: in memory, as a copy of what Table.SPOOL says."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from taskdb.store.base import ReadTxn, WriteTxn
from taskdb.store.schema import U64, U64_PAIR, Meta, Table, digest, meta_key
from taskdb.store.spooled import SpooledRun, decode_spooled, encode_spooled

#: (graph, first index)
Place = tuple[int, int]

_CHANGES = meta_key(Meta.SPOOL_CHANGES)


class SpooledKeys:
    """Every change of the table comes through here. A transaction that is dropped takes its changes with it: so both count them."""

    def __init__(self) -> None:
        self._changes = 0
        self._by_digest: dict[bytes, Place] = {}
        #: First id and number of tasks of each run.
        self._runs: dict[Place, tuple[int, int]] = {}
        self.tasks = 0

    def attend(self, txn: ReadTxn) -> None:
        """Be what this transaction sees. Reads one record, unless it has to read all."""
        data = txn.get(Table.META, _CHANGES)
        changes = 0 if data is None else int(U64.unpack(data)[0])
        if changes == self._changes:
            return
        self._by_digest.clear()
        self._runs.clear()
        self.tasks = 0
        for key, value in txn.scan(Table.SPOOL):
            run = decode_spooled(value)
            graph_id, first_index = U64_PAIR.unpack(key)
            self._note((graph_id, first_index), run.first_id, [digest(name) for name in run.columns()[0]])
        self._changes = changes

    def _note(self, place: Place, first_id: int, digests: Sequence[bytes]) -> None:
        self._by_digest.update(dict.fromkeys(digests, place))
        self._runs[place] = first_id, len(digests)
        self.tasks += len(digests)

    def _count(self, txn: WriteTxn) -> None:
        self._changes += 1
        txn.put(Table.META, _CHANGES, U64.pack(self._changes))

    def add(self, txn: WriteTxn, place: Place, run: SpooledRun, digests: Sequence[bytes]) -> None:
        self._count(txn)
        self._note(place, run.first_id, digests)
        txn.put(Table.SPOOL, U64_PAIR.pack(*place), encode_spooled(run))

    def remove(self, txn: WriteTxn, place: Place, keys: Iterable[bytes]) -> None:
        self._count(txn)
        for key in keys:
            self._by_digest.pop(digest(key), None)
        self.tasks -= self._runs.pop(place)[1]
        txn.delete(Table.SPOOL, U64_PAIR.pack(*place))

    def place_of(self, key_digest: bytes) -> Place | None:
        """Of a key, as far as its digest tells."""
        return self._by_digest.get(key_digest)

    def place_of_id(self, task_id: int) -> Place | None:
        for place, (first_id, count) in self._runs.items():
            if first_id <= task_id < first_id + count:
                return place
        return None
