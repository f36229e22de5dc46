"""Everything of one run: the processes, what is done to them, and what must have come of it."""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import Collection
from contextvars import Context
from dataclasses import dataclass, field
from random import Random
from typing import Any

from distributed.comm.core import CommClosedError

from scheduler_adapter.config import AdapterConfig
from scheduler_adapter.keys import pack_key
from taskdb.engine.refs import find_key
from tests.simulation import tasks
from tests.simulation.client import LABEL as CLIENT
from tests.simulation.client import Client
from tests.simulation.daemon import Daemon
from tests.simulation.loop import Process
from tests.simulation.network import End, Network
from tests.simulation.plan import Plan
from tests.simulation.scheduler import Incarnation
from tests.simulation.worker import LABEL as WORKER
from tests.simulation.worker import Worker
from tests.stress.model import Node

logger = logging.getLogger("simulation")

#: Until then a lost worker is told to the database: if the scheduler dies before, the next one cannot know of what that made it run.
TOLD_SECONDS = 6.0
#: How long after a scheduler has begun workers may be kept from it.
LATE_SECONDS = 8.0
#: How long a scheduler waits for workers of the one before.
WORKERS_RETURN_SECONDS = 5
#: Marks lines of the trace that are not part of its digest.
DETAIL = "    |"


