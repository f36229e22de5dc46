"""What is kept of a scheduler, with real schedulers one after another and a dictionary in the place of the database."""

from __future__ import annotations

import asyncio
import inspect
import itertools
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from distributed import Scheduler
from distributed.diagnostics.plugin import SchedulerPlugin
from distributed.protocol.pickle import dumps
from distributed.protocol.serialize import Serialized
from distributed.publish import PublishExtension
from distributed.queues import QueueExtension
from distributed.scheduler import TaskState
from distributed.shuffle._core import ShuffleRunSpec
from distributed.variable import VariableExtension

from scheduler_adapter import dask_extensions as extensions
from scheduler_adapter import kept
from scheduler_adapter.dask_internals import Undo
from scheduler_adapter.keys import pack_key
from taskdb.commands import DURATIONS, Command, DropClient, Keep, Want


class Database:
    """Takes what a pager would send."""

    def __init__(self) -> None:
        self.items: dict[bytes, bytes] = {}
        self.other: list[Command] = []
        self.session = None

    def send(self, *commands: Command, urgent: bool = False) -> None:
        for command in commands:
            if isinstance(command, Keep):
                self.items.update(zip(command.names, command.values, strict=True))
                self.items = {name: value for name, value in self.items.items() if value}
            else:
                self.other.append(command)

    def sections(self) -> set[bytes]:
        return {name.partition(b"\0")[0] for name in self.items}


@asynccontextmanager
async def scheduler(database: Database, clients: tuple[str, ...] = ()) -> AsyncIterator[Scheduler]:
    """A scheduler with what the database has. At its end everything of it is gone, as when it is killed."""
    s = Scheduler(port=0, host="127.0.0.1", dashboard=False, validate=True)

    async def preload() -> None:
        s.kept = kept.Kept(s, database, Undo(), dict(database.items), clients)  # type: ignore[arg-type]

    s.preloads.start = preload
    async with s:
        database.items.pop(kept.WORKER_PLUGINS + pack_key("shuffle"), None)  # stock's own
        yield s
        s.kept.durations._timer.cancel()
        s.kept._closed = True


def plays(test: Callable[[Database], Awaitable[None]]) -> Callable[[], None]:
    def run() -> None:
        asyncio.run(asyncio.wait_for(test(Database()), 30))

    run.__name__, run.__doc__ = test.__name__, test.__doc__
    return run


def task(s: Scheduler, key: str) -> TaskState:
    return s.new_task(key, None, "released")


def queues(s: Scheduler) -> QueueExtension:
    extension = s.extensions["queues"]
    assert isinstance(extension, QueueExtension)
    return extension


def variables(s: Scheduler) -> VariableExtension:
    extension = s.extensions["variables"]
    assert isinstance(extension, VariableExtension)
    return extension


def datasets(s: Scheduler) -> PublishExtension:
    extension = s.extensions["publish"]
    assert isinstance(extension, PublishExtension)
    return extension


async def put(s: Scheduler, name: str, *values: Any) -> None:
    for value in values:
        await queues(s).put(name=name, data=value)


async def get(s: Scheduler, name: str) -> Any:
    return (await queues(s).get(name=name))["value"]


# ------------------------------------------------------------------------------------------------------------- queues


@plays
async def test_items_of_a_queue_keep_their_order(database: Database) -> None:
    async with scheduler(database) as s:
        queues(s).create("q", maxsize=3)
        queues(s).create("q")
        await put(s, "q", "a", "b", "c")
        assert await get(s, "q") == "a"
    async with scheduler(database) as s:
        q = queues(s).queues["q"]
        assert (q.maxsize, q.qsize(), queues(s).client_refcount["q"]) == (3, 2, 2)
        await put(s, "q", "d")
        assert q.full()
        assert await get(s, "q") == "b"
    async with scheduler(database) as s:
        assert [await get(s, "q") for _ in range(2)] == ["c", "d"]
        queues(s).release("q")
        assert b"queues" in database.sections()
        queues(s).release("q")
        assert database.items == {}


@plays
async def test_each_item_is_written_once(database: Database) -> None:
    async with scheduler(database) as s:
        queues(s).create("q")
        sent: list[Command] = []
        database.send = lambda *commands, urgent=False: sent.extend(commands)  # type: ignore[method-assign]
        await put(s, "q", *range(20))
        assert [len(command.names) for command in sent if isinstance(command, Keep)] == [1] * 20


