from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import Any

import msgpack
import pytest

from taskdb import commands as c
from taskdb.engine import listing
from taskdb.engine.listing import Filters
from taskdb.errors import InvalidRequest
from taskdb.model import Level, TaskFlag
from tests.support.engine_world import World

KEYS = [msgpack.packb(key) for key in ("load-1", ("sum-2", 0, 1), "mean-3", ("sum-aggregate-4", 0))]
WANTED = int(TaskFlag.WANTED)


@pytest.fixture
def world() -> World:
    """1 queued, 2 to 4 wait; then 5 to 8 of another graph: 5 in memory, 6 failed, 7 leased, 8 queued."""
    world = World()
    groups = ["load-1", "sum-2", "sum-aggregate-4"]
    world.do(
        c.BeginGraph("g", "alice", 1.0, 9.5, "label"),
        c.AddTasks(
            "g",
            0,
            KEYS,
            [b"s"] * 4,
            [0, 0, WANTED, WANTED],
            [0, 1, 2, 1],
            [0, 0, 1, 2],
            [2, 2, 1, 0],
            groups=[0, 1, 1, 2],
            new_groups=groups,
        ),
        c.SealGraph("g"),
    )
    keys = [msgpack.packb(("x", i)) for i in range(4)]
    world.do(
        c.BeginGraph("h", "bob", 2.0, 10.0, "other"),
        c.AddTasks("h", 0, keys, [b"s"] * 4, [WANTED] * 4, groups=[0] * 4, new_groups=["x"], orders=[3.0, 2.0, 1.0, 0.0]),
        c.SealGraph("h"),
    )
    world.do(c.Report([5, 7], [Level.MEMORY, Level.HELD], [80, -1]), c.Fail(6, b"payload", "ValueError('no')"))
    return world


def pages(world: World, limit: int = 100, **filters: Any) -> Iterator[list[int]]:
    with world.store.read() as txn:
        cursor = b""
        while True:
            page = listing.list_tasks(txn, Filters(**filters), cursor, limit)
            assert len(page.tasks) <= limit
            yield [task.id for task in page.tasks]
            cursor = page.cursor
            if not cursor:
                return


@pytest.mark.parametrize(
    ("filters", "ids"),
    [
        ({}, [1, 2, 3, 4, 5, 6, 7, 8]),
        ({"submission": "g"}, [1, 2, 3, 4]),
        ({"submission": "none"}, []),
        ({"state": "waiting"}, [2, 3, 4]),
        ({"state": "processing"}, [7]),
        ({"state": "memory"}, [5]),
        ({"state": "erred"}, [6]),
        ({"state": "released"}, []),
        ({"prefix": "sum"}, [2, 4]),
        ({"group": "sum"}, [2, 3, 4]),
        ({"group": "sum-aggregate"}, [4]),
        ({"group": "sum-2"}, [2, 3]),
        ({"group": "su"}, []),
        ({"pattern": "*'sum-*0)"}, [4]),
        ({"pattern": "('x', [12])"}, [6, 7]),
        ({"wanted": True}, [3, 4, 5, 6, 7, 8]),
        ({"submission": "h", "state": "queued", "prefix": "x"}, [8]),
        ({"submission": "g", "state": "memory"}, []),
    ],
)
def test_filters(world: World, filters: dict[str, Any], ids: list[int]) -> None:
    for limit in (1, 2, 100):
        assert list(chain(*pages(world, limit, **filters))) == ids


@pytest.mark.parametrize("bound", ["LIST_SCAN_MAX", "LIST_NAMES_MAX"])
def test_the_work_for_a_page_is_bounded(world: World, bound: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listing, "_CHUNK", 1)
    monkeypatch.setattr(listing, bound, 2)
    found = list(pages(world, prefix="mean"))
    assert list(chain(*found)) == [3]
    assert len(found) > 2


SORTED = [
    ("bytes", True, [5, 1, 2, 3, 4, 6, 7, 8]),
    ("priority", False, [1, 2, 3, 4, 8, 7, 6, 5]),
    ("priority", True, [5, 6, 7, 8, 4, 3, 2, 1]),
    ("needed-by", True, [1, 2, 3, 4, 5, 6, 7, 8]),
    ("waits-for", False, [1, 5, 6, 7, 8, 2, 4, 3]),
]


@pytest.mark.parametrize(("sort", "descending", "ids"), SORTED)
@pytest.mark.parametrize("chunk", [1, 3, 100])
def test_sorted_pages(world: World, sort: str, descending: bool, ids: list[int], chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of all stretches, merged, whatever their length."""
    monkeypatch.setattr(listing, "_CHUNK", chunk)
    monkeypatch.setattr(listing, "LIST_SCAN_MAX", 2)
    found: list[int] = []
    after = b""
    with world.store.read() as txn:
        while True:
            best: list[Any] = []
            cursor = b""
            while True:
                page = listing.list_tasks(txn, Filters(), cursor, 3, sort, descending, after)
                best = sorted([*best, *page.tasks], key=lambda task: task.token)[:3]
                cursor = page.cursor
                if not cursor:
                    break
            found += [task.id for task in best]
            if len(best) < 3:
                break
            after = best[-1].token
    assert found == ids


def test_sorted_and_filtered(world: World) -> None:
    with world.store.read() as txn:
        assert [x.id for x in listing.list_tasks(txn, Filters(prefix="x", submission="h"), sort="priority", limit=2).tasks] == [8, 7]


@pytest.mark.parametrize(
    "args",
    [{"filters": Filters(state="lost")}, {"cursor": b"x"}, {"sort": "colour"}, {"sort": "bytes", "after": b"x"}],
)
def test_what_it_does_not_know_is_refused(world: World, args: dict[str, Any]) -> None:
    with world.store.read() as txn, pytest.raises(InvalidRequest):
        listing.list_tasks(txn, **args)
