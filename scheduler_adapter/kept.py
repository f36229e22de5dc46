"""What lives in a scheduler besides tasks and belongs to the work outlives it: each piece is an item in the database.

Kept are published datasets, Variables, Queues, task metadata, plugins (and with them uploaded files) and learned durations. Locks,
semaphores, events, actors, logs and event topics are not.

What a client was told is done (a dataset published, an item put) is on disk: calls that change something are answered when it is. An
item of a Queue is handed out at once, and one with a future stays stored until its receipt is confirmed: what was got just before the
scheduler died may be got again.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import logging
import struct
from collections import deque
from collections.abc import Callable, Collection, Iterator
from typing import Any

from distributed.scheduler import Scheduler

from scheduler_adapter import dask_extensions as extensions
from scheduler_adapter import dask_internals as internals
from scheduler_adapter.dask_extensions import ABSENT, Told
from scheduler_adapter.keys import pack_key, pack_keys, unpack_key
from scheduler_adapter.pager import Pager
from taskdb.commands import DURATIONS, DropClient, Keep, Want
from taskdb.errors import LimitExceeded, Unavailable
from taskdb.limits import KEY_BYTES_MAX

logger = logging.getLogger("distributed.taskdb")

#: Sections of items: `section NUL name`, the name packed as keys are. All but DURATIONS are pickled.
DATASETS = b"datasets\0"
VARIABLES = b"variables\0"
QUEUES = b"queues\0"
QUEUE_ITEMS = b"queue-items\0"
METADATA = b"metadata\0"
WORKER_PLUGINS = b"worker-plugins\0"
NANNY_PLUGINS = b"nanny-plugins\0"
SCHEDULER_PLUGINS = b"scheduler-plugins\0"

#: Bytes of one value, pickled: some of them fit into one message to the daemon. What is larger is not kept, and said so.
VALUE_BYTES_MAX = 128 * 2**20
#: How long a plugin's start may take when it is put back.
PLUGIN_SECONDS = 30.0
#: How often it is looked whether something sent is on disk.
ON_DISK_SECONDS = 0.005
#: How often durations are written, by how much they must have changed, and how many are kept.
DURATIONS_SECONDS = 5.0
DURATIONS_CHANGE = 0.1
DURATIONS_MAX = 10_000
#: Characters of a prefix whose duration is kept.
PREFIX_CHARS_MAX = 1_000

#: Calls that are answered when what they changed is on disk.
_DURABLE = (
    "publish_put",
    "publish_delete",
    "variable_set",
    "queue_create",
    "queue_put",
    "set_metadata",
    "scatter",
    "update_data",
    "register_worker_plugin",
    "unregister_worker_plugin",
    "register_nanny_plugin",
    "unregister_nanny_plugin",
    "register_scheduler_plugin",
    "unregister_scheduler_plugin",
)


class Kept:
    """`items`: what is in the database, by name with section. `clients`: those with wants there.

    Puts everything back but the scheduler's plugins, which come back when the scheduler starts its own.
    """

    def __init__(self, scheduler: Scheduler, pager: Pager, undo: internals.Undo, items: dict[bytes, bytes], clients: Collection[str] = ()):
        self.scheduler = scheduler
        self.pager = pager
        self._closed = False
        self._number = 0
        self._read: dict[bytes, dict[bytes, bytes]] = {}
        for name, value in items.items():
            section, nul, rest = name.partition(b"\0")
            self._read.setdefault(section + nul, {})[rest] = value
        self.scheduler_plugins = SchedulerPlugins(self, undo)
        self.durations = Durations(self, {name.decode(errors="replace"): value for name, value in self._read.get(DURATIONS, {}).items()})
        for section, told in (
            (METADATA, extensions.task_metadata(scheduler)),
            (WORKER_PLUGINS, extensions.worker_plugins(scheduler)),
            (NANNY_PLUGINS, extensions.nanny_plugins(scheduler)),
        ):
            Entries(self, section, told).put_back()
        undo.set_attr(scheduler, "set_metadata", self.set_metadata)
        undo.set_item(scheduler.handlers, "set_metadata", self.set_metadata)
        owners = {*_datasets(self), *Variables(self, undo).owners, *Queues(self, undo).owners}
        gone = [name for name in clients if name.startswith(("published-", "variable-", "queue-")) and name not in owners]
        pager.send(*[DropClient(name) for name in gone])
        for op in _DURABLE:
            if op in scheduler.handlers:
                undo.set_item(scheduler.handlers, op, self._answered_on_disk(scheduler.handlers[op]))
        self._read.clear()

    def close(self) -> None:
        """Nothing is kept any more. To be called while the pager still sends."""
        self.durations.close()
        self._closed = True

    # ---------------------------------------------------------------------------------------------------------- items

    def next_number(self) -> int:
        """Numbers give the order in which things are put back."""
        self._number += 1
        return self._number

    def read(self, section: bytes) -> Iterator[tuple[Any, int, Any]]:
        """Names, numbers and values of a section, in order. What cannot be read is left out (and stays stored)."""
        found = []
        for packed, data in self._read.get(section, {}).items():
            try:
                found.append((*extensions.decode(data), unpack_key(packed)))
            except Exception as e:
                logger.error("taskdb: a kept item of %s cannot be read: %r", section[:-1].decode(), e)
        found.sort(key=lambda item: item[0])
        for number, value, name in found:
            self._number = max(self._number, number)
            yield name, number, value

    def put(self, section: bytes, name: Any, number: int, value: Any) -> None:
        if self._closed:
            return
        packed = data = b""
        try:
            packed = _bounded(section + pack_key(name), KEY_BYTES_MAX)
            data = _bounded(extensions.encode((number, value)), VALUE_BYTES_MAX)
        except Exception as e:
            logger.warning("taskdb: %s %r is not kept: %s", section[:-1].decode(), name, e)
        if packed:  # without data: nor is what it was before
            self.pager.send(Keep([packed], [data]))

    def remove(self, section: bytes, *names: Any) -> None:
        if names and not self._closed:
            packed = [section + name for name in pack_keys(names)]
            self.pager.send(Keep(packed, [b""] * len(packed)))

    async def on_disk(self) -> None:
        """Return once everything sent so far is on disk, however long the daemon is away. Raises Unavailable if the scheduler ends."""
        session = self.pager.session
        await self.pager.answered()
        seq = session.last_seq if session is not None else 0
        while session is None or session.durable_seq < seq:
            if session is None or self.pager.session is not session:
                raise Unavailable("the scheduler stops; whether this was done is not known")
            await asyncio.sleep(ON_DISK_SECONDS)

    def _answered_on_disk(self, handler: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(handler)
        async def on_disk(*args: Any, **kwargs: Any) -> Any:
            result = handler(*args, **kwargs)
            if inspect.isawaitable(result):
                result = await result
            await self.on_disk()
            return result

        return on_disk

    def set_metadata(self, keys: list[Any], value: Any = None) -> None:
        """Stock's, and all below its first key is written again."""
        scheduler = self.scheduler
        type(scheduler).set_metadata(scheduler, keys, value)
        scheduler.task_metadata[keys[0]] = scheduler.task_metadata[keys[0]]

    # -------------------------------------------------------------------------------------------------- pseudo clients

    def restate(self, client: str, keys: Collection[Any]) -> None:
        """A pseudo client wants just these: others are of a put, or a release, that the old scheduler did not finish."""
        internals.ensure_client_state(self.scheduler, client)
        self.pager.send(DropClient(client), Want(client, pack_keys(keys)))

    async def find(self, record: dict[str, Any], client: str) -> dict[str, Any]:
        """A record that is handed out: if its task is on disk, with a stub for it."""
        if extensions.not_found(record):
            key = extensions.future_key(record)
            await self.pager.ensure([key], client)
            ts = self.scheduler.tasks.get(key)
            if ts is not None:
                internals.hold(ts, internals.ensure_client_state(self.scheduler, client))
                extensions.describe(record, ts)
        return record


