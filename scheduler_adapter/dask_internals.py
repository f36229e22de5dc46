"""The only module that touches private or replaced names of `distributed`. One function a touch point.

Each docstring names what it relies on. All of it was read in 2026.8.0 and is pinned by `tests/scheduler_adapter/test_dask_internals.py`.
Nothing here decides anything: what to hold, drop or tell stands in `window.py` and `adapter.py`.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import dask
from dask.utils import key_split, parse_timedelta
from distributed.client import _MapExpr
from distributed.core import error_message
from distributed.protocol.serialize import Serialized, ToPickle, deserialize
from distributed.scheduler import ClientState, Computation, Scheduler, TaskState

from scheduler_adapter.specs import StoredSpec

HOLDER = "taskdb"


class Undo:
    """Replacements made on one scheduler, to be taken back at teardown."""

    def __init__(self) -> None:
        self._steps: list[Callable[[], None]] = []

    def set_item(self, mapping: Any, key: Any, value: Any) -> None:
        missing = object()
        old = mapping.get(key, missing)

        def back() -> None:
            if old is missing:
                mapping.pop(key, None)
            else:
                mapping[key] = old

        mapping[key] = value
        self._steps.append(back)

    def set_attr(self, obj: Any, name: str, value: Any) -> None:
        """Shadow a method on the instance; teardown lets the class's own be seen again."""
        setattr(obj, name, value)
        self._steps.append(lambda: obj.__dict__.pop(name, None) and None)

    def step(self, back: Callable[[], None]) -> None:
        """Something else to be called at teardown."""
        self._steps.append(back)

    def run(self) -> None:
        while self._steps:
            self._steps.pop()()


# ------------------------------------------------------------------------------------------------------ submission


def load_expr(expr_ser: Serialized) -> Any:
    """The submitted expression. Raises RuntimeError with stock's words (`Scheduler.update_graph`) if it cannot be unpickled."""
    try:
        return deserialize(expr_ser.header, expr_ser.frames)
    except Exception as e:
        msg = """\
                    Error during deserialization of the task graph. This frequently
                    occurs if the Scheduler and Client have different environments.
                    For more information, see
                    https://docs.dask.org/en/stable/deployment-considerations.html#consistent-software-environments
                """
        raise RuntimeError(textwrap.dedent(msg)) from e


def is_map(expr: Any) -> bool:
    """Whether the expression is what `Client.map` sends: `func`, `iterables`, `keys` and `kwargs`, of which Dask makes tasks of their own
    if they are over 1e5 bytes (`_MapExpr._layer`)."""
    return type(expr) is _MapExpr


def graph_update_begins(scheduler: Scheduler) -> None:
    """`_active_graph_updates` keeps the scheduler from being called idle."""
    scheduler._active_graph_updates += 1


def graph_update_ends(scheduler: Scheduler) -> None:
    scheduler._active_graph_updates -= 1


def lost_dependencies(scheduler: Scheduler, dsk: dict[Any, Any], keys: set[Any]) -> bool:
    return bool(scheduler._find_lost_dependencies(dsk, keys))


def create_tasks(scheduler: Scheduler, **kwargs: Any) -> dict[str, float]:
    """Stock's own way to take in a graph (`_create_taskstate_from_graph`); specs may be StoredSpec. The client's wants are stock's here:
    the database hears of them with the tasks."""
    ours = scheduler.client_desires_keys
    scheduler.client_desires_keys = partial(type(scheduler).client_desires_keys, scheduler)
    try:
        return scheduler._create_taskstate_from_graph(**kwargs)
    finally:
        scheduler.client_desires_keys = ours


def next_generation(scheduler: Scheduler, submitting_task: Any, fifo_timeout: Any, start: float) -> float:
    """The generation `_set_priorities` would give a graph, with the same effect on `generation` and `_last_time`."""
    if submitting_task:
        ts = scheduler.tasks.get(submitting_task)
        if ts is not None and ts.priority:
            return float(ts.priority[1]) - 0.01
        return float(scheduler.generation)
    if scheduler._last_time + parse_timedelta(fifo_timeout) < start:
        scheduler.generation += 1
        scheduler._last_time = start
    return float(scheduler.generation)


