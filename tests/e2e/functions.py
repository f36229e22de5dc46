"""What tests run on workers and on the scheduler. Found there by module name, so it imports little."""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path
from typing import Any


def inc(x: int) -> int:
    return x + 1


def add(x: int, y: int) -> int:
    return x + y


def first(x: Any, *others: Any) -> Any:
    return x


def total(xs: Any) -> int:
    return sum(xs)


def total_of(*xs: int) -> int:
    return sum(xs)


def slow_inc(x: int, seconds: float = 0.05) -> int:
    time.sleep(seconds)
    return x + 1


def fail(x: Any) -> Any:
    raise ValueError(f"bad input {x}")


def mark_until(started: str, stop: str, x: int = 0) -> int:
    """Say that it runs, by making a file, and run until another file is there."""
    Path(started).touch()
    deadline = time.monotonic() + 60
    while not Path(stop).exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    return x


def wait_for_file(path: str, x: int = 0, *deps: Any) -> int:
    deadline = time.monotonic() + 60
    while not Path(path).exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    return x


def touch(path: str, *deps: Any) -> str:
    Path(path).touch()
    return path


def count_run(path: str, x: int, *deps: Any) -> int:
    """Leaves a line for every time it runs."""
    with open(path, "a") as f:
        f.write(f"{x}\n")
    return x


def fail_unless(path: str, x: int, *deps: Any) -> int:
    """Works once the file is there."""
    if not Path(path).exists():
        raise OSError(f"{path} is not there")
    return x


def fail_times(path: str, times: int, x: int) -> int:
    """Fails the first `times` times."""
    with open(path, "a") as f:
        f.write("x")
    if Path(path).stat().st_size <= times:
        raise OSError("flaky")
    return x


def die_once(path: str, x: int) -> int:
    """The first call ends its worker."""
    if not Path(path).exists():
        Path(path).touch()
        os._exit(1)
    return x


def die_always(path: str, needed: Any = None) -> None:
    """Every call ends its worker."""
    with open(path, "a") as f:
        f.write(f"{os.getpid()}\n")
    os._exit(1)


def run_until(path: str, name: str, started: str, stop: str) -> int:
    """`count_run`, and runs until another file is there."""
    with open(path, "a") as f:
        f.write(f"{name}\n")
    return mark_until(started, stop, 1)


def fail_when(started: str, stop: str, *inputs: Any) -> None:
    mark_until(started, stop)
    Path(started + ".failed").touch()
    raise ValueError("at last")


def slow_identity(x: Any, seconds: float) -> Any:
    time.sleep(seconds)
    return x


def speak_another_protocol() -> None:
    from scheduler_adapter import inventory

    inventory.PROTOCOL += 1


def held_keys(dask_worker: Any) -> list[str]:
    return [str(key) for key in dask_worker.state.tasks]


def shuffle_has_begun(dask_scheduler: Any) -> bool:
    """Some part of a P2P shuffle is done, and not all."""
    shuffles = dask_scheduler.plugins["shuffle"].active_shuffles
    done = [ts for ts in dask_scheduler.tasks.values() if "transfer" in str(ts.key) and ts.state == "memory"]
    return bool(shuffles) and len(done) > 2


def wait_for_workers_no_more(dask_scheduler: Any) -> None:
    """As when the time for them to come back is over."""
    dask_scheduler.taskdb.recovery._give_up()


async def told_all(dask_scheduler: Any) -> None:
    """Everything that happened so far is on disk."""
    pager = dask_scheduler.taskdb.pager
    while pager.window.changed:  # of a task without an id nothing can be told yet
        await asyncio.sleep(0.01)
    await pager.durable()


def where(*deps: Any) -> str:
    from distributed import get_worker

    return get_worker().address


def submits_others(started: str, gate: str, runs: str) -> int:
    """Has a client of its own, with finished and pending futures."""
    from distributed import worker_client

    with worker_client() as client:
        count_run(runs, "outer")
        done = [client.submit(count_run, runs, i, key=f"inner-{i}") for i in range(3)]
        client.gather(done)
        pending = client.submit(wait_for_file, gate, 10, key="inner-pending")
        Path(started).touch()
        return sum(client.gather([*done, pending]))


