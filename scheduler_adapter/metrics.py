"""Metrics of the adapter, in those that Dask's scheduler serves at `/metrics`.

Dask has one registry for a process, and names the scheduler that was started last; so does this.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import TYPE_CHECKING

from distributed.http.prometheus import PrometheusCollector
from prometheus_client import REGISTRY
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from scheduler_adapter.figures import figures

if TYPE_CHECKING:
    from scheduler_adapter.adapter import Adapter


class Collector(PrometheusCollector):
    def __init__(self) -> None:
        super().__init__(None)
        self.subsystem = "taskdb"
        self._shown: list[weakref.ref[Adapter]] = []

    def show(self, adapter: Adapter) -> None:
        """Of this one, until it is hidden."""
        if not self._shown:
            REGISTRY.register(self)
        self._shown.append(weakref.ref(adapter))

    def hide(self, adapter: Adapter) -> None:
        self._shown = [ref for ref in self._shown if ref() not in (None, adapter)]
        if not self._shown:
            REGISTRY.unregister(self)

    def describe(self) -> list[Metric]:
        """Nothing: without this the registry would collect to learn the names."""
        return []

    def collect(self) -> Iterator[Metric]:
        adapter = next((found for ref in reversed(self._shown) if (found := ref()) is not None), None)
        if adapter is None:
            return
        now = figures(adapter)
        for name, text, value in (
            ("epoch", "Number of this scheduler among those that have owned the store", now.epoch),
            ("link_up", "1 while the daemon is there", int(now.link == "live")),
            ("resident_tasks", "Tasks in the scheduler", now.resident),
            ("window_tasks", "How many of them there may be", now.window),
            ("leased_tasks", "Tasks of paged graphs that were handed out and have not finished", now.leased),
            ("cold_results", "Results of which the scheduler keeps a short record only", now.cold),
            ("graphs", "Graphs of which something is left", now.graphs),
            ("graph_tasks", "All of their tasks that the database has not forgotten", now.graph_tasks),
            ("queued_tasks", "Tasks on disk that could be handed out", now.queued),
            ("ready_tasks", "Those of them that could run at once", now.ready),
            ("unanswered_batches", "Batches of reports without an answer", now.unanswered),
            ("undurable_batches", "Batches of reports that are not on disk", now.undurable),
            ("durable_seconds", "How long it took, last, until a batch of reports was on disk", now.durable_seconds),
        ):
            yield GaugeMetricFamily(self.build_name(name), text, value)
        yield CounterMetricFamily(self.build_name("taken_in_tasks"), "New tasks of graphs that were taken in", now.taken_in)


COLLECTOR = Collector()
