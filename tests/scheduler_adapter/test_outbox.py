"""What a client keeps until its scheduler acknowledges it, and what the next scheduler is told."""

from __future__ import annotations

import pickle
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import pytest

from scheduler_adapter import outbox as module
from scheduler_adapter.outbox import FIRE_AND_FORGET, Outbox


def graph(*keys: Any, needs: Iterable[str] = ()) -> dict[str, Any]:
    """As `Client._graph_to_futures` makes it: what it needs stands in the pickled expression."""
    return {"op": "update-graph", "keys": set(keys), "expr_ser": SimpleNamespace(frames=[pickle.dumps(list(needs))])}


def cancel(*keys: Any) -> dict[str, Any]:
    return {"op": "cancel-keys", "keys": list(keys), "force": False, "reason": None, "msg": None}


def forget(*keys: Any) -> dict[str, Any]:
    return {"op": "client-desires-keys", "keys": list(keys), "client": FIRE_AND_FORGET}


def said(messages: list[dict[str, Any]]) -> list[tuple[str, Any]]:
    return [(m["op"], sorted(m["keys"], key=str) if "keys" in m else m.get("name")) for m in messages]


@pytest.fixture
def outbox() -> Outbox:
    return Outbox("me")


def test_what_must_not_be_lost_is_numbered_and_kept(outbox: Outbox) -> None:
    first = outbox.take(graph("x"), live=True)
    second = outbox.take(cancel("x"), live=True)
    third = outbox.take({"op": "variable_delete", "name": "v"}, live=True)
    assert [m["taskdb_number"] for m in (first, second, third)] == [1, 2, 3]
    assert 0 < len(first["taskdb_submission"].encode()) <= 128
    assert "taskdb_resent" not in first
    assert len(outbox) == 3
    outbox.acknowledged(2)
    assert len(outbox) == 1
    outbox.acknowledged(3)
    assert len(outbox) == 0
    outbox.acknowledged(1)  # said twice


def test_work_is_left_behind_until_what_is_fired_and_forgotten_is_acknowledged(outbox: Outbox) -> None:
    outbox.take(graph("x"), live=True)
    assert not outbox.leaves_work
    number = outbox.take(forget("x"), live=True)["taskdb_number"]
    outbox.acknowledged(number - 1)
    assert outbox.leaves_work
    outbox.acknowledged(number)
    assert not outbox.leaves_work


@pytest.mark.parametrize(
    "message",
    [
        {"op": "client-releases-keys", "keys": ["x"], "client": "me"},
        {"op": "client-desires-keys", "keys": ["x"]},
        {"op": "report-key", "key": "x"},
        {"op": "subscribe-topic", "topic": "t", "client": "me"},
        {"op": "publish_flush_batched_send", "uid": "1"},
    ],
)
def test_what_a_client_says_anyhow_when_it_is_back_is_not_kept(outbox: Outbox, message: dict[str, Any]) -> None:
    assert outbox.take(message, live=True) is message
    assert outbox.take(message, live=False) is message
    assert len(outbox) == 0
    assert outbox.again([]) == ([], [])


def test_other_messages_said_meanwhile_come_last_and_once(outbox: Outbox) -> None:
    strange = {"op": "of-a-plugin"}
    outbox.take(strange, live=True)
    outbox.take(strange, live=False)
    outbox.take(cancel("x"), live=False)
    first, rest = outbox.again([])
    assert first == []
    assert [m["op"] for m in rest] == ["cancel-keys", "of-a-plugin"]
    assert [m["op"] for m in outbox.again([])[1]] == ["cancel-keys"]


def test_what_could_not_be_said_comes_later_and_once(outbox: Outbox) -> None:
    for message in (graph("x"), {"op": "report-key", "key": "x"}, {"op": "of-a-plugin"}):
        outbox.unsaid(outbox.take(message, live=True))
    first, rest = outbox.again(["x"])
    assert [m["op"] for m in (*first, *rest)] == ["update-graph", "of-a-plugin"]


def test_what_is_returned_is_not_what_is_kept(outbox: Outbox) -> None:
    """A scheduler in this process takes a message apart."""
    original = graph("x")
    now = outbox.take(original, live=True)
    assert set(original) == {"op", "keys", "expr_ser"}
    now.clear()
    (again,), _ = outbox.again(["x"])
    again.clear()
    (more,), _ = outbox.again(["x"])
    assert more["op"] == "update-graph"


def test_only_what_a_scheduler_had_is_marked_as_resent(outbox: Outbox) -> None:
    name = outbox.take(graph("x"), live=True)["taskdb_submission"]
    outbox.take(graph("y"), live=False)
    first, _ = outbox.again(["x", "y"])
    assert [m.get("taskdb_resent", False) for m in first] == [True, False]
    assert first[0]["taskdb_submission"] == name
    first, _ = outbox.again(["x", "y"])
    assert [m["taskdb_resent"] for m in first] == [True, True]
    assert first[0]["taskdb_submission"] == name