class Counter:
    n = 0

    def __init__(self) -> None:
        self.n = 0

    def increment(self) -> int:
        self.n += 1
        return self.n


class Gate:
    """A number that only the process that made it can pickle before a file is there; `fails`: nor after that."""

    def __init__(self, number: int, path: str, fails: bool = False, pid: int | None = None):
        self.number, self.path, self.fails, self.pid = number, path, fails, pid or os.getpid()

    def __reduce__(self) -> Any:
        if os.getpid() != self.pid:
            wait_for_file(self.path)
            if self.fails:
                raise ValueError("this number does not travel")
        return Gate, (self.number, self.path, self.fails, self.pid)

    def __index__(self) -> int:
        return self.number


class CannotBeUnpickled:
    """Pickled by the client, and read nowhere: not in the scheduler, the ingest process or a worker."""

    def __reduce__(self) -> Any:
        return refuse, ()


def refuse() -> None:
    raise TypeError("this cannot be unpickled here")


def all_known(client: Any, keys: list[str]) -> bool:
    """Whether the scheduler or the database has all of these tasks."""
    return all(state is not None for state in client.sync(client.scheduler.get_task_status, keys=keys).values())


# ------------------------------------------------------------------------------------------------------ on the scheduler


def resident(dask_scheduler: Any) -> dict[str, str]:
    return {str(k): ts.state for k, ts in dask_scheduler.tasks.items()}


def group_counts(dask_scheduler: Any) -> dict[str, dict[str, int]]:
    return {name: {k: v for k, v in g.states.items() if v} for name, g in dask_scheduler.task_groups.items()}


def group_negatives(dask_scheduler: Any) -> list[str]:
    return [
        f"{c.name}: {dict(c.states)}"
        for c in (*dask_scheduler.task_groups.values(), *dask_scheduler.task_prefixes.values())
        if any(v < 0 for v in c.states.values())
    ]


def prefix_counts(dask_scheduler: Any) -> dict[str, dict[str, int]]:
    return {name: {k: v for k, v in p.states.items() if v} for name, p in dask_scheduler.task_prefixes.items()}


def spans(dask_scheduler: Any) -> int:
    return len(dask_scheduler.extensions["spans"].spans)


def span_cumulative_tasks(dask_scheduler: Any) -> dict[str, int]:
    return {" ".join(s.name): sum(len(g) for g in s.groups) for s in dask_scheduler.extensions["spans"].spans.values()}


def clients(dask_scheduler: Any) -> list[str]:
    return list(dask_scheduler.clients)


def adaptive_target(dask_scheduler: Any) -> int:
    return dask_scheduler.adaptive_target()


def is_idle(dask_scheduler: Any) -> bool:
    return dask_scheduler.check_idle() is not None or dask_scheduler.is_idle


def processing(dask_scheduler: Any) -> int:
    return sum(len(ws.processing) for ws in dask_scheduler.workers.values())


def wants_of(client: str, dask_scheduler: Any) -> list[str]:
    cs = dask_scheduler.clients.get(client)
    return [] if cs is None else [str(ts.key) for ts in cs.wants_what]


def fire_and_forget(dask_scheduler: Any) -> set[str]:
    """Keys, here and on disk, that nobody waits for and that are not done."""
    return set(dask_scheduler.taskdb.pager.fire_and_forget)


def has_prefix(name: str, dask_scheduler: Any) -> bool:
    return name in dask_scheduler.task_prefixes


def run_of(key: str, dask_scheduler: Any) -> tuple[int | None, Any] | None:
    """Run id and priority of a resident task."""
    ts = dask_scheduler.tasks.get(key)
    return None if ts is None else (ts.run_id, ts.priority)


def inboxes(dask_scheduler: Any) -> dict[str, bool]:
    return {c: i.idle for c, i in dask_scheduler.taskdb.clients.inboxes.items()}


def ingest_pid(dask_scheduler: Any) -> int:
    return dask_scheduler.taskdb.ingest.pid


def all_is_on_disk(dask_scheduler: Any) -> bool:
    session = dask_scheduler.taskdb.session
    return bool(session.durable_seq >= session.last_seq)