def computation_for(scheduler: Scheduler, code: Any, annotations: dict[str, Any] | None, busy: bool) -> Computation:
    """As in `_create_taskstate_from_graph`: the running computation, or a new one. `busy`: there is work that is not resident."""
    if (busy or not scheduler.is_idle) and scheduler.computations:
        computation = scheduler.computations[-1]
    else:
        computation = Computation()
        scheduler.computations.append(computation)
    if code:
        computation.code.add(code)
    if annotations:
        computation.annotations.update({k: v for k, v in annotations.items() if not callable(v)})
    return computation


def failed_submission(scheduler: Scheduler, error: Exception, keys: Iterable[Any], client: str) -> None:
    """Tell a client that its graph was refused, as `update_graph` does."""
    err = error_message(error)
    for key in keys:
        scheduler.report({"op": "task-erred", "key": key, "exception": err["exception"], "traceback": err["traceback"]}, client=client)


# ------------------------------------------------------------------------------------------------------- residents


def holder() -> ClientState:
    """The want that keeps stock from releasing what tasks on disk need.

    Not in `Scheduler.clients`: so it is in no heartbeat, report or count of clients.
    """
    return ClientState(HOLDER)


def hold(ts: TaskState, cs: ClientState) -> None:
    if ts.who_wants is None:
        ts.who_wants = set()
    ts.who_wants.add(cs)
    cs.wants_what.add(ts)


def unhold(ts: TaskState, cs: ClientState) -> None:
    cs.wants_what.discard(ts)
    if ts.who_wants:
        ts.who_wants.discard(cs)


def new_task(scheduler: Scheduler, key: Any, spec: StoredSpec | None, computation: Computation | None) -> TaskState:
    return scheduler.new_task(key, spec, "released", computation=computation)


def new_stub(scheduler: Scheduler, key: Any, erred: tuple[Any, Any] | None) -> TaskState:
    """A task that can be looked up and wanted, but not run; `erred`: its exception and traceback."""
    ts = scheduler.new_task(key, StoredSpec(b""), "released" if erred is None else "erred")
    ts.has_lost_dependencies = True
    if erred is not None:
        ts.exception, ts.traceback = erred
        ts.exception_blame = ts
        ts.erred_on = set()
    return ts


def annotate(scheduler: Scheduler, ts: TaskState, annotations: dict[str, Any]) -> None:
    """`_apply_annotations`: restrictions, resources, retries … as stock reads them."""
    scheduler._apply_annotations(tasks=[ts], annotations_by_type={}, global_annotations=annotations)


def unlink(ts: TaskState) -> None:
    """Cut a task from its dependencies, so that they can leave.

    With `has_lost_dependencies` set stock itself forgets the task if its result is lost, and with it whatever waits for it: they leave
    the scheduler, and the database says what runs again.
    """
    for dts in ts.dependencies:
        dts.dependents.discard(ts)
        if dts.waiters:
            dts.waiters.discard(ts)
    ts.dependencies.clear()
    ts.has_lost_dependencies = True


def cut_dependents(ts: TaskState) -> None:
    """Cut what depends on a task from it; see `unlink`."""
    for dts in list(ts.dependents):
        dts.dependencies.discard(ts)
        if dts.waiting_on:
            dts.waiting_on.discard(ts)
        dts.has_lost_dependencies = True
    ts.dependents.clear()


def relink(ts: TaskState, dependencies: Iterable[TaskState]) -> None:
    ts.has_lost_dependencies = False
    for dts in dependencies:
        ts.add_dependency(dts)


def let_go(scheduler: Scheduler, cs: ClientState, tss: Iterable[TaskState], stimulus_id: str) -> None:
    """End the holder's want; stock frees or forgets what nobody else wants. Slots this opens are left open: what is queued may be let go
    of next."""
    recommendations: dict[Any, Any] = {}
    scheduler._client_releases_keys(keys=[ts.key for ts in tss], cs=cs, recommendations=recommendations)
    if recommendations:
        scheduler.transitions(recommendations, stimulus_id)


