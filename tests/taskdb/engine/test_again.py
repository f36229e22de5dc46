"""A submission whose stream broke, because the daemon died, comes again from the beginning: what of it is there goes on as it is."""

from __future__ import annotations

import pytest

from taskdb import commands as c
from taskdb.errors import SaidOtherwise
from taskdb.model import GraphFlag, Level, TaskFlag
from tests.support.engine_world import World

KEYS = [b"a", b"b", b"c", b"d"]


def run_of(first: int, *keys: bytes, flags: int = int(TaskFlag.WANTED)) -> c.AddTasks:
    return c.AddTasks("g", first, list(keys), [b"spec"] * len(keys), [flags] * len(keys))


def begun(*keys: bytes) -> World:
    world = World()
    world.do(c.BeginGraph("g", "client", 0.0, 0.0), run_of(0, *keys))
    return world


def test_what_ran_does_not_run_again() -> None:
    world = begun(b"a", b"b")
    assert world.lease(1, 1) == ["a"]
    world.finish("a")
    ids = [world.id("a"), world.id("b")]
    result = world.do(c.BeginGraph("g", "client", 0.0, 0.0), run_of(0, b"a", b"b"), run_of(2, b"c", b"d"), c.SealGraph("g"))
    assert world.refused == []
    assert [(added.first_index, added.known, added.missing) for added in result.added] == [(0, [], []), (2, [], [])]
    assert result.added[0].ids == ids
    assert world.states("abcd") == ["memory", "queued", "queued", "queued"]


def test_what_was_known_from_elsewhere_is_said_to_be() -> None:
    world = World()
    world.add("before", {"b": []}, want="b")
    first = world.do(c.BeginGraph("g", "client", 0.0, 0.0), run_of(0, *KEYS))
    again = world.do(run_of(0, *KEYS))
    assert [added.known for added in (*first.added, *again.added)] == [[1], [1]]
    assert first.added == again.added


def test_what_was_forgotten_meanwhile_does_not_come_back() -> None:
    world = begun(b"a", b"b")
    world.lease(1, 1)
    world.finish("a")
    world.do(c.Unwant("client", [b"a"]))
    assert world.state("a") == "forgotten"
    world.do(run_of(0, b"a", b"b"))
    assert world.refused == []
    assert world.state("a") == "forgotten"


OTHERWISE = {"order": run_of(0, b"b", b"a"), "longer": run_of(0, b"a", b"b", b"c"), "across": run_of(1, b"b", b"c")}


@pytest.mark.parametrize("run", OTHERWISE.values(), ids=OTHERWISE)
def test_one_that_comes_otherwise_is_aborted_and_may_begin_anew(run: c.AddTasks) -> None:
    world = begun(b"a", b"b")
    world.do(run)
    assert [kind for _, _, kind, _ in world.refused] == [SaidOtherwise.kind]
    world.drain()
    assert world.states("ab") == ["forgotten", "forgotten"]
    world.do(c.BeginGraph("g", "client", 0.0, 0.0), run_of(0, *KEYS), c.SealGraph("g"))
    assert world.refused == []
    assert world.states("abcd") == ["queued"] * 4


def test_a_key_nobody_knows_is_answered_as_such() -> None:
    world = begun(b"a")
    world.do(c.SealGraph("g"))
    world.begin_epoch()
    assert world.adopt(1, x=Level.MEMORY, a=Level.MEMORY)["x"] == c.Adopted(b"x", Level.OUT, None)


def test_a_graph_said_again_claims_what_a_worker_has_before_it_is_leased() -> None:
    """The claim stands in the batch that brings the tasks; it is of no epoch, so it holds for nothing else of that name."""
    world = World()
    world.begin_epoch()
    begin = c.BeginGraph("g", "client", 0.0, 0.0, "", int(GraphFlag.RESENT))
    result = world.do(begin, run_of(0, b"a"), c.Adopt(0, [b"a"], [Level.MEMORY], [8]), c.SealGraph("g"))
    assert [answer.lease is not None for answer in result.adopted] == [True]
    assert world.state("a") == "memory"
    other = c.AddTasks("h", 0, [b"b"], [b"spec"], [int(TaskFlag.WANTED)])
    result = world.do(c.BeginGraph("h", "client", 0.0, 0.0), other, c.Adopt(0, [b"b"], [Level.MEMORY], [8]), c.SealGraph("h"))
    assert [(answer.level, answer.lease) for answer in result.adopted] == [(Level.MEMORY, None)]
    assert world.state("b") == "queued"
