"""The page `/taskdb` of Dask's dashboard, as a browser gets it: over HTTP and Bokeh's websocket, from a real scheduler and daemon."""

from __future__ import annotations

import os
import re
import signal
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

import pandas  # noqa: F401 (all here is one process: Bokeh looks into it while another thread may be half way through importing it)
import pytest
from bokeh.client import pull_session
from distributed import Client, Future, LocalCluster

from bench.workloads import cube
from scheduler_adapter import dashboard, history
from scheduler_adapter.submitted import Submission
from taskdb.wire import taskdb_pb2 as pb
from tests.e2e import functions as f
from tests.support.cluster import until

pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    """Everything is paged."""
    preload = {"preload": "scheduler_adapter", "preload_argv": ["--taskdb-window", "0"]}
    options = {"n_workers": 1, "threads_per_worker": 1, "processes": False, "dashboard_address": "127.0.0.1:0"}
    with LocalCluster(**options, scheduler_kwargs=preload) as cluster:
        yield cluster


@pytest.fixture
def gate(tmp_path: Path) -> Iterator[Path]:
    """A file that tasks wait for."""
    path = tmp_path / "gate"
    yield path
    path.touch()


@pytest.fixture(scope="module")
def client(cluster: LocalCluster) -> Iterator[Client]:
    with Client(cluster) as client:
        yield client


@pytest.fixture(scope="module")
def url(cluster: LocalCluster) -> str:
    return f"http://127.0.0.1:{urlparse(cluster.dashboard_link).port}"


class Visit:
    """Someone looks at the page."""

    def __init__(self, cluster: LocalCluster, url: str):
        self.cluster = cluster
        self._session = pull_session(url=f"{url}/taskdb")

    def close(self) -> None:
        self._session.close()

    def shown(self, name: str) -> Any:
        """A part of the page, as the server keeps it up to date for this visitor."""

        def look() -> Any:
            visits = self.cluster.scheduler.http_application.applications[-1].get_sessions("/taskdb")
            [page] = (visit for visit in visits if visit.connection_count)
            return page.document.select_one({"name": name})

        return on_loop(self.cluster, look)


@pytest.fixture(scope="module")
def page(cluster: LocalCluster, url: str) -> Iterator[Visit]:
    page = Visit(cluster, url)
    yield page
    page.close()


def graphs(page: Visit) -> list[dict[str, Any]]:
    data = page.shown("taskdb-graphs").data
    return [dict(zip(data, row, strict=True)) for row in zip(*data.values(), strict=True)]


def last(page: Visit, column: str) -> float:
    return float(page.shown("taskdb-rows").data[column][-1])


def on_loop(cluster: LocalCluster, call: Callable[[], Any]) -> Any:
    async def run() -> Any:
        return call()

    return cluster.sync(run)


def test_it_stands_in_the_navigation_of_every_page(url: str) -> None:
    for path in ("status", "taskdb", "system"):
        with urllib.request.urlopen(f"{url}/{path}") as answer:
            html = answer.read().decode()
        assert re.findall(r'<a href="(?:[./]*)taskdb">', html), path


def test_a_graph_is_shown_with_its_progress(client: Client, page: Visit, gate: Path) -> None:
    done = client.map(f.inc, range(5), pure=False, priority=1)
    futures = client.map(f.wait_for_file, [str(gate)] * 20, pure=False, key="held")
    until(lambda: all(future.done() for future in done), "the first graph is done")
    [row] = until(lambda: [row for row in graphs(page) if row["graph"] == "held" and row["processing"]], "the second is shown")
    assert (row["tasks"], row["done"], row["erred"]) == (20, 0, 0)
    assert row["processing"] + row["queued"] + row["waiting"] == 20
    until(lambda: last(page, "resident") >= 1 and last(page, "graph_tasks") >= 20, "the chart has it")
    gate.touch()
    client.gather(futures)
    [row] = until(lambda: [row for row in graphs(page) if row["graph"] == "held" and row["done"] == 20], "it is shown as done")
    assert row["share"] == 100