def forget_held(scheduler: Scheduler, cs: ClientState, residents: Iterable[Any]) -> None:
    """End all of the holder's wants, and forget what then has neither dependents nor wants (before `restart`)."""
    residents = list(residents)
    for resident in residents:
        resident.leaving = True
        unhold(resident.task, cs)
    scheduler.transitions(
        {r.key: "forgotten" for r in residents if r.task is not None and not r.task.who_wants and not r.task.dependents}, "taskdb-restart"
    )


def release_wants(scheduler: Scheduler, keys: list[Any], cs: ClientState, stimulus_id: str) -> None:
    """`client_releases_keys` for a ClientState, known to the scheduler or not."""
    recommendations: dict[Any, Any] = {}
    scheduler._client_releases_keys(keys=keys, cs=cs, recommendations=recommendations)
    scheduler.transitions(recommendations, stimulus_id)
    scheduler.stimulus_queue_slots_maybe_opened(stimulus_id=stimulus_id)


def observe(scheduler: Scheduler, tss: list[TaskState], span_metadata: Any, code: Any) -> None:
    """Tell the spans extension; without it a worker's heartbeat fails an assertion."""
    spans = scheduler.extensions.get("spans")
    if spans is not None:
        spans.observe_tasks(tss, span_metadata=span_metadata, code=code)


def clear_error(ts: TaskState) -> None:
    ts.exception_blame = None


def clients_listening(scheduler: Scheduler) -> list[str]:
    """Those to whom messages can go. One that has just registered takes its first batch to be the greeting, and nothing but that.

    Relies on `BatchedSend.batch_count`.
    """
    return [client for client, comm in scheduler.client_comms.items() if comm.batch_count]


def client_state(scheduler: Scheduler, client: str) -> ClientState | None:
    return scheduler.clients.get(client)


def ensure_client_state(scheduler: Scheduler, client: str) -> ClientState:
    """As `client_desires_keys` does for the pseudo clients of publish, Queue and Variable."""
    cs = scheduler.clients.get(client)
    if cs is None:
        cs = scheduler.clients[client] = ClientState(client)
    return cs


def suppress_cancelled(scheduler: Scheduler, undo: Undo, is_ours: Callable[[TaskState], bool]) -> None:
    """A task that leaves because its inputs are gone is not cancelled for its clients.

    Shadows `_TRANSITIONS_TABLE` on the instance for (released, forgotten) and (memory, forgotten): when `is_ours` says that the database
    will run the task again, wants are dropped first, so that stock has nobody to tell.
    """
    table = dict(type(scheduler)._TRANSITIONS_TABLE)
    for start in ("released", "memory"):
        stock = table[start, "forgotten"]

        def silent(self: Scheduler, key: Any, stimulus_id: str, _stock: Any = stock) -> Any:
            ts = self.tasks[key]
            if ts.has_lost_dependencies and is_ours(ts):
                for cs in ts.who_wants or ():
                    cs.wants_what.discard(ts)
                ts.who_wants = None
            return _stock(self, key, stimulus_id)

        table[start, "forgotten"] = silent
    undo.set_attr(scheduler, "_TRANSITIONS_TABLE", table)


def send_stored_specs(scheduler: Scheduler, undo: Undo) -> None:
    """Hand a StoredSpec's bytes to the worker as they are.

    Shadows `_task_to_msg`. `Serialized` frames pass through TCP and `inproc://` alike (`Pickled` is not unpacked in-process).
    """
    stock = scheduler._task_to_msg

    def task_to_msg(ts: TaskState) -> dict[str, Any]:
        msg = stock(ts)
        spec = ts.run_spec
        if type(spec) is StoredSpec:
            msg["run_spec"] = Serialized({"serializer": "pickle", "writeable": (), "compression": (None,)}, [spec.data])
        return msg

    undo.set_attr(scheduler, "_task_to_msg", task_to_msg)


# ----------------------------------------------------------------------------------------------------------- other


def runnable_here(scheduler: Scheduler) -> int:
    """Tasks that run or could run now, whoever submitted them. O(workers)."""
    return sum(len(ws.processing) for ws in scheduler.workers.values()) + len(scheduler.queued) + len(scheduler.unrunnable)


