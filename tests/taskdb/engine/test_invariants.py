"""A rule that never complains checks nothing: each must find the damage made for it."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from taskdb.engine.invariants import RULES, violations
from taskdb.engine.todo import Todo
from taskdb.model import TaskFlag
from taskdb.store.base import WriteTxn
from taskdb.store.codec import PARKED, Growth, decode_task, encode_dropped, encode_growth, encode_task
from taskdb.store.schema import TODO_KEY, U64, U64_PAIR, Meta, Table, meta_key
from taskdb.store.spooled import SpooledRun, encode_spooled, pack_columns
from tests.support.engine_world import World

ONE, TWO = U64.pack(1), U64.pack(2)


def change(**values: int) -> Callable[[WriteTxn], None]:
    def damage(txn: WriteTxn) -> None:
        task = decode_task(1, txn.get(Table.TASKS, ONE) or b"")
        for name, value in values.items():
            setattr(task, name, value)
        txn.put(Table.TASKS, ONE, encode_task(task))

    return damage


def remove_first(table: Table) -> Callable[[WriteTxn], None]:
    def damage(txn: WriteTxn) -> None:
        pair = txn.first(table)
        assert pair is not None
        txn.delete(table, pair[0])

    return damage


def put(table: Table, key: bytes, value: bytes) -> Callable[[WriteTxn], None]:
    return lambda txn: txn.put(table, key, value)


@pytest.mark.parametrize(
    ("rule", "damage"),
    [
        ("links", put(Table.EDGES, ONE, TWO)),
        ("links", remove_first(Table.REDGES)),
        ("counters", change(waiting_on=1)),
        ("counters", change(blocked_on=1)),
        ("counters", change(need=7)),
        ("counters", change(links=7)),
        ("counters", change(wants=7)),
        ("states", change(state=5)),
        ("states", change(state=1)),
        ("queues", remove_first(Table.READY)),
        ("queues", change(state=4)),
        ("holds", put(Table.HOLDS, ONE, ONE)),
        ("holds", change(state=3)),
        ("wants", remove_first(Table.WANTS)),
        ("wants", remove_first(Table.CLIENTS)),
        ("wants", remove_first(Table.CLIENT_NAMES)),
        ("keys", remove_first(Table.KEYS)),
        ("keys", remove_first(Table.NAMES)),
        ("errors", put(Table.ERRORS, ONE, bytes(12))),
        ("orphans", put(Table.SPECS, U64.pack(99), b"")),
        ("orphans", put(Table.RUNS, U64_PAIR.pack(99, 1), bytes(16))),
        ("graphs", change(expected=3)),
        ("graphs", change(state=6)),
        ("residents", change(flags=int(TaskFlag.DATA))),
        ("growths", put(Table.GROWTH, U64.pack(99), encode_growth(Growth(0, 1, [0])))),
        ("dropped", put(Table.DROPPED, ONE, encode_dropped([1]))),
        ("spooled", put(Table.SPOOL, U64_PAIR.pack(1, 3), encode_spooled(SpooledRun(9, {}, pack_columns([[]] * 10))))),
    ],
)
def test_damage_is_found(rule: str, damage: Callable[[WriteTxn], None]) -> None:
    world = World()
    world.add("g", {"a": [], "b": ["a"], "c": []}, want="bc")
    txn = world.store.write()
    damage(txn)
    txn.commit()
    with world.store.read() as snapshot:
        assert rule in {words.split(":")[0] for words in violations(snapshot)}


def delete(table: Table, key: bytes) -> Callable[[WriteTxn], None]:
    return lambda txn: txn.delete(table, key) and None


def park(*, orphan: bool) -> Callable[[WriteTxn], None]:
    """Task 2 is parked: because its dependency is an orphan, or though this scheduler has it."""

    def damage(txn: WriteTxn) -> None:
        task = decode_task(2, txn.get(Table.TASKS, TWO) or b"")
        txn.delete(Table.READY, task.rank + TWO)
        task.flags |= PARKED
        txn.put(Table.TASKS, TWO, encode_task(task))
        if not orphan:
            txn.put(Table.HOLDS, ONE, U64.pack(2))

    return damage


GIVE_BACK = TODO_KEY.pack(Todo.GIVE_BACK, 2, 0)


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (park(orphan=True), ""),
        (put(Table.TODO, GIVE_BACK, bytes(8)), ""),
        (delete(Table.META, meta_key(Meta.RECOVERING)), "held by epoch 1, not 2"),
        (put(Table.HOLDS, ONE, U64.pack(3)), "held by epoch 3, not 2"),
        (park(orphan=False), "parked for nothing"),
        (delete(Table.HOLDS, ONE), "not held, though"),
        (put(Table.HOLDS, TWO, U64.pack(2)), "neither PROCESSING nor in MEMORY"),
        (put(Table.TODO, TODO_KEY.pack(Todo.GIVE_BACK, 1, 0), bytes(8)), "given back, in epoch 2"),
    ],
)
def test_damage_to_what_is_held_is_found(damage: Callable[[WriteTxn], None], words: str) -> None:
    """In a recovery: task 1 is in memory with the scheduler before, and task 2 needs it. (Without words: no damage.)"""
    world = World()
    world.add("g", {"a": [], "b": ["a"]}, want="b")
    world.lease(1, 1)
    world.finish("a")
    world.begin_epoch()
    txn = world.store.write()
    damage(txn)
    txn.commit()
    with world.store.read() as snapshot:
        found = [said for said in violations(snapshot) if said.startswith("holds: ")]
    assert bool(found) == bool(words)
    assert all(words in said for said in found[:1])


def test_every_rule_has_damage() -> None:
    marks = test_damage_is_found.pytestmark  # type: ignore[attr-defined]
    assert {case[0] for case in marks[0].args[1]} == {rule.__name__ for rule in RULES}
