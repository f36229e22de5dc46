"""Submissions that are given up, while what they brought is being taken back, and when their name comes again."""

from __future__ import annotations

import pytest

from taskdb import commands as c
from taskdb.engine import engine as engine_module
from taskdb.model import Level, TaskFlag
from tests.support.engine_world import World


@pytest.fixture
def slowly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of an abort is done with the command itself."""
    monkeypatch.setattr(engine_module, "STEP_ITEMS_BATCH", 0)
    monkeypatch.setattr(engine_module, "STEP_ITEMS_PER_COMMAND_ITEM", 0)


def test_what_is_being_taken_back_is_not_leased(slowly: None) -> None:
    world = World()
    world.add("g", {"a": [], "b": ["a"], "x": []}, want=["b", "x"], seal=False)
    world.add("other", {"z": []}, want=["z"])
    world.do(c.AbortGraph("g"))
    assert world.lease(9, 9) == ["z"]
    world.drain()
    assert world.states(["a", "b", "x"]) == ["forgotten"] * 3


def test_what_others_need_of_it_is_leased_afterwards(slowly: None) -> None:
    world = World()
    world.add("g", {"a": [], "b": ["a"]}, want=["b"], seal=False)
    world.do(c.Want("somebody", [b"a"]), c.AbortGraph("g"))
    assert world.lease(9, 9) == []
    world.drain()
    assert world.lease(9, 9) == ["a"]
    assert world.report(Level.MEMORY, "a") is not None
    assert world.states(["a", "b"]) == ["memory", "forgotten"]


def test_its_name_again_is_another_graph_to_the_link() -> None:
    """Both ends keep shared bytes by number: the old graph's must not be taken for the new one's."""
    world = World()

    def submit(shared: bytes) -> c.Lease:
        add = c.AddTasks("g", 0, [b"a"], [b"spec"], [TaskFlag.WANTED], new_groups=["group"], shared=[1], new_shared=[shared])
        world.do(c.BeginGraph("g", "client", 0.0, 0.0), add)
        txn = world.store.write()
        (lease,), _ = world.engine.lease(txn, 1, 1)
        txn.commit()
        return lease

    first = submit(b"old")
    world.do(c.AbortGraph("g"), c.Report([first.id], [Level.OUT]))
    world.drain()
    second = submit(b"new")
    assert (first.shared, second.shared) == (b"old", b"new")
    assert first.shared_number != second.shared_number