def in_background(scheduler: Scheduler, coroutine: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
    """Run a coroutine beside others; the scheduler's own group keeps it alive and ends it at close."""
    scheduler._ongoing_background_tasks.call_soon(coroutine, *args, **kwargs)


def slots_open(scheduler: Scheduler) -> bool:
    """Whether some worker could take another root task now."""
    return bool(scheduler.idle_task_count)


def set_resources(scheduler: Scheduler, worker: str, resources: dict[str, float] | None) -> str:
    """`add_resources`, then what `add_worker` does of tasks without a worker (`bulk_schedule_unrunnable_after_adding_worker`). What is used
    stays used, which stock forgets."""
    ws = scheduler.workers[worker]
    used = dict(ws.used_resources)
    answer: str = scheduler.add_resources(worker=worker, resources=resources)
    ws.used_resources.update(used)
    scheduler.transitions(scheduler.bulk_schedule_unrunnable_after_adding_worker(ws), "taskdb-set-resources")
    return answer


def to_pickle(obj: Any) -> ToPickle[Any]:
    return ToPickle(obj)


def adaptive_target(scheduler: Scheduler, stock: Callable[..., int], ready_on_disk: int, target_duration: Any) -> int:
    """Stock's `adaptive_target`, raised by what the tasks ready on disk would take. Their duration is the average of what runs now."""
    target = stock(target_duration) if target_duration is not None else stock()
    if not ready_on_disk:
        return target
    seconds = parse_timedelta(target_duration or dask.config.get("distributed.adaptive.target-duration"))
    prefixes = [p for p in scheduler.task_prefixes.values() if p.states["waiting"] or p.states["processing"]]
    durations = [scheduler._get_prefix_duration(p) for p in prefixes] or [scheduler.UNKNOWN_TASK_DURATION]
    cpu = math.ceil(ready_on_disk * sum(durations) / len(durations) / seconds)
    cpu = min(cpu, ready_on_disk)
    if scheduler.workers:
        nthreads = sum(ws.nthreads for ws in scheduler.workers.values())
        cpu = math.ceil(cpu / max(nthreads, 1) * len(scheduler.workers))
    return max(target, cpu, 1)


_progress_asks = False


def progress_asks_us() -> None:
    """Make `Progress.setup` and `MultiProgress.setup` ask the adapter of their scheduler, if it has one.

    They are made by functions that clients send, so there is no instance to shadow: the classes are changed, once a process.
    """
    global _progress_asks
    if _progress_asks:
        return
    _progress_asks = True
    from distributed.diagnostics.progress import MultiProgress, Progress

    from scheduler_adapter.lookups import paged_progress

    def patched(stock: Any, bars: bool) -> Any:
        async def setup(self: Any) -> None:
            adapter = getattr(self.scheduler, "taskdb", None)
            if adapter is not None:
                group_of = None
                if bars:
                    by_prefix = self.group_by == "spans" or not callable(self.group_by)
                    group_of = key_split if by_prefix else self.group_by
                if await paged_progress(self, adapter.pager, group_of):
                    self.func = group_of
                    return
            await stock(self)

        return setup

    Progress.setup = patched(Progress.setup, False)
    MultiProgress.setup = patched(MultiProgress.setup, True)


def before_results_are_lost(scheduler: Scheduler, undo: Undo, call: Callable[[], None]) -> None:
    """`call` when a worker leaves that alone has results: before stock forgets what waits for them, and with it what only that needed.

    Wraps `Scheduler.remove_worker`, which is also the handler of `unregister`.
    """
    stock = scheduler.remove_worker

    async def remove_worker(address: str, **kwargs: Any) -> Any:
        ws = scheduler.workers.get(scheduler.coerce_address(address))
        if ws is not None and any(len(ts.who_has or ()) == 1 for ts in ws.has_what):
            call()
        return await stock(address, **kwargs)

    undo.set_attr(scheduler, "remove_worker", remove_worker)
    undo.set_item(scheduler.handlers, "unregister", remove_worker)
