"""A worker that computes nothing: it answers every task it is given at once, so that only the scheduler is measured.

Run as `python -m bench.zero_worker SCHEDULER [--nthreads N] [--nbytes BYTES] [--name NAME]`. It ends when the scheduler
closes the stream. It never unpickles: run specs stay the frames they arrived as.

What it claims: each result has `nbytes` bytes and took no time. It holds no data, so its results can be waited for,
not gathered; and it fetches no inputs, so every result has one replica.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import pickle
import time
import uuid
from collections.abc import Iterable
from typing import Any

from distributed.comm import Comm, connect, listen
from distributed.comm.core import CommClosedError
from distributed.versions import get_versions

#: Result size claimed for each task when none is given, bytes.
NBYTES = 1024
#: Memory limit claimed, bytes: large, so that the scheduler never thinks of memory.
MEMORY_LIMIT_BYTES = 2**36
#: Time claimed for each task, seconds. Not 0: the scheduler divides by durations.
DURATION_S = 1e-4

#: What a finished task reports as the type of its result (pickled, as the protocol wants).
_TYPE = pickle.dumps(int)


def _metrics() -> dict[str, Any]:
    """The fields of a worker's metrics that the scheduler reads, all of them idle."""
    transfer = {f"{way}_{what}": 0 for way in ("incoming", "outgoing") for what in ("bytes", "count", "count_total")}
    return {
        "bandwidth": {"total": 1e8, "workers": {}, "types": {}},
        "cpu": 0,
        "digests_total_since_heartbeat": {},
        "event_loop_interval": 0.02,
        "host_disk_io": {"read_bps": 0, "write_bps": 0},
        "host_net_io": {"read_bps": 0, "write_bps": 0},
        "managed_bytes": 0,
        "memory": 10**8,
        "num_fds": 10,
        "spilled_bytes": {"memory": 0, "disk": 0},
        "task_counts": {},
        "time": time.time(),
        "transfer": transfer,
    }


def _finished(msg: dict[str, Any], nbytes: int, now: float) -> dict[str, Any]:
    """The answer to one compute-task message."""
    return {
        "op": "task-finished",
        "status": "OK",
        "key": msg["key"],
        "run_id": msg["run_id"],
        "nbytes": nbytes,
        "type": _TYPE,
        "typename": "int",
        "metadata": {},
        "thread": 1,
        "startstops": [{"action": "compute", "start": now, "stop": now + DURATION_S}],
        "stimulus_id": f"task-finished-{now}",
    }


def answers(messages: Iterable[dict[str, Any]], nbytes: int, now: float) -> tuple[list[dict[str, Any]], bool]:
    """Return what to send back for one batch from the scheduler, and whether the worker is asked to go.

    A steal request always comes too late: the task is finished. All other messages (free-keys, acquire-replicas,
    status changes) need no answer from a worker without data.
    """
    replies: list[dict[str, Any]] = []
    for msg in messages:
        match msg.get("op"):
            case "compute-task":
                replies.append(_finished(msg, nbytes, now))
            case "steal-request":
                replies.append(
                    {
                        "op": "steal-response",
                        "key": msg["key"],
                        "state": "memory",
                        "stimulus_id": msg["stimulus_id"],
                    }
                )
            case "close" | "close-stream":
                return replies, True
    return replies, False


async def serve_peer(comm: Comm) -> None:
    """Answer whoever calls (a client's gather, a broadcast): nothing is served, nobody waits for ever."""
    with contextlib.suppress(CommClosedError, OSError):
        while True:
            msg = await comm.read()
            if isinstance(msg, dict) and msg.get("reply", True):
                if msg.get("op") == "get_data":
                    await comm.write({"status": "error", "message": "a zero worker holds no data"})
                else:
                    await comm.write({"status": "OK"})


async def _beat(scheduler: str, address: str, interval_s: float) -> None:
    """Tell the scheduler every `interval_s` that we live, over a connection of its own."""
    comm = await connect(scheduler, deserialize=False)
    try:
        while True:
            await asyncio.sleep(interval_s)
            await comm.write(
                {
                    "op": "heartbeat_worker",
                    "reply": True,
                    "address": address,
                    "now": time.time(),
                    "metrics": _metrics(),
                    "executing": {},
                    "extensions": {},
                }
            )
            await comm.read()
    finally:
        comm.abort()


def registration(address: str, name: str, nthreads: int) -> dict[str, Any]:
    """The message with which a worker comes to its scheduler."""
    now = time.time()
    return {
        "op": "register-worker",
        "reply": False,
        "address": address,
        "status": "running",
        "server_id": f"zero-worker-{uuid.uuid4().hex}",
        "name": name,
        "nthreads": nthreads,
        "memory_limit": MEMORY_LIMIT_BYTES,
        "resources": {},
        "services": {},
        "local_directory": "/nonexistent",
        "nanny": None,
        "pid": os.getpid(),
        "versions": get_versions(),
        "metrics": _metrics(),
        "extra": {},
        "now": now,
        "stimulus_id": f"worker-connect-{now}",
    }


async def run(scheduler: str, name: str, nthreads: int, nbytes: int) -> None:
    """Register with the scheduler and answer it until it goes."""
    listener = await listen("tcp://127.0.0.1:0", serve_peer, deserialize=False)
    address = listener.contact_address
    stream = await connect(scheduler, deserialize=False)
    await stream.write(registration(address, name, nthreads), serializers=["msgpack"])
    welcome = await stream.read()
    if welcome.get("status") != "OK":
        raise RuntimeError(f"the scheduler refused the worker: {welcome}")
    beat = asyncio.create_task(_beat(scheduler, address, max(1.0, welcome["heartbeat-interval"])))
    try:
        asked_to_go = False
        while not asked_to_go:
            replies, asked_to_go = answers(await stream.read(), nbytes, time.time())
            if replies:
                # One batch in, one batch out: writing at once needs no timer, and a slow reader slows us down.
                await stream.write(replies)
    finally:
        beat.cancel()
        listener.stop()
        stream.abort()


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m bench.zero_worker", description=__doc__.splitlines()[0])
    parser.add_argument("scheduler", help="address of the scheduler, such as tcp://127.0.0.1:8786")
    parser.add_argument("--nthreads", type=int, default=4)
    parser.add_argument("--nbytes", type=int, default=NBYTES, help="size claimed for each result")
    parser.add_argument("--name", default=f"zero-{os.getpid()}")
    given = parser.parse_args()
    with contextlib.suppress(KeyboardInterrupt, CommClosedError):
        asyncio.run(run(given.scheduler, given.name, given.nthreads, given.nbytes))


if __name__ == "__main__":
    main()