def test_numbers_go_on_and_follow_the_order_of_saying(outbox: Outbox) -> None:
    outbox.take(cancel("other"), live=True)
    outbox.take(graph("x"), live=True)
    outbox.acknowledged(0)
    first, rest = outbox.again(["x"])
    assert said(first) == [("update-graph", ["x"])]
    assert said(rest) == [("cancel-keys", ["other"])]
    assert [m["taskdb_number"] for m in (*first, *rest)] == [3, 4]
    outbox.acknowledged(3)
    assert said(outbox.again(["x"])[1]) == [("cancel-keys", ["other"])]


def test_a_key_submitted_again_is_not_cancelled(outbox: Outbox) -> None:
    outbox.take(graph("x"), live=True)
    outbox.take(cancel("x", "y"), live=True)
    outbox.take(graph("x"), live=False)
    outbox.take(cancel("z"), live=False)
    first, rest = outbox.again(["x"])
    assert said(first) == [("update-graph", ["x"]), ("update-graph", ["x"])]
    assert said(rest) == [("cancel-keys", ["y"]), ("cancel-keys", ["z"])]
    outbox.clear()
    outbox.take(cancel("x"), live=True)
    outbox.take(graph("x"), live=False)
    assert outbox.again(["x"])[1] == []


def test_what_nobody_wants_is_not_submitted(outbox: Outbox) -> None:
    outbox.take(graph("needed"), live=True)
    outbox.take(graph("named"), live=True)
    outbox.take(graph("x", needs=["needed"]), live=True)
    outbox.take(graph("unwanted"), live=True)
    first, _ = outbox.again(["x"])
    assert said(first) == [("update-graph", ["needed"]), ("update-graph", ["x"])]
    assert outbox.submitted_keys() == {"needed", "x"}
    assert outbox.again([]) == ([], [])


def test_what_a_graph_needs_that_is_itself_needed(outbox: Outbox) -> None:
    outbox.take(graph("a"), live=True)
    outbox.take(graph(("b", 0), needs=["a"]), live=True)
    outbox.take(graph("c", needs=["b"]), live=True)
    assert [keys for _, keys in said(outbox.again(["c"])[0])] == [["a"], [("b", 0)], ["c"]]


def test_graphs_too_large_to_search_may_need_anything(outbox: Outbox, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SEARCHED_BYTES_MAX", 4)
    outbox.take(graph("a"), live=True)
    outbox.take(graph("c", needs=["b"]), live=True)
    assert [keys for _, keys in said(outbox.again(["c"])[0])] == [["a"], ["c"]]


def test_fired_and_forgotten(outbox: Outbox) -> None:
    outbox.take(graph("x"), live=True)
    assert outbox.take(forget("x"), live=True)["taskdb_sender"] == "me"
    first, _ = outbox.again([])
    assert said(first) == [("update-graph", ["x"]), ("client-desires-keys", ["x"])]
    assert first[1]["client"] == FIRE_AND_FORGET
    outbox.acknowledged(first[0]["taskdb_number"])
    assert said(outbox.again([])[0]) == [("client-desires-keys", ["x"])]


def release(*keys: Any) -> dict[str, Any]:
    return {"op": "client-releases-keys", "keys": list(keys), "client": "me"}


def test_a_graph_that_is_said_again_says_what_was_let_go_of_before_it(outbox: Outbox) -> None:
    """Or a scheduler that has not heard of that would take its keys for the old tasks."""
    outbox.take(release("x", "y"), live=True)
    assert "taskdb_released" not in outbox.take(graph("x"), live=True), "it has been said"
    outbox.take(release("z"), live=False)
    outbox.take(graph("w"), live=False)
    first, _ = outbox.again(["x", "w"])
    assert [m["taskdb_released"] for m in first] == [["x", "y"], ["y", "z"]], "x is wanted again"


def test_what_was_let_go_of_is_remembered_until_that_is_on_disk(outbox: Outbox) -> None:
    outbox.take(release("x"), live=True)
    outbox.take(graph("a"), live=True)
    outbox.take(release("y"), live=True)
    outbox.acknowledged(1)
    outbox.take(graph("b"), live=True)
    first, _ = outbox.again(["b"])
    assert [m["taskdb_released"] for m in first] == [["y"]]
    outbox.acknowledged(3)  # of what came before that it is wanted no more
    outbox.take(graph("c"), live=True)
    first, _ = outbox.again(["c"])
    assert [m["taskdb_released"] for m in first] == [["y"]]
