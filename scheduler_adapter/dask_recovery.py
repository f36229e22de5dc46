"""What recovery touches of `distributed.Scheduler`: private or replaced names, one function a touch point. See `dask_internals.py`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from distributed.scheduler import Computation, Scheduler, TaskState, WorkerState

from scheduler_adapter.dask_internals import Undo
from scheduler_adapter.specs import StoredSpec


def take_extra(ws: WorkerState, name: str) -> Any:
    """What a worker's preload sent with its registration. Taken out: it would stay in every description of the worker."""
    return ws.extra.pop(name, None)


def new_in_memory(
    scheduler: Scheduler, key: Any, spec: StoredSpec | None, ws: WorkerState, nbytes: int, type_name: str, computation: Computation | None
) -> TaskState:
    """A finished task that a worker holds, as `Scheduler.update_data` makes one."""
    ts = scheduler.new_task(key, spec, "memory", computation=computation)
    _set_result(scheduler, ts, ws, nbytes, type_name)
    return ts


def into_memory(scheduler: Scheduler, ts: TaskState, ws: WorkerState, nbytes: int, type_name: str) -> None:
    """The same for a task that is there, in state `released` or `erred`, without links."""
    if ts.state == "erred":
        scheduler.transitions({ts.key: "released"}, "taskdb-adopt")
    ts.state = "memory"
    _set_result(scheduler, ts, ws, nbytes, type_name)


def _set_result(scheduler: Scheduler, ts: TaskState, ws: WorkerState, nbytes: int, type_name: str) -> None:
    ts.type = type_name or None
    if nbytes >= 0:
        ts.set_nbytes(nbytes)
    scheduler.add_replica(ts, ws)


def add_replica(scheduler: Scheduler, ts: TaskState, ws: WorkerState) -> None:
    """One more worker holds a result."""
    if ws not in (ts.who_has or ()):
        scheduler.add_replica(ts, ws)


def set_processing(scheduler: Scheduler, ts: TaskState, ws: WorkerState, run_id: int, seceded: bool) -> None:
    """A task that the worker runs already: what `released` to `processing` does, but nothing is sent.

    Relies on `_transition_released_waiting` and `_add_to_processing` changing nothing but what a transition does, and on the run id in the
    worker's later messages being compared with `TaskState.run_id`. All dependencies are in memory.
    """
    scheduler._transition_released_waiting(ts.key, "taskdb-adopt")
    scheduler._add_to_processing(ts, ws, "taskdb-adopt")
    ts.run_id = run_id
    if seceded:
        scheduler.handle_long_running(ts.key, ws.address, run_id, None, "taskdb-adopt")


def next_run_id() -> int:
    """No task runs under this one: runs until now have lower ids, runs from now on higher ones."""
    return next(TaskState._run_id_iterator)


def free_on(scheduler: Scheduler, ws: WorkerState, keys: list[Any]) -> None:
    """Let a worker drop results, and what it runs.

    What a worker that is registering has been given to compute meanwhile waits in the buffer of its stream: this is put before it, or it
    would be dropped, too. Relies on `BatchedSend.buffer` being what is sent first once there is a comm.
    """
    stream = scheduler.stream_comms.get(ws.address)
    if not keys or stream is None:
        return
    message = {"op": "free-keys", "keys": keys, "stimulus_id": "taskdb-adopt"}
    if stream.comm is None:
        stream.buffer.insert(0, message)
    else:
        scheduler.worker_send(ws.address, message)


def leave_workers_alone(scheduler: Scheduler, undo: Undo, when: Callable[[str], bool]) -> None:
    """Do not tell workers to close when the scheduler does, for such reasons: those that can wait for the next one.

    Wraps `Scheduler.close`, which sends `close` on every worker's stream that is open.
    """
    stock = scheduler.close

    async def close(*args: Any, reason: str = "unknown", **kwargs: Any) -> None:
        if when(reason):
            for comm in scheduler.stream_comms.values():
                comm.send = lambda *messages: None
        await stock(*args, reason=reason, **kwargs)

    undo.set_attr(scheduler, "close", close)


def forget_broken_registrations(scheduler: Scheduler, undo: Undo) -> None:
    """A worker that dies while it registers leaves the scheduler.

    `add_worker` takes it in, waits for plugins, and answers; if that fails, stock keeps it, and the tasks sent to it, until its
    `worker-ttl`. Wraps the handler of `register-worker`; a stream that was not started has no comm.
    """
    stock = scheduler.handlers["register-worker"]

    async def add_worker(comm: Any, *, address: str, **kwargs: Any) -> Any:
        try:
            return await stock(comm, address=address, **kwargs)
        except OSError:
            address = scheduler.coerce_address(address, kwargs.get("resolve_address", True))
            stream = scheduler.stream_comms.get(address)
            if stream is not None and stream.comm is None:
                await scheduler.remove_worker(address, stimulus_id="taskdb-broken-registration")
            raise

    undo.set_item(scheduler.handlers, "register-worker", add_worker)


def forgive_unknown_spans(scheduler: Scheduler, undo: Undo) -> None:
    """Workers that were there before report times of spans of the old scheduler: leave those out.

    Wraps `SpansSchedulerExtension.heartbeat`, which looks up `spans[id]` of each.
    """
    spans = scheduler.extensions.get("spans")
    if spans is None:
        return
    stock = spans.heartbeat

    def heartbeat(ws: WorkerState, data: dict[tuple[Any, ...], float]) -> None:
        stock(ws, {metric: value for metric, value in data.items() if metric[1] in spans.spans})

    undo.set_attr(spans, "heartbeat", heartbeat)


def watch_runs(scheduler: Scheduler, undo: Undo, told: Callable[[str, Any, str, dict[str, Any]], bool]) -> None:
    """`told(op, key, worker, message)` sees first what workers say of the tasks they run, and says whether stock is to be spared it.

    Stock lets a worker free what it does not know. Wraps the handlers of these messages in `stream_handlers`.
    """

    def watch(op: str) -> None:
        stock = scheduler.stream_handlers[op]

        def handler(key: Any, worker: str, **message: Any) -> None:
            if not told(op, key, worker, message):
                stock(key=key, worker=worker, **message)

        undo.set_item(scheduler.stream_handlers, op, handler)

    for op in ("task-finished", "task-erred", "long-running", "reschedule"):
        watch(op)
