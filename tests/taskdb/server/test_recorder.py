"""The history: what is noted, what is written, what goes when it is full."""

from __future__ import annotations

import msgpack
import pytest

from taskdb import commands as c
from taskdb.engine import listing
from taskdb.engine.listing import Filters
from taskdb.engine.records import unreadable
from taskdb.engine.stories import Event, story
from taskdb.errors import StoreCorrupt
from taskdb.model import Level
from taskdb.server import recorder as recording
from taskdb.server.histories import stretch
from taskdb.server.recorder import Recorder, history_bytes
from taskdb.store.history import StoredBlock
from taskdb.store.schema import Table
from tests.support.engine_world import World

KEYS = [msgpack.packb(("x", i)) for i in range(3)]


class Kept:
    """A world whose history is kept. Each command happens a second after the one before."""

    def __init__(self, bytes_max: int = 1 << 20) -> None:
        self.world = World()
        self.now = 100.0
        self.recorder = Recorder(bytes_max, lambda: self.now)
        self.world.engine.moves = self.recorder.moves

    def do(self, *commands: c.Command) -> None:
        self.now += 1
        self.world.do(*commands)
        self.write()

    def write(self) -> None:
        txn = self.world.store.write()
        self.recorder.note(txn)
        self.recorder.write(txn)
        txn.commit()

    def graph(self, name: str = "g") -> None:
        run = c.AddTasks(name, 0, KEYS, [b"s"] * 3, [1] * 3, groups=[0] * 3, new_groups=["x-group"])
        self.do(c.BeginGraph(name, "alice", 1.0, 9.5, "label"), run, c.SealGraph(name))

    def story(self, key: bytes, limit: int = 0) -> list[Event]:
        with self.world.store.read() as txn:
            return story(txn, key, limit).events


def finish(kept: Kept) -> None:
    kept.do(c.Report([1], [Level.HELD]))
    kept.do(c.Report([1], [Level.MEMORY], [8], ran_on=[1], began=[102.5], seconds=[0.25], workers=["tcp://w:1"]))


def test_a_story_from_begin_to_end() -> None:
    kept = Kept()
    kept.graph()
    finish(kept)
    kept.do(c.Unwant("alice", [KEYS[0]]))
    assert kept.story(KEYS[0]) == [
        Event(101, 1, "came", "g"),
        Event(101, 1, "queued", "g"),
        Event(102, 1, "processing", "g"),
        Event(102.5, 1, "ran", "", "tcp://w:1", 0.25),
        Event(103, 1, "memory", "g"),
        Event(104, 1, "forgotten", "g"),
    ]
    assert kept.story(msgpack.packb("other")) == []


def test_a_key_that_means_another_task_by_now() -> None:
    kept = Kept()
    kept.graph()
    kept.do(c.DropClient("alice"))
    kept.graph("again")
    assert [(event.id, event.what, event.submission) for event in kept.story(KEYS[1])] == [
        (2, "came", "g"),
        (2, "queued", "g"),
        (2, "forgotten", "g"),
        (5, "came", "again"),
        (5, "queued", "again"),
    ]
    assert [event.id for event in kept.story(KEYS[1], 2)] == [5, 5]


def test_tasks_that_a_worker_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recording, "BLOCK_MOVES", 1)
    monkeypatch.setattr(listing, "LIST_SCAN_MAX", 1)
    kept = Kept()
    kept.graph()
    for task_id, worker in ((1, "a"), (2, "b"), (3, "a")):
        kept.do(c.Report([task_id], [Level.HELD]))
        kept.do(c.Report([task_id], [Level.MEMORY], [8], ran_on=[1], began=[102.5], seconds=[0.25], workers=[worker]))
    for worker, ids in (("a", [1, 3]), ("b", [2]), ("c", [])):
        found, cursor = [], b""
        with kept.world.store.read() as txn:
            while not found or cursor:
                page = listing.list_tasks(txn, Filters(worker=worker, submission="g"), cursor, 1)
                found += [task.id for task in page.tasks]
                cursor = page.cursor
                if not cursor:
                    break
        assert found == ids


