"""What the worker preload touches of `distributed.Worker`: private or replaced names, one function a touch point.

Each docstring names what it relies on. All of it was read in 2026.8.0 and is pinned by `tests/scheduler_adapter/test_dask_worker.py`.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Iterator
from time import time
from typing import Any

from distributed.batched import BatchedSend
from distributed.comm import Comm, connect
from distributed.core import Status
from distributed.protocol.pickle import dumps
from distributed.protocol.serialize import Serialize
from distributed.versions import get_versions
from distributed.worker import Worker
from distributed.worker_state_machine import FreeKeysEvent, TaskState

#: States of a worker's task in which its function runs.
RUNNING = ("executing", "long-running")


def replace_stream_handler(worker: Worker, handler: Callable[[Comm], Awaitable[None]]) -> None:
    """`_register_with_scheduler` runs `handle_scheduler` once registered; stock's closes the worker when the stream ends."""
    worker.handle_scheduler = handler


def replace_batched_send(worker: Worker, send: Callable[[dict[str, Any]], None]) -> Callable[[dict[str, Any]], None]:
    """All messages of the state machine to the scheduler; stock's drops them while there is no stream. Returns stock's."""
    stock: Callable[[dict[str, Any]], None] = worker.batched_send
    worker.batched_send = send
    return stock


#: Why stock closes a worker whose heartbeat the scheduler cannot place.
UNKNOWN_TO_SCHEDULER = "worker-heartbeat-missing"


def replace_close(worker: Worker, close: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
    """`Worker.heartbeat` closes the worker through this. What the scheduler and the nanny send goes to stock's. Returns stock's."""
    stock: Callable[..., Awaitable[Any]] = worker.close
    worker.close = close
    return stock


def drop_stream(worker: Worker) -> None:
    """The stream ends, if it is open still."""
    stream = worker.batched_stream
    if stream is not None and stream.comm is not None:
        stream.comm.abort()


def on_message(worker: Worker, op: str, handler: Callable[..., None]) -> None:
    """A handler for one more message of the scheduler's stream."""
    worker.stream_handlers[op] = handler


def at_registration(worker: Worker, name: str, value: Callable[[Worker], Any]) -> None:
    """`startup_information` is asked at each registration, and arrives as `WorkerState.extra`."""
    worker.startup_information[name] = value


async def stock_stream(worker: Worker, comm: Comm) -> None:
    """Read the scheduler's messages until the stream ends."""
    await worker.handle_stream(comm)


def wants_to_live(worker: Worker) -> bool:
    """It was not told to close, and is not retiring."""
    return worker.status in (Status.running, Status.paused)


def tasks(worker: Worker) -> Iterator[TaskState]:
    yield from worker.state.tasks.values()


def nbytes_of(ts: TaskState) -> int:
    return ts.get_nbytes()


def type_name(ts: TaskState) -> str:
    """As in the `task-finished` message."""
    return f"{ts.type.__module__}.{ts.type.__qualname__}" if ts.type is not None else ""


def actors(worker: Worker) -> set[Any]:
    return set(worker.state.actors)


def free(worker: Worker, keys: list[Any], stimulus_id: str) -> None:
    """As the scheduler's `free-keys`: what runs is left to end, and its result dropped."""
    if keys:
        worker.handle_stimulus(FreeKeysEvent(keys=keys, stimulus_id=stimulus_id))


def error_of(ts: TaskState) -> list[Any]:
    """Exception and traceback of a task in state `error`, as bytes, and as text (see `distributed.core.error_message`)."""
    return [_pickled(ts.exception), _pickled(ts.traceback), ts.exception_text, ts.traceback_text]


def _pickled(x: Serialize | None) -> bytes | None:
    return None if x is None else x.data if isinstance(x.data, bytes) else dumps(x.data)


def end_shuffles(worker: Worker, reason: str) -> None:
    """Runs of P2P shuffles end: the new scheduler begins them anew (`ShuffleWorkerPlugin.shuffle_runs`)."""
    plugin = worker.extensions.get("shuffle")
    if plugin is not None:
        for shuffle_id, run in list(plugin.shuffle_runs._active_runs.items()):
            plugin.shuffle_runs.fail(shuffle_id, run.run_id, reason)


def stop_heartbeat(worker: Worker) -> None:
    """A heartbeat a scheduler cannot place is answered "missing", and closes the worker."""
    for name in ("keep-alive", "heartbeat"):
        worker.periodic_callbacks[name].stop()


def start_heartbeat(worker: Worker) -> None:
    for name in ("keep-alive", "heartbeat"):
        worker.periodic_callbacks[name].start()


def move_to(worker: Worker, address: str) -> None:
    """The scheduler has another address now (`Worker.scheduler` is the pooled rpc)."""
    if worker.scheduler.address != address:
        worker.scheduler = worker.rpc(address)


def _drop_span_metrics(worker: Worker) -> None:
    """`get_metrics` gathers them for the next heartbeat, which asserts that there are none yet."""
    spans = worker.extensions.get("spans")
    if spans is not None:
        spans.heartbeat()


class Refused(Exception):
    """The scheduler answered, and does not want this worker."""


async def register(worker: Worker, inventory: Callable[[], dict[str, Any]], stimulus_id: str, timeout_seconds: float) -> Comm:
    """What `_register_with_scheduler` does, for a worker that holds data: open the stream, and say what it has.

    `inventory` is called with no await between it and the message, so whatever happens later is told on the new stream. Raises OSError
    or TimeoutError if the scheduler is not there, Refused if it says no.
    """
    comm = await connect(worker.scheduler.address, timeout=timeout_seconds, **worker.connection_args)
    try:
        comm.name = "Worker->Scheduler"
        metrics = await worker.get_metrics()
        _drop_span_metrics(worker)
        extra = await worker.get_startup_information()
        extra.update(inventory())
        await comm.write(
            {
                "op": "register-worker",
                "reply": False,
                "address": worker.contact_address,
                "status": worker.status.name,
                "nthreads": worker.state.nthreads,
                "name": worker.name,
                "now": time(),
                "resources": worker.state.total_resources,
                "memory_limit": worker.memory_manager.memory_limit,
                "local_directory": worker.local_directory,
                "services": worker.service_ports,
                "nanny": worker.nanny,
                "pid": os.getpid(),
                "versions": get_versions(),
                "metrics": metrics,
                "extra": extra,
                "stimulus_id": stimulus_id,
                "server_id": worker.id,
            },
            serializers=["msgpack"],
        )
        response = await comm.read(deserializers=["msgpack"])
        if response["status"] != "OK":
            raise Refused(response.get("message") or repr(response))
    except BaseException:
        comm.abort()
        raise
    worker.batched_stream = BatchedSend(interval="2ms", loop=worker.loop)
    worker.batched_stream.start(comm)
    plugins = response["worker-plugins"]
    await asyncio.gather(*(worker.plugin_add(name=name, plugin=plugins[name]) for name in plugins if name not in worker.plugins))
    return comm
