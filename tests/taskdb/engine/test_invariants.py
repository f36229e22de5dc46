"""A rule that never complains checks nothing: each must find the damage made for it."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from taskdb.engine.invariants import RULES, violations
from taskdb.model import TaskFlag
from taskdb.store.base import WriteTxn
from taskdb.store.codec import decode_task, encode_task
from taskdb.store.schema import U64, U64_PAIR, Table
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


def test_every_rule_has_damage() -> None:
    marks = test_damage_is_found.pytestmark  # type: ignore[attr-defined]
    assert {case[0] for case in marks[0].args[1]} == {rule.__name__ for rule in RULES}
