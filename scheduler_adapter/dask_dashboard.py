"""The graph page of the dashboard: what is touched of `GraphLayout`, the plugin that lays tasks out.

It places the tasks of a graph when that is submitted, and takes for granted that all of them are there and keep their links until they are
forgotten. Paged tasks come later, and are cut from what they were computed from. Pages are made by the dashboard itself, so there is no
instance to shadow: the class is changed, once a process. Read in 2026.8.0 and pinned by `tests/scheduler_adapter/test_dask_dashboard.py`.
"""

from __future__ import annotations

from typing import Any

from distributed.diagnostics.graph_layout import GraphLayout

_patched = False


def graph_page_sees_paging() -> None:
    """Make `GraphLayout` place a task when it first hears of it, and erase with a task all links that were drawn of it."""
    global _patched
    if _patched:
        return
    _patched = True
    stock_update, stock_reset = GraphLayout.update_graph, GraphLayout.reset_index

    def update_graph(self: Any, scheduler: Any, *, priority: Any = None, tasks: Any = None, **kwargs: Any) -> None:
        before = len(self.new_edges)
        stock_update(self, scheduler, priority=priority or {}, tasks=tasks or (), **kwargs)
        for edge in self.new_edges[before:]:
            for end in edge:
                _links(self).setdefault(end, set()).add(edge)

    def transition(self: Any, key: Any, start: str, finish: str, *args: Any, **kwargs: Any) -> None:
        if finish != "forgotten":
            if key not in self.index:
                self.update_graph(self.scheduler, tasks=[key])
            if key in self.index:
                self.state_updates.append((self.index[key], finish))
        elif key in self.index:
            _erase(self, key)

    def reset_index(self: Any) -> None:
        for key in [key for key in self.x if key not in self.scheduler.tasks]:  # cold results leave without a transition
            _erase(self, key)
        stock_reset(self)
        links = self.taskdb_links = {}
        for edge in self.index_edge:
            for end in edge:
                links.setdefault(end, set()).add(edge)

    GraphLayout.update_graph, GraphLayout.transition, GraphLayout.reset_index = update_graph, transition, reset_index


def _links(layout: Any) -> dict[Any, set[tuple[Any, Any]]]:
    """The links that are drawn, by either end."""
    try:
        return layout.taskdb_links
    except AttributeError:
        layout.taskdb_links = {}
        return layout.taskdb_links


def _erase(layout: Any, key: Any) -> None:
    links = _links(layout)
    layout.visible_updates.append((layout.index[key], "False"))
    for edge in links.pop(key, ()):
        other = edge[0] if edge[1] == key else edge[1]
        if other in links:
            links[other].discard(edge)
        if edge in layout.index_edge:
            layout.visible_edge_updates.append((layout.index_edge.pop(edge), "False"))
    layout.collision.pop((layout.x[key], layout.y[key]), None)
    for places in (layout.x, layout.y, layout.index):
        del places[key]
