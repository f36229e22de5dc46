"""What is killed in a round, and when: all of it from one seed."""

from __future__ import annotations

import random
from dataclasses import dataclass

SCHEDULER, DAEMON, WORKER = "scheduler", "daemon", "worker"
KINDS = (SCHEDULER, DAEMON, WORKER)

#: Longest time something stays dead before it is started again.
DOWN_SECONDS_MAX = 2.0
#: One round in so many has a worker killed, too: in the others nothing that has finished may run again.
WORKERS_DIE_IN = 3
#: Longest time until a job begins.
BEGIN_SECONDS_MAX = 3.0


@dataclass(frozen=True)
class Kill:
    kind: str
    #: Which of the workers.
    number: int
    #: Part of the round's tasks that has ended then.
    at: float
    #: Seconds until it is started again.
    down: float

    def __str__(self) -> str:
        return f"{self.kind} {self.at:.0%}"


@dataclass(frozen=True)
class Plan:
    seed: int
    kills: tuple[Kill, ...]
    #: Seed and first seconds of each job, by name of its shape.
    jobs: dict[str, tuple[int, float]]

    @property
    def workers_die(self) -> bool:
        return any(kill.kind == WORKER for kill in self.kills)


def plan(seed: int, shapes: list[str], workers: int) -> Plan:
    """Kills may come so close to each other that several things are dead at once."""
    chance = random.Random(seed)
    kinds = chance.choices((SCHEDULER, DAEMON), k=chance.randint(1, 3))
    if chance.randrange(WORKERS_DIE_IN) == 0:
        kinds.append(WORKER)
    chance.shuffle(kinds)
    times = sorted(chance.uniform(0.02, 0.9) for _ in kinds)
    if chance.random() < 0.25:
        times = [times[0]] * len(times)
    kills = tuple(
        Kill(kind, chance.randrange(workers), at, chance.uniform(0, DOWN_SECONDS_MAX)) for kind, at in zip(kinds, times, strict=True)
    )
    chosen = chance.sample(shapes, chance.randint(3, 6))
    jobs = {name: (chance.randrange(2**32), chance.uniform(0, BEGIN_SECONDS_MAX)) for name in sorted(chosen)}
    return Plan(seed, kills, jobs)
