"""How long a scheduler takes from its start to the first task it hands to a worker, on a store with unfinished work: a crash is over then.

The store is made by the engine itself: pairs of tasks and their sums, in the middle of which a scheduler of an earlier epoch was killed
with some results and some leases. The daemon runs on, as it does beside a scheduler that died; the worker is there before the scheduler.
Stock's figure, for comparison: from its start to a registered worker.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path

import msgpack
from distributed.comm import connect, listen

from bench.zero_worker import registration, serve_peer
from scheduler_adapter.local.processes import Processes, await_port, free_port
from taskdb import commands as c
from taskdb.engine.engine import Engine
from taskdb.engine.queries import status
from taskdb.model import Level, TaskFlag
from taskdb.store.lmdb_store import LmdbStore

#: Tasks of one run on their way into the store, and runs of one transaction.
RUN_TASKS = 1_000
#: Tasks that were done, and that were leased, when the scheduler died.
DONE, LEASED = 2_000, 128
#: A spec of a usual size. Nobody reads it: the worker computes nothing.
SPEC = os.urandom(200)
START_S = 120.0


def make_store(folder: Path, tasks: int) -> int:
    """A store with about this number of unfinished tasks. Returns how many there are."""
    store = LmdbStore(folder, sync=False)
    engine = Engine()
    try:
        txn = store.write()
        epoch = engine.begin_epoch(txn, "killed")
        engine.apply(txn, epoch, 1, [c.BeginGraph("graph", "client", 0.0, time.time())])
        pairs = tasks // 3 + DONE // 2
        seq = 1
        for run in _runs(pairs):
            seq += 1
            engine.apply(txn, epoch, seq, [run])
            if seq % 20 == 0:
                txn.commit()
                txn = store.write()
        engine.apply(txn, epoch, seq + 1, [c.SealGraph("graph")])
        leases, _ = engine.lease(txn, DONE, DONE)
        ids = [lease.id for lease in leases]
        engine.apply(txn, epoch, seq + 2, [c.Report(ids, [Level.MEMORY] * len(ids), [1024] * len(ids))])
        engine.lease(txn, LEASED, LEASED)
        txn.commit()
        with store.read() as read:
            states = status(read).states
        return sum(count for state, count in states.items() if state.upper() in ("WAITING", "QUEUED", "PROCESSING"))
    finally:
        store.close()


def _runs(pairs: int) -> Iterator[c.AddTasks]:
    """Two tasks and their sum, again and again; the client wants the sums."""
    index = 0
    for start in range(0, pairs, RUN_TASKS // 3):
        keys, counts, deps, flags, dependents = [], [], [], [], []
        for pair in range(start, min(start + RUN_TASKS // 3, pairs)):
            at = index + len(keys)
            keys += [msgpack.packb((name, pair)) for name in ("left", "right", "sum")]
            counts += [0, 0, 2]
            deps += [at, at + 1]
            flags += [0, 0, int(TaskFlag.WANTED)]
            dependents += [1, 1, 0]
        yield c.AddTasks(
            "graph",
            index,
            keys,
            [SPEC] * len(keys),
            flags,
            counts,
            deps,
            dependents,
            groups=[0] * len(keys),
            new_groups=["pairs"] if not index else [],
        )
        index += len(keys)


async def _first(address: str, task: bool) -> float:
    """Register with the scheduler as soon as it is there. The time at which it answers or, if `task`, hands out a task."""
    listener = await listen("tcp://127.0.0.1:0", serve_peer, deserialize=False)
    while True:
        try:
            stream = await connect(address, deserialize=False, timeout=1)
            break
        except OSError:
            await asyncio.sleep(0.01)
    try:
        await stream.write(registration(listener.contact_address, "first", 4), serializers=["msgpack"])
        await stream.read()
        while task:
            if any(message.get("op") == "compute-task" for message in await stream.read()):
                break
        return time.perf_counter()
    finally:
        stream.abort()
        listener.stop()


def start_to_first(folder: Path, store: Path | None) -> float:
    """Seconds from the start of the scheduler's process. `store`: None for stock."""
    with Processes(folder) as processes:
        port = free_port()
        args = ["-m", "dask", "scheduler", "--host", "127.0.0.1", "--port", str(port), "--no-dashboard"]
        if store is not None:
            url = f"127.0.0.1:{free_port()}"
            daemon = processes.start("daemon", ["-m", "taskdb", "serve", "--data", str(store), "--listen", url])
            await_port(daemon, int(url.rpartition(":")[2]), START_S)
            args += ["--preload", "scheduler_adapter", "--taskdb-url", url]
        began = time.perf_counter()
        processes.start("scheduler", args)
        with contextlib.suppress(TimeoutError):
            return asyncio.run(asyncio.wait_for(_first(f"tcp://127.0.0.1:{port}", store is not None), START_S)) - began
        processes.check()
        raise TimeoutError(f"no task came within {START_S:.0f} s; logs are in {folder}")