def _bounded(data: bytes, most: int) -> bytes:
    if len(data) > most:
        raise LimitExceeded(f"it has {len(data):,} bytes, over the bound of {most:,}")
    return data


class Entries:
    """A dictionary, an item each entry."""

    def __init__(self, kept: Kept, section: bytes, told: Told):
        self._kept = kept
        self._section = section
        self.told = told
        self._numbers: dict[Any, int] = {}

    def put_back(self) -> None:
        for name, number, value in self._kept.read(self._section):
            self.told[name] = value
            self._numbers[name] = number
        self.told.tell = self.changed

    def changed(self, name: Any, old: Any, value: Any) -> None:
        if value is ABSENT:
            self._numbers.pop(name, None)
            self._kept.remove(self._section, name)
        else:
            number = self._numbers.get(name) or self._kept.next_number()
            self._numbers[name] = number
            self._kept.put(self._section, name, number, value)


def _datasets(kept: Kept) -> set[str]:
    """Returns the pseudo clients of datasets. Their wants were written together with them."""
    told = extensions.datasets(kept.scheduler)
    if told is None:
        return set()
    Entries(kept, DATASETS, told).put_back()
    owners = {extensions.dataset_client(name) for name in told}
    for client in owners:
        internals.ensure_client_state(kept.scheduler, client)
    return owners


