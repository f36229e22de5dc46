"""What a client that comes back says again of its submissions: what is wanted, and what that needs; nothing else."""

from __future__ import annotations

import pickle
from typing import Any

import msgpack
import pytest
from distributed.protocol import Serialized, serialize, to_serialize

from scheduler_adapter import outbox
from scheduler_adapter.outbox import Outbox


def submitted(box: Outbox, key: Any, *deps: Any) -> None:
    expr = Serialized(*serialize(to_serialize({key: ("f", deps)}), on_error="raise"))
    box.take({"op": "update-graph", "expr_ser": expr, "keys": {key}}, live=True)


def again(box: Outbox, wanted: set[Any]) -> list[Any]:
    first, rest = box.again(wanted)
    assert rest == []
    return [key for message in first for key in message["keys"]]


def test_what_nobody_wants_is_not_said_again() -> None:
    box = Outbox("client")
    for i in range(30):
        submitted(box, f"loop-{i}")
    # loop-2 begins loop-20, and is not needed by it.
    assert again(box, {"loop-20", "loop-29"}) == ["loop-20", "loop-29"]


@pytest.mark.parametrize("n", [3, 31, 32, 254, 255, 256, 40_000])
def test_what_a_wanted_graph_needs_is(n: int) -> None:
    long = "k" * n
    box = Outbox("client")
    submitted(box, "first-" + long)
    submitted(box, "other-" + long)
    submitted(box, ("second", 1), "first-" + long)
    submitted(box, "last", ("second", 1))
    assert again(box, {"last"}) == ["first-" + long, ("second", 1), "last"]


@pytest.mark.parametrize("n", [0, 1, 31, 32, 255, 256, 2**16 - 1, 2**16])
def test_a_text_is_found_as_it_is_pickled_and_packed(n: int) -> None:
    key = "é" * (n // 2) + "x" * (n % 2)
    for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1):
        assert any(text in pickle.dumps(["a", key], protocol) for text in outbox._texts(key))
    assert any(text in msgpack.packb(["a", key]) for text in outbox._texts(key))


def test_of_keys_without_text_nothing_is_known() -> None:
    box = Outbox("client")
    submitted(box, 5)
    submitted(box, "last")
    assert again(box, {"last"}) == [5, "last"]


def test_beyond_the_bound_nothing_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outbox, "SEARCHED_BYTES_MAX", 10)
    box = Outbox("client")
    submitted(box, "unrelated")
    submitted(box, "last")
    assert again(box, {"last"}) == ["unrelated", "last"]
