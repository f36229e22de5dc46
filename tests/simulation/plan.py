"""What a seed stands for: sizes, settings and faults. Everything else follows from it by chance."""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random

from tests.simulation.daemon import POINTS


@dataclass
class Fault:
    at: float
    #: "daemon", "link", "worker", "scheduler", or "rival": a second scheduler begins while the first lives.
    kind: str
    #: Point of the daemon, or "".
    point: str = ""
    passes: int = 0


@dataclass
class Plan:
    seed: int
    workers: int = 2
    threads: int = 1
    clients: int = 1
    window: int = 0
    lookahead: int = 8
    #: Graphs of more tasks go through the ingest process.
    local_tasks: int = 1000
    survive: bool = True
    #: How often an attempt of a worker to come back to a scheduler fails.
    late: float = 0.0
    sync: bool = True
    run_seconds: tuple[float, ...] = (0.001, 0.01, 0.1)
    steps: int = 3
    #: How often a step gives the key of an old task to a new one.
    reuse: float = 0.05
    #: How many of the graphs the scheduler can only hold whole, as it does a P2P shuffle.
    wholes: float = 0.0
    seconds: float = 1.0
    verbose: bool = False
    faults: list[Fault] = field(default_factory=list)

    @classmethod
    def of(cls, seed: int, kinds: tuple[str, ...] = ("daemon", "daemon", "link", "worker", "scheduler", "scheduler", "rival")) -> Plan:
        chance = Random(f"{seed} plan")
        plan = cls(
            seed,
            workers=chance.randint(1, 3),
            threads=chance.randint(1, 2),
            clients=chance.randint(1, 2),
            window=chance.choice((0, 0, 3, 16, 10_000)),
            lookahead=chance.choice((1, 4, 8, 128)),
            local_tasks=chance.choice((0, 8, 1000, 1000)),
            survive=chance.random() < 0.8,
            run_seconds=chance.choice(((0.0, 0.001), (0.001, 0.01, 0.1), (0.0, 0.02, 0.5))),
            late=chance.choice((0.0, 0.0, 0.5, 0.9)),
            steps=chance.randint(1, 5),
            seconds=chance.choice((0.1, 0.5, 2.0)),
        )
        for _ in range(chance.randint(0, 4)):
            fault = Fault(chance.uniform(0, plan.seconds * 1.5), chance.choice(kinds))
            if fault.kind == "daemon" and chance.random() < 0.7:
                fault.point, fault.passes = chance.choice(POINTS), chance.choice((0, 0, 1, 3, 10))
            plan.faults.append(fault)
        plan.faults.sort(key=lambda fault: fault.at)
        return plan