@plays
async def test_future_in_a_queue_is_kept_until_its_receipt_is_confirmed(database: Database) -> None:
    async with scheduler(database) as s:
        task(s, "x")
        queues(s).create("q")
        for _ in range(2):
            await queues(s).put(name="q", key="x")
        assert await get(s, "q") == "x"
        assert await get(s, "q") == "x"
        queues(s).future_release(name="q", key="x", client="c")
    async with scheduler(database) as s:
        task(s, "x")
        assert queues(s).qsize("q") == 1
        assert queues(s).future_refcount["q", "x"] == 1
        assert DropClient("queue-q") in database.other
        assert any(isinstance(c, Want) and c.client == "queue-q" and len(c.keys) == 1 for c in database.other)
        assert await get(s, "q") == "x"
        queues(s).future_release(name="q", key="x", client="c")
        assert database.sections() == {b"queues"}
        assert queues(s).future_refcount == {}


@plays
async def test_receipt_that_comes_to_the_next_scheduler(database: Database) -> None:
    """The client outlived the one that handed the future out."""
    async with scheduler(database) as s:
        task(s, "x")
        queues(s).create("q", maxsize=3)
        await put(s, "q", 1)
        await queues(s).put(name="q", key="x")
        await put(s, "q", 2)
        assert await get(s, "q") == 1
        assert await get(s, "q") == "x"
        await put(s, "q", 3, 4)
    async with scheduler(database) as s:
        task(s, "x")
        assert queues(s).qsize("q") == 4
        waiting = asyncio.ensure_future(put(s, "q", 5))
        queues(s).future_release(name="q", key="x", client="Client-1")
        assert [await get(s, "q") for _ in range(2)] == [2, 3]
        await waiting
    async with scheduler(database) as s:
        assert [await get(s, "q") for _ in range(2)] == [4, 5]
        # Nobody knows of this one.
        with pytest.warns(UserWarning, match="key is unknown"):
            queues(s).future_release(name="gone", key="y", client="Client-1")
        await asyncio.sleep(0)
        assert database.sections() == {b"queues"}
        assert queues(s).future_refcount == {}


@plays
async def test_queue_that_is_released_takes_with_it_what_was_handed_out(database: Database) -> None:
    async with scheduler(database) as s:
        task(s, "x")
        queues(s).create("q")
        await queues(s).put(name="q", key="x")
        assert await get(s, "q") == "x"
        queues(s).release("q")
        assert database.items == {}


@plays
async def test_what_waits_for_room_in_a_released_queue_is_not_kept(database: Database) -> None:
    async with scheduler(database) as s:
        queues(s).create("q", maxsize=1)
        await put(s, "q", 1)
        old = queues(s).queues["q"]
        waiting = asyncio.ensure_future(put(s, "q", 2))
        await asyncio.sleep(0)
        queues(s).release("q")
        assert old.get_nowait()["value"] == 1
        await waiting
        assert database.items == {}


# -------------------------------------------------------------------------------------------------------- dictionaries


@plays
async def test_entries_come_back_in_their_order(database: Database) -> None:
    async with scheduler(database) as s:
        for name in ("b", "gone", "a", "c"):
            s.worker_plugins[name] = name.encode()
        s.worker_plugins["b"] = b"again"
        del s.worker_plugins["gone"]
    for _ in range(2):
        async with scheduler(database) as s:
            assert list(s.worker_plugins.items())[:3] == [("b", b"again"), ("a", b"a"), ("c", b"c")]


@plays
async def test_variable_of_a_future(database: Database) -> None:
    async with scheduler(database, clients=("variable-old", "Client-1", "published-never")) as s:
        assert database.other == [DropClient("variable-old"), DropClient("published-never")]
        task(s, "x")
        await variables(s).set(name="v", key="x")
        await variables(s).set(name="w", data={"a": 1})
    database.other.clear()
    async with scheduler(database, clients=("variable-v", "variable-w")) as s:
        assert variables(s).variables == {"v": {"type": "Future", "value": "x"}, "w": {"type": "msgpack", "value": {"a": 1}}}
        assert {"variable-v", "variable-w"} <= set(s.clients)
        assert [(c.client, len(c.keys)) for c in database.other if isinstance(c, Want)] == [("variable-v", 1), ("variable-w", 0)]
        # A client of the old scheduler confirms what the old one gave it.
        with pytest.warns(UserWarning, match="key is unknown"):
            await variables(s).future_received_confirm(name="v", key="x", token="of the old one", client="Client-1")


