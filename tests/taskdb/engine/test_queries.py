from __future__ import annotations

from struct import pack

import msgpack
import pytest

from taskdb import commands as c
from taskdb.engine import critical, queries
from taskdb.engine.reader import key_text
from taskdb.model import Level, TaskFlag
from tests.support.engine_world import World

KEYS = [msgpack.packb(key) for key in ("load-1", ("sum-2", 0, 1), "mean-3")]


@pytest.fixture
def world() -> World:
    world = World()
    world.do(
        c.BeginGraph("g", "alice", 1.0, 9.5, "label"),
        c.AddTasks("g", 0, KEYS, [b"1", b"2", b"3"], [0, 0, int(TaskFlag.WANTED)], [0, 1, 2], [0, 0, 1], [2, 1, 0], new_groups=["group"]),
        c.SealGraph("g"),
    )
    return world


def test_status(world: World) -> None:
    with world.store.read() as txn:
        status = queries.status(txn)
    assert (status.epoch, status.tasks, status.todo) == (1, 3, 0)
    assert status.states == {"waiting": 2, "queued": 1}
    assert status.graphs == [queries.GraphInfo("g", "alice", "label", 9.5, True, 3, {"waiting": 2, "queued": 1}, 1, 0, 3)]


def test_explain(world: World) -> None:
    with world.store.read() as txn:
        answer = queries.explain(txn, KEYS[2])
        assert answer.task is not None
        assert answer.task.state == "waiting"
        assert [task.id for task in answer.waits_for] == [1, 2]
        assert [task.id for task in answer.chain] == [2, 1]
        assert answer.wanted_by == ["alice"]
        assert "load-1 (queued)" in answer.reason
        assert queries.explain(txn, KEYS[0]).reason.startswith("queued: its dependencies are in memory; 0 tasks")
        assert queries.explain(txn, b"unknown").task is None


def test_explain_says_what_failed(world: World) -> None:
    world.do(c.Fail(1, b"payload", "ValueError: bad\nmore"))
    with world.store.read() as txn:
        answer = queries.explain(txn, KEYS[2])
        stored = queries.get_tasks(txn, [KEYS[2], b"unknown"], with_spec=True)
    assert answer.reason == "erred: load-1 failed: ValueError: bad"
    assert answer.cause is not None
    assert answer.cause.id == 1
    assert stored[0] is not None
    assert (stored[0].spec, stored[0].deps, stored[0].cause, stored[0].payload) == (b"3", KEYS[:2], KEYS[0], b"payload")
    assert stored[1] is None


def test_every_state_has_a_reason(world: World) -> None:
    world.do(c.Report([1], [Level.HELD]))
    reasons = []
    for level in (None, Level.MEMORY):
        if level:
            world.do(c.Report([1], [level]))
        with world.store.read() as txn:
            reasons.append(queries.explain(txn, KEYS[0]).reason)
    assert [reason.split(":")[0] for reason in reasons] == ["processing", "memory"]


def test_key_text() -> None:
    assert key_text(msgpack.packb(("x", 1))) == "('x', 1)"
    assert key_text(msgpack.packb("x")) == "x"
    assert key_text(b"\xc1") == "b'\\xc1'"


def chain_and_fan(seconds: dict[str, float]) -> World:
    """ "end" needs a chain of three "step"s, and one "long"; durations are recorded."""
    keys = [msgpack.packb(key) for key in ("step-1", "step-2", "step-3", "long-1", "end-1")]
    world = World()
    world.do(
        c.Keep([c.DURATIONS + prefix.encode() for prefix in seconds], [pack(">d", x) for x in seconds.values()]),
        c.BeginGraph("g", "alice", 1.0, 0.0, ""),
        c.AddTasks(
            "g",
            0,
            keys,
            [b"s"] * 5,
            [0, 0, 0, 0, 1],
            [0, 1, 1, 0, 2],
            [0, 1, 2, 3],
            [1, 1, 1, 1, 0],
            groups=[0, 0, 0, 1, 2],
            new_groups=["step", "long", "end"],
        ),
        c.SealGraph("g"),
    )
    return world


@pytest.mark.parametrize(
    ("seconds", "ids", "takes"),
    [
        ({"step": 1.0, "long": 2.5}, [1, 2, 3, 5], [1.0, 1.0, 1.0, None]),
        ({"step": 1.0, "long": 3.5, "end": 0.5}, [4, 5], [3.5, 0.5]),
        ({}, [1, 2, 3, 5], [None] * 4),
    ],
)
def test_critical_path(seconds: dict[str, float], ids: list[int], takes: list[float | None]) -> None:
    world = chain_and_fan(seconds)
    with world.store.read() as txn:
        path = queries.explain(txn, msgpack.packb("end-1")).path
        assert queries.explain(txn, msgpack.packb("step-1")).path.steps == []
    assert [(task.id, known) for task, known in path.steps] == list(zip(ids, takes))
    assert (path.tasks, path.whole) == (5, True)


def test_critical_path_is_of_what_is_left() -> None:
    world = chain_and_fan({"step": 1.0, "long": 2.5})
    world.do(c.Report([1], [Level.MEMORY], [8]))
    with world.store.read() as txn:
        path = queries.explain(txn, msgpack.packb("end-1")).path
    assert [task.id for task, _ in path.steps] == [4, 5]


def test_critical_path_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(critical, "EXPLAIN_PATH_LINKS_MAX", 2)
    world = chain_and_fan({"step": 1.0})
    with world.store.read() as txn:
        path = queries.explain(txn, msgpack.packb("end-1")).path
    assert not path.whole
    assert path.tasks == 3
    assert path.steps[-1][0].id == 5
