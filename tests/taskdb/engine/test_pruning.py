"""A graph is pruned: what only it needs goes, in steps; what others need stays. Every step keeps all rules (World checks)."""

from __future__ import annotations

import pytest

from taskdb import commands as c
from taskdb.engine.queries import finished_graphs
from taskdb.errors import InvalidRequest
from taskdb.model import Level
from taskdb.store.schema import Table
from tests.support.engine_world import World

KEYS = [b"\xa2k%d" % i for i in range(6)]


@pytest.fixture
def world() -> World:
    """Graph "old": 1 to 6, wanted by two clients, the last failed; graph "new": one task that needs 1, leased."""
    world = World()
    world.do(c.BeginGraph("old", "alice", 1.0, 10.0, ""), c.AddTasks("old", 0, KEYS, [b"s"] * 6, [1] * 6), c.SealGraph("old"))
    world.do(c.Want("bob", KEYS[:3]), c.Report([1, 2, 3, 4, 5, 6], [Level.HELD] * 6))
    world.do(c.Report([1, 2, 3, 4, 5], [Level.MEMORY] * 5, [8] * 5), c.Fail(6, b"payload", "no"))
    below = c.AddTasks("new", 0, [KEYS[0], b"\xa3new"], [b"", b"s"], [2, 1], [0, 1], [0], [1, 0])
    world.do(c.BeginGraph("new", "carol", 2.0, 20.0, ""), below, c.SealGraph("new"), c.Report([7], [Level.HELD]))
    return world


def prune(world: World, *names: str) -> list[c.Result]:
    txn = world.store.write()
    world.engine.prune(txn, names)
    txn.commit()
    return world.drain(items_max=2)


def tasks(world: World) -> list[int]:
    with world.store.read() as txn:
        return [int.from_bytes(key) for key, _ in txn.scan(Table.TASKS)]


def test_what_only_it_needs_is_forgotten(world: World) -> None:
    results = prune(world, "old", "unknown")
    assert len(results) > 3
    assert tasks(world) == [1, 7]
    assert {x.key for result in results for x in result.cancelled} == set(KEYS)
    # The scheduler lets go of the results, and of what it may hold as failed.
    assert {x for result in results for x in result.release} == {2, 3, 4, 5, 6}


def test_the_rest_goes_when_it_is_needed_no_more(world: World) -> None:
    prune(world, "old")
    world.do(c.Report([7], [Level.MEMORY], [8]))
    world.do(c.DropClient("carol"))
    world.drain()
    assert tasks(world) == []
    with world.store.read() as txn:
        assert [txn.count(table) for table in (Table.GRAPHS, Table.NAMES, Table.KEYS, Table.WANTS, Table.RUNS, Table.ERRORS)] == [0] * 6


def test_which_graphs_may_go(world: World) -> None:
    with world.store.read() as txn:
        assert [graph.submission for graph in finished_graphs(txn, [], 15.0)] == ["old"]
        assert [graph.submission for graph in finished_graphs(txn, ["old"], 0.0)] == ["old"]
        assert finished_graphs(txn, [], 10.0) == []
        assert [graph.submission for graph in finished_graphs(txn, [], 30.0)] == ["old"], "new has a task that runs"
        with pytest.raises(InvalidRequest, match="unfinished"):
            finished_graphs(txn, ["new"], 0.0)
        with pytest.raises(InvalidRequest, match="no graph"):
            finished_graphs(txn, ["none"], 0.0)
