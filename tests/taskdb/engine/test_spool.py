"""Runs that are stored as they come: what is there at once, what comes when somebody names it, and what is never carried out."""

from __future__ import annotations

import pytest

from taskdb import commands as c
from taskdb.engine import hunger, spool
from taskdb.engine.engine import Engine
from taskdb.engine.queries import status
from taskdb.engine.recovery import clients, graphs
from taskdb.engine.refs import find_graph
from taskdb.errors import SaidOtherwise
from taskdb.model import GraphFlag, Level, TaskFlag
from taskdb.store.schema import Table
from tests.support.grown_world import Grown, grid

WANTED = int(TaskFlag.WANTED)


def chain(name: str, first: int, count: int, declared: int = 1) -> c.AddTasks:
    """Each task needs the one before."""
    at = range(first, first + count)
    return c.AddTasks(
        name,
        first,
        [f"{name}{i}".encode() for i in at],
        [b"spec"] * count,
        [WANTED] * count,
        [int(i > 0) for i in at],
        [i - 1 for i in at if i],
        [declared] * count,
        new_groups=[] if first else [name],
    )


def begin(name: str, client: str = "client", flags: int = GraphFlag.SPOOLED) -> c.BeginGraph:
    return c.BeginGraph(name, client, 0.0, 0.0, flags=flags)


class Spooled(Grown):
    def __init__(self) -> None:
        super().__init__()
        self.note(self.do(begin("g"), chain("g", 0, 3), chain("g", 3, 3), chain("g", 6, 3)))

    def count(self, table: Table = Table.SPOOL) -> int:
        with self.store.read() as txn:
            return txn.count(table)


def test_nothing_is_there_until_it_may_be_asked_for() -> None:
    world = Spooled()
    assert (world.count(), world.tasks()) == (3, 0)
    assert world.grow()
    assert (world.count(), world.tasks()) == (2, 3)
    with world.store.read() as txn:
        (graph,) = status(txn).graphs
    assert (graph.tasks, graph.total, graph.sealed) == (3, 9, False)


def test_a_sealed_one_says_what_is_to_come() -> None:
    world = Spooled()
    world.grow()
    world.do(c.SealGraph("g"))
    with world.store.read() as txn:
        (graph,) = status(txn).graphs
        (stored,) = graphs(txn)
    assert (graph.unmade, graph.total, graph.sealed) == (6, 9, True)
    assert (stored.tasks, stored.unfinished, stored.groups, stored.flags) == (9, 9, {"g": 9}, GraphFlag.SPOOLED)
    world.run()
    assert world.order == [f"g{i}".encode() for i in range(9)]
    world.note(world.do(c.DropClient("client")))
    world.settle()
    assert (world.count(Table.GRAPHS), world.forgotten) == (0, {"g": 9})


def test_many_queued_tasks_are_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hunger, "GROW_QUEUED", 1)
    world = Spooled()
    assert world.grow()
    assert not world.grow()
    assert world.count() == 2


def test_who_names_a_key_has_it_carried_out_first() -> None:
    world = Spooled()
    (answer,) = world.do(c.Want("other", [b"g4"])).wants
    assert answer.id == world.id("g4") != 0
    assert (world.count(), world.tasks()) == (1, 6)
    world.do(begin("h", flags=0), c.AddTasks("h", 0, [b"g7"], flags=[TaskFlag.EXTERNAL]))
    assert (world.count(), world.tasks()) == (0, 9)


def test_ids_are_those_it_was_answered_with() -> None:
    world = Grown()
    (first,) = world.do(begin("g"), chain("g", 0, 3)).added
    (second,) = world.do(chain("g", 3, 3)).added
    (again,) = world.do(chain("g", 3, 3)).added
    assert again.ids == second.ids
    txn = world.store.write()
    world.engine.apply(txn, world.epoch, world.seq + 1, [c.Want("other", [b"g5"])])
    txn.abort()
    world.do(c.Report([first.ids[0]], [Level.HELD]))
    assert world.state("g0") == "processing"
    assert world.state("g3") == "forgotten"
    world.do(c.Want("other", [b"g5"]))
    assert [world.id(f"g{i}") for i in range(6)] == first.ids + second.ids


def test_said_again_with_other_keys_it_is_refused() -> None:
    world = Spooled()
    world.do(c.AddTasks("g", 3, [b"x", b"y", b"z"]))
    assert [kind for _, _, kind, _ in world.refused] == [SaidOtherwise.kind]


def test_a_cancel_goes_up_to_what_is_spooled() -> None:
    world = Spooled()
    world.do(c.SealGraph("g"))
    world.grow()
    result = world.note(world.do(c.Cancel("client", [b"g1"], True)))
    assert sorted(x.key for x in result.cancelled) == [f"g{i}".encode() for i in range(1, 9)]