@dataclass
class World:
    plan: Plan
    network: Network = field(init=False)
    failures: list[str] = field(default_factory=list)
    errors: list[BaseException] = field(default_factory=list)
    trace: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        plan = self.plan
        self._loop = asyncio.get_running_loop()
        #: Done when it makes no sense to go on.
        self.doomed = self._loop.create_future()
        self._chance = Random(f"{plan.seed} world")
        self.network = Network(Random(f"{plan.seed} network"))
        #: When each key was last begun, and when last something was lost that may have to be computed again.
        self._begun: dict[Any, float] = {}
        self._lost_at = -1.0
        self.nodes: dict[Any, Node] = {}
        #: Tasks of graphs that begin anew as a unit.
        self._whole: set[Node] = set()
        #: Keys that have meant more than one task.
        self._reused: set[Any] = set()
        self.workers: dict[str, Worker] = {}
        self._worker_count = 0
        self._scheduler_count = 0
        #: The scheduler before the latest died while it attached.
        self._ghost = False
        tasks.attempts.clear()
        self.daemon = Daemon(self, self.network, Random(f"{plan.seed} daemon"), sync=plan.sync)
        self.scheduler = self.new_scheduler()
        for _ in range(plan.workers):
            self.new_worker()
        self.clients = [Client(self, number) for number in range(plan.clients)]

    # ------------------------------------------------------------------------------------------------------ what is told

    def note(self, *words: Any) -> None:
        self.trace.append(f"{self._loop.time():10.4f} " + " ".join(str(word) for word in words))

    def detail(self, *words: Any) -> None:
        """For `--verbose` only."""
        if self.plan.verbose:
            self.trace.append(f"{self._loop.time():10.4f} {DETAIL} " + " ".join(str(word) for word in words))

    def failed(self, words: str, error: BaseException | None = None, *, fatal: bool = False) -> None:
        self.note("FAILED", words)
        if fatal and not self.doomed.done():
            self.doomed.set_result(None)
        self.failures.append(words)
        if error is not None:
            self.errors.append(error)

    def digest(self) -> str:
        return hashlib.sha256("\n".join(line for line in self.trace if DETAIL not in line).encode()).hexdigest()[:16]

    def later(self, seconds: float, callback: Any, *args: Any) -> None:
        self._loop.call_later(seconds, callback, *args, context=Context())

    # -------------------------------------------------------------------------------------------------------- processes

    def new_scheduler(self) -> Incarnation:
        self._scheduler_count += 1
        plan = self.plan
        config = AdapterConfig.load(
            url="simulated:1",
            window=plan.window,
            lookahead=plan.lookahead,
            local_tasks=plan.local_tasks,
            connect_timeout=60,
            workers_return=WORKERS_RETURN_SECONDS,
            clients_return=10,
        )
        self.scheduler = Incarnation(self, self._scheduler_count, config)
        return self.scheduler

    def kill_scheduler(self, why: str) -> None:
        if self.scheduler.process.alive:
            self.note("scheduler killed", why)
            now = self._loop.time()
            if not self.plan.survive or self._lost_at > now - TOLD_SECONDS:
                self._lost_at = now
            # Its Attach may still arrive, and fence the one that comes after it.
            self._ghost = not self.scheduler.ready
            self.network.kill(self.scheduler.process)
            self.later(self._chance.choice((0.01, 0.2, 1.0)), self.new_scheduler)

    def rival(self) -> None:
        """Another scheduler on the same store: the later one wins."""
        if self.scheduler.process.alive and self.scheduler.ready:
            self.note("a rival begins")
            if not self.plan.survive:
                self._lost_at = self._loop.time()
            self.new_scheduler()

    def scheduler_stopped(self, process: Process, reason: str) -> None:
        self.note("scheduler stops", process.name, reason)
        if process is self.scheduler.process:
            if self._ghost:
                self.kill_scheduler("it was fenced by one that is dead")
                return
            self.failed(f"the scheduler stopped: {reason}", fatal=True)
        self.network.kill(process)

    def new_worker(self) -> None:
        self._worker_count += 1
        worker = Worker(self, self._worker_count, self.plan.threads, survives=self.plan.survive)
        self.workers[worker.address] = worker

    def kill_worker(self, worker: Worker) -> None:
        self.note("worker killed", worker.name)
        self.worker_gone(worker)

    def worker_gone(self, worker: Worker) -> None:
        """It died, or closed itself; a new one takes its place."""
        self._lost_at = self._loop.time()
        self.network.kill(worker.process)
        self.workers.pop(worker.address, None)
        self.later(self._chance.uniform(0, 0.5), self.new_worker)

    # ------------------------------------------------------------------------------------------------------- connections

    async def connect(self, process: Process) -> End:
        """A stream to the scheduler, which waits for the first message. Raises OSError if none serves."""
        await asyncio.sleep(self.network.latency())
        scheduler = self.scheduler
        if not scheduler.process.alive or not scheduler.ready:
            raise CommClosedError("nobody listens")
        label = CLIENT if process.name.startswith("client") else WORKER
        late = label is WORKER and self._scheduler_count > 1 and self._loop.time() < scheduler.began + LATE_SECONDS
        if late and self._chance.random() < self.plan.late:
            raise CommClosedError("simulated: it does not get through")
        ours, theirs = self.network.pair(process, scheduler.process, label)
        scheduler.process.spawn(self._accept(scheduler, theirs))
        return ours

    async def _accept(self, scheduler: Incarnation, end: End) -> None:
        try:
            message = dict(await end.read())
        except OSError:
            return
        op = message.pop("op")
        message.pop("reply", None)
        if op == "register-worker":
            message["resolve_address"] = False
        try:
            await scheduler.scheduler.handlers[op](end, **message)
        except CommClosedError:
            pass

    async def ask_scheduler(self, process: Process, op: str, **kwargs: Any) -> Any:
        """A call of a handler. Raises OSError if the scheduler is not there, or dies before it has answered."""
        end = await self.connect_call(process, op, kwargs)
        answer = await end.receive()
        end.abort()
        if isinstance(answer, BaseException):
            raise answer
        return answer

    async def connect_call(self, process: Process, op: str, kwargs: dict[str, Any]) -> End:
        await asyncio.sleep(self.network.latency())
        scheduler = self.scheduler
        if not scheduler.process.alive or not scheduler.ready:
            raise CommClosedError("nobody listens")
        ours, theirs = self.network.pair(process, scheduler.process, "call")

        async def serve() -> None:
            try:
                answer = await scheduler.answer(op, **kwargs)
            except Exception as error:
                answer = error
            if not theirs.ended:
                theirs.send(answer)

        scheduler.process.spawn(serve())
        return ours

    async def fetch(self, address: str, keys: Collection[Any]) -> dict[Any, Any] | None:
        """Values a worker holds; None if it cannot be reached."""
        await asyncio.sleep(self.network.latency())
        worker = self.workers.get(address)
        if worker is None or not worker.process.alive:
            return None
        found = {key: worker.state.data[key] for key in sorted(keys, key=str) if key in worker.state.data}
        await asyncio.sleep(self.network.latency())
        return found if worker.process.alive else None

    # --------------------------------------------------------------------------------------------------------------- work

    def run_seconds(self) -> float:
        return self._chance.choice(self.plan.run_seconds)

    def runs(self, worker: Worker, key: Any, spec: Any) -> None:
        """A task begins. What is not lost is not computed again."""
        self.note("runs", worker.name, key)
        if not worker.survives and worker.batched_stream.comm.cut:
            return  # a stock worker that has yet to notice that its scheduler is gone
        if not worker.survives and self.scheduler.ready and worker.address not in self.scheduler.scheduler.workers:
            return  # one of a scheduler that has yet to hear that it is fenced
        if spec.args[0] != self.nodes[key].name:
            return  # the task that the key meant before: its scheduler has yet to hear of the new one
        before = self._begun.get(key)
        self._begun[key] = self._loop.time()
        if before is not None and before > self._lost_at and self.may_run_once(key):
            self.failed(f"{key} runs again on {worker.name}, and nothing was lost since it began at {before:.4f} s")

    def forgive_unknown(self) -> None:
        """A new scheduler serves. What never reached the disk, as daemon and scheduler died together, may run again; and so may what an
        older one, that has yet to hear of it, had stock workers do."""
        if not self.plan.survive:
            self._lost_at = self._loop.time()
        # Nor can what workers have that do not come back in time.
        self.later(WORKERS_RETURN_SECONDS, self._given_up, self.scheduler)
        # What is stored under a key that is used again may be the old task, while the new one is said again; copies of either look alike.
        again = self._reused & {key for client in self.clients for key in client.outbox.submitted_keys()}
        with self.daemon.store.read() as txn:
            for key in [key for key in self._begun if key in again or not find_key(txn, pack_key(key))]:
                del self._begun[key]

    def _given_up(self, scheduler: Incarnation) -> None:
        if any(worker.survives and address not in scheduler.scheduler.workers for address, worker in self.workers.items()):
            self._lost_at = self._loop.time() + 0.1

    def may_run_once(self, key: Any) -> bool:
        """Whether it never fails, and somebody still needs it: what was let go of may be begun again before that is heard."""
        node = self.nodes[key]
        if node.mode != "ok":
            return False
        if self._scheduler_count > 1 and any(dependent.mode != "ok" for dependent in node.dependents):
            return False  # let go of when that failed, which a scheduler that died at once has not told
        held = {future.node for client in self.clients for future in client.futures.values()}
        below, seen, needed = [node], {node}, False
        while below:
            current = below.pop()
            if current in self._whole and self._scheduler_count > 1:
                return False
            needed |= current in held
            below += [x for x in current.dependents if x not in seen]
            seen.update(current.dependents)
        return needed

    def submitted(self, nodes: list[Node], whole: bool) -> None:
        for node in nodes:
            if whole:
                self._whole.add(node)
            if node.key in self.nodes:
                self._reused.add(node.key)
            self.nodes[node.key] = node
            self._begun.pop(node.key, None)
