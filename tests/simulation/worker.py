"""A worker: the state machine of `distributed`, the real preload if it survives its scheduler, and virtual work."""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Collection
from types import SimpleNamespace
from typing import Any

from distributed.core import Status
from distributed.protocol.serialize import Serialize, Serialized, serialize
from distributed.worker_state_machine import (
    AcquireReplicasEvent,
    BaseWorker,
    CancelComputeEvent,
    ComputeTaskEvent,
    ExecuteFailureEvent,
    ExecuteSuccessEvent,
    FindMissingEvent,
    FreeKeysEvent,
    GatherDepNetworkFailureEvent,
    GatherDepSuccessEvent,
    RefreshWhoHasEvent,
    RemoveReplicasEvent,
    RemoveWorkerEvent,
    RescheduleEvent,
    RetryBusyWorkerEvent,
    StateMachineEvent,
    StealRequestEvent,
    WorkerState,
)

from scheduler_adapter import dask_worker
from scheduler_adapter.worker import Survivor
from tests.simulation.loop import Process
from tests.simulation.network import End

LABEL = "worker"
#: How often a worker asks again for what it misses.
FIND_SECONDS = 1.0
_EVENTS: dict[str, type[StateMachineEvent]] = {
    "cancel-compute": CancelComputeEvent,
    "acquire-replicas": AcquireReplicasEvent,
    "compute-task": ComputeTaskEvent,
    "free-keys": FreeKeysEvent,
    "remove-replicas": RemoveReplicasEvent,
    "steal-request": StealRequestEvent,
    "refresh-who-has": RefreshWhoHasEvent,
    "remove-worker": RemoveWorkerEvent,
}


class _Timer:
    """A periodic callback that is not simulated."""

    def start(self) -> None: ...
    def stop(self) -> None: ...


