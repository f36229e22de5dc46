"""Which copies of a key that came to mean another task are the old one's."""

from __future__ import annotations

from scheduler_adapter.reused import RECENT, Reused
from taskdb.commands import Keep


def store(kept: dict[bytes, bytes], keep: Keep) -> None:
    for name, value in zip(keep.names, keep.values, strict=True):
        if value:
            kept[name] = value
        else:
            del kept[name]


def made(kept: dict[bytes, bytes]) -> Reused:
    reused = Reused()
    reused.restore(lambda keep: store(kept, keep), dict(kept))
    return reused


def test_an_old_copy_is_told_from_a_new_one_by_the_next_scheduler() -> None:
    kept: dict[bytes, bytes] = {}
    reused = made(kept)
    reused.left(("x", 1))
    reused.comes([("x", 1), "y", "z"], lambda key: key == "y")
    (first,) = {int.from_bytes(value) for value in kept.values()}
    for later in (reused, made(kept)):
        for key in (("x", 1), "y"):
            assert later.is_old(key, first - 1)
            assert later.is_old(key, -1)
            assert not later.is_old(key, first + 1)
        assert not later.is_old("z", -1)


def test_once_it_is_done_nothing_is_kept() -> None:
    kept: dict[bytes, bytes] = {}
    reused = made(kept)
    reused.left("x")
    reused.comes(["x"], lambda key: False)
    assert len(kept) == 1
    reused.ends(["x", "other"])
    assert kept == {}
    assert not reused.is_old("x", 0)


def test_keys_that_left_long_ago_are_not_remembered() -> None:
    kept: dict[bytes, bytes] = {}
    reused = made(kept)
    for i in range(RECENT + 1):
        reused.left(i)
    reused.comes([0, 1], lambda key: False)
    assert len(kept) == 1
