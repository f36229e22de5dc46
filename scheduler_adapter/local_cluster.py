"""`from scheduler_adapter import LocalCluster`: a cluster in one program, with the database."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from os import PathLike, fspath
from typing import Any

import dask
import distributed
from distributed.core import Status

from scheduler_adapter.config import AdapterConfig
from scheduler_adapter.figures import Figures, figures
from taskdb.errors import TaskDBError
from taskdb.wire import taskdb_pb2 as pb

PRELOAD = "scheduler_adapter"
#: How long a repr waits for the daemon.
ANSWER_SECONDS = 2.0


@dataclass(frozen=True)
class TaskDBState:
    """How the scheduler and its database stand."""

    now: Figures
    #: What the daemon says, with everything in it that clients were told before; None if it does not answer (in time).
    daemon: pb.StatusReply | None

    @property
    def unfinished(self) -> int:
        """Tasks that are to run, on disk and resident. 0 if the daemon does not answer."""
        if self.daemon is None:
            return 0
        states = self.daemon.states
        return sum(states[x] for x in ("waiting", "queued", "processing")) + sum(graph.unmade for graph in self.daemon.graphs)


class LocalCluster(distributed.LocalCluster):
    """`distributed.LocalCluster`, with its scheduler's tasks in taskdb.

    window: budget of tasks in the scheduler, 0 pages everything; data: folder of the store, kept at the end and taken up again by the next
    cluster on it (None: a temporary folder); url: address of a daemon that runs already, in the place of a child. What is None is what
    Dask's configuration says (`taskdb.window` and so on). Everything else as for `distributed.LocalCluster`.

    Raises ValueError with one line for a bad option.
    """

    def __init__(
        self,
        *args: Any,
        window: int | None = None,
        data: str | PathLike[str] | None = None,
        url: str | None = None,
        scheduler_kwargs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        data = None if data is None else fspath(data)
        if url is not None and data is not None:
            raise ValueError("either data or url: the daemon at the url has a store of its own")
        # Here, as Dask only logs an option of a preload that is refused.
        AdapterConfig.load(url=url, window=window, data=data)
        words = {"--taskdb-url": url, "--taskdb-window": window, "--taskdb-data": data}
        ours = [word for name, value in words.items() if value is not None for word in (name, str(value))]
        super().__init__(*args, scheduler_kwargs={**(scheduler_kwargs or {}), **_preloads(scheduler_kwargs or {}, ours)}, **kwargs)

    @property
    def taskdb(self) -> TaskDBState | None:
        """How things stand. What clients have been told is in it; so it waits for the disk, but not for long. None: not started, or closed.

        From the cluster's own event loop (an asynchronous cluster), which must not wait, it is what the scheduler knows by itself.
        """
        adapter = getattr(getattr(self, "scheduler", None), "taskdb", None)
        if adapter is None or self.status is not Status.running:
            return None
        if self.asynchronous:
            return TaskDBState(figures(adapter), None)
        state: TaskDBState = self.sync(_state, adapter)
        return state

    def __repr__(self) -> str:
        text: str = super().__repr__()
        state = self.taskdb
        if state is None:
            return text
        words = [f"taskdb={state.now.link}", f"resident={state.now.resident:,}", f"window={state.now.window:,}"]
        if state.daemon is not None:
            words.append(f"unfinished={state.unfinished:,}")
        return f"{text.removesuffix(')')}, {', '.join(words)})"

    def _repr_html_(self, cluster_status: str | None = None) -> str:
        state = self.taskdb
        rows = (cluster_status or "") + ("" if state is None else _html(state))
        # In the place of stock's: the template takes one piece of HTML, and stock's own is made on the way.
        text: str = super()._repr_html_(cluster_status=rows or None)
        return text


def _preloads(given: dict[str, Any], words: list[str]) -> dict[str, Any]:
    """The preloads that were asked for, and ours, each with its words."""
    names = given.get("preload") or dask.config.get("distributed.scheduler.preload") or []
    argv: Sequence[Any] = given.get("preload_argv") or dask.config.get("distributed.scheduler.preload-argv") or []
    names = [names] if isinstance(names, str) else list(names)
    if not argv or isinstance(argv[0], str):
        argv = [list(argv)] * len(names)
    both = dict(zip(names, map(list, argv), strict=True))
    both[PRELOAD] = [*both.get(PRELOAD, []), *words]
    return {"preload": list(both), "preload_argv": list(both.values())}


async def _state(adapter: Any) -> TaskDBState:
    status = None
    try:
        async with asyncio.timeout(ANSWER_SECONDS):
            await adapter.pager.durable()
            status = await adapter.session.status(ANSWER_SECONDS)
    except (TimeoutError, TaskDBError):
        pass
    return TaskDBState(figures(adapter), status)


def _html(state: TaskDBState) -> str:
    """Rows of the cluster's table."""
    now, daemon = state.now, state.daemon
    if daemon is None:
        store = f"{now.link}, no answer"
    else:
        store = f"{now.link}, epoch {daemon.epoch}, {daemon.store_bytes / 2**20:,.1f} MiB"
    cells = {
        "Resident tasks": f"{now.resident:,} (window {now.window:,})",
        "Unfinished tasks": "unknown" if daemon is None else f"{state.unfinished:,} in {len(daemon.graphs):,} graphs",
        "Task database": store,
        "On disk, could be handed out": f"{now.queued:,}",
    }
    parts = [f'<td style="text-align: left;"><strong>{name}:</strong> {value}</td>' for name, value in cells.items()]
    return "".join(f"<tr>{left}{right}</tr>" for left, right in zip(parts[::2], parts[1::2], strict=True))