class Worker(BaseWorker):
    """`survives`: it has the preload."""

    def __init__(self, world: Any, number: int, nthreads: int, *, survives: bool) -> None:
        self.world = world
        self.name = f"worker-{number}"
        self.process = Process(self.name, world)
        self.contact_address = self.address = f"tcp://10.0.0.{number}:1000"
        super().__init__(WorkerState(nthreads=nthreads, address=self.address, validate=True, transition_counter_max=50_000))
        self.survives = survives
        self.status = Status.running
        # What the preload, and the registration, look at.
        self.id = f"id-{self.name}"
        self.nanny = None
        self.local_directory = ""
        self.service_ports: dict[str, int] = {}
        self.connection_args: dict[str, Any] = {}
        self.plugins: dict[str, Any] = {}
        self.extensions: dict[str, Any] = {}
        self.startup_information: dict[str, Any] = {}
        self.stream_handlers: dict[str, Any] = {}
        self.memory_manager = SimpleNamespace(memory_limit=2**36)
        self.periodic_callbacks = {name: _Timer() for name in ("keep-alive", "heartbeat")}
        self.scheduler = SimpleNamespace(address="tcp://scheduler:1", taskdb=lambda: world.ask_scheduler(self.process, "taskdb"))
        self.loop = None
        self.batched_stream: Any = None
        self.handle_scheduler = self._serve
        if survives:
            self.survivor = Survivor(self)  # type: ignore[arg-type]
        self.process.spawn(self._live())
        self.process.spawn(self._find_missing())

    async def _live(self) -> None:
        while self.status is Status.running:
            try:
                comm = await dask_worker.register(self, dict, "worker-connect", 10.0)  # type: ignore[arg-type]
            except OSError:
                await asyncio.sleep(0.1)
            except dask_worker.Refused:
                await self.close("refused")
            else:
                await self.handle_scheduler(comm)
                return

    async def _serve(self, comm: End) -> None:
        """Stock: it ends with its stream."""
        try:
            await self.handle_stream(comm)
        finally:
            await self.close(reason="worker-handle-scheduler-connection-broken")

    async def handle_stream(self, comm: End) -> None:
        try:
            while True:
                for message in await comm.read():
                    message = dict(message)
                    op = message.pop("op")
                    if op == "close":
                        await self.close(message.get("reason", ""))
                        return
                    if op == "close-stream":
                        return
                    self.handle(op, message)
        except OSError:
            pass

    def handle(self, op: str, message: dict[str, Any]) -> None:
        if not self.process.alive or self.status is not Status.running:
            return
        if op == "compute-task":
            spec = message["run_spec"]
            message["run_spec"] = pickle.loads(spec.frames[0]) if isinstance(spec, Serialized) else _unpickled(spec.data)
        if op in _EVENTS:
            self.handle_stimulus(_EVENTS[op](**message))
        elif op in self.stream_handlers:
            self.stream_handlers[op](**message)

    def batched_send(self, message: dict[str, Any]) -> None:
        stream = self.batched_stream
        for name in ("exception", "traceback"):
            if isinstance(message.get(name), Serialize):
                message[name] = Serialized(*serialize(message[name]))
        if stream is not None and stream.comm is not None and not stream.comm.closed():
            stream.send(message)

    async def close(self, reason: str = "") -> None:
        if self.status is Status.running:
            self.status = Status.closing
            self.world.note("worker closes", self.name, reason)
            self.world.worker_gone(self)

    # --------------------------------------------------------------------------------------- what the registration asks

    async def get_metrics(self) -> dict[str, Any]:
        return {
            "bandwidth": {"total": 1e8, "workers": {}, "types": {}},
            "digests_total_since_heartbeat": {},
            "memory": 10**8,
            "spilled_bytes": {"memory": 0, "disk": 0},
        }

    async def get_startup_information(self) -> dict[str, Any]:
        return {name: value(self) for name, value in self.startup_information.items()}

    async def plugin_add(self, plugin: Any = None, name: str = "") -> None: ...

    # ------------------------------------------------------------------------------------------------------------- work

    def digest_metric(self, name: Any, value: float) -> None: ...

    async def execute(self, key: Any, *, stimulus_id: str) -> StateMachineEvent:
        ts = self.state.tasks[key]
        if self.status is not Status.running:
            return RescheduleEvent(key=key, stimulus_id="worker-closing")
        run_id, spec = ts.run_id, ts.run_spec
        assert spec is not None
        began = asyncio.get_running_loop().time()
        try:
            data = {dep.key: self.state.data[dep.key] for dep in ts.dependencies}
            if ts.state == "executing":
                self.world.runs(self, key, spec)
            await asyncio.sleep(self.world.run_seconds())
            value = spec(data)
        except Exception as error:
            return ExecuteFailureEvent.from_exception(error, key=key, run_id=run_id, stimulus_id="task-erred")
        return ExecuteSuccessEvent(
            key=key,
            run_id=run_id,
            value=value,
            start=began,
            stop=asyncio.get_running_loop().time() + 1e-6,
            nbytes=28,
            type=int,
            stimulus_id="task-finished",
        )

    async def gather_dep(self, worker: str, to_gather: Collection[Any], total_nbytes: int, *, stimulus_id: str) -> StateMachineEvent:
        found = await self.world.fetch(worker, to_gather)
        if found is None:
            return GatherDepNetworkFailureEvent(worker=worker, total_nbytes=total_nbytes, stimulus_id="gather-dep-failure")
        return GatherDepSuccessEvent(worker=worker, total_nbytes=total_nbytes, data=found, stimulus_id="gather-dep-success")

    async def retry_busy_worker_later(self, worker: str) -> StateMachineEvent:
        await asyncio.sleep(0.15)
        return RetryBusyWorkerEvent(worker=worker, stimulus_id="retry-busy-worker")

    async def _find_missing(self) -> None:
        while self.status is Status.running:
            await asyncio.sleep(FIND_SECONDS)
            if self.state.missing_dep_flight:
                self.handle_stimulus(FindMissingEvent(stimulus_id="find-missing"))


def _unpickled(spec: Any) -> Any:
    """As it arrives on the other side."""
    return pickle.loads(pickle.dumps(spec))
