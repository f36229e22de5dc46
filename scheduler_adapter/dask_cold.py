"""What cold results touch of `distributed.Scheduler`: private or replaced names, one function a touch point. See `dask_internals.py`.

Stock looks a key up in `Scheduler.tasks`. Whatever is asked or told of keys comes through one of the handlers below: it is answered from
the table of cold results, or they are made tasks again first.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any, Protocol

from dask.utils import key_split
from distributed.active_memory_manager import ReduceReplicas, RetireWorker
from distributed.core import Status
from distributed.scheduler import Scheduler, TaskState

from scheduler_adapter.dask_internals import Undo
from scheduler_adapter.specs import StoredSpec

#: Of a result that is a task again only the database knows the spec.
_NO_SPEC = StoredSpec(b"")
#: Policies that need no task of a result that is where it should be.
_POLICIES = (ReduceReplicas, RetireWorker)


def can_be_cold(ts: TaskState) -> bool:
    """Whether nothing in the scheduler needs the task of this result: one worker that is to stay has it, and nothing is linked to it."""
    who_has = ts.who_has or ()
    return (
        ts.state == "memory"
        and len(who_has) == 1
        and next(iter(who_has)).status is Status.running
        and not (ts.dependents or ts.dependencies or ts.waiters or ts.metadata or ts.actor)
    )


def chill(scheduler: Scheduler, ts: TaskState) -> str:
    """Take a task for which `can_be_cold` out of the scheduler and say nothing to its worker, whose address is returned.

    Its bytes stay counted in `WorkerState.nbytes`, and it itself in its group as one in memory.
    """
    ws = next(iter(ts.who_has or ()))
    for cs in ts.who_wants or ():
        cs.wants_what.discard(ts)
    ts.who_wants = ts.who_has = None
    del ws._has_what[ts]
    del scheduler.tasks[ts.key]
    return ws.address


def warm(scheduler: Scheduler, key: Any, worker: str, nbytes: int, type_name: str | None) -> TaskState:
    """The opposite. As stock forgets a paged task whose result is lost, see `dask_internals.unlink`."""
    ts = scheduler.new_task(key, _NO_SPEC, "memory")
    for c in (ts.group, ts.group.prefix):
        c.states["memory"] -= 1
        c._size -= 1
    ts.nbytes = nbytes
    ts.type = type_name
    ts.has_lost_dependencies = True
    ws = scheduler.workers[worker]
    ts.who_has = {ws}
    ws._has_what[ts] = None
    return ts


def leaves(scheduler: Scheduler, key: Any, worker: str, nbytes: int) -> None:
    """A cold result is gone."""
    ws = scheduler.workers.get(worker)
    if ws is not None:
        ws.nbytes -= nbytes
    scheduler.task_metadata.pop(key, None)


def tell_in_memory(scheduler: Scheduler, key: Any, client: str) -> None:
    """`report_on_key` of a finished task."""
    scheduler.report({"op": "key-in-memory", "key": key}, client=client)


def sees_all(scheduler: Scheduler) -> bool:
    """Whether the active memory manager has a policy that may look at all results of a worker."""
    amm = scheduler.extensions.get("amm")
    return amm is not None and not all(isinstance(policy, _POLICIES) for policy in amm.policies)


class Results(Protocol):
    """What the handlers need to know of cold results. Keys are Dask's."""

    def __len__(self) -> int: ...
    def __contains__(self, key: Any) -> bool: ...
    def warm(self, keys: Iterable[Any]) -> None: ...
    def warm_worker(self, address: str) -> None: ...
    def warm_all(self) -> None: ...
    def worker_of(self, key: Any) -> str | None: ...
    def nbytes_of(self, key: Any) -> int: ...
    def items(self, worker: str | None = None) -> Iterable[tuple[Any, str, int]]: ...
    def held(self) -> AbstractContextManager[None]: ...
    def restricted(self, key: Any, workers: set[str] | None) -> None: ...


def _shadow(scheduler: Scheduler, undo: Undo, name: str, ours: Callable[..., Any], handler: str = "", stream: str = "") -> None:
    """A method is called by its name, and by the handlers that were bound to it."""
    undo.set_attr(scheduler, name, ours)
    if handler:
        undo.set_item(scheduler.handlers, handler, ours)
    if stream:
        undo.set_item(scheduler.stream_handlers, stream, ours)


def answer_for(scheduler: Scheduler, undo: Undo, cold: Results) -> None:
    """Questions about results, answered from the table: `who_has` (and with it `gather`), `has_what`, `nbytes`. Each of them may name
    everything; then all cold results are gone through."""
    stock_who_has, stock_has_what = scheduler.get_who_has, scheduler.get_has_what

    def who_has(keys: Iterable[Any] | None = None) -> dict[Any, list[str]]:
        keys = None if keys is None else list(keys)
        found = stock_who_has(keys)
        if keys is None:
            found.update((key, [worker]) for key, worker, _ in cold.items())
        elif cold:
            for key in keys:
                if not found[key] and (worker := cold.worker_of(key)) is not None:
                    found[key] = [worker]
        return found

    def has_what(workers: Iterable[str] | None = None) -> dict[str, list[Any]]:
        found = stock_has_what(workers)
        for address, keys in found.items():
            keys.extend(key for key, _, _ in cold.items(address))
        return found

    def nbytes(keys: Iterable[Any] | None = None, summary: bool = True) -> dict[Any, int]:
        if keys is None:
            found = {key: ts.nbytes for key, ts in scheduler.tasks.items() if ts.nbytes >= 0}
            found.update((key, size) for key, _, size in cold.items())
        else:
            found = {key: cold.nbytes_of(key) if key in cold else scheduler.tasks[key].nbytes for key in keys}
        if not summary:
            return found
        sums: defaultdict[Any, int] = defaultdict(int)
        for key, size in found.items():
            sums[key_split(key)] += size
        return dict(sums)

    _shadow(scheduler, undo, "get_who_has", who_has, "who_has")
    _shadow(scheduler, undo, "get_has_what", has_what, "has_what")
    _shadow(scheduler, undo, "get_nbytes", nbytes, "nbytes")