@plays
async def test_dataset_stays_serialised(database: Database) -> None:
    frames = [memoryview(bytearray(b"abc")), b"de"]
    async with scheduler(database) as s:
        datasets(s).datasets["name", 1] = {"keys": ("x",), "data": Serialized({"serializer": "pickle"}, frames)}
        frames[0][:] = b"xyz"  # type: ignore[index]
    async with scheduler(database) as s:
        (dataset,) = datasets(s).get((("name", 1),))
        assert dataset is not None
        assert dataset["data"] == Serialized({"serializer": "pickle"}, [b"abc", b"de"])
        assert extensions.dataset_client(("name", 1)) in s.clients


@plays
async def test_metadata_of_a_key_goes_with_it(database: Database) -> None:
    async with scheduler(database) as s:
        s.set_metadata(["x", "y"], 1)
        s.set_metadata(["x", "z", "deep"], 2)
        s.set_metadata(["other"], 3)
        s.task_metadata.pop("other")
        s.task_metadata.pop("never", None)
    async with scheduler(database) as s:
        assert s.get_metadata([]) == {"x": {"y": 1, "z": {"deep": 2}}}
        s.task_metadata.clear()
        assert database.items == {}


@plays
async def test_dictionaries_are_plain_to_others(database: Database) -> None:
    """Functions that clients send may return them."""
    async with scheduler(database) as s:
        s.set_metadata(["x"], 1)
        copy = extensions.decode(dumps(s.task_metadata))
        assert type(copy) is dict
        assert copy == {"x": 1}


@plays
async def test_what_is_too_large_is_not_kept_and_said(database: Database) -> None:
    async with scheduler(database) as s:
        await variables(s).set(name="v", data="small")
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(kept, "VALUE_BYTES_MAX", 1000)
            said = await warnings_of(variables(s).set(name="v", data="x" * 1000))
        (line,) = said
        assert line.startswith("taskdb: variables 'v' is not kept: it has 1,")
        assert database.items == {}, "nor is what it was before"
        assert (await warnings_of(variables(s).set(name=("v", None), data=1))) == []
        (line,) = await warnings_of(variables(s).set(name=object, data=1))
        assert "is not kept" in line


async def warnings_of(doing: Awaitable[Any]) -> list[str]:
    lines: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        for level in ("warning", "error"):
            patch.setattr(kept.logger, level, lambda text, *args: lines.append(text % args))
        await doing
    return lines


@plays
async def test_what_cannot_be_read_is_left_out_and_said(database: Database) -> None:
    async with scheduler(database) as s:
        await variables(s).set(name="v", data=1)
        await variables(s).set(name="w", data=2)
    name = next(name for name in database.items if name.endswith(b"v"))
    database.items[name] = b"not a pickle"
    database.items[b"of-a-later-release\0x"] = b"?"

    async def again() -> None:
        async with scheduler(database) as s:
            assert list(variables(s).variables) == ["w"]

    (line,) = await warnings_of(again())
    assert line.startswith("taskdb: a kept item of variables cannot be read")
    assert name in database.items


# ------------------------------------------------------------------------------------------------------------- plugins


class Plugin(SchedulerPlugin):
    def __init__(self, name: str):
        self.name = name


@plays
async def test_scheduler_plugins(database: Database) -> None:
    async with scheduler(database) as s:
        register = s.kept.scheduler_plugins.register
        for name in ("b", "gone", "a"):
            await register(plugin=dumps(Plugin(name)), name=name, idempotent=False)
        await register(plugin=dumps(Plugin("b")), name="b", idempotent=True)
        await register(plugin=Plugin("an object"), name="an object", idempotent=False)
        await s.unregister_scheduler_plugin("gone")
        with pytest.raises(ValueError, match="gone"):
            await s.unregister_scheduler_plugin("gone")
    async with scheduler(database) as s:
        names = [name for name, plugin in s.plugins.items() if isinstance(plugin, Plugin)]
        assert names == ["b", "a"]
        assert "taskdb-plugins" not in s.plugins


# ----------------------------------------------------------------------------------------------------------- durations


