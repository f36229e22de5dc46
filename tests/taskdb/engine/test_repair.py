"""Recovery without a scheduler: what it says is what happens, however often it is interrupted; and entries of indexes come back."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from struct import pack

import pytest

from taskdb.commands import DURATIONS, BeginGraph, DropClient, EndRecovery, Keep
from taskdb.engine import repair
from taskdb.engine.engine import Engine
from taskdb.engine.indexes import faults
from taskdb.engine.invariants import violations
from taskdb.engine.recovery import clients, kept
from taskdb.engine.repair import Outcome, Survey, duration, durations, recover
from taskdb.errors import InvariantBroken
from taskdb.model import Level
from taskdb.store.base import WriteTxn
from taskdb.store.lmdb_store import LmdbStore
from taskdb.store.schema import U64, Meta, Table, meta_key
from tests.support.stores import Stored, abandoned, crowd, key


@pytest.fixture
def store(tmp_path: Path) -> Iterator[LmdbStore]:
    abandoned(tmp_path)
    store = LmdbStore(tmp_path, sync=False)
    yield store
    store.close()


def run(store: LmdbStore) -> Outcome:
    def turn(txn: WriteTxn) -> WriteTxn:
        txn.commit()
        return store.write()

    txn, outcome = recover(Engine(), store.write(), turn, lambda items: None)
    txn.commit()
    with store.read() as snapshot:
        assert list(violations(snapshot)) == []
    return outcome


def states(store: LmdbStore) -> dict[bytes, int]:
    with store.read() as txn:
        survey = Survey(txn)
        names = {int.from_bytes(task): name for task, name in txn.scan(Table.NAMES)}
        return dict(zip((names[task] for task in survey.ids.tolist()), survey.tasks["state"].tolist()))


def numbers(outcome: Outcome) -> dict[str, object]:
    return {
        name: getattr(outcome, name)
        for name in Outcome.__slots__
        if name not in ("before", "after", "epoch", "cost", "changed") and getattr(outcome, name)
    }


RIGHT = {
    "unfinished": 6,
    "begun": 1,
    "lost_results": 2,
    "released_inputs": 1,
    "lost_data": 1,
    "cancelled": 1,
    "dropped": 2,
}


def test_what_is_lost_runs_again_and_what_is_wanted_stays_wanted(store: LmdbStore) -> None:
    outcome = run(store)
    assert outcome.changed
    assert numbers(outcome) == RIGHT
    assert outcome.to_run == 9
    loads, incs = ([key(name, i) for i in range(4)] for name in ("load-1a2b", "inc-1a2b"))
    assert states(store) == {**dict.fromkeys(loads, 2), **dict.fromkeys(incs, 1), key("total"): 1, key("bad"): 6}
    assert (outcome.cost.seconds, outcome.cost.known, outcome.cost.unknown) == (4 * 2.0 + 4 * 0.5, 8, 1)
    assert outcome.cost.groups == [("load-1a2b", 4, 8.0), ("inc-1a2b", 4, 2.0), ("total", 1, None)]
    with store.read() as txn:
        assert txn.count(Table.HOLDS) == txn.count(Table.TODO) == 0
        assert txn.get(Table.META, meta_key(Meta.RECOVERING)) is None
        assert txn.get(Table.META, meta_key(Meta.EPOCH)) == U64.pack(outcome.epoch) == U64.pack(2)
        assert list(clients(txn)) == ["alice"]
        assert dict(kept(txn, b"datasets")) == {b"datasets\0x": b"any"}


def test_a_second_time_there_is_nothing_to_do(store: LmdbStore) -> None:
    run(store)
    before = states(store)
    outcome = run(store)
    assert not outcome.changed
    assert outcome.epoch == 2
    assert numbers(outcome) == {"unfinished": 9}
    assert states(store) == before


def test_a_scheduler_comes_to_the_same(tmp_path: Path) -> None:
    """What `recover` leaves is what a scheduler leaves that nobody came back to."""
    found = []
    for name in ("by command", "by scheduler"):
        abandoned(tmp_path / name)
        store = LmdbStore(tmp_path / name, sync=False)
        if name == "by command":
            run(store)
        else:
            engine, txn = Engine(), store.write()
            epoch = engine.begin_epoch(txn, "scheduler-2")
            engine.apply(txn, epoch, 1, [EndRecovery()])
            while engine.step(txn)[1]:
                pass
            txn.commit()
        found.append(states(store))
        store.close()
    assert found[0] == found[1]


class Interrupted(Exception):
    pass


@pytest.mark.parametrize("items", [1, 3])
def test_interrupted_anywhere_it_goes_on_where_it_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, items: int) -> None:
    """Each time two transactions are committed, and the third is not."""
    monkeypatch.setattr(repair, "RECOVER_STEP_ITEMS", items)
    abandoned(tmp_path / "at once")
    store = LmdbStore(tmp_path / "at once", sync=False)
    run(store)
    right = states(store)
    store.close()
    abandoned(tmp_path / "in parts")
    done = False
    for _ in range(200):
        store = LmdbStore(tmp_path / "in parts", sync=False)
        turns = 0

        def turn(txn: WriteTxn, store: LmdbStore = store) -> WriteTxn:
            nonlocal turns
            turns += 1
            if turns > 2:
                raise Interrupted
            txn.commit()
            return store.write()

        try:
            txn, _ = recover(Engine(), store.write(), turn, lambda count: None)
            txn.commit()
            done = True
        except Interrupted:
            pass
        store.close()
        store = LmdbStore(tmp_path / "in parts", sync=False)
        with store.read() as snapshot:
            assert list(violations(snapshot)) == []
        if done:
            break
        store.close()
    assert done
    assert states(store) == right
    store.close()


# ----------------------------------------------------------------------------------------------------------- indexes


def remove_all(table: Table) -> Callable[[WriteTxn], None]:
    def damage(txn: WriteTxn) -> None:
        for name, _ in list(txn.scan(table)):
            txn.delete(table, name)

    return damage


def add(table: Table, name: bytes, value: bytes) -> Callable[[WriteTxn], None]:
    return lambda txn: txn.put(table, name, value)


def mislead(txn: WriteTxn) -> None:
    """Two keys lead to each other's task."""
    (a, to_a), (b, to_b) = list(txn.scan(Table.KEYS))[:2]
    txn.put(Table.KEYS, a, to_b)
    txn.put(Table.KEYS, b, to_a)


