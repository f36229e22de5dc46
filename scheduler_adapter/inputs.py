"""What a graph that must be resident needs from earlier ones."""

from __future__ import annotations

import asyncio
import time

from scheduler_adapter.graph import Graph, prepare
from scheduler_adapter.keys import pack_key, unpack_key
from scheduler_adapter.pager import Pager
from taskdb.commands import Unwant
from taskdb.model import TaskState

#: How often it is looked whether they are there.
LOOK_SECONDS = 0.01
#: How often the database is asked what has become of those that are not.
ASK_SECONDS = 1.0


async def inputs_ready(pager: Pager, graph: Graph, waiter: str) -> bool:
    """Wait until they are resident; paged tasks of the graph itself are left as they are, and cut from it. `waiter`: who wants them
    meanwhile. False: one of them has failed, and is on disk. One that nobody knows is not waited for."""
    by_key, cooling = pager.window.by_key, pager.cooling
    cooling.warm((*graph.dsk, *graph.external))
    shared = [key for key in graph.dsk if (r := by_key.get(key)) is not None and (r.paged or r.stub)]
    if shared:
        stop = set(shared)
        culled = prepare(
            {k: v for k, v in graph.dsk.items() if k not in stop},
            graph.annotations_by_type,
            graph.wanted,
            graph.order,
            graph.global_annotations,
        )
        graph.dsk, graph.external = culled.dsk, culled.external
    tasks = pager.scheduler.tasks
    wanted: set[bytes] = set()
    asked = 0.0
    try:
        while missing := [k for k in graph.external if (r := by_key.get(k)) is None or r.stub]:
            if time.monotonic() > asked + ASK_SECONDS:
                asked = time.monotonic()
                wanted.update(map(pack_key, missing))
                for want in await pager.want(waiter, missing):
                    if want.state in (None, TaskState.ERRED) and unpack_key(want.key) not in tasks:
                        return want.state is None
            else:
                await asyncio.sleep(LOOK_SECONDS)
            cooling.warm(missing)
        return True
    finally:
        if wanted:
            pager.send(Unwant(waiter, list(wanted)))
