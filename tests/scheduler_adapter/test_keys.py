"""Dask keys to bytes and back."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler_adapter.keys import pack_key, unpack_key
from taskdb.errors import LimitExceeded
from taskdb.limits import KEY_BYTES_MAX

texts = st.text(st.characters(exclude_categories=["Cs"]))
numbers = st.integers(-(2**63), 2**64 - 1)
#: Whole ones of 64 bits and more, and infinite ones, stand in a test of their own below.
floats = st.floats(-(2.0**62), 2.0**62)
parts = st.recursive(
    texts | numbers | floats | st.binary() | st.booleans(),
    lambda p: st.tuples(p) | st.tuples(p, p) | st.tuples(p, p, p),
)
keys = texts | numbers | parts


@given(keys)
def test_round_trip(key: Any) -> None:
    assert unpack_key(pack_key(key)) == key


@given(keys, keys)
def test_equal_keys_and_only_they_have_equal_bytes(a: Any, b: Any) -> None:
    assert (pack_key(a) == pack_key(b)) == (a == b)


#: Forms of one and the same key of a dict.
SAME = [
    [("x", 1, 2), ("x", 1.0, 2), ("x", True, 2), ("x", np.int64(1), np.int8(2)), ("x", np.float64(1), 2)],
    [("x", 0), ("x", False), ("x", -0.0), ("x", np.bool_(False))],
    ["name", np.str_("name")],
    [3, 3.0, np.int32(3)],
    [("x", (1, ("y", 0))), ("x", (True, ("y", False)))],
    [("x", 2.5), ("x", np.float64(2.5)), ("x", np.float32(2.5))],
]


@pytest.mark.parametrize("forms", SAME, ids=str)
def test_forms_of_one_key(forms: list[Any]) -> None:
    assert len(dict.fromkeys(forms)) == 1, "they are one key for Dask"
    assert len({pack_key(form) for form in forms}) == 1


@given(st.integers(-(2**60), 2**60))
def test_whole_floats_and_integers_of_a_key_are_one(n: int) -> None:
    assert pack_key(("x", float(n))) == pack_key(("x", int(float(n))))


class Name(str):
    """A str with something beside it, as some libraries make."""


def test_subclasses_are_their_base() -> None:
    assert pack_key(Name("a")) == pack_key("a")
    assert unpack_key(pack_key(("a", Name("b")))) == ("a", "b")


def test_tuples_come_back_as_tuples() -> None:
    key = ("a", (1, (2, ())))
    back = unpack_key(pack_key(key))
    assert back == key
    assert {back: 1}[key] == 1


@pytest.mark.parametrize("number", [float("inf"), -float("inf"), 1e300, 2.0**64, -(2.0**64)])
def test_large_floats(number: float) -> None:
    assert unpack_key(pack_key(("x", number))) == ("x", number)


@pytest.mark.parametrize(
    "key", [object(), ("a", object()), ("a", None, {1}), 2**64, ("a", -(2**63) - 1), "\ud800", ("a", "\udfff"), ("a", 1j)]
)
def test_odd_keys_have_one_clear_error(key: Any) -> None:
    with pytest.raises(TypeError, match="cannot be stored") as caught:
        pack_key(key)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 400


def test_key_at_its_bound() -> None:
    overhead = len(pack_key("k" * 60_000)) - 60_000
    longest = "k" * (KEY_BYTES_MAX - overhead)
    assert unpack_key(pack_key(longest)) == longest
    with pytest.raises(LimitExceeded, match=f"{KEY_BYTES_MAX:,}") as caught:
        pack_key(longest + "k")
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 400
