"""Metrics for Prometheus, on a port of their own: `taskdb serve --metrics HOST:PORT`. Names and numbers only: no keys, no specs.

They are collected in a thread of their own, from a snapshot and from numbers that the loop keeps; the loop never waits for it.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import psutil
from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, InfoMetricFamily, Metric

import taskdb
from taskdb.engine import queries
from taskdb.model import TaskState
from taskdb.server.counters import COMMIT_SECONDS
from taskdb.server.reads import StoreInfo
from taskdb.server.writer import Writer
from taskdb.store.base import Store
from taskdb.store.schema import Table

if TYPE_CHECKING:
    from wsgiref.simple_server import WSGIServer

#: How long a connection may say nothing: each has a thread.
SILENT_SECONDS_MAX = 10.0


class CannotServe(Exception):
    """The address cannot be listened on. Says why and what to do."""


class Collector:
    """One set of numbers a question. O(graphs)."""

    def __init__(self, store: Store, writer: Writer, info: StoreInfo):
        self._store = store
        self._writer = writer
        self._info = info
        self._process = psutil.Process()
        #: The store may not be closed under a snapshot.
        self._lock = threading.Lock()
        self._closed = False

    def close(self) -> None:
        """Wait for the question that is being answered; there are no numbers after it."""
        with self._lock:
            self._closed = True

    def collect(self) -> Iterator[Metric]:
        with self._lock:
            if self._closed:
                return
            with self._store.read() as txn:
                status = queries.status(txn)
                ready, ahead = txn.count(Table.READY), txn.count(Table.AHEAD)
            store_bytes = self._store.size_bytes()
        counters = self._writer.counters
        yield InfoMetricFamily(
            "taskdb",
            "Version of the daemon and of its store",
            {"version": taskdb.__version__, "store_uuid": self._info.uuid, "format": str(self._info.format_version)},
        )
        yield GaugeMetricFamily("taskdb_epoch", "Schedulers that have owned the store so far", status.epoch)
        yield GaugeMetricFamily("taskdb_scheduler_attached", "1 while a scheduler is attached", int(self._writer.attached))
        tasks = GaugeMetricFamily("taskdb_tasks", "Tasks that exist, by state", labels=["state"])
        for state in TaskState:
            tasks.add_metric([state.name.lower()], status.states.get(state.name.lower(), 0))
        yield tasks
        yield GaugeMetricFamily("taskdb_tasks_unmade", "Tasks of rules that are yet to be made", sum(x.unmade for x in status.graphs))
        yield GaugeMetricFamily("taskdb_graphs", "Graphs of which something is left", len(status.graphs))
        yield GaugeMetricFamily("taskdb_tasks_queued", "Tasks that could be handed out", ready + ahead)
        yield GaugeMetricFamily("taskdb_tasks_ready", "Those of them that could run at once", ready)
        yield GaugeMetricFamily("taskdb_background_items", "Items of background work that wait", status.todo)
        yield CounterMetricFamily("taskdb_tasks_added", "Tasks that senders of graphs added", counters.tasks_added)
        yield CounterMetricFamily("taskdb_leases", "Tasks handed to schedulers", counters.leases)
        yield CounterMetricFamily("taskdb_batches", "Batches of reports from schedulers", counters.batches)
        yield CounterMetricFamily("taskdb_transactions_dropped", "Transactions that were given up, and said again", counters.dropped)
        counts, buckets = 0, []
        for bound, count in zip([*map(str, COMMIT_SECONDS), "+Inf"], counters.commits_by_seconds, strict=True):
            counts += count
            buckets.append((bound, float(counts)))
        yield HistogramMetricFamily("taskdb_commit_seconds", "Duration of group commits", buckets, counters.commit_seconds)
        yield GaugeMetricFamily("taskdb_store_bytes", "Bytes the store occupies", store_bytes)
        yield GaugeMetricFamily("taskdb_store_bytes_max", "Bytes it may grow to", self._info.bytes_max)
        yield from self._of_process()

    def _of_process(self) -> Iterator[Metric]:
        """Under the names that Prometheus' own collectors use."""
        with self._process.oneshot():
            cpu, memory = self._process.cpu_times(), self._process.memory_info()
            yield CounterMetricFamily("process_cpu_seconds", "CPU time of the daemon in seconds", cpu.user + cpu.system)
            yield GaugeMetricFamily("process_resident_memory_bytes", "Resident memory of the daemon in bytes", memory.rss)
            yield GaugeMetricFamily("process_start_time_seconds", "When it started, in seconds since 1970", self._process.create_time())
            yield GaugeMetricFamily("process_open_fds", "Open file descriptors", self._process.num_fds())


@contextlib.contextmanager
def serving(collector: Collector, address: str) -> Iterator[str]:
    """Answer at HOST:PORT (0: any free port) until the end; the address with its real port. Raises CannotServe."""
    host, _, port = address.rpartition(":")
    registry = CollectorRegistry(auto_describe=False)
    registry.register(collector)
    try:
        server, thread = _start(int(port), host.strip("[]"), registry)
    except OSError as error:
        raise CannotServe(f"cannot serve metrics on {address}: {error.strerror or error}; choose another with --metrics") from error
    try:
        yield f"{host}:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
        collector.close()


def _start(port: int, host: str, registry: CollectorRegistry) -> tuple[WSGIServer, threading.Thread]:
    server, thread = start_http_server(port, host, registry)
    handler: Any = server.RequestHandlerClass
    server.RequestHandlerClass = type("Handler", (handler,), {"timeout": SILENT_SECONDS_MAX})
    return server, thread
