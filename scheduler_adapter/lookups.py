"""Answers of the scheduler about tasks that are on disk: Variables, Queues, status, replay of errors, progress, adaptive scaling.

Stock looks a key up in `Scheduler.tasks`. Where it only needs the name to be there, a *stub* is made: a resident without links, which
becomes a real one when its task is leased. Everything else asks the database.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import Any

from distributed.scheduler import Scheduler

from scheduler_adapter import dask_dashboard
from scheduler_adapter import dask_internals as internals
from scheduler_adapter.keys import pack_key, unpack_key
from scheduler_adapter.pager import Pager
from scheduler_adapter.specs import Shared, StoredSpec
from taskdb.errors import TaskDBError

#: Names of states as clients know them.
_STATE = {
    "PROCESSING": "processing",
    "QUEUED": "queued",
    "WAITING": "waiting",
    "MEMORY": "memory",
    "RELEASED": "released",
    "ERRED": "erred",
}
#: How often a key nobody knows yet is asked for.
ASK_SECONDS = 0.05
#: How often progress of a paged graph is looked at.
PROGRESS_SECONDS = 0.1


class Lookups:
    def __init__(self, scheduler: Scheduler, pager: Pager, undo: internals.Undo):
        self.scheduler = scheduler
        self.pager = pager
        handlers = scheduler.handlers
        for op, client in {"variable_set": "variable", "queue_put": "queue"}.items():
            if op in handlers:
                undo.set_item(handlers, op, self._with_stub(handlers[op], client))
        undo.set_item(handlers, "get_task_status", self.task_status)
        undo.set_item(handlers, "get_error_cause", self.error_cause)
        undo.set_item(handlers, "get_runspec", self.run_spec)
        self._stock_adaptive_target = scheduler.adaptive_target
        undo.set_attr(scheduler, "adaptive_target", self.adaptive_target)
        undo.set_item(handlers, "adaptive_target", self.adaptive_target)
        undo.set_item(handlers, "set_resources", self.set_resources)
        internals.progress_asks_us()
        dask_dashboard.graph_page_sees_paging()

    def _with_stub(self, stock: Callable[..., Any], prefix: str) -> Callable[..., Any]:
        """`Variable.set` and `Queue.put` wait until the key is in `tasks`, and give up."""

        async def handler(name: Any = None, key: Any = None, **kwargs: Any) -> Any:
            if key is None:
                return await stock(name=name, key=key, **kwargs)
            asking = asyncio.ensure_future(self._ensure_until_known(key, f"{prefix}-{name}"))
            try:
                with self.pager.cooling.held():
                    return await stock(name=name, key=key, **kwargs)
            finally:
                asking.cancel()

        return handler

    async def _ensure_until_known(self, key: Any, client: str) -> None:
        """The graph that brings the key may still be on its way, behind this call."""
        while key not in self.scheduler.tasks:
            await self.pager.ensure([key], client)
            await asyncio.sleep(ASK_SECONDS)

    async def _stored(self, keys: Iterable[Any], with_spec: bool = False) -> dict[Any, Any]:
        """What the database has of these keys, as of everything sent so far."""
        keys = list(keys)
        session = self.pager.session
        if not keys or session is None:
            return {}
        await self.pager.durable()
        try:
            found = await session.get_tasks([pack_key(k) for k in keys], with_spec)
        except TaskDBError:
            return {}
        return {k: t for k, t in zip(keys, found, strict=True) if t.found}

    async def task_status(self, keys: Iterable[Any]) -> dict[Any, str | None]:
        tasks, cooling = self.scheduler.tasks, self.pager.cooling
        out: dict[Any, str | None] = {k: tasks[k].state if k in tasks else "memory" if k in cooling else None for k in keys}
        for key, stored in (await self._stored(k for k, state in out.items() if state is None)).items():
            out[key] = _STATE.get(stored.info.state.upper(), stored.info.state)
        return out

    async def error_cause(self, *args: Any, keys: Iterable[Any] = (), **kwargs: Any) -> Any:
        keys = [tuple(k) if isinstance(k, list) else k for k in keys]
        for key in keys:
            ts = self.scheduler.tasks.get(key)
            if ts is not None and ts.exception_blame is not None:
                return ts.exception_blame.key
        for key, stored in (await self._stored(keys)).items():
            if stored.cause or stored.payload:
                return unpack_key(stored.cause) if stored.cause else key
        return None

    async def run_spec(self, *args: Any, key: Any = None, **kwargs: Any) -> Any:
        key = tuple(key) if isinstance(key, list) else key
        ts = self.scheduler.tasks.get(key)
        spec = ts.run_spec if ts is not None else None
        if spec is None or (isinstance(spec, StoredSpec) and not spec.data):
            stored = (await self._stored([key], with_spec=True)).get(key)
            if stored is None:
                raise KeyError(key)
            spec = StoredSpec(Shared.read(stored.shared).spec(stored.spec) if stored.shared else stored.spec)
        return internals.to_pickle(spec)

    def adaptive_target(self, target_duration: Any = None) -> int:
        """Stock's, with the runnable tasks on disk counted as queued ones."""
        return internals.adaptive_target(self.scheduler, self._stock_adaptive_target, self.pager.ready_on_disk, target_duration)

    def set_resources(self, worker: str, resources: dict[str, float] | None = None) -> str:
        """`Worker.set_resources`: stock does not look again at tasks that wait for a resource."""
        return internals.set_resources(self.scheduler, worker, resources)


