"""What is relied on of the graph page's layout, and that tasks may come late and be cut from what they were computed from."""

from __future__ import annotations

import asyncio

from distributed.diagnostics.graph_layout import GraphLayout
from distributed.scheduler import Scheduler

from scheduler_adapter import dask_dashboard
from scheduler_adapter import dask_internals as internals
from scheduler_adapter.specs import StoredSpec


def test_a_task_that_comes_late_is_drawn_and_leaves_with_its_links() -> None:
    async def play() -> None:
        dask_dashboard.graph_page_sees_paging()
        async with Scheduler(port=0, host="127.0.0.1", dashboard=False) as scheduler:
            layout = GraphLayout(scheduler)
            a, b = (internals.new_task(scheduler, key, StoredSpec(b"x"), None) for key in "ab")
            internals.relink(b, [a])
            layout.transition("b", "released", "waiting")
            assert set(layout.index) == {"a", "b"}
            assert set(layout.index_edge) == {("a", "b")}
            internals.unlink(b)
            layout.transition("b", "memory", "forgotten")
            assert (set(layout.x), layout.index_edge) == ({"a"}, {})
            assert layout.visible_edge_updates == [(0, "False")]
            layout.reset_index()
            assert set(layout.index) == {"a"}
            layout.transition("never drawn", "released", "forgotten")

    asyncio.run(play())