def test_a_client_that_is_dropped_wants_nothing_that_is_spooled() -> None:
    world = Spooled()
    world.do(c.SealGraph("g"))
    with world.store.read() as txn:
        assert list(clients(txn)) == ["client"]
    world.note(world.do(c.DropClient("client")))
    with world.store.read() as txn:
        assert list(clients(txn)) == []
    world.settle()
    assert (world.count(), world.tasks(), world.forgotten) == (0, 0, {"g": 9})


@pytest.mark.parametrize("how", ["abort", "another scheduler"])
def test_taken_back_it_is_never_carried_out(how: str) -> None:
    world = Spooled()
    world.grow()
    world.note(world.do(c.AbortGraph("g")) if how == "abort" else world.begin_epoch())
    world.settle()
    assert (world.count(), world.tasks(), world.forgotten) == (0, 0, {"g": 9})


def test_a_rule_has_no_spooled_runs_beside_it() -> None:
    world = Spooled()
    world.submit("rule", grid(2), [(2, 0)])
    assert (world.count(), world.state("g8")) == (0, "waiting")
    world.do(begin("h"), chain("h", 0, 3))
    assert (world.count(), world.state("h0")) == (0, "queued")


def test_more_than_there_may_be_is_carried_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spool, "SPOOL_TASKS_MAX", 9)
    world = Spooled()
    world.do(chain("g", 9, 3))
    assert (world.count(), world.tasks()) == (3, 3)


@pytest.mark.parametrize(
    ("flags", "run"),
    [
        (0, chain("h", 0, 3)),
        (GraphFlag.SPOOLED | GraphFlag.WHOLE, chain("h", 0, 3)),
        (GraphFlag.SPOOLED | GraphFlag.RESENT, chain("h", 0, 3)),
        (GraphFlag.SPOOLED, c.AddTasks("h", 0, [b"h0"], flags=[WANTED | TaskFlag.HELD])),
        (GraphFlag.SPOOLED, c.AddTasks("h", 0, [b"h0", b"h0"], flags=[WANTED, WANTED])),
    ],
)
def test_what_is_not_spooled(flags: int, run: c.AddTasks) -> None:
    world = Grown()
    world.do(begin("h", flags=flags), run)
    assert world.id("h0")


def test_one_that_declared_too_little_is_given_up() -> None:
    """That is seen when its dependency is gone."""
    world = Grown()
    world.do(begin("g"), c.AddTasks("g", 0, [b"g0"], [b"spec"], new_groups=["g"]), chain("g", 1, 2), c.SealGraph("g"))
    world.grow()
    for result in world.drain():
        world.note(result)
    assert world.state("g0") == "forgotten"
    txn = world.store.write()
    result, _ = world.engine.grow(txn)
    txn.commit()
    world.note(result)
    assert [x.key for x in result.cancelled] == [b"g1", b"g2"]
    world.settle()
    assert (world.tasks(), world.forgotten) == (0, {"g": 3})


def test_another_daemon_knows_what_is_spooled() -> None:
    world = Spooled()
    world.engine = Engine()
    world.do(c.Want("other", [b"g8"]))
    assert world.state("g8") == "waiting"


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        (c.Want("other", [b"g4"]), [("g", 0), ("g", 3)]),
        (c.Unwant("client", [b"h0", b"g1"]), [("g", 0), ("h", 0)]),
        (c.Retry([b"h3"]), [("h", 0), ("h", 3)]),
        (c.Cancel("client", [b"h0"], False), [("g", 0), ("g", 3), ("g", 6), ("h", 0), ("h", 3)]),
        (c.Want("other", [b"unknown"]), []),
        (c.DropClient("client"), []),
        (c.AddTasks("other", 0, [b"g1"], flags=[TaskFlag.EXTERNAL]), [("g", 0)]),
        # A run that comes again, as its stream broke.
        (chain("g", 3, 3), []),
    ],
)
def test_what_a_command_names_can_be_carried_out_before_it(command: c.Command, expected: list[tuple[str, int]]) -> None:
    """In steps; then there is nothing left of it for the command itself to do."""
    world = Spooled()
    world.do(begin("h"), chain("h", 0, 3), chain("h", 3, 3))
    with world.store.read() as txn:
        numbers = {name: find_graph(txn, name) for name in "gh"}
        places = world.engine.spooled(txn, [command])
    assert places == [(numbers[name], at) for name, at in expected]
    for place in places:
        world.carry(place)
    left = world.count()
    assert left == 5 - len(places)
    world.do(command)
    assert world.count() == left
    for place in places:
        world.carry(place)  # done already: nothing happens
    assert world.count() == left