class LiveCount:
    """Looks like a set of keys to a progress bar: only its length is used. Read from task groups, so it costs nothing to keep."""

    def __init__(self, scheduler: Scheduler, groups: list[str], states: tuple[str, ...] | None):
        self._scheduler = scheduler
        self._groups = groups
        self._states = states
        self._last: dict[str, int] = {}

    def __len__(self) -> int:
        total = 0
        for name in self._groups:
            group = self._scheduler.task_groups.get(name)
            if group is not None:
                states: dict[str, int] = dict(group.states)
                self._last[name] = len(group) if self._states is None else sum(states[s] for s in self._states)
            elif self._states is not None:
                self._last[name] = 0
            total += self._last.get(name, 0)
        return max(total, 0)


UNFINISHED = ("waiting", "queued", "processing", "no-worker")


async def paged_progress(progress: Any, pager: Pager, group_of: Callable[[str], str] | None) -> bool:
    """Set up a `distributed.diagnostics.progress.Progress` whose keys are paged. False: they are not, stock can do it.

    `group_of`: from a group's name to the name of its bar; None for one bar.
    """
    scheduler = pager.scheduler
    keys = set(progress.keys)
    while True:
        residents = [pager.window.by_key.get(k) for k in keys]
        if all(r is not None and not r.paged and not r.stub for r in residents):
            return False
        stored = await scheduler.taskdb.lookups._stored(keys)
        if len(stored) == len(keys) or not scheduler.taskdb.lookups.pager.session.connected:
            break
        if all(k in scheduler.tasks for k in keys - set(stored)):
            break
        await asyncio.sleep(PROGRESS_SECONDS)
    names: dict[str, None] = {}
    for task in stored.values():
        submission = pager.residency.submissions.get(task.info.submission)
        if submission is not None:
            names.update(dict.fromkeys(submission.groups))
        names[task.info.group] = None
    groups = [n for n in names if n in scheduler.task_groups]
    if group_of is None:
        progress.all_keys = LiveCount(scheduler, groups, None)
        progress.keys = LiveCount(scheduler, groups, UNFINISHED)
    else:
        bars: dict[str, list[str]] = {}
        for name in groups:
            bars.setdefault(group_of(name), []).append(name)
        progress.all_keys = {bar: LiveCount(scheduler, names, None) for bar, names in bars.items()}
        progress.keys = {bar: LiveCount(scheduler, names, UNFINISHED) for bar, names in bars.items()}
    internals.in_background(scheduler, _watch, progress, keys, scheduler)
    return True


async def _watch(progress: Any, keys: set[Any], scheduler: Scheduler) -> None:
    """End the progress when its keys are done, or one has failed."""
    while progress.status is None:
        states = await scheduler.taskdb.lookups.task_status(keys)
        erred = next((k for k, s in states.items() if s == "erred"), None)
        if erred is not None:
            progress.status = "error"
            ts = scheduler.tasks.get(erred)
            progress.extra.update({"exception": ts.exception if ts is not None else None, "key": erred})
        elif all(s == "memory" for s in states.values()):
            progress.status = "finished"
        elif any(s is None for s in states.values()):
            progress.status = "error"
            progress.extra.update({"exception": True, "key": next(k for k, s in states.items() if s is None)})
        else:
            await asyncio.sleep(PROGRESS_SECONDS)
