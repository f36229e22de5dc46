"""An engine on a memory store, in few words: for tests that say one rule each. Every call checks all rules afterwards."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from taskdb import commands as c
from taskdb.engine.engine import Engine, Refused
from taskdb.engine.invariants import violations
from taskdb.engine.queries import get_tasks
from taskdb.engine.reader import TaskInfo
from taskdb.engine.refs import find_key
from taskdb.model import Level, TaskFlag
from taskdb.store.memory_store import MemoryStore

#: key -> keys it depends on
Graph = dict[str, Sequence[str]]


class World:
    def __init__(self, free_bytes: Callable[[], int] | None = None) -> None:
        self.store = MemoryStore()
        self.engine = Engine(free_bytes)
        self.begin_epoch()
        self.refused: list[Refused] = []
        #: What the last `lease` said: whether there may be more.
        self.more = False

    def begin_epoch(self) -> c.Result:
        """Another scheduler takes over."""
        txn = self.store.write()
        self.epoch = self.engine.begin_epoch(txn, "scheduler")
        result, _ = self.engine.step(txn)
        txn.commit()
        self.seq = 0
        self.check()
        return result

    def do(self, *commands: c.Command) -> c.Result:
        txn = self.store.write()
        self.seq += 1
        result, self.refused = self.engine.apply(txn, self.epoch, self.seq, commands)
        txn.commit()
        self.check()
        return result

    def check(self) -> None:
        with self.store.read() as txn:
            found = list(violations(txn))
            assert found == []

    def drain(self, items_max: int = 500) -> list[c.Result]:
        results = []
        more = True
        while more:
            txn = self.store.write()
            result, more = self.engine.step(txn, items_max)
            txn.commit()
            self.check()
            results.append(result)
        return results

    def add(self, name: str, graph: Graph, want: Sequence[str] = (), seal: bool = True, **flags: TaskFlag) -> c.Result:
        """Submit a graph in one run; `flags` by key."""
        index = {key: i for i, key in enumerate(graph)}
        add = c.AddTasks(
            name,
            0,
            [key.encode() for key in graph],
            [b"spec " + key.encode() for key in graph],
            [(TaskFlag.WANTED if key in want else 0) | flags.get(key, 0) for key in graph],
            [len(deps) for deps in graph.values()],
            [index[dep] for deps in graph.values() for dep in deps],
            [sum(key in deps for deps in graph.values()) for key in graph],
            new_groups=["group"],
        )
        commands: list[c.Command] = [c.BeginGraph(name, "client", 0.0, 0.0), add]
        return self.do(*commands, c.SealGraph(name)) if seal else self.do(*commands)

    def id(self, key: str) -> int:
        with self.store.read() as txn:
            return find_key(txn, key.encode())

    def info(self, key: str) -> TaskInfo | None:
        with self.store.read() as txn:
            stored = get_tasks(txn, [key.encode()])[0]
            return stored.info if stored else None

    def state(self, key: str) -> str:
        info = self.info(key)
        return info.state if info else "forgotten"

    def states(self, keys: str) -> list[str]:
        return [self.state(key) for key in keys]

    def lease(self, ready: int, total: int) -> list[str]:
        txn = self.store.write()
        leases, self.more = self.engine.lease(txn, ready, total)
        txn.commit()
        self.check()
        return [lease.key.decode() for lease in leases]

    def adopt(self, epoch: int, **levels: Level) -> dict[str, c.Adopted]:
        """A worker of an earlier epoch brings what it has; levels by key."""
        result = self.do(c.Adopt(epoch, [key.encode() for key in levels], list(levels.values())))
        return {answer.key.decode(): answer for answer in result.adopted}

    def report(self, level: Level, *keys: str) -> c.Result:
        return self.do(c.Report([self.id(key) for key in keys], [level] * len(keys), [8] * len(keys)))

    def finish(self, *keys: str) -> c.Result:
        """Report MEMORY one after another."""
        return self.report(Level.MEMORY, *keys)
