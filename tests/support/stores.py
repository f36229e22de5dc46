"""Stores on disk with something of everything in them, as an earlier cluster may have left them."""

from __future__ import annotations

from pathlib import Path
from struct import pack

import msgpack

from taskdb import commands as c
from taskdb.engine.engine import Engine
from taskdb.engine.refs import find_key
from taskdb.model import Level, TaskFlag
from taskdb.store.lmdb_store import LmdbStore

LOADS = 4


def key(*parts: str | int) -> bytes:
    packed: bytes = msgpack.packb(parts if len(parts) > 1 else parts[0])
    return packed


class Stored:
    """An engine on an LMDB store, one transaction a call."""

    def __init__(self, folder: Path, *, sync: bool = False):
        self.store = LmdbStore(folder, sync=sync)
        self.engine = Engine()
        self.seq = 0
        txn = self.store.write()
        self.epoch = self.engine.begin_epoch(txn, "scheduler-1")
        txn.commit()

    def do(self, *commands: c.Command) -> c.Result:
        self.seq += 1
        txn = self.store.write()
        result, refused = self.engine.apply(txn, self.epoch, self.seq, commands)
        txn.commit()
        assert refused == []
        return result

    def ids(self, *keys: bytes) -> list[int]:
        with self.store.read() as txn:
            return [find_key(txn, packed) for packed in keys]

    def report(self, level: Level, *keys: bytes) -> None:
        self.do(c.Report(self.ids(*keys), [level] * len(keys), [8] * len(keys)))

    def lease(self, count: int) -> list[bytes]:
        txn = self.store.write()
        leases, _ = self.engine.lease(txn, count, count)
        txn.commit()
        return [lease.key for lease in leases]

    def step(self) -> None:
        more = True
        while more:
            txn = self.store.write()
            _, more = self.engine.step(txn)
            txn.commit()

    def close(self) -> None:
        self.store.close()


def crowd(stored: Stored, count: int, name: str = "crowd") -> None:
    """`count` independent tasks that are wanted, in a submission of their own."""
    keys = [key(name, i) for i in range(count)]
    add = c.AddTasks(name, 0, keys, [b"spec"] * count, [int(TaskFlag.WANTED)] * count, new_groups=[name])
    stored.do(c.BeginGraph(name, name, 0.0, 0.0), add, c.SealGraph(name))


def abandoned(folder: Path) -> None:
    """What a cluster leaves that dies all at once: tasks in every state, data, an open submission, and what else a scheduler keeps.

    "total" is the sum of "inc" 0 to 3, each made from a "load". inc 0 is done, and so its load was let go; load 1 is done, load 2 begun.
    "bad" has failed. "use" needs "data", which was scattered. An open submission has brought two tasks, of which one was begun.
    """
    stored = Stored(folder)
    loads, incs = [key("load-1a2b", i) for i in range(LOADS)], [key("inc-1a2b", i) for i in range(LOADS)]
    total = key("total")
    sums = c.AddTasks(
        "sums",
        0,
        [*loads, *incs, total],
        [b"spec"] * (2 * LOADS + 1),
        [0] * 2 * LOADS + [int(TaskFlag.WANTED)],
        [0] * LOADS + [1] * LOADS + [LOADS],
        [*range(LOADS), *range(LOADS, 2 * LOADS)],
        [1] * 2 * LOADS + [0],
        groups=[0] * LOADS + [1] * LOADS + [2],
        new_groups=["load-1a2b", "inc-1a2b", "total"],
    )
    stored.do(
        c.BeginGraph("sums", "alice", 0.0, 0.0),
        sums,
        c.SealGraph("sums"),
        c.Keep([c.DURATIONS + b"load", c.DURATIONS + b"inc", b"datasets\0x"], [pack(">d", 2.0), pack(">d", 0.5), b"any"]),
    )
    assert stored.lease(3) == loads[:3]
    stored.report(Level.MEMORY, *loads[:2])
    stored.report(Level.HELD, incs[0])
    stored.report(Level.MEMORY, incs[0])
    wanted = int(TaskFlag.WANTED)
    data = int(TaskFlag.DATA | TaskFlag.HELD)
    stored.do(
        c.BeginGraph("uses", "bob", 1.0, 0.0),
        c.AddTasks("uses", 0, [key("data"), key("use")], [b"", b"spec"], [data, wanted], [0, 1], [0], [1, 0]),
        c.SealGraph("uses"),
        c.BeginGraph("fails", "alice", 2.0, 0.0),
        c.AddTasks("fails", 0, [key("bad")], [b"spec"], [wanted | int(TaskFlag.HELD)]),
        c.SealGraph("fails"),
    )
    stored.report(Level.MEMORY, key("data"))
    (bad,) = stored.ids(key("bad"))
    stored.do(c.Report([bad], [Level.ERRED]), c.Fail(bad, b"payload", "ValueError: no"))
    stored.do(
        c.BeginGraph("open", "carol", 3.0, 0.0),
        c.AddTasks("open", 0, [key("half", 0), key("half", 1)], [b"spec"] * 2, [int(TaskFlag.HELD), 0], dependent_counts=[1, 1]),
    )
    stored.step()
    stored.close()