def remember_restrictions(scheduler: Scheduler, undo: Undo, cold: Results) -> None:
    """What `set_restrictions` says of a task is told, too: it may leave, and come back."""
    stock = scheduler.set_restrictions

    def set_restrictions(worker: dict[Any, Any]) -> None:
        cold.warm(worker)
        stock(worker)
        for key in worker:
            cold.restricted(key, scheduler.tasks[key].worker_restrictions)

    _shadow(scheduler, undo, "set_restrictions", set_restrictions, "set_restrictions")


def warm_before(scheduler: Scheduler, undo: Undo, cold: Results) -> None:
    """Calls and messages that name results, or workers, and change something about them: stock gets tasks. While a call runs nothing goes
    cold: it may hold on to tasks."""

    def keys_first(name: str, handler: str = "", stream: str = "", one: bool = False) -> None:
        stock = getattr(scheduler, name)

        def ours(*args: Any, **kwargs: Any) -> Any:
            if cold:
                cold.warm([kwargs["key"]] if one else kwargs.get("keys") or ())
            return stock(*args, **kwargs)

        _shadow(scheduler, undo, name, ours, handler, stream)

    keys_first("add_keys", "add_keys", "add-keys")
    keys_first("release_worker_data", stream="release-worker-data", one=True)
    keys_first("handle_request_refresh_who_has", stream="request-refresh-who-has")
    keys_first("get_call_stack", "call_stack")

    stock_replicate, stock_rebalance, stock_retire = scheduler.replicate, scheduler.rebalance, scheduler.retire_workers

    async def replicate(keys: Any, *args: Any, **kwargs: Any) -> Any:
        with cold.held():
            cold.warm(keys)
            return await stock_replicate(keys, *args, **kwargs)

    async def rebalance(keys: Any = None, *args: Any, **kwargs: Any) -> Any:
        with cold.held():
            if keys is None:
                cold.warm_all()
            else:
                keys = list(keys)
                cold.warm(keys)
            return await stock_rebalance(keys, *args, **kwargs)

    async def retire_workers(*args: Any, **kwargs: Any) -> Any:
        with cold.held():
            return await stock_retire(*args, **kwargs)

    _shadow(scheduler, undo, "replicate", replicate, "replicate")
    _shadow(scheduler, undo, "rebalance", rebalance, "rebalance")
    _shadow(scheduler, undo, "retire_workers", retire_workers, "retire_workers")

    stock_status = scheduler.handle_worker_status_change

    def status_change(status: Any, worker: Any, stimulus_id: str) -> None:
        """A worker that is about to go: its results are moved, by `RetireWorker`, which reads `WorkerState.has_what`."""
        stock_status(status, worker, stimulus_id)
        ws = scheduler.workers.get(worker) if isinstance(worker, str) else worker
        if ws is not None and ws.status is Status.closing_gracefully:
            cold.warm_worker(ws.address)

    _shadow(scheduler, undo, "handle_worker_status_change", status_change, stream="worker-status-change")

    amm = scheduler.extensions.get("amm")
    if amm is not None:
        stock_add_policy = amm.add_policy

        def add_policy(policy: Any) -> None:
            stock_add_policy(policy)
            if sees_all(scheduler):
                cold.warm_all()

        undo.set_attr(amm, "add_policy", add_policy)


def forgive_finished(scheduler: Scheduler, undo: Undo, cold: Results) -> None:
    """A worker that says once more that it has finished what it holds is not told to free it, as stock does of a task it does not know."""
    stock = scheduler.stream_handlers["task-finished"]

    def finished(key: Any, worker: str, **message: Any) -> None:
        if not cold or cold.worker_of(key) != worker:
            stock(key=key, worker=worker, **message)

    undo.set_item(scheduler.stream_handlers, "task-finished", finished)


def validate_with(scheduler: Scheduler, undo: Undo, cold: Results) -> None:
    """`validate_state` compares the bytes of each worker with those of its tasks."""
    stock = scheduler.validate_state

    def validate_state(*args: Any, **kwargs: Any) -> None:
        rows = list(cold.items())
        for _, worker, nbytes in rows:
            scheduler.workers[worker].nbytes -= nbytes
        try:
            stock(*args, **kwargs)
        finally:
            for _, worker, nbytes in rows:
                scheduler.workers[worker].nbytes += nbytes

    undo.set_attr(scheduler, "validate_state", validate_state)
