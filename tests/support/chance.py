"""What random tests of graphs that come as they are needed have in common."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from taskdb import commands as c
from taskdb.engine import engine
from taskdb.model import Level, TaskState
from taskdb.store.base import ReadTxn
from taskdb.store.schema import U64_PAIR, Table
from tests.support.grown_world import Grown

CLIENTS = ("client", "other")


def put_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is put off stays put off."""
    monkeypatch.setattr(engine, "STEP_ITEMS", 1)
    monkeypatch.setattr(engine, "STEP_ITEMS_BATCH", 1)
    monkeypatch.setattr(engine, "STEP_ITEMS_PER_COMMAND_ITEM", 0)


class Chance:
    """A world, and what was submitted to it."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.world = Grown()
        #: Tasks by group that came new with a submission.
        self.total: Counter[str] = Counter()
        self.names: list[str] = []
        #: Keys that may be named.
        self.keys: list[bytes] = []

    def some(self, items: list[tuple[bytes, int]], most: int) -> tuple[list[bytes], list[int]]:
        """Keys and ids of some tasks, at least one if there is any."""
        some = self.random.sample(items, min(len(items), self.random.randint(1, most)))
        return [key for key, _ in some], [task_id for _, task_id in some]

    def lease(self) -> None:
        """Without doing all that is put off before."""
        txn = self.world.store.write()
        self.world.engine.lease(txn, 2, self.random.randint(1, 5))
        txn.commit()
        self.world.check()

    def some_background(self) -> None:
        txn = self.world.store.write()
        self.world.note(self.world.engine.step(txn, self.random.randint(1, 9))[0])
        txn.commit()
        self.world.check()

    def take_over(self, *others: bytes) -> None:
        """Another scheduler, to which workers bring some of what the one before had; and perhaps `others`."""
        world = self.world
        held = world.in_states(TaskState.PROCESSING, TaskState.MEMORY)
        world.note(world.begin_epoch())
        if held:
            keys, _ = self.some(held, len(held))
            keys = list(dict.fromkeys([*keys, *others]))
            world.note(world.do(c.Adopt(world.epoch - 1, keys, [self.random.choice([Level.MEMORY, Level.HELD]) for _ in keys])))
        world.note(world.do(c.EndRecovery()))

    def compute_all(self) -> None:
        """All that is wanted is computed, or has failed, and a retry helps."""
        world = self.world
        for _ in range(2):
            world.finish_ids(*(task_id for _, task_id in world.in_states(TaskState.PROCESSING)))
            world.run()
            world.note(world.do(c.Retry(self.keys)))
            world.settle()
        world.run()
        with world.store.read() as txn:
            assert _wanted(txn) <= {task_id for _, task_id in world.in_states(TaskState.MEMORY)}

    def leave(self) -> None:
        """Nobody wants anything any more."""
        self.world.note(self.world.do(*map(c.DropClient, CLIENTS)))
        self.world.settle()

    def nothing_is_left(self, *tables: Table) -> None:
        assert self.world.tasks() == 0
        with self.world.store.read() as txn:
            assert [table for table in tables if txn.count(table)] == []
        assert self.world.forgotten == {group: count for group, count in self.total.items() if count}


def _wanted(txn: ReadTxn) -> set[int]:
    return {U64_PAIR.unpack(key)[1] for key, _ in txn.scan(Table.WANTS)}