class Variables:
    def __init__(self, kept: Kept, undo: internals.Undo):
        self._kept = kept
        self.owners: set[str] = set()
        told = extensions.variables(kept.scheduler)
        if told is None:
            return
        Entries(kept, VARIABLES, told).put_back()
        for name, record in told.items():
            client = extensions.variable_client(name)
            key = extensions.future_key(record)
            kept.restate(client, [] if key is ABSENT else [key])
            self.owners.add(client)
        handlers = kept.scheduler.handlers
        self._stock_get = handlers["variable_get"]
        undo.set_item(handlers, "variable_get", self.get)

    async def get(self, name: Any = None, **kwargs: Any) -> Any:
        return await self._kept.find(await self._stock_get(name=name, **kwargs), extensions.variable_client(name))


class Queues:
    """Each queue is an item, and each of its records another."""

    def __init__(self, kept: Kept, undo: internals.Undo):
        self._kept = kept
        self.owners: set[str] = set()
        #: Numbers and keys of the records in each queue, first in first out as the queue itself.
        self._stored: dict[Any, deque[tuple[int, Any]]] = {}
        #: Numbers of records with futures that were handed out, by queue and key.
        self._taken: dict[tuple[Any, Any], deque[int]] = {}
        #: Number of each queue.
        self._numbers: dict[Any, int] = {}
        queues = extensions.Queues.of(kept.scheduler)
        if queues is None:
            return
        self._queues = queues
        self._put_back()
        queues.queues.tell = self._queue_changed
        queues.client_refcount.tell = self._clients_changed
        queues.future_refcount.tell = self._count_changed
        handlers = kept.scheduler.handlers
        self._stock_get = handlers["queue_get"]
        undo.set_item(handlers, "queue_get", self.get)

    def _put_back(self) -> None:
        records: dict[Any, list[dict[str, Any]]] = {}
        for (name, number), _, record in self._kept.read(QUEUE_ITEMS):
            records.setdefault(name, []).append(record)
            self._stored.setdefault(name, deque()).append((number, extensions.future_key(record)))
        for name, number, (maxsize, clients) in self._kept.read(QUEUES):
            self._queues.put_back(name, maxsize, clients, records.get(name, ()))
            self._numbers[name] = number
            self._watch(name)
            client = extensions.queue_client(name)
            self._kept.restate(client, {key for _, key in self._stored[name] if key is not ABSENT})
            self.owners.add(client)

    def _watch(self, name: Any) -> None:
        self._stored.setdefault(name, deque())
        self._queues.watch(name, functools.partial(self._put, name), functools.partial(self._got, name))

    def _queue_changed(self, name: Any, old: Any, queue: Any) -> None:
        if queue is not ABSENT:
            self._watch(name)  # it is written with its count of clients
            return
        numbers = [number for number, _ in self._stored.pop(name, ())]
        for at in [at for at in self._taken if at[0] == name]:
            numbers.extend(self._taken.pop(at))
        self._numbers.pop(name, None)
        self._kept.remove(QUEUE_ITEMS, *[(name, number) for number in numbers])
        self._kept.remove(QUEUES, name)

    def _clients_changed(self, name: Any, old: Any, clients: Any) -> None:
        queue = self._queues.queues.get(name)
        if queue is None or clients is ABSENT:
            return
        if name not in self._numbers:
            self._numbers[name] = self._kept.next_number()
        self._kept.put(QUEUES, name, self._numbers[name], (queue.maxsize, clients))

    def _put(self, name: Any, record: dict[str, Any]) -> None:
        number = self._kept.next_number()
        self._stored[name].append((number, extensions.future_key(record)))
        self._kept.put(QUEUE_ITEMS, (name, number), number, record)

    def _got(self, name: Any) -> None:
        number, key = self._stored[name].popleft()
        if key is ABSENT:
            self._kept.remove(QUEUE_ITEMS, (name, number))
        else:
            self._taken.setdefault((name, key), deque()).append(number)

    def _count_changed(self, at: tuple[Any, Any], old: Any, count: Any) -> None:
        """One less of a future: a client has confirmed that it has it."""
        if count is not ABSENT and count < 0:
            # Of a queue that is gone. Not to be counted against what may come; and 0 now would make stock end a want that is not there.
            asyncio.get_running_loop().call_soon(self._queues.future_refcount.pop, at, None)
        if old is ABSENT or count is ABSENT or count >= old:
            return
        if at not in self._taken:
            self._withdraw(*at)
        if taken := self._taken.get(at):
            self._kept.remove(QUEUE_ITEMS, (at[0], taken.popleft()))
            if not taken:
                del self._taken[at]

    def _withdraw(self, name: Any, key: Any) -> None:
        """The scheduler before handed it out, so it is in the queue again. It leaves as if it were got now."""
        stored = self._stored.get(name, deque())
        index = next((i for i, (_, other) in enumerate(stored) if other == key), None)
        if index is not None:
            stored.rotate(-index)
            self._queues.take(name, index)
            stored.rotate(index)

    async def get(self, name: Any = None, **kwargs: Any) -> Any:
        answer = await self._stock_get(name=name, **kwargs)
        client = extensions.queue_client(name)
        for record in answer if isinstance(answer, list) else [answer]:
            await self._kept.find(record, client)
        return answer


