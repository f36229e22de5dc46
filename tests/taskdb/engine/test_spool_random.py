"""Graphs whose runs are spooled, beside others that share keys with them, with failures, losses, crashes, new schedulers and clients that
come and go, at random: every step keeps all rules, all that is wanted is computed in the end, and nothing is left."""

from __future__ import annotations

from collections import Counter

import pytest

from taskdb import commands as c
from taskdb.engine import hunger, spool
from taskdb.engine.engine import Engine
from taskdb.model import GraphFlag, Level, TaskFlag, TaskState
from taskdb.store.schema import Table
from tests.support.chance import CLIENTS, Chance, put_off
from tests.support.grown_world import grid


class Spools(Chance):
    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        #: What is still to be sent of each open submission.
        self.rest: dict[str, list[c.AddTasks]] = {}
        self.sent: dict[str, list[c.AddTasks]] = {}
        #: Runs that were spooled.
        self.spooled = 0

    def submit(self) -> None:
        """A graph in several runs: most keys are its own; some are others', and inputs are named as such."""
        chance, name = self.random, f"g{len(self.names)}"
        self.names.append(name)
        spooled = chance.random() < 0.8
        flags = chance.choice([0, 0, int(GraphFlag.RESENT)]) | (int(GraphFlag.SPOOLED) if spooled else 0)
        inputs = self.some(self.world.in_states(*TaskState), 2)[0] if chance.random() < 0.5 else []
        if self.keys and chance.random() < 0.3:
            inputs = list({*inputs, chance.choice(self.keys)})
        keys, deps = list(inputs), [[] for _ in inputs]
        for number in range(chance.randint(1, 20)):
            shared = self.keys and chance.random() < 0.05
            keys.append(chance.choice(self.keys) if shared else f"{name}.{number}".encode())
            before = range(max(0, len(deps) - 8), len(deps))
            deps.append(chance.sample(before, min(len(before), chance.randint(0, 3))))
        counts = Counter(dep for own in deps for dep in own)
        wanted = chance.choice([0.1, 0.3, 1.0])
        marks = [
            int(TaskFlag.EXTERNAL) if at < len(inputs) else int(TaskFlag.WANTED) if chance.random() < wanted or not counts[at] else 0
            for at in range(len(keys))
        ]
        runs, at = [], 0
        while at < len(keys):
            stop = len(inputs) if at < len(inputs) else min(len(keys), at + chance.randint(1, 5))
            own = range(at, stop)
            runs.append(
                c.AddTasks(
                    name,
                    at,
                    keys[at:stop],
                    [b"spec"] * (stop - at),
                    marks[at:stop],
                    [len(deps[i]) for i in own],
                    [dep for i in own for dep in deps[i]],
                    [counts[i] for i in own],
                    new_groups=[] if at else [name],
                )
            )
            at = stop
        self.keys += [key for key in keys if key not in self.keys]
        self.rest[name], self.sent[name] = runs, []
        self.world.note(self.world.do(c.BeginGraph(name, chance.choice(CLIENTS), float(len(self.names)), 0.0, flags=flags)))
        self.send(chance.randint(0, len(runs)))

    def send(self, count: int) -> None:
        """More of an open submission; all of it: it is sealed, sooner or later."""
        if not self.rest:
            return
        name = self.random.choice(list(self.rest))
        for run in self.rest[name][:count]:
            before = self.count(Table.SPOOL)
            result = self.world.note(self.world.do(run))
            assert not self.world.refused
            self.spooled += self.count(Table.SPOOL) > before
            (added,) = result.added
            if added.missing:
                del self.rest[name]
                return
            self.total[name] += len(run.keys) - len(added.known)
            self.sent[name].append(run)
        self.rest[name] = self.rest[name][count:]
        if not self.rest[name] and self.random.random() < 0.8:
            self.seal(name)

    def seal(self, name: str) -> None:
        del self.rest[name]
        self.world.note(self.world.do(c.SealGraph(name)))

    def say_again(self) -> None:
        """Its stream broke."""
        if self.rest:
            name = self.random.choice(list(self.rest))
            for run in self.sent[name]:
                (added,) = self.world.note(self.world.do(run)).added
                assert not self.world.refused
                assert len(added.ids) == len(run.keys)

    def count(self, table: Table) -> int:
        with self.world.store.read() as txn:
            return txn.count(table)

    def crash(self) -> None:
        """Leases of tasks that came in a transaction that was lost are told again by the scheduler, perhaps to a new daemon."""
        txn = self.world.store.write()
        self.world.engine.grow(txn)
        if self.keys and self.random.random() < 0.5:
            for place in self.world.engine.spooled(txn, [c.Want("", [self.random.choice(self.keys)])]):
                self.world.engine.carry(txn, place)
        leases, _ = self.world.engine.lease(txn, 2, 2)
        txn.abort()
        if self.random.random() < 0.5:
            self.world.engine = Engine()
            txn = self.world.store.write()
            self.world.engine.opened(txn)
            txn.commit()
        if leases:
            ids = [lease.id for lease in leases]
            if self.random.random() < 0.5:
                txn = self.world.store.write()
                self.world.note(self.world.engine.resync(txn, self.world.epoch, ids))
                txn.commit()
            self.world.note(self.world.do(c.Report(ids, [Level.HELD] * len(leases))))

    def step(self) -> None:
        world, chance = self.world, self.random
        processing, memory = world.in_states(TaskState.PROCESSING), world.in_states(TaskState.MEMORY)
        client, key = chance.choice(CLIENTS), chance.choice(self.keys)
        match chance.randrange(20):
            case 0 | 1 if len(self.names) < 6:
                self.submit()
            case 2:
                world.grow()
            case 3:
                self.lease()
            case 4 | 5 | 6 if processing:
                world.finish_ids(*self.some(processing, 4)[1])
            case 7 if memory or processing:
                ids = self.some(memory + processing, 5)[1]
                level = chance.choice([Level.OUT, Level.OUT, Level.RELEASED, Level.HELD])
                world.note(world.do(c.Report(ids, [level] * len(ids))))
            case 8 if processing and chance.random() < 0.3:
                world.note(world.do(c.Fail(chance.choice(processing)[1], b"payload", "no luck")))
            case 9:
                world.note(world.do(c.Retry([key])))
            case 10 if chance.random() < 0.3:
                self.rest.clear()
                self.take_over(key)
            case 11 if chance.random() < 0.5:
                world.note(world.do(c.Want(client, [key])))
            case 12 if chance.random() < 0.5:
                world.note(world.do(c.Unwant(client, [key])))
            case 13 if chance.random() < 0.3:
                world.note(world.do(c.Cancel(client, [key], chance.random() < 0.5)))
            case 14 if chance.random() < 0.2:
                world.note(world.do(c.DropClient(client)))
            case 15:
                self.crash()
            case 16:
                self.say_again()
            case 17:
                self.some_background()
            case 18 if chance.random() < 0.1:
                name = chance.choice(self.names)
                self.rest.pop(name, None)
                world.note(world.do(c.AbortGraph(name)))
            case _:
                self.send(2)

    def end(self) -> None:
        world, chance = self.world, self.random
        for name in list(self.rest):
            self.seal(name)
        if chance.random() < 0.3:
            world.note(world.do(*map(c.DropClient, CLIENTS)))
        if chance.random() < 0.3:
            rule = grid(2)
            world.submit("rule", rule, [(2, 0)])
            self.names.append("rule")
            self.total.update({f"rule{layer}": count for layer, count in enumerate(rule.counts)})
            assert self.count(Table.SPOOL) == 0
        self.compute_all()
        assert self.count(Table.SPOOL) == 0
        self.leave()
        self.nothing_is_left(Table.GRAPHS, Table.CLIENTS, Table.RUNS, Table.REDGES, Table.EDGES, Table.SPECS, Table.TODO)


def play(seed: int, monkeypatch: pytest.MonkeyPatch) -> Spools:
    monkeypatch.setattr(hunger, "GROW_QUEUED", 3)
    monkeypatch.setattr(spool, "SPOOL_TASKS_MAX", 25)
    if seed % 2:
        put_off(monkeypatch)
    chance = Spools(seed)
    chance.submit()
    for _ in range(100):
        chance.step()
    chance.end()
    return chance


@pytest.mark.parametrize("seed", range(40))
def test_anything_may_happen(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    chance = play(seed, monkeypatch)
    if seed == 0:
        assert chance.spooled > 3
