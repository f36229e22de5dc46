"""What clients do in a run, the faults that happen meanwhile, and what every future must hold in the end."""

from __future__ import annotations

import asyncio
from random import Random
from typing import Any

from tests.simulation.client import Client
from tests.simulation.plan import Fault
from tests.simulation.rpc import INGEST, SESSION
from tests.stress.model import Maker, Node


class Work:
    def __init__(self, world: Any) -> None:
        self.world = world
        self.plan = world.plan
        self.chance = Random(f"{self.plan.seed} work")
        self.maker = Maker(self.chance, "s")
        #: Nodes each client may build on: it holds a future of them, and they were not cancelled.
        self._held: dict[Client, list[Node]] = {client: [] for client in world.clients}

    async def do(self) -> None:
        for client in self.world.clients:
            await client.ready.wait()
        for fault in self.plan.faults:
            self.world.later(fault.at, self._strike, fault)
        for _ in range(self.plan.steps):
            self._step(self.chance.choice(self.world.clients))
            await asyncio.sleep(self.chance.uniform(0, 2 * self.plan.seconds / self.plan.steps))

    def _step(self, client: Client) -> None:
        held, chance = self._held[client], self.chance
        x = chance.random()
        if held and x < 0.25:
            self._release(client, chance.sample(held, chance.randint(1, len(held))))
        elif held and x < 0.3:
            self._cancel(client, chance.sample(held, chance.randint(1, min(3, len(held)))))
        elif x < 0.3 + self.plan.reuse and (old := self._reusable(client)):
            self._reuse(client, chance.choice(old))
        else:
            self._submit(client)

    def _submit(self, client: Client) -> None:
        held, chance = self._held[client], self.chance
        retries = chance.choice((0, 0, 3))
        nodes = self.maker.graph(chance.randint(3, 20), held, retries)
        ends = [node for node in nodes if not node.dependents]
        wanted = ends + [node for node in nodes if node.dependents and chance.random() < 0.1]
        client.submit(nodes, wanted, retries, whole=self.plan.wholes > 0 and chance.random() < self.plan.wholes)
        self._held[client] = held + wanted

    def _release(self, client: Client, nodes: list[Node]) -> None:
        self._held[client] = [node for node in self._held[client] if node not in nodes]
        client.release([node.key for node in nodes])

    def _cancel(self, client: Client, nodes: list[Node]) -> None:
        for node in nodes:
            node.loosen("cancelled")
        for graph in client.unacknowledged():
            # As in stock: if a graph comes whose inputs are gone, none of it is taken.
            if why := next((node.why_loose for node in graph if node.loose), ""):
                for node in graph:
                    node.loosen(why)
        self._held = {other: [node for node in held if not node.loose] for other, held in self._held.items()}
        client.cancel([node.key for node in nodes])

    def _reusable(self, client: Client) -> list[Node]:
        """Results of which nobody makes anything: their keys may come to mean other tasks."""
        return [node for node in self._held[client] if not node.dependents and client.may_reuse(node.key)]

    def _reuse(self, client: Client, old: Node) -> None:
        """Another task under the key of one that is let go of."""
        self._release(client, [old])
        node = self.maker.node([], mode="ok")
        node.key = old.key
        client.submit([node], [node], 0)
        self._held[client].append(node)

    # ----------------------------------------------------------------------------------------------------------- faults

    def _strike(self, fault: Fault) -> None:
        world = self.world
        if fault.kind == "daemon":
            if fault.point:
                world.daemon.armed = (fault.point, fault.passes)
            else:
                world.daemon.kill("at its leisure")
        elif fault.kind == "link":
            for end in world.network.ends(SESSION) + world.network.ends(INGEST):
                world.note("link cut", end.label)
                world.network.cut(end)
        elif fault.kind == "worker":
            if world.workers:
                world.kill_worker(self.chance.choice(list(world.workers.values())))
        elif fault.kind == "rival":
            world.rival()
        elif fault.kind == "scheduler":
            world.kill_scheduler("at its leisure")

    # ------------------------------------------------------------------------------------------------------------- the end

    async def settled(self) -> None:
        while any(client.unsettled() for client in self.world.clients):
            await asyncio.gather(*(client.process.spawn(client.settle()) for client in self.world.clients))

    def judge(self) -> None:
        for client in self.world.clients:
            for key, future in client.futures.items():
                status = future.status
                if wrong := future.node.judge(status, future.result):
                    self.world.failed(f"{client.name}: future {key} {wrong}")

    def release_all(self) -> None:
        for client in self.world.clients:
            if client.futures:
                client.release(list(client.futures))
