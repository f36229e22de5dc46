"""Metrics of the adapter in those of Dask's scheduler; and everything that names metrics names ones that there are."""

from __future__ import annotations

import json
import re
import shlex
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlparse

import pytest
from distributed import Client
from prometheus_client import REGISTRY
from prometheus_client.parser import text_string_to_metric_families

from scheduler_adapter import LocalCluster
from scheduler_adapter.local.processes import Processes, await_port, free_port
from scheduler_adapter.metrics import COLLECTOR
from tests.e2e import functions as f
from tests.support.cluster import PATIENCE_SECONDS, until

pytestmark = pytest.mark.e2e

ROOT = Path(__file__).resolve().parents[2]
BOARD = ROOT / "deploy/grafana/taskdb.json"
DOCUMENT = ROOT / "docs/monitoring.md"
OPTIONS = {"n_workers": 1, "threads_per_worker": 1, "processes": False, "dashboard_address": "127.0.0.1:0", "window": 0}


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    with LocalCluster(**OPTIONS) as cluster:
        yield cluster


def address(cluster: LocalCluster) -> str:
    return f"127.0.0.1:{urlparse(cluster.dashboard_link).port}"


def scrape(address: str) -> dict[str, float]:
    """name -> the sum of its samples."""
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=10) as answer:
        text = answer.read().decode()
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found[sample.name] = found.get(sample.name, 0) + sample.value
    return found


def test_the_scheduler_tells_of_its_window(cluster: LocalCluster, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    with Client(cluster) as client:
        before = scrape(address(cluster))["dask_taskdb_taken_in_tasks_total"]
        futures = client.map(f.wait_for_file, [str(gate)] * 12, pure=False)
        now = until(lambda: (now := scrape(address(cluster)))["dask_taskdb_leased_tasks"] > 0 and now, "tasks to be handed out")
        assert now["dask_taskdb_taken_in_tasks_total"] - before == 12
        assert (now["dask_taskdb_graphs"], now["dask_taskdb_graph_tasks"], now["dask_taskdb_link_up"]) == (1, 12, 1)
        assert now["dask_taskdb_resident_tasks"] + now["dask_taskdb_queued_tasks"] >= 12
        assert now["dask_taskdb_window_tasks"] == 0
        gate.touch()
        client.gather(futures)
        until(lambda: scrape(address(cluster))["dask_taskdb_durable_seconds"] > 0, "a batch to be on disk")
        del futures
        until(lambda: scrape(address(cluster))["dask_taskdb_graphs"] == 0, "the graph to be gone")


def test_another_scheduler_in_the_process_takes_over_and_gives_back(cluster: LocalCluster) -> None:
    with LocalCluster(**{**OPTIONS, "window": 77, "n_workers": 0}) as other:
        assert scrape(address(other))["dask_taskdb_window_tasks"] == 77
    assert scrape(address(cluster))["dask_taskdb_window_tasks"] == 0


def test_none_is_left_registered() -> None:
    class Adapter: ...

    shown, COLLECTOR._shown = COLLECTOR._shown, []
    if shown:
        REGISTRY.unregister(COLLECTOR)
    try:
        adapter = Adapter()
        COLLECTOR.show(adapter)  # type: ignore[arg-type]
        COLLECTOR.hide(adapter)  # type: ignore[arg-type]
        REGISTRY.register(COLLECTOR)  # refused if it were there
        REGISTRY.unregister(COLLECTOR)
    finally:
        COLLECTOR._shown = shown
        if shown:
            REGISTRY.register(COLLECTOR)


# ------------------------------------------------------------------------------------------------------------- names

#: What stands in the expressions of Prometheus besides names of metrics.
WORDS = {"rate", "sum", "max", "by", "histogram_quantile", "le", "state", "job", "instance", "label_values", "clamp_min"}


@pytest.fixture(scope="module")
def served(cluster: LocalCluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, set[str]]]:
    """Names of metrics by who serves them; the daemon as the document starts it."""
    folder = tmp_path_factory.mktemp("served")
    [line] = re.findall(r"^<!-- tested: metrics -->\n```bash\n(.*)\n```", DOCUMENT.read_text(), re.M)
    listen, metrics = free_port(), free_port()
    words = shlex.split(line.replace(":7070", f":{listen}").replace("9107", str(metrics)))
    with Processes(folder) as processes:
        await_port(processes.start("daemon", ["-m", *words]), listen, PATIENCE_SECONDS)
        yield {"daemon": set(scrape(f"127.0.0.1:{metrics}")), "scheduler": set(scrape(address(cluster)))}


def expressions(board: dict) -> Iterator[str]:
    for panel in board["panels"]:
        for target in panel.get("targets", ()):
            yield target["expr"]
    for variable in board["templating"]["list"]:
        if variable["type"] == "query":
            yield variable["query"]["query"]


def names(expression: str) -> set[str]:
    bare = re.sub(r'"[^"]*"|\[[^]]*\]|\$\w+', "", expression)
    return set(re.findall(r"[a-z_][a-z0-9_]*", bare)) - WORDS


def test_names_are_found_in_an_expression() -> None:
    found = names('histogram_quantile(0.99, sum by (le) (rate(taskdb_commit_seconds_bucket{job="$daemon"}[$__rate_interval])))')
    assert found == {"taskdb_commit_seconds_bucket"}


def test_the_board_shows_metrics_that_there_are(served: dict[str, set[str]]) -> None:
    board = json.loads(BOARD.read_text())
    shown = set().union(*map(names, expressions(board)))
    assert shown - served["daemon"] - served["scheduler"] == set()
    assert len([name for name in shown if name.startswith("taskdb_")]) > 8
    assert len([name for name in shown if name.startswith("dask_taskdb_")]) > 6


def test_the_board_is_one(served: dict[str, set[str]]) -> None:
    board = json.loads(BOARD.read_text())
    ids = [panel["id"] for panel in board["panels"]]
    assert len(ids) == len(set(ids))
    places = [(p["gridPos"]["x"], p["gridPos"]["y"]) for p in board["panels"]]
    assert len(places) == len(set(places))
    assert all(p["gridPos"]["x"] + p["gridPos"]["w"] <= 24 for p in board["panels"])
    assert all(panel["datasource"]["uid"] == "${source}" for panel in board["panels"] if panel["type"] != "row")


def test_the_document_names_every_metric(served: dict[str, set[str]]) -> None:
    told = set(re.findall(r"^\| `((?:dask_)?taskdb_\w+)", DOCUMENT.read_text(), re.M))
    ours = {name for name in served["daemon"] | served["scheduler"] if re.match(r"(dask_)?taskdb_", name)}
    assert told == {re.sub(r"_(bucket|count|sum|created)$", "", name) for name in ours}
