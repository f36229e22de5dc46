"""A scheduler and an ingest in one process, for measuring what else goes on in a daemon: `python -m bench.query_load URL PACE`.

It adds runs of tasks, leases them and says that they have finished, at most PACE tasks a second (0: as fast as it is answered). Prints a
line of JSON every INTERVAL_S: tasks finished so far, and the longest wait for an answer since the last line, in seconds. Ends with its
stdin.
"""

from __future__ import annotations

import asyncio
import json
import sys
import threading
import time
from typing import Any

import msgpack

from taskdb import commands as c
from taskdb.client import Session
from taskdb.model import Level

INTERVAL_S = 0.25
#: Tasks of one run, and tasks that may be there unfinished: the scheduler keeps up.
RUN_TASKS, UNFINISHED_MAX = 256, 4_096
ATTACH_S = 60.0


class Load:
    def __init__(self, address: str, pace: float) -> None:
        self._pace = pace
        self.finished = 0
        self.waited_max = 0.0
        self._added = 0
        self._leased: list[int] = []
        self._sent = time.perf_counter()
        self._answered = asyncio.Event()
        self._session = Session(address, "load", on_result=self._on_result, on_state=lambda *_: None, held=list)

    def _on_result(self, result: c.Result, seq: int, refused: list[Any]) -> None:
        self._leased += [lease.id for lease in result.leases]
        if seq:
            self.waited_max = max(self.waited_max, time.perf_counter() - self._sent)
            self._answered.set()

    async def run(self) -> None:
        await self._session.attach(ATTACH_S)
        name = f"load-{time.time():.6f}"
        # What is in the store stays as it is: nobody says that its workers are gone.
        await self._ask(c.BeginGraph(name, "load", 0.0, time.time(), "load"))
        began = time.perf_counter()
        while True:
            if self._pace:
                await asyncio.sleep(max(0.0, self.finished / self._pace - (time.perf_counter() - began)))
            commands: list[c.Command] = []
            if self._added - self.finished < UNFINISHED_MAX:
                keys = [msgpack.packb((name, self._added + i)) for i in range(RUN_TASKS)]
                groups = ["load"] if not self._added else []
                commands.append(
                    c.AddTasks(
                        name, self._added, keys, [b"spec" * 50] * RUN_TASKS, [1] * RUN_TASKS, groups=[0] * RUN_TASKS, new_groups=groups
                    )
                )
                self._added += RUN_TASKS
            done, self._leased = self._leased, []
            if done:
                ran = {
                    "ran_on": [1] * len(done),
                    "began": [time.time()] * len(done),
                    "seconds": [0.01] * len(done),
                    "workers": ["tcp://127.0.0.1:1"],
                }
                commands.append(c.Report(done, [Level.MEMORY] * len(done), [8] * len(done), **ran))
                self.finished += len(done)
            commands.append(c.Credit(64, 64, self._session.leases_seen))
            await self._ask(*commands)

    async def _ask(self, *commands: c.Command) -> None:
        self._answered.clear()
        self._sent = time.perf_counter()
        self._session.send(commands)
        await self._answered.wait()


async def _main(address: str, pace: float) -> None:
    load = Load(address, pace)
    running = asyncio.create_task(load.run())
    ended = asyncio.Event()
    loop = asyncio.get_running_loop()
    threading.Thread(target=lambda: (sys.stdin.read(), loop.call_soon_threadsafe(ended.set)), daemon=True).start()
    while not ended.is_set() and not running.done():
        await asyncio.sleep(INTERVAL_S)
        print(json.dumps({"at": time.time(), "finished": load.finished, "waited_max_s": load.waited_max}), flush=True)
        load.waited_max = 0.0
    running.cancel()


if __name__ == "__main__":
    asyncio.run(_main(sys.argv[1], float(sys.argv[2])))
