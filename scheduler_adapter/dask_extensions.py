"""What `kept.py` touches of `distributed`: the scheduler's extensions and numbers. Private or replaced names, one function a touch point.

See `dask_internals.py` for the rule. Most of it swaps a dictionary of the scheduler for one that tells of every change: whoever makes the
change, and in the same turn of the loop as the wants that belong to it.
"""

from __future__ import annotations

import asyncio
import io
import itertools
import math
import pickle
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

from dask.utils import stringify
from distributed.diagnostics.plugin import SchedulerPlugin
from distributed.scheduler import Scheduler, TaskPrefix, TaskState
from distributed.shuffle._core import ShuffleRunSpec

#: The value of what is not, or no longer, in a dictionary.
ABSENT: Any = object()
#: Called with key, value before and value after.
Tell = Callable[[Any, Any, Any], None]


class Told(dict[Any, Any]):
    """A dictionary that tells of every change, in the ways stock makes them."""

    tell: Tell = staticmethod(lambda key, old, new: None)

    def __setitem__(self, key: Any, value: Any) -> None:
        old = self.get(key, ABSENT)
        super().__setitem__(key, value)
        self.tell(key, old, value)

    def __delitem__(self, key: Any) -> None:
        old = self[key]
        super().__delitem__(key)
        self.tell(key, old, ABSENT)

    def pop(self, key: Any, *default: Any) -> Any:
        if key not in self:  # the usual case, once a task
            return dict.pop(self, key, *default)
        value = self[key]
        del self[key]
        return value

    def clear(self) -> None:
        for key in list(self):
            del self[key]

    def __reduce__(self) -> Any:
        """Whoever asks for it from outside gets a plain one."""
        return dict, (dict(self),)


class Counts(Told):
    """The same for a `defaultdict(int)`."""

    def __missing__(self, key: Any) -> int:
        return 0


class _Tokens(set[str]):
    """Tokens of the old scheduler may be confirmed to this one; stock's `remove` would raise, and with it end the client's stream."""

    remove = set.discard


def _told(owner: Any, name: str, kind: type[Told] = Told) -> Told:
    told = kind(getattr(owner, name))
    setattr(owner, name, told)
    return told


# ------------------------------------------------------------------------------------------------------ dictionaries


def datasets(scheduler: Scheduler) -> Told | None:
    """`PublishExtension.datasets`: name to keys and data. None without the extension."""
    extension = scheduler.extensions.get("publish")
    return None if extension is None else _told(extension, "datasets")


def variables(scheduler: Scheduler) -> Told | None:
    """`VariableExtension.variables`: name to record, as `future_key` reads it. None without the extension."""
    extension = scheduler.extensions.get("variables")
    if extension is None:
        return None
    extension.waiting.default_factory = _Tokens
    return _told(extension, "variables")


def task_metadata(scheduler: Scheduler) -> Told:
    """`Scheduler.task_metadata`. What is set below its first level is not told."""
    return _told(scheduler, "task_metadata")


def worker_plugins(scheduler: Scheduler) -> Told:
    return _told(scheduler, "worker_plugins")


def nanny_plugins(scheduler: Scheduler) -> Told:
    return _told(scheduler, "nanny_plugins")


def task_prefixes(scheduler: Scheduler) -> Told:
    return _told(scheduler, "task_prefixes")


# ------------------------------------------------------------------------------------------------ queues, their records


class Queues:
    """`QueueExtension`: its queues, how many `Queue` objects clients have of each, and how many futures of a key are in, or on their way
    into or out of, each."""

    def __init__(self, extension: Any):
        self.queues = _told(extension, "queues")
        self.client_refcount = _told(extension, "client_refcount")
        self.future_refcount: Counts = _told(extension, "future_refcount", Counts)  # type: ignore[assignment]

    @classmethod
    def of(cls, scheduler: Scheduler) -> Queues | None:
        extension = scheduler.extensions.get("queues")
        return None if extension is None else cls(extension)

    def put_back(self, name: Any, maxsize: int, clients: int, records: Iterable[dict[str, Any]]) -> None:
        """A queue as it was. It may hold more than `maxsize`: what had been handed out and was not confirmed."""
        queue: asyncio.Queue[Any] = asyncio.Queue(maxsize)
        for record in records:
            queue._put(record)
            if (key := future_key(record)) is not ABSENT:
                self.future_refcount[name, key] += 1
        self.queues[name] = queue
        self.client_refcount[name] = clients

    def take(self, name: Any, index: int) -> None:
        """Get the record at a place in the queue; who waits for room is told."""
        queue = self.queues[name]
        queue._queue.rotate(-index)
        queue.get_nowait()
        queue._queue.rotate(index)

    def watch(self, name: Any, on_put: Callable[[dict[str, Any]], None], on_get: Callable[[], None]) -> None:
        """Shadows `_put` and `_get` of the `asyncio.Queue`, which are made to be overridden: all that goes in and out passes them."""
        queue = self.queues[name]
        put, get = queue._put, queue._get

        def _put(record: dict[str, Any]) -> None:
            put(record)
            if self.queues.get(name) is queue:  # else it was released while this waited for room
                on_put(record)

        def _get() -> Any:
            record = get()
            if self.queues.get(name) is queue:
                on_get()
            return record

        queue._put, queue._get = _put, _get


