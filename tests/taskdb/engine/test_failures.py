from __future__ import annotations

import msgpack
import pytest

from taskdb import commands as c
from taskdb.engine import failures
from taskdb.engine.failures import ErrorGroup, errors, exception_name
from taskdb.engine.reader import prefix_text
from taskdb.errors import InvalidRequest
from taskdb.limits import ERROR_TEXT_MAX, TRACEBACK_TEXT_MAX
from taskdb.model import Level, TaskFlag
from tests.support.engine_world import World

KEYS = [msgpack.packb(("load-0123456789abcdef", i)) for i in range(3)] + [msgpack.packb("use")]


@pytest.fixture
def world() -> World:
    """Two loads fail with ValueError, one with KeyError; "use" needs all of them. Another graph has a load that fails, too."""
    world = World()
    flags = [0, 0, 0, int(TaskFlag.WANTED)]
    for name, keys, flag, counts, deps, dependents in (
        ("g", KEYS, flags, [0, 0, 0, 3], [0, 1, 2], [1, 1, 1, 0]),
        ("h", [msgpack.packb("load-7")], [1], [0], [], [0]),
    ):
        world.do(
            c.BeginGraph(name, "alice", 1.0, 9.5, ""),
            c.AddTasks(name, 0, keys, [b"s"] * len(keys), flag, counts, deps, dependents),
            c.SealGraph(name),
        )
    world.do(c.Report([1, 2, 3, 5], [Level.HELD] * 4))
    world.do(c.Fail(1, b"p", "ValueError('one')", "  File x"), c.Fail(2, b"p", "ValueError('two')"))
    world.do(c.Fail(3, b"p", "KeyError('k')"), c.Fail(5, b"p", "ValueError('other')"))
    return world


def test_groups(world: World) -> None:
    with world.store.read() as txn:
        found, cursor = errors(txn)
        mine, _ = errors(txn, "h")
        assert errors(txn, "none") == ([], b"")
    assert cursor == b""
    assert found == [
        ErrorGroup("ValueError", "load", KEYS[0], "g", "ValueError('one')", "  File x", 3, 1),
        ErrorGroup("KeyError", "load", KEYS[2], "g", "KeyError('k')", "", 1, 0),
    ]
    assert [(group.failed, group.submission) for group in mine] == [(1, "h")]


def test_a_page_is_bounded(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(failures, "ERRORS_SCAN_MAX", 2)
    cursor, failed, blamed, pages = b"", 0, 0, 0
    with world.store.read() as txn:
        while pages == 0 or cursor:
            groups, cursor = errors(txn, cursor=cursor)
            failed += sum(group.failed for group in groups)
            blamed += sum(group.blamed for group in groups)
            pages += 1
        with pytest.raises(InvalidRequest):
            errors(txn, cursor=b"x")
    assert (failed, blamed, pages) == (4, 1, 3)


def test_texts_are_cut() -> None:
    world = World()
    world.do(c.BeginGraph("g", "a", 1.0, 0.0, ""), c.AddTasks("g", 0, [b"\xa1k"], [b"s"], [1]), c.SealGraph("g"))
    world.do(c.Report([1], [Level.HELD]), c.Fail(1, b"payload", "x" * 10**5, "head" + "y" * 10**5))
    with world.store.read() as txn:
        ((group,), _) = errors(txn)
    assert group.text == "x" * ERROR_TEXT_MAX
    assert group.traceback == "y" * TRACEBACK_TEXT_MAX


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("ValueError('no')", "ValueError"),
        ("a.b.Error: no", "a.b.Error"),
        ("Traceback\nZeroDivisionError: x", "ZeroDivisionError"),
        ("", "unknown"),
        ("<x>", "unknown"),
    ],
)
def test_names_of_exceptions(text: str, name: str) -> None:
    assert exception_name(text) == name


@pytest.mark.parametrize(
    ("key", "prefix"),
    [
        ("x", "x"),
        ("sum-aggregate-1a2b", "sum-aggregate"),
        ("x-deadbeef", "x"),
        ("x-abc-1", "x-abc"),
        (msgpack.packb(("load-7", 1)), "load"),
    ],
)
def test_prefixes(key: str | bytes, prefix: str) -> None:
    assert prefix_text(key) == prefix