@plays
async def test_durations(database: Database) -> None:
    def written() -> dict[str, float]:
        names = {name for name in database.items if name.startswith(DURATIONS)}
        return {name.removeprefix(DURATIONS).decode(): struct.unpack(">d", database.items[name])[0] for name in names}

    async with scheduler(database) as s:
        prefix = task(s, "inc-1").prefix
        task(s, "never-1")
        assert prefix is not None
        prefix.duration_average = 1.0
        s.kept.durations.write()
        assert written() == {"inc": 1.0}
        prefix.duration_average = 1.09
        s.kept.durations.write()
        assert written() == {"inc": 1.0}
        prefix.duration_average = 1.2
        s.kept.durations.write()
        assert written() == {"inc": 1.2}
        # So slow that stock has dropped its average: what it expects then is kept.
        prefix.add_exec_time(30.0)
        assert prefix.duration_average == -1
        s.kept.durations.write()
        assert written() == {"inc": 60.0}
    async with scheduler(database) as s:
        assert s.get_task_prefix_states() == {}
        ts = task(s, "inc-1")
        assert ts.prefix.duration_average == 60.0
        assert s._get_prefix_duration(ts.prefix) == extensions.expected_seconds(ts.prefix) == 60.0
        assert task(s, "other-1").prefix.duration_average == -1


@plays
async def test_durations_are_bounded(database: Database) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kept, "DURATIONS_MAX", 3)
        for epoch in range(3):
            async with scheduler(database) as s:
                for i in range(2):
                    task(s, f"{'abc'[epoch]}{'xy'[i]}-1").prefix.duration_average = 1.0
                s.kept.durations.write()
            assert len(database.items) == min(2 * (epoch + 1), 3)
        names = {name.removeprefix(DURATIONS) for name in database.items}
        assert {b"cx", b"cy"} < names, "those that are used stay"


@plays
async def test_nothing_is_told_after_close(database: Database) -> None:
    async with scheduler(database) as s:
        queues(s).create("q")
        before = dict(database.items)
        s.kept.close()
        await put(s, "q", 1)
        await get(s, "q")
        await variables(s).set(name="v", data=1)
        s.set_metadata(["x"], 1)
        assert database.items == before
        assert s.kept.durations._timer.cancelled()


# ------------------------------------------------------------------------------------------------- numbers, touch points


@plays
async def test_numbers_continue(database: Database) -> None:
    async with scheduler(database) as s:
        for epoch, generation, expected in ((5, 3.99, 4), (6, 4.0, 4), (7, 1.0, 4)):
            extensions.continue_numbers(s, epoch, generation)
            assert s.generation == expected
            first, again = (next(TaskState._run_id_iterator) for _ in range(2))
            assert epoch << 32 <= first < again
            run, rerun = (ShuffleRunSpec(spec=None, worker_for={}, span_id=None).run_id for _ in range(2))
            assert epoch << 32 <= run < rerun
        extensions.continue_numbers(s, 1, 0.0)
        assert next(TaskState._run_id_iterator) > again, "never below what this process has used"


def test_stock_changes_these_dictionaries_as_is_told() -> None:
    """Only in the ways `Told` tells of; and looks each up on its owner, every time."""
    assert set(_uses(PublishExtension, "self.datasets")) <= {".pop(", "[name]", ".get(", "", " = {}"}
    assert set(_uses(VariableExtension, "self.variables")) <= {"[name]", "", " = dict()"}
    assert set(_uses(QueueExtension, "self.queues")) <= {"[name]", "", " = dict()"}
    assert set(_uses(QueueExtension, "self.client_refcount")) <= {"[name]", " = dict()"}
    assert set(_uses(QueueExtension, "self.future_refcount")) <= {"[name, key]", " = defaultdict(int)"}
    assert set(_uses(Scheduler, "self.worker_plugins")) <= {".pop(", "[name]", "", " = {}"}
    assert set(_uses(Scheduler, "self.nanny_plugins")) <= {".pop(", "[name]", "", " = {}"}
    assert set(_uses(Scheduler.__mro__[1], "self.task_metadata")) <= {".pop(", "", " = {}"}
    assert set(_uses(Scheduler.__mro__[1], "self.task_prefixes")) <= {".get(", "[prefix_key]", "[prefix_name]", "", " = {}"}
    assert isinstance(TaskState._run_id_iterator, itertools.count)
    assert "self._put(item)" in inspect.getsource(asyncio.Queue)
    assert "self._get()" in inspect.getsource(asyncio.Queue)


def _uses(owner: type, name: str) -> list[str]:
    """What follows each mention of an attribute: an index, a method, an assignment, or nothing that changes it."""
    found = []
    for part in inspect.getsource(owner).split(name)[1:]:
        line = part.partition("\n")[0]
        if line.startswith(" = "):
            found.append(line.rstrip())
        elif line.startswith("["):
            found.append(line[: line.index("]") + 1])
        elif line.startswith("."):
            found.append(line[: line.index("(") + 1])
        elif not line[:1].isalnum():
            found.append("")
    return found