def all_is_answered(dask_scheduler: Any) -> bool:
    pager = dask_scheduler.taskdb.pager
    return pager._flush is None and not pager.session.in_flight


def left_behind(dask_scheduler: Any) -> dict[str, Any]:
    """What a scheduler without work should not have."""
    found = {
        "tasks": {str(k): ts.state for k, ts in dask_scheduler.tasks.items()},
        "groups": group_counts(dask_scheduler),
        "graph updates": dask_scheduler._active_graph_updates,
    }
    adapter = getattr(dask_scheduler, "taskdb", None)
    if adapter is not None:
        found["submissions"] = len(adapter.pager.residency.submissions)
        found["window"] = [str(k) for k in adapter.pager.window.by_key]
        found["leased"] = len(adapter.pager.window.leased)
        found["cold"] = len(adapter.pager.window.cold)
        # To see why.
        found["wanted"] = {str(k): [str(cs) for cs in ts.who_wants or ()] for k, ts in list(dask_scheduler.tasks.items())[:3]}
        inboxes = adapter.clients.inboxes.items()
        found["not handled"] = {client: ops for client, inbox in inboxes if (ops := [message.op for message in inbox.waiting()])}
    return {name: value for name, value in found.items() if value}


def count_block(block: Any, path: str, seconds: float = 0.0, fails: tuple[int, ...] | None = None, block_id: Any = None) -> Any:
    """A block that is told of in a file by its place, takes its time, and fails in one place."""
    with open(path, "a") as f:
        f.write(f"{'-'.join(map(str, block_id))}\n")
    time.sleep(seconds)
    if fails is not None and tuple(block_id) == fails:
        raise ValueError("one block is bad")
    return block


def block_sum(blocks: Any) -> Any:
    """The sum of a list of blocks, along their first axis as well."""
    return sum(blocks).sum(axis=0)


def cold(dask_scheduler: Any) -> dict[str, Any]:
    """How many tasks are resident, how many results are cold, and the bytes of workers."""
    return {
        "tasks": len(dask_scheduler.tasks),
        "cold": len(dask_scheduler.taskdb.pager.cooling),
        "nbytes": {address: ws.nbytes for address, ws in dask_scheduler.workers.items()},
        "memory": sum(group.states["memory"] for group in dask_scheduler.task_groups.values()),
    }


def validate_state(dask_scheduler: Any) -> None:
    dask_scheduler.validate_state()


async def task_status(dask_scheduler: Any, keys: list[Any]) -> dict[Any, Any]:
    found: dict[Any, Any] = await dask_scheduler.handlers["get_task_status"](keys=keys)
    return found


async def set_resources(dask_worker: Any, **resources: float) -> None:
    await dask_worker.set_resources(**resources)


def draw_pages(dask_scheduler: Any) -> dict[str, Any]:
    """Make the components of the dashboard's pages about tasks, or bring them up to date, and return what they show."""
    from distributed.dashboard.components import scheduler as components

    pages = dask_scheduler.__dict__.setdefault("pages_drawn", {})
    for kind in ("TaskStream", "TaskProgress", "TaskGraph", "TaskGroupProgress"):
        if kind not in pages:
            pages[kind] = getattr(components, kind)(dask_scheduler)
        pages[kind].update()
    progress = pages["TaskProgress"].source.data
    layout = pages["TaskGraph"].layout
    return {
        "progress": dict(zip(progress["name"], map(int, progress["all"]), strict=True)),
        "nodes": len(layout.x),
        "links": len(layout.index_edge),
        "stream": len(pages["TaskStream"].source.data["start"]),
    }


def draw_groups(dask_scheduler: Any) -> dict[str, int]:
    """Groups, and how many tasks each has, as the page of task groups shows them."""
    from distributed.dashboard.components.scheduler import TaskGroupGraph

    page = TaskGroupGraph(dask_scheduler)
    page.update()
    nodes = page.nodes_source.data
    return dict(zip(nodes["name"], map(int, nodes["tot_tasks"]), strict=True))


def close_pages(dask_scheduler: Any) -> None:
    """What lays tasks out for the graph page ends with the page."""
    del dask_scheduler.pages_drawn