class SchedulerPlugins:
    """Those that clients register, pickled. They come back in the order they came, by the same path."""

    def __init__(self, kept: Kept, undo: internals.Undo):
        self._kept = kept
        self._read = list(kept.read(SCHEDULER_PLUGINS))
        self._numbers = {name: number for name, number, _ in self._read}
        self._stock_register = kept.scheduler.handlers["register_scheduler_plugin"]
        undo.set_item(kept.scheduler.handlers, "register_scheduler_plugin", self.register)
        undo.set_attr(kept.scheduler, "remove_plugin", self.remove)
        if self._read:
            name = "taskdb-plugins"
            kept.scheduler.add_plugin(extensions.AtStart(name, self._put_back), name=name)

    async def _put_back(self) -> None:
        for name, _, plugin in self._read:
            try:
                async with asyncio.timeout(PLUGIN_SECONDS):
                    await self._stock_register(plugin=plugin, name=name, idempotent=False)
            except Exception as e:
                logger.error("taskdb: scheduler plugin %r could not be put back, the scheduler runs without it: %r", name, e)
        self._read.clear()

    async def register(self, plugin: Any, name: str | None = None, *, idempotent: bool) -> None:
        there = idempotent and name in self._kept.scheduler.plugins
        await self._stock_register(plugin=plugin, name=name, idempotent=idempotent)
        if not there and name is not None and isinstance(plugin, (bytes, bytearray, memoryview)):
            self._numbers.setdefault(name, self._kept.next_number())
            self._kept.put(SCHEDULER_PLUGINS, name, self._numbers[name], bytes(plugin))

    def remove(self, name: str | None = None) -> None:
        scheduler = self._kept.scheduler
        type(scheduler).remove_plugin(scheduler, name)
        if self._numbers.pop(name, None) is not None:
            self._kept.remove(SCHEDULER_PLUGINS, name)


class Durations:
    """What tasks of each prefix took. A prefix knows it again as soon as there is one."""

    _VALUE = struct.Struct(">d")

    def __init__(self, kept: Kept, items: dict[str, bytes]):
        self._kept = kept
        self.learned = {name: self._VALUE.unpack(value)[0] for name, value in items.items() if len(value) == self._VALUE.size}
        self._prefixes = extensions.task_prefixes(kept.scheduler)
        self._prefixes.tell = self._changed
        self._loop = asyncio.get_running_loop()
        self._timer = self._loop.call_later(DURATIONS_SECONDS, self._tick)

    def _changed(self, name: str, old: Any, prefix: Any) -> None:
        if prefix is not ABSENT and (seconds := self.learned.get(name)) is not None:
            extensions.expect(prefix, seconds)

    def _tick(self) -> None:
        self.write()
        self._timer = self._loop.call_later(DURATIONS_SECONDS, self._tick)

    def write(self) -> None:
        """Those that have changed. O(prefixes)."""
        changed: dict[str, float] = {}
        for name, prefix in self._prefixes.items():
            seconds = extensions.expected_seconds(prefix)
            if seconds is None or len(name) > PREFIX_CHARS_MAX:
                continue
            old = self.learned.get(name)
            if old is None or abs(seconds - old) > DURATIONS_CHANGE * old:
                changed[name] = seconds
        learned = self.learned
        over = len(learned.keys() | changed.keys()) - DURATIONS_MAX
        unused = [name for name in learned if name not in self._prefixes][: max(over, 0)]
        for name in unused:
            del learned[name]
        room = DURATIONS_MAX - len(learned)
        new = [name for name in changed if name not in learned]
        for name in new[max(room, 0) :]:
            del changed[name]
        learned.update(changed)
        names = [DURATIONS + name.encode(errors="replace") for name in (*changed, *unused)]
        if names:
            values = [self._VALUE.pack(seconds) for seconds in changed.values()] + [b""] * len(unused)
            self._kept.pager.send(Keep(names, values))

    def close(self) -> None:
        self._timer.cancel()
        self.write()
