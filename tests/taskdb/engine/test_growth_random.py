"""Rules, and other graphs that share keys with them, with failures, losses, crashes, new schedulers and clients that come and go, at
random: every step keeps all rules, all that is wanted is computed in the end, and nothing is left."""

from __future__ import annotations

import pytest

from taskdb import commands as c
from taskdb.engine import growth, hunger
from taskdb.model import Level, TaskFlag, TaskState
from taskdb.rules import Rule
from taskdb.store.schema import Table
from tests.support.chance import CLIENTS, Chance, put_off
from tests.support.grown_world import anomaly, grid, tree


class Rules(Chance):
    def submit_rule(self) -> None:
        n, chance = self.random.randint(1, 5), self.random
        rule = chance.choice([grid(n), anomaly(n), tree(chance.randint(1, 30), chance.randint(2, 5))])
        outputs = self._outputs(rule)
        name = self._name()
        added = self.world.submit(name, rule, outputs, seal=False).added[0]
        assert not self.world.refused
        if chance.random() < 0.8:
            self.world.note(self.world.do(c.SealGraph(name)))
        self.total.update({f"{name}{layer}": count for layer, count in enumerate(rule.counts)})
        self.total.subtract(f"{name}{outputs[i][0]}" for i in added.known)
        self.keys += [rule.key(layer, rule.indices(layer, element)) for layer, element in outputs]

    def _outputs(self, rule: Rule) -> list[tuple[int, int]]:
        last = len(rule.layers) - 1
        places = [(layer, element) for layer, count in enumerate(rule.counts[:last]) for element in range(count)]
        some = self.random.sample(places, self.random.randint(0, len(places) // 2)) if self.random.random() < 0.5 else []
        return sorted(some) + [(last, element) for element in range(rule.counts[last])]

    def submit_graph(self) -> None:
        """Tasks that depend on some that are there, of whatever graph."""
        keys, _ = self.some(self.world.in_states(*TaskState), 3)
        name = self._name()
        new = [name.encode(), *self.random.sample([b"x\0", b"x\1\1", b"y\0", b"2-\0"], 1)]
        add = c.AddTasks(
            name,
            0,
            keys + new,
            [b""] * len(keys) + [b"spec"] * len(new),
            [int(TaskFlag.EXTERNAL)] * len(keys) + [int(TaskFlag.WANTED)] * len(new),
            [0] * len(keys) + [len(keys)] + [0],
            list(range(len(keys))),
            [1] * len(keys) + [0] * len(new),
            new_groups=[name],
        )
        result = self.world.note(self.world.do(c.BeginGraph(name, "other", 0.0, 0.0), add, c.SealGraph(name)))
        if not result.added[0].missing:
            self.total[name] += len(keys + new) - len(result.added[0].known)
            self.keys += new

    def _name(self) -> str:
        self.names.append(f"g{len(self.names)}")
        return self.names[-1]

    def crash(self) -> None:
        """Leases of tasks made in a transaction that was lost are told again by the scheduler."""
        txn = self.world.store.write()
        self.world.engine.grow(txn)
        leases, _ = self.world.engine.lease(txn, 2, 2)
        txn.abort()
        if leases:
            self.world.note(self.world.do(c.Report([lease.id for lease in leases], [Level.HELD] * len(leases))))

    def step(self) -> None:
        world, chance = self.world, self.random
        processing, memory = world.in_states(TaskState.PROCESSING), world.in_states(TaskState.MEMORY)
        match chance.randrange(18):
            case 0 if len(self.names) < 4:
                self.submit_rule()
            case 1 if len(self.names) < 4 and world.tasks():
                self.submit_graph()
            case 2 | 3:
                world.take(chance.randint(1, 5))
            case 4:
                world.grow()
                self.lease()
            case 5 | 6 | 7 | 8 if processing:
                world.finish_ids(*self.some(processing, 4)[1])
            case 9 | 10 if memory or processing:
                ids = self.some(memory + processing, 5)[1]
                level = chance.choice([Level.OUT, Level.OUT, Level.OUT, Level.RELEASED, Level.HELD])
                world.note(world.do(c.Report(ids, [level] * len(ids))))
            case 11 if processing and chance.random() < 0.3:
                world.note(world.do(c.Fail(chance.choice(processing)[1], b"payload", "no luck")))
            case 11 if memory and processing and chance.random() < 0.3:
                world.note(world.do(c.Blame(chance.choice(memory)[1], chance.choice(processing)[1])))
            case 12:
                world.note(world.do(c.Retry([chance.choice(self.keys)])))
            case 13 if chance.random() < 0.3:
                self.take_over()
            case 14:
                world.note(world.do(c.Want(chance.choice(CLIENTS), [chance.choice(self.keys)])))
            case 15 if chance.random() < 0.5:
                world.note(world.do(c.Unwant(chance.choice(CLIENTS), [chance.choice(self.keys)])))
            case 15 if chance.random() < 0.3:
                world.note(world.do(c.Cancel(chance.choice(CLIENTS), [chance.choice(self.keys)], chance.random() < 0.5)))
            case 16:
                self.crash()
            case 17:
                self.some_background()

    def end(self) -> None:
        world = self.world
        world.note(world.do(*(c.SealGraph(name) for name in self.names)))
        world.refused.clear()
        self.compute_all()
        self.leave()
        if self.random.random() < 0.5:
            world.note(world.do(*map(c.AbortGraph, self.names)))
            world.settle()
        self.nothing_is_left(Table.GRAPHS, Table.RULES, Table.GROWTH, Table.DROPPED, Table.RUNS, Table.REDGES, Table.EDGES, Table.TODO)


@pytest.mark.parametrize("seed", range(40))
def test_anything_may_happen(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(growth, "GROW_TASKS", 5)
    monkeypatch.setattr(hunger, "GROW_QUEUED", 3)
    if seed % 2:
        put_off(monkeypatch)
    chance = Rules(seed)
    chance.submit_rule()
    for _ in range(80):
        chance.step()
    chance.end()