def future_key(record: dict[str, Any]) -> Any:
    """The key a record of a Queue or Variable names; ABSENT if it holds a plain value."""
    return record["value"] if record["type"] == "Future" else ABSENT


def not_found(record: dict[str, Any]) -> bool:
    """Whether stock has answered a get with a future of a key that is not in `tasks`."""
    return record["type"] == "Future" and record.get("state") == "lost"


def describe(record: dict[str, Any], ts: TaskState) -> None:
    """Put the state of its task into such an answer, as stock does."""
    record["state"] = ts.state
    if ts.state == "erred" and ts.exception_blame is not None:
        record["exception"] = ts.exception_blame.exception
        record["traceback"] = ts.exception_blame.traceback


# ----------------------------------------------------------------------------------------------------- clients, plugins


def dataset_client(name: Any) -> str:
    """The pseudo client that wants what a dataset needs."""
    return f"published-{stringify(name)}"


def variable_client(name: Any) -> str:
    return f"variable-{name}"


def queue_client(name: Any) -> str:
    return f"queue-{name}"


class AtStart(SchedulerPlugin):
    """Calls a coroutine when the scheduler starts its plugins: after the preloads, before anybody is served. A plugin that is registered
    then is not started a second time."""

    def __init__(self, name: str, call: Callable[[], Awaitable[None]]):
        self.name = name
        self._call = call

    async def start(self, scheduler: Scheduler) -> None:
        scheduler.remove_plugin(self.name)
        await self._call()


# ------------------------------------------------------------------------------------------------- durations, numbers


def expected_seconds(prefix: TaskPrefix) -> float | None:
    """What the scheduler expects a task of it to take (`SchedulerState._get_prefix_duration`); None if it has seen none."""
    if prefix.duration_average >= 0:
        return prefix.duration_average
    return 2 * prefix.max_exec_time if prefix.max_exec_time > 0 else None


def expect(prefix: TaskPrefix, seconds: float) -> None:
    prefix.duration_average = seconds


def continue_numbers(scheduler: Scheduler, epoch: int, generation: float) -> None:
    """Priorities and run ids go on above those of earlier schedulers.

    `generation`: the highest of a stored graph; earlier graphs come first. Run ids of tasks (`TaskState._run_id_iterator`) and of shuffles
    (the default factory of `ShuffleRunSpec.run_id`, a partial that is changed in place) are compared by workers, and live in the process:
    another scheduler in it, of another store, may be ahead.
    """
    scheduler.generation = max(scheduler.generation, math.ceil(generation))
    first = epoch << 32
    TaskState._run_id_iterator = itertools.count(max(first, next(TaskState._run_id_iterator)))
    factory: Any = ShuffleRunSpec.__dataclass_fields__["run_id"].default_factory
    factory.__setstate__((next, (itertools.count(max(first, factory())),), {}, {}))


# ------------------------------------------------------------------------------------------------------------- values


class _Pickler(pickle.Pickler):
    """Frames of a `Serialized` may be views of a buffer of the comm: copies are kept."""

    def reducer_override(self, obj: Any) -> Any:
        return (bytes, (obj.tobytes(),)) if isinstance(obj, memoryview) else NotImplemented


def encode(value: Any) -> bytes:
    """A value of the scheduler as bytes. What clients sent serialised stays so. Raises what pickle raises."""
    out = io.BytesIO()
    _Pickler(out, protocol=5).dump(value)
    return out.getvalue()


def decode(data: bytes) -> Any:
    return pickle.loads(data)