def test_failed_tasks_are_counted(client: Client, page: Visit) -> None:
    futures = client.map(f.fail, range(7), pure=False, key="bad")
    until(lambda: all(future.status == "error" for future in futures), "they fail")
    [row] = until(lambda: [row for row in graphs(page) if row["graph"] == "bad" and row["erred"] == 7], "it is shown")
    assert row["done"] == 0


def test_ten_million_tasks(cluster: LocalCluster, client: Client, page: Visit) -> None:
    n = 216
    future: Future = client.compute(cube(n))
    [row] = until(lambda: [row for row in graphs(page) if row["tasks"] >= n**3], "the graph is shown")
    assert 0 <= row["tasks"] - (n**3 + n**2 + n + 1) <= 1  # and one that finalizes it
    until(lambda: last(page, "graph_tasks") >= n**3 // 2, "the chart has it")
    until(lambda: row_of(page, n**3)["done"] > 0, "it goes on")
    assert last(page, "resident") < 1000
    future.cancel()
    del future
    until(lambda: not any(row["tasks"] >= n**3 for row in graphs(page)), "it is gone")


def row_of(page: Visit, tasks: int) -> dict[str, Any]:
    return next(row for row in graphs(page) if row["tasks"] >= tasks)


def test_a_refresh_shows_so_many_graphs_the_unfinished_first(cluster: LocalCluster) -> None:
    adapter = cluster.scheduler.taskdb

    def look() -> tuple[list[str], int]:
        kept = adapter.history.status
        many = [pb.GraphStatus(submission=f"s{i}", label=f"g{i}", submitted=i, tasks=1, states={"memory": 1}) for i in range(10_000)]
        many.append(pb.GraphStatus(submission="old", label="old", submitted=0, tasks=2, states={"queued": 1, "memory": 1}))
        adapter.history.status = pb.StatusReply(graphs=many)
        try:
            view = dashboard.View(adapter)
            view.update()
            return view.graphs.data["graph"], len(view.source.data["time"])
        finally:
            adapter.history.status = kept

    names, rows = on_loop(cluster, look)
    assert names[:3] == ["old", "g9999", "g9998"]
    assert len(names) == dashboard.GRAPHS_SHOWN
    assert 0 < rows <= history.ROWS_MAX


def test_what_the_scheduler_was_told_knows_the_size_of_a_graph() -> None:
    left = pb.GraphStatus(submission="s", label="update", submitted=1, tasks=30, unmade=10, states={"processing": 5, "memory": 25})
    row = dashboard.graph_row(left, Submission("s", "c", total=100, groups={"sum-1", "sum-2", "('x-3', 0)", "y", "z", "finalize-1"}))
    assert (row["tasks"], row["done"], row["waiting"], row["share"]) == (100, 85, 10, 85.0)
    assert row["graph"] == "sum, x, y, …"
    alone = dashboard.graph_row(left, None)
    assert (alone["tasks"], alone["done"], alone["graph"]) == (40, 25, "update")


def test_names_cannot_bring_html() -> None:
    evil = "<script>alert(1)</script>"
    row = dashboard.graph_row(pb.GraphStatus(submission=evil, label=evil, client=evil, tasks=1, states={evil: 1}), None)
    assert "script" not in row["bar"]


def test_the_page_is_taken_away_with_the_adapter_and_says_when_the_daemon_is_gone(cluster: LocalCluster, url: str, page: Visit) -> None:
    adapter = cluster.scheduler.taskdb
    assert 'id="taskdb-link">live<' in until(lambda: page.shown("taskdb-words").text, "there are words")
    os.kill(adapter.daemon.pid, signal.SIGKILL)
    until(lambda: 'id="taskdb-link">lost<' in page.shown("taskdb-words").text, "the link is shown as lost")

    def navigation() -> list[str]:
        from distributed.dashboard.scheduler import template_variables

        return template_variables(cluster.scheduler)["pages"]

    assert "taskdb" in on_loop(cluster, navigation)
    cluster.sync(adapter.close)
    assert "taskdb" not in on_loop(cluster, navigation)
    with pytest.raises(urllib.error.HTTPError, match="404"):
        urllib.request.urlopen(f"{url}/taskdb")
