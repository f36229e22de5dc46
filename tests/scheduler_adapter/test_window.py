"""Levels told to the database, and how much is asked for."""

from __future__ import annotations

import pytest
from distributed.scheduler import ALL_TASK_STATES
from hypothesis import given
from hypothesis import strategies as st

from scheduler_adapter.window import Resident, Window, credit
from taskdb.model import Level


class Task:
    def __init__(self, state: str):
        self.state = state
        self.retries = 0
        self.suspicious = 0


def resident(key: str, id: int = 0, state: str = "waiting", told: Level | None = Level.HELD) -> Resident:
    return Resident(key, id, Task(state), paged=True, told=told)


EXPECTED = {
    "released": Level.RELEASED,
    "waiting": Level.HELD,
    "no-worker": Level.HELD,
    "queued": Level.HELD,
    "processing": Level.HELD,
    "memory": Level.MEMORY,
    "erred": Level.ERRED,
    "forgotten": Level.OUT,
}


def test_every_state_of_stock_has_a_level() -> None:
    assert set(EXPECTED) == set(ALL_TASK_STATES)


@pytest.mark.parametrize("state", EXPECTED)
def test_levels(state: str) -> None:
    assert resident("a", 1, state).level() is EXPECTED[state]


def test_a_failure_is_told_though_the_level_is_the_same() -> None:
    window = Window()
    r = resident("a", 1)
    window.add(r)
    for suspicious, told in ((0, []), (1, [(r, Level.HELD)]), (1, [])):
        r.task.suspicious = suspicious
        window.changed[r] = None
        assert window.changes() == told


def test_a_failure_before_the_task_has_an_id_is_told() -> None:
    window = Window()
    r = resident("a")
    window.add(r)
    r.task.suspicious = 2
    window.changed[r] = None
    assert window.changes() == []
    window.identify(r, 1)
    assert window.changes() == [(r, Level.HELD)]
    assert r.failures == (0, 2)


def test_failures_are_told_with_what_leaves() -> None:
    """A worker died, and with it an input: the task leaves, and comes again from the database."""
    window = Window()
    r = resident("a", 1)
    window.add(r)
    r.task.suspicious = 1
    window.changed[r] = None
    window.drop(r)
    assert window.changes() == [(r, Level.OUT)]
    assert r.failures == (0, 1)


def test_a_difference_is_told_once() -> None:
    window = Window()
    r = resident("a", 1)
    window.add(r)
    window.changed[r] = None
    assert window.changes() == []
    r.task.state = "memory"
    window.changed[r] = None
    assert window.changes() == [(r, Level.MEMORY)]
    window.changed[r] = None
    assert window.changes() == []


def test_there_and_back_between_two_flushes_is_nothing() -> None:
    window = Window()
    r = resident("a", 1)
    window.add(r)
    for state in ("processing", "released", "waiting"):
        r.task.state = state
        window.changed[r] = None
    assert window.changes() == []


def test_without_an_id_it_waits() -> None:
    window = Window()
    r = resident("a", 0, "memory")
    window.add(r)
    window.changed[r] = None
    assert window.changes() == []
    window.identify(r, 7)
    assert window.by_id == {7: r}
    assert window.changes() == [(r, Level.MEMORY)], "not forgotten"
    assert not window.changed


def test_what_left_is_told_as_out() -> None:
    window = Window()
    r = resident("a", 1)
    window.add(r)
    window.leased.add(r)
    window.changed[r] = None
    window.drop(r)
    assert (window.by_key, window.by_id, window.leased) == ({}, {}, set())
    assert window.changes() == [(r, Level.OUT)]


def test_one_that_left_does_not_take_its_successor_along() -> None:
    """A key that left and came back under the same or another id."""
    window = Window()
    old = resident("a", 1)
    window.add(old)
    new = resident("a", 2)
    window.add(new)
    window.drop(old)
    assert window.by_key == {"a": new}
    assert window.by_id == {2: new}


def test_named_after_it_left_is_not_listed() -> None:
    window = Window()
    r = resident("a")
    window.add(r)
    window.drop(r)
    window.identify(r, 5)
    assert window.by_id == {}
    window.changed[r] = None
    assert window.changes() == [(r, Level.OUT)]


def test_another_id_replaces_the_first() -> None:
    window = Window()
    r = resident("a", 3)
    window.add(r)
    window.identify(r, 4)
    assert window.by_id == {4: r}


def test_told_again() -> None:
    window = Window()
    r = resident("a", 1, "memory", Level.MEMORY)
    window.add(r)
    window.tell_again([r])
    assert window.changes() == [(r, Level.MEMORY)]


def test_stubs_are_never_told_and_not_held() -> None:
    window = Window()
    stub = resident("a", 1, "released", None)
    stub.stub = True
    real = resident("b", 2)
    for r in (stub, real):
        window.add(r)
        window.changed[r] = None
    real.task.state = "memory"
    assert window.changes() == [(real, Level.MEMORY)]
    assert window.held_ids() == [2]


def test_clear() -> None:
    window = Window()
    r = resident("a", 1)
    window.add(r)
    window.leased.add(r)
    window.changed[r] = None
    window.clear()
    assert (window.by_key, window.by_id, window.leased, window.changed) == ({}, {}, set(), {})


numbers = st.integers(0, 10_000)


@given(threads=st.integers(1, 5000), runnable=numbers, leased=numbers, lookahead=st.integers(1, 2000))
def test_credit(threads: int, runnable: int, leased: int, lookahead: int) -> None:
    ready, total = credit(threads=threads, runnable=runnable, leased=leased, lookahead=lookahead)
    assert min(ready, total) >= 0
    assert runnable + ready >= 2 * threads, "no thread idles for a round trip"
    assert leased + total <= max(leased, lookahead, 4 * threads), "bounded, whatever the graph's size"


def test_credit_of_nothing_to_do() -> None:
    assert credit(threads=2, runnable=100, leased=500, lookahead=128) == (0, 0)


@pytest.mark.parametrize(("runnable", "leased", "expected"), [(0, 0, (1, 1)), (1, 1, (0, 0)), (0, 1, (1, 1)), (5, 9, (0, 0))])
def test_without_a_worker_one_task_is_asked_for(runnable: int, leased: int, expected: tuple[int, int]) -> None:
    """So that stock says that there is no worker. Not more."""
    ready, total = credit(threads=0, runnable=runnable, leased=leased, lookahead=128)
    assert ready == expected[0]
    assert total <= expected[1]