def test_failures_are_told() -> None:
    kept = Kept()
    kept.graph()
    kept.do(c.Report([2], [Level.HELD]))
    kept.do(c.Fail(2, b"payload", "ValueError('no')" + "x" * 1000))
    *_, failed, erred = kept.story(KEYS[1])
    assert (failed.what, failed.text[:16], len(failed.text), erred.what) == ("failed", "ValueError('no')", recording.TEXT_MAX, "erred")


def test_it_is_bounded_and_the_oldest_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recording, "BLOCK_MOVES", 4)
    kept = Kept(bytes_max=2_000)
    for number in range(20):
        kept.graph(f"g{number}")
        kept.do(c.DropClient("alice"))
    with kept.world.store.read() as txn:
        assert history_bytes(txn) == sum(len(data) for _, data in txn.scan(Table.HISTORY)) <= 2_000
        assert list(unreadable(txn)) == []
    events = kept.story(KEYS[0])
    assert events[-1].submission == "g19"
    assert events[0].time > 110


def test_a_graph_that_ends_with_its_last_task_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recording, "BLOCK_MOVES", 1)
    kept = Kept()
    kept.graph()
    kept.do(c.DropClient("alice"))
    with kept.world.store.read() as txn:
        assert txn.count(Table.GRAPHS) == 0
        (*_, last) = [StoredBlock(data).columns() for _, data in txn.scan(Table.HISTORY)]
    assert last.states.tolist() == [0, 0, 0]
    assert [names[0] for names in last.graphs.values()] == ["g"]
    assert list(last.groups.values()) == ["x-group"]


def test_a_block_that_is_not_full_is_written_again() -> None:
    kept = Kept()
    kept.graph()
    finish(kept)
    with kept.world.store.read() as txn:
        assert txn.count(Table.HISTORY) == 1


def test_what_was_dropped_is_not_told() -> None:
    kept = Kept()
    kept.graph()
    txn = kept.world.store.write()
    kept.world.engine.apply(txn, 1, 0, [c.DropClient("alice")])
    kept.recorder.note(txn)
    kept.recorder.write(txn)
    txn.abort()
    kept.recorder.dropped()
    finish(kept)
    assert [event.what for event in kept.story(KEYS[0])] == ["came", "queued", "processing", "ran", "memory"]
    assert [event.what for event in kept.story(KEYS[1])] == ["came", "queued"]


def test_the_history_of_a_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = Kept()
    kept.graph()
    finish(kept)
    kept.do(c.DropClient("alice"))
    kept.graph("other")
    with kept.world.store.read() as txn:
        reply, rest = stretch(txn, "g", 0)
        assert stretch(txn, "none", 0) == (None, 0)
    assert rest == 0
    assert reply is not None
    assert [graph.submission for graph in reply.graphs] == ["g"]
    assert list(zip(reply.ids, reply.states)) == [(1, 2), (2, 2), (3, 2), (1, 3), (1, 4), (1, 0), (2, 0), (3, 0)]
    assert [reply.groups[place] for place in set(reply.of_group)] == ["x-group"]
    assert dict(zip(reply.key_ids, reply.keys)) == dict(enumerate(KEYS, 1))
    assert (list(reply.ran_ids), [reply.workers[place] for place in reply.ran_on]) == ([1], ["tcp://w:1"])


def test_old_history_is_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recording, "REMOVED_MAX", 2)
    monkeypatch.setattr(recording, "BLOCK_MOVES", 1)
    kept = Kept()
    for number in range(4):
        kept.graph(f"g{number}")
        kept.do(c.DropClient("alice"))
    txn = kept.world.store.write()
    assert kept.recorder.step(txn) is False
    kept.recorder.forget_before = 104
    assert kept.recorder.step(txn) is True
    assert kept.recorder.step(txn) is False
    txn.commit()
    with kept.world.store.read() as read:
        assert [StoredBlock(data).begin for _, data in read.scan(Table.HISTORY)] == [104, 105, 106, 107, 108]
        assert history_bytes(read) == sum(len(data) for _, data in read.scan(Table.HISTORY))


@pytest.mark.parametrize("data", [b"", b"\xc1", msgpack.packb((1.0, 2.0, [1], b"no", b"zip")), msgpack.packb((1, 2, 3))])
def test_damaged_blocks(data: bytes) -> None:
    with pytest.raises(StoreCorrupt):
        StoredBlock(data).keys()
    with pytest.raises(StoreCorrupt):
        StoredBlock(data).columns()
