"""What questions cost: how long each takes on a large store while a graph is ingested and run, and what the running one notices of it; and
of a large graph being pruned."""

from __future__ import annotations

import json
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import msgpack

from bench.recovery import SPEC
from scheduler_adapter.local.processes import Processes, await_port, free_port
from taskdb import commands as c
from taskdb.client import Client
from taskdb.engine.engine import Engine
from taskdb.model import Level
from taskdb.store.lmdb_store import LmdbStore

START_S, QUERY_S, PRUNE_S = 120.0, 60.0, 3_600.0
#: The load is let to get going.
WARM_S = 3.0


@dataclass
class Phase:
    """A stretch of the load: tasks it finished a second, and its longest wait for an answer."""

    per_second: float
    waited_max_s: float


@dataclass
class Measured:
    #: Question -> seconds each.
    latencies: dict[str, list[float]] = field(default_factory=dict)
    #: Phases without and with questions, in turn.
    without: list[Phase] = field(default_factory=list)
    asked: list[Phase] = field(default_factory=list)

    @property
    def slowdown(self) -> float:
        """Times as long a task takes with questions, as without."""
        rates = [statistics.median(phase.per_second for phase in phases) for phases in (self.without, self.asked)]
        return rates[0] / rates[1]


class Load:
    """`bench.query_load` as a process."""

    def __init__(self, address: str, pace: float) -> None:
        args = [sys.executable, "-m", "bench.query_load", address, str(pace)]
        self._process = subprocess.Popen(args, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def phase(self, seconds: float, meanwhile: Callable[[], bool]) -> Phase:
        """Call `meanwhile` until it says False, and so many seconds have passed."""
        lines = [self._line()]
        stop = time.monotonic() + seconds
        more = True
        while more or time.monotonic() < stop:
            more = meanwhile()
            while not lines or time.time() - float(lines[-1]["at"]) > 0.5:
                lines.append(self._line())
        lines.append(self._line())
        first, last = lines[0], lines[-1]
        rate = (last["finished"] - first["finished"]) / (last["at"] - first["at"])
        return Phase(rate, max(line["waited_max_s"] for line in lines[1:]))

    def _line(self) -> dict[str, float]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError("the load ended")
        found: dict[str, float] = json.loads(line)
        return found

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.kill()
        self._process.wait()


@contextmanager
def served(folder: Path, store: Path, *words: str) -> Iterator[str]:
    """A daemon on a store: its address."""
    with Processes(folder) as processes:
        address = f"127.0.0.1:{free_port()}"
        daemon = processes.start("daemon", ["-m", "taskdb", "serve", "--data", str(store), "--listen", address, *words])
        await_port(daemon, int(address.rpartition(":")[2]), START_S)
        yield address
        processes.check()


def questions(client: Client, tasks: int) -> dict[str, Callable[[], object]]:
    """Of a store made by `bench.recovery.make_store`."""

    def key() -> bytes:
        packed: bytes = msgpack.packb(("sum", random.randrange(tasks // 3)))
        return packed

    return {
        "status": client.status,
        "tasks": lambda: client.list_tasks(limit=100, submission="graph", state=random.choice(["waiting", "queued"])),
        "tasks, a rare pattern": lambda: client.list_tasks(limit=100, pattern="*'right', 123456*"),
        "tasks, sorted": lambda: client.list_tasks(limit=100, sort="priority", descending=True),
        "explain": lambda: client.explain(key()),
    }


def measure(folder: Path, store: Path, tasks: int, rate: float, pace: float, seconds: float, rounds: int) -> Measured:
    """Ask `rate` questions a second, each kind in turn, for `rounds` times `seconds`."""
    measured = Measured()
    with served(folder, store) as address, Client(address, QUERY_S) as client:
        load = Load(address, pace)
        try:
            load.phase(WARM_S, lambda: False)
            kinds = questions(client, tasks)
            names = list(kinds)
            measured.latencies = {name: [] for name in names}
            asked = 0

            def ask() -> bool:
                nonlocal asked
                name = names[asked % len(names)]
                asked += 1
                began = time.perf_counter()
                kinds[name]()
                took = time.perf_counter() - began
                measured.latencies[name].append(took)
                time.sleep(max(0.0, 1 / rate - took))
                return False

            def rest() -> bool:
                time.sleep(1 / rate)
                return False

            for number in range(rounds):
                # The other way round every second time, against drift of the machine.
                for with_questions in (False, True) if number % 2 == 0 else (True, False):
                    phases = measured.asked if with_questions else measured.without
                    phases.append(load.phase(seconds, ask if with_questions else rest))
        finally:
            load.close()
    return measured


# --------------------------------------------------------------------------------------------------------------- prune


@dataclass(frozen=True)
class Pruned:
    tasks: int
    seconds: float
    #: Before, and while it was pruned.
    before: Phase
    meanwhile: Phase
    used_bytes_before: int
    used_bytes: int
    file_bytes_before: int
    file_bytes: int


def make_finished_store(folder: Path, tasks: int) -> None:
    """A store with one graph, "old", of finished and wanted tasks."""
    store = LmdbStore(folder, sync=False)
    engine = Engine()
    try:
        txn = store.write()
        epoch = engine.begin_epoch(txn, "gone")
        engine.apply(txn, epoch, 1, [c.BeginGraph("old", "gone", 0.0, 1.0)])
        seq, size = 1, 512
        for start in range(0, tasks, size):
            count = min(size, tasks - start)
            keys = [msgpack.packb(("old", start + i)) for i in range(count)]
            groups = ["old"] if not start else []
            add = c.AddTasks("old", start, keys, [SPEC] * count, [1] * count, groups=[0] * count, new_groups=groups)
            done = c.Report(list(range(start + 1, start + count + 1)), [Level.MEMORY] * count, [8] * count)
            seq += 1
            engine.apply(txn, epoch, seq, [add, done])
            if seq % 20 == 0:
                txn.commit()
                txn = store.write()
        engine.apply(txn, epoch, seq + 1, [c.SealGraph("old")])
        txn.commit()
    finally:
        store.close()


def prune(folder: Path, store: Path, tasks: int, pace: float, seconds: float) -> Pruned:
    """Prune "old" while another graph runs."""
    with served(folder, store) as address, Client(address, QUERY_S) as client:
        load = Load(address, pace)
        try:
            load.phase(WARM_S, lambda: False)
            deadline = time.monotonic() + PRUNE_S
            before = load.phase(seconds, lambda: time.sleep(0.1) is not None)
            first = client.status()
            began = time.monotonic()
            client.prune(["old"])

            def pruning() -> bool:
                time.sleep(0.2)
                return any(graph.submission == "old" for graph in client.status().graphs) and time.monotonic() < deadline

            meanwhile = load.phase(0.0, pruning)
            took = time.monotonic() - began
            last = client.status()
        finally:
            load.close()
    return Pruned(tasks, took, before, meanwhile, first.used_bytes, last.used_bytes, first.store_bytes, last.store_bytes)
