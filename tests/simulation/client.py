"""A client: submits graphs, follows its futures as `distributed.Client` does, and gathers results."""

from __future__ import annotations

import asyncio
import pickle
from dataclasses import dataclass, field
from typing import Any

from distributed.protocol.serialize import Serialized, deserialize, serialize, to_serialize

from scheduler_adapter.outbox import Outbox
from tests.simulation.loop import Process
from tests.simulation.network import End
from tests.simulation.tasks import Graph
from tests.stress.model import Node

LABEL = "client"


@dataclass(eq=False)
class Future:
    node: Node
    status: str = "pending"
    result: Any = None
    gathered: bool = False
    cancelled_here: bool = False
    #: Who said last what it is.
    told_by: End | None = None
    event: asyncio.Event = field(default_factory=asyncio.Event)

    def set(self, status: str, result: Any = None) -> None:
        if status == self.status == "finished":
            return
        self.status, self.result, self.gathered = status, result, False
        if status in ("finished", "error", "cancelled"):
            self.event.set()
        else:
            self.event.clear()


class Client:
    """Outlives schedulers, with the real outbox of the preload: it says again what was not acknowledged, and what it wants."""

    def __init__(self, world: Any, number: int) -> None:
        self.world = world
        self.name = f"client-{number}"
        self.process = Process(self.name, world)
        self.futures: dict[Any, Future] = {}
        self.outbox = Outbox(self.name)
        self._graphs: list[list[Node]] = []
        #: It has been connected, and may speak.
        self.ready = asyncio.Event()
        self._comm: End | None = None
        self.process.spawn(self._live())

    # ------------------------------------------------------------------------------------------------------- the stream

    async def _live(self) -> None:
        while True:
            try:
                answer = await self.world.ask_scheduler(self.process, "taskdb", client=self.name)
                comm = await self.world.connect(self.process)
            except OSError:
                await asyncio.sleep(0.1)
                continue
            comm.send({"op": "register-client", "client": self.name, "versions": {}})
            if self.ready.is_set():
                comm.send(self._again(answer["received"]))
            self._comm = comm
            self.ready.set()
            await self._listen(comm)
            self._comm = None

    def _again(self, received: int) -> list[dict[str, Any]]:
        """What a new scheduler is told. See `scheduler_adapter.client.Survivor._go_on`."""
        self.outbox.acknowledged(received)
        wanted = [key for key, future in self.futures.items() if future.status != "cancelled"]
        first, rest = self.outbox.again(wanted)
        self.world.note(self.name, "is back", len(first), len(wanted), len(rest))
        return [*first, {"op": "taskdb-restate", "keys": wanted}, *rest]

    async def _listen(self, comm: End) -> None:
        try:
            while True:
                messages = await comm.read()
                for message in messages if isinstance(messages, list | tuple) else (messages,):
                    self._hear(dict(message))
        except OSError:
            pass

    def _hear(self, message: dict[str, Any]) -> None:
        op = message["op"]
        if op == "cancelled-keys":
            for key in message["keys"]:
                self._set(key, "cancelled", message.get("reason"))
        elif op == "key-in-memory":
            self._set(message["key"], "finished")
        elif op == "lost-data":
            self._set(message["key"], "lost")
        elif op == "task-retried":
            self._set(message["key"], "pending")
        elif op == "taskdb-acknowledged":
            self.outbox.acknowledged(message["number"])
        elif op == "task-erred":
            self._set(message["key"], "error", _loaded(message["exception"]))

    def _set(self, key: Any, status: str, result: Any = None) -> None:
        future = self.futures.get(key)
        if future is not None and not future.cancelled_here:
            self.world.note("future", self.name, key, status)
            future.told_by = self._comm
            future.set(status, result)

    def may_reuse(self, key: Any) -> bool:
        """Whether no report is on its way that would be taken for one of a new task of that name; stock cannot tell them apart either."""
        future = self.futures[key]
        return future.status == "finished" and (self._comm is None or (future.told_by is self._comm and not len(self.outbox)))

    def send(self, message: dict[str, Any]) -> None:
        if self._comm is None:
            self.outbox.take(message, live=False)
            return
        message = self.outbox.take(message, live=True)
        if not self._comm.ended:
            self._comm.send([message])

    # ---------------------------------------------------------------------------------------------------------- what it does

    def submit(self, nodes: list[Node], wanted: list[Node], retries: int, *, whole: bool = False) -> None:
        keys = [node.key for node in wanted]
        for node in wanted:
            if node.key not in self.futures:
                self.futures[node.key] = Future(node)
        self.world.submitted(nodes, whole)
        self.world.note("submits", self.name, len(nodes), keys)
        self._graphs.append(nodes)
        header, frames = serialize(to_serialize(Graph(nodes, retries, whole=whole)), on_error="raise")
        message = {
            "op": "update-graph",
            "expr_ser": Serialized(header, frames),
            "keys": set(keys),
            "internal_priority": None,
            "submitting_task": None,
            "fifo_timeout": 0,
            "actors": False,
            "code": (),
            "annotations": {},
            "span_metadata": {},
        }
        self.send(message)

    def unacknowledged(self) -> list[list[Node]]:
        """Graphs that may not have been taken in yet, in order."""
        keys = self.outbox.submitted_keys()
        self._graphs = [graph for graph in self._graphs if any(node.key in keys for node in graph)]
        return self._graphs

    def release(self, keys: list[Any]) -> None:
        self.world.note("releases", self.name, keys)
        for key in keys:
            del self.futures[key]
        self.send({"op": "client-releases-keys", "keys": keys})

    def cancel(self, keys: list[Any]) -> None:
        self.world.note("cancels", self.name, keys)
        self.send({"op": "cancel-keys", "keys": keys, "force": False, "reason": "", "msg": ""})
        for key in keys:
            # As in stock, which does not wait to be told, and hears no more of it.
            self._set(key, "cancelled")
            self.futures[key].cancelled_here = True

    def unsettled(self) -> list[Future]:
        return [f for f in self.futures.values() if not (f.gathered or f.status in ("error", "cancelled"))]

    async def settle(self) -> None:
        """Return once every future has its result, its error, or was cancelled."""
        while pending := self.unsettled():
            future = pending[0]
            await future.event.wait()
            if future.status != "finished":
                continue
            keys = [f.node.key for f in pending if f.status == "finished"]
            try:
                response = await self.world.ask_scheduler(self.process, "gather", keys=keys)
            except OSError:
                await asyncio.sleep(0.1)
                continue
            if response["status"] == "OK":
                for key, value in response["data"].items():
                    # It may have been lost since, and come again.
                    if (found := self.futures.get(key)) is not None and found.status == "finished":
                        found.result, found.gathered = value, True
            else:
                for key in response["keys"]:
                    self.send({"op": "report-key", "key": key})
                    if key in self.futures:
                        self.futures[key].set("pending")


def _loaded(exception: Any) -> Any:
    """The exception, whichever way it travels."""
    while not isinstance(exception, BaseException):
        if isinstance(exception, Serialized):
            exception = deserialize(exception.header, exception.frames)
        elif isinstance(exception, bytes):
            exception = pickle.loads(exception)
        else:
            exception = exception.data
    return exception
