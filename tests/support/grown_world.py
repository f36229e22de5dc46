"""An engine that makes the tasks of rules, and some rules: for tests of what is made, dropped, and made again."""

from __future__ import annotations

from taskdb import commands as c
from taskdb.engine.queries import status
from taskdb.model import Level, TaskFlag, TaskState
from taskdb.rules import LOOP, Layer, Rule
from taskdb.store.codec import decode_task
from taskdb.store.schema import U64, Table
from tests.support.engine_world import World


def grid(n: int) -> Rule:
    """x[i, j] -> y[j], over all i -> z, over all j."""
    return Rule(
        (n, n),
        [
            Layer(b"x", (1, 0), (), [b"x ", 1, 0]),
            Layer(b"y", (0,), (0,), [b"y ", 0, b":", [LOOP, 1, 1, [1, b","]]]),
            Layer(b"z", (), (1,), [b"z"]),
        ],
    )


def anomaly(n: int) -> Rule:
    """x[i, j] -> mean[j] -> x[i, j] - mean[j]."""
    x = Layer(b"x", (0, 1), (), [b"x"])
    return Rule((n, n), [x, Layer(b"m", (0,), (0,), [b"m"]), Layer(b"a", (0, 1), (0, 1), [b"a"])])


def tree(n: int, by: int) -> Rule:
    """A tree of sums, `by` at a time."""
    layers = [Layer(b"x", (0,), (), [b"x"])]
    factor = 1
    while factor < n:
        factor *= by
        layers.append(
            Layer(b"%d-" % factor, (0,), (len(layers) - 1,), [b"+", 0, b":", [LOOP, 0, factor // by, [0, b","]]], factors=(factor,))
        )
    return Rule((n,), layers)


class Grown(World):
    def __init__(self) -> None:
        super().__init__()
        self.order: list[bytes] = []
        self.forgotten: dict[str, int] = {}

    def note(self, result: c.Result) -> c.Result:
        for count in result.forgotten:
            self.forgotten[count.group] = self.forgotten.get(count.group, 0) + count.count
        return result

    def submit(self, name: str, rule: Rule, outputs: list[tuple[int, int]], want: bool = True, seal: bool = True) -> c.Result:
        command = c.AddRule(
            name,
            0,
            rule.write(),
            [f"{name}{i}" for i in range(len(rule.layers))],
            [],
            [layer for layer, _ in outputs],
            [element for _, element in outputs],
            [int(TaskFlag.WANTED) if want else 0] * len(outputs),
            [0] * len(outputs),
        )
        return self.note(self.do(c.BeginGraph(name, "client", 0.0, 0.0), command, *([c.SealGraph(name)] if seal else [])))

    def grow(self) -> bool:
        txn = self.store.write()
        result, more = self.engine.grow(txn)
        txn.commit()
        self.note(result)
        self.check()
        return more

    def carry(self, place: tuple[int, int]) -> None:
        txn = self.store.write()
        self.note(self.engine.carry(txn, place))
        txn.commit()
        self.check()

    def settle(self) -> None:
        while self.grow():
            pass
        for result in self.drain():
            self.note(result)

    def take(self, count: int) -> list[c.Lease]:
        self.settle()
        txn = self.store.write()
        leases, _ = self.engine.lease(txn, count, count)
        txn.commit()
        self.check()
        return leases

    def finish_ids(self, *ids: int) -> c.Result:
        return self.note(self.do(c.Report(ids, [Level.MEMORY] * len(ids), [8] * len(ids))))

    def run(self, threads: int = 3) -> None:
        """Hand out and finish, until nothing more can run."""
        while leases := self.take(threads):
            for lease in leases:
                self.order.append(lease.key)
                self.finish_ids(lease.id)
        self.settle()

    def tasks(self) -> int:
        with self.store.read() as txn:
            return status(txn).tasks

    def in_states(self, *states: TaskState) -> list[tuple[bytes, int]]:
        """(key, id) of all tasks in these states."""
        with self.store.read() as txn:
            found = [
                (txn.get(Table.NAMES, id_key) or b"", int.from_bytes(id_key)) for id_key, data in txn.scan(Table.TASKS) if data[0] in states
            ]
        return sorted(found)

    def info_of(self, task_id: int) -> tuple[int, ...]:
        """State, waiting_on, blocked_on, need, expected, wants."""
        with self.store.read() as txn:
            task = decode_task(task_id, txn.get(Table.TASKS, U64.pack(task_id)) or b"")
        return task.state, task.waiting_on, task.blocked_on, task.need, task.expected, task.wants
