"""One seed, from the plan to the verdict."""

from __future__ import annotations

import asyncio
import gc
import logging
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from random import Random
from typing import Any

from taskdb.client import Session
from taskdb.engine.invariants import violations
from taskdb.model import TaskState
from taskdb.store.codec import decode_task
from taskdb.store.schema import Table
from tests.simulation.loop import Hung, Killed, VirtualLoop, virtual_clocks
from tests.simulation.plan import Plan
from tests.simulation.scheduler import replaced
from tests.simulation.work import Work
from tests.simulation.world import World

#: Seeds between two runs of the collector.
RUNS_COLLECTED = 10
_runs = 0
#: Virtual time in which a run must be over, seconds.
LIMIT_SECONDS = 150.0
#: Virtual time in which all must have been let go of, seconds.
EMPTY_SECONDS = 40.0


@dataclass
class Outcome:
    seed: int
    failures: list[str]
    trace: list[str]
    digest: str
    details: str = ""


def run(plan: Plan, session: type[Session] = Session) -> Outcome:
    """Run a plan on a loop of its own."""
    chance = Random(f"{plan.seed} loop")
    loop = VirtualLoop(chance, LIMIT_SECONDS)
    found: dict[str, Any] = {}
    asyncio.set_event_loop(loop)

    async def main() -> None:
        found["world"] = world = World(plan)
        loop.set_exception_handler(lambda loop, context: _unhandled(world, context))
        with _errors_logged(world):
            story = loop.create_task(_story(world))
            await asyncio.wait({story, world.doomed}, return_when=asyncio.FIRST_COMPLETED)
            if story.done():
                story.result()

    failures: list[str] = []
    try:
        with _collecting_between(), virtual_clocks(Random(f"{plan.seed} names")), replaced(session):
            loop.run_until_complete(main())
    except Hung as error:
        failures.append(f"hung: {error}")
    except Exception as error:
        failures.append(f"the simulation itself failed: {error!r}\n{traceback.format_exc()}")
    world: World | None = found.get("world")
    if world is None:
        return Outcome(plan.seed, failures, [], "")
    details = ""
    if failures and "hung" in failures[0]:
        details = _waiting(world)
    details += "".join("".join(traceback.format_exception(error)) for error in world.errors[:5])
    return Outcome(plan.seed, [*world.failures, *failures], world.trace, world.digest(), details)


async def _story(world: World) -> None:
    work = Work(world)
    await work.do()
    await work.settled()
    work.judge()
    if world.failures:
        return
    await _emptied(world, work)


async def _emptied(world: World, work: Work) -> None:
    """Once nothing is wanted any more, nothing is left, anywhere."""
    work.release_all()
    left: list[str] = ["?"]
    for _ in range(int(EMPTY_SECONDS / 0.5)):
        await asyncio.sleep(0.5)
        left = _left(world)
        if not left:
            break
    for words in left:
        world.failed(f"left at the end: {words}")
    with world.daemon.store.read() as txn:
        for words in violations(txn):
            world.failed(f"invariant: {words}")
    scheduler = world.scheduler.scheduler
    try:
        scheduler.validate_state()
    except Exception as error:
        world.failed(f"the scheduler's state is not valid: {error!r}", error)


def _left(world: World) -> list[str]:
    scheduler, adapter = world.scheduler.scheduler, world.scheduler.adapter
    left = []
    if not world.scheduler.ready or not world.daemon.process.alive:
        return ["a process that is not there"]
    if scheduler.tasks:
        left.append(f"tasks in the scheduler: { {k: ts.state for k, ts in scheduler.tasks.items()} }")
    if scheduler.task_groups:
        left.append(f"task groups: {dict(scheduler.task_groups)}")
    if adapter.pager.window.by_id or adapter.pager.window.by_key:
        left.append(f"residents: {list(adapter.pager.window.by_key)} {list(adapter.pager.window.by_id)}")
    if adapter.pager.residency.submissions:
        left.append(f"submissions: {list(adapter.pager.residency.submissions)}")
    if adapter.session is not None and adapter.session.unacked:
        left.append(f"{adapter.session.unacked} batches that are not durable")
    with world.daemon.store.read() as txn:
        for table in (Table.TASKS, Table.GRAPHS, Table.CLIENTS, Table.TODO, Table.HOLDS):
            if count := txn.count(table):
                left.append(f"{count} in {table.name}")
        for key, data in txn.scan(Table.TASKS):
            task = decode_task(int.from_bytes(key), data)
            left.append(f"stored {txn.get(Table.NAMES, key)!r} {TaskState(task.state).name} wants {task.wants} links {task.links}")
    for worker in world.workers.values():
        if worker.state.data:
            left.append(f"data on {worker.name}: {list(worker.state.data)}")
    return left


def _waiting(world: World) -> str:
    """What there is, when nothing goes on."""
    lines = [f"left: {words}" for words in _left(world)]
    for client in world.clients:
        lines += [f"{client.name} {key}: {future.status}" for key, future in client.futures.items() if not future.gathered]
    session = world.scheduler.adapter.session
    if session is not None:
        lines.append(f"session: connected {session.connected}, in flight {session.in_flight}, unacked {session.unacked}")
    return "\n".join(lines) + "\n"


# ------------------------------------------------------------------------------------------------------ errors nobody sees


@contextmanager
def _collecting_between() -> Iterator[None]:
    """The collector ends coroutines of processes that were killed: not while anything goes on."""
    global _runs
    _runs += 1
    if _runs == 2:
        gc.freeze()  # all modules are there: the collector need not look at them again
    if _runs % RUNS_COLLECTED == 0:
        gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


#: What is logged as an error, and is none here.
EXPECTED = (
    "lost scattered data",
    "Couldn't gather",
    "Removing worker",
    "Compute Failed",
    "Scheduler was unaware",
    "marked as failed because",
    "it is the one that lost this worker",
    "this scheduler stops",  # a later one has begun; else it is noticed otherwise
)


class _Errors(logging.Handler):
    def __init__(self, world: World) -> None:
        super().__init__(logging.ERROR)
        self._world = world

    def emit(self, record: logging.LogRecord) -> None:
        words = record.getMessage()
        error = record.exc_info[1] if record.exc_info else None
        if isinstance(error, Killed) or any(expected in words for expected in EXPECTED):
            return
        self._world.failed(f"logged by {record.name}: {words[:300]} {error!r}", error)


@contextmanager
def _errors_logged(world: World) -> Iterator[None]:
    handler = _Errors(world)
    loggers = [logging.getLogger(name) for name in ("distributed", "taskdb", "tornado")]
    before = [(x.level, x.propagate, list(x.handlers)) for x in loggers]
    for x in loggers:
        x.handlers, x.propagate = [handler], False
        x.setLevel(logging.ERROR)
    try:
        yield
    finally:
        for x, (level, propagate, handlers) in zip(loggers, before, strict=True):
            x.level, x.propagate, x.handlers = level, propagate, handlers


def _unhandled(world: World, context: dict[str, Any]) -> None:
    error = context.get("exception")
    if not isinstance(error, Killed) and "was destroyed but it is pending" not in context.get("message", ""):
        world.failed(f"unhandled: {context.get('message')} {error!r}", error)