@pytest.mark.parametrize(
    "damage",
    [
        remove_all(Table.HOLDS),
        remove_all(Table.READY),
        remove_all(Table.AHEAD),
        remove_all(Table.KEYS),
        remove_all(Table.WANTED_BY),
        add(Table.HOLDS, U64.pack(4), U64.pack(1)),
        add(Table.HOLDS, U64.pack(99), U64.pack(1)),
        add(Table.READY, bytes(24) + U64.pack(4), b""),
        add(Table.AHEAD, bytes(24) + U64.pack(99), b""),
        add(Table.KEYS, bytes(16), U64.pack(1)),
        add(Table.WANTED_BY, U64.pack(1) * 2, b""),
        mislead,
    ],
)
def test_indexes_come_back(store: LmdbStore, damage: Callable[[WriteTxn], None]) -> None:
    with store.read() as snapshot:
        assert list(faults(snapshot)) == []
    txn = store.write()
    damage(txn)
    txn.commit()
    with store.read() as snapshot:
        assert list(violations(snapshot)) != []
    outcome = run(store)
    assert outcome.entries > 0
    assert {**numbers(outcome), "entries": 0} == {**RIGHT, "entries": 0}


def test_what_breaks_a_rule_is_not_repaired_by_guessing(store: LmdbStore) -> None:
    """A task that is to run depends on one that is not there."""
    (total,) = [task for task, name in _names(store) if name == key("total")]
    txn = store.write()
    txn.put(Table.EDGES, U64.pack(5), U64.pack(total + 50))
    txn.commit()
    with pytest.raises(InvariantBroken, match="gone"):
        run(store)


def _names(store: LmdbStore) -> list[tuple[int, bytes]]:
    with store.read() as txn:
        return [(int.from_bytes(task), name) for task, name in txn.scan(Table.NAMES)]


# ------------------------------------------------------------------------------------------------------------- costs


@pytest.mark.parametrize(
    ("group", "seconds"),
    [
        ("inc", 1.0),
        ("inc-1a2b", 1.0),
        ("inc-1a2b-3c", 1.0),
        ("inc-part-1a2b", 3.0),
        ("inc-partly-1a2b", 1.0),
        ("increment-1a2b", None),
        ("in", None),
        ("", None),
    ],
)
def test_a_group_takes_what_its_longest_prefix_takes(group: str, seconds: float | None) -> None:
    assert duration({"inc": 1.0, "inc-part": 3.0}, group) == seconds


def test_durations_that_make_no_sense_are_left_out(tmp_path: Path) -> None:
    stored = Stored(tmp_path)
    values = {b"good": pack(">d", 2.0), b"short": b"x", b"nan": pack(">d", float("nan")), b"below": pack(">d", -1.0)}
    stored.do(Keep([DURATIONS + name for name in values], list(values.values())))
    with stored.store.read() as txn:
        assert durations(txn) == {"good": 2.0}
    stored.close()


def test_nothing_at_all(tmp_path: Path) -> None:
    stored = Stored(tmp_path)
    outcome = run(stored.store)
    assert not outcome.changed
    assert numbers(outcome) == {}
    stored.close()


def test_an_open_submission_without_tasks_is_dropped(tmp_path: Path) -> None:
    stored = Stored(tmp_path)
    stored.do(BeginGraph("open", "carol", 0.0, 0.0))
    outcome = run(stored.store)
    assert outcome.changed
    assert len(outcome.before.open_graphs) == 1
    assert outcome.after.open_graphs == []
    stored.close()


def test_results_that_clients_have_given_up_are_forgotten(tmp_path: Path) -> None:
    stored = Stored(tmp_path)
    crowd(stored, 1_500)
    keys = stored.lease(1_500)
    stored.report(Level.MEMORY, *keys)
    txn = stored.store.write()
    # Its wants are taken back in the background, and the cluster dies before.
    stored.engine.apply(txn, stored.epoch, stored.seq + 1, [DropClient("crowd")])
    txn.commit()
    outcome = run(stored.store)
    assert len(outcome.before.ids) > 0
    assert numbers(outcome) == {"forgotten": len(outcome.before.ids)}
    stored.close()
