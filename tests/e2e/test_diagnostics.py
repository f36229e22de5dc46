"""What looks at tasks from outside: pages of the dashboard, `/info`, Prometheus, task stream, stories, dumps."""

from __future__ import annotations

import gzip
import re
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import msgpack
import pytest
from distributed import Client, get_task_stream

from tests.e2e import functions as f
from tests.e2e.conftest import REGIMES
from tests.support.cluster import Cluster, until

pytestmark = pytest.mark.e2e

WIDTH = 60
#: Not "groups": with this graph it fails in stock as well (a group that comes before one it depends on).
PAGES = ["status", "tasks", "graph", "workers", "stealing", "events", "counters", "individual-memory-by-key"]


@pytest.fixture(scope="module", params=list(REGIMES))
def watched(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A cluster with a dashboard."""
    folder = tmp_path_factory.mktemp("watched")
    stock = request.param == "stock"
    with Cluster(folder, window=REGIMES[request.param], stock=stock, workers=1, scheduler=("--dashboard",)) as cluster:
        yield cluster


@pytest.fixture
def client(watched: Cluster) -> Iterator[Client]:
    with Client(watched.address) as client:
        yield client
        until(lambda: not client.run_on_scheduler(f.resident), "nothing is left")
    assert watched.faults() == []
    assert "Plugin failed" not in watched.scheduler_log()


def get(client: Client, page: str) -> str:
    """A page of the scheduler's web server."""
    port = client.scheduler_info()["services"]["dashboard"]
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/{page}", timeout=30) as answer:
        text: str = answer.read().decode()
        return text


def half_done(gate: Path, name: str) -> tuple[dict[str, tuple[object, ...]], str]:
    """WIDTH tasks that can run, as many above them that wait for the gate, and their sum."""
    graph: dict[str, tuple[object, ...]] = {f"{name}gate": (f.wait_for_file, str(gate), 1)}
    graph.update({f"{name}low-{i}": (f.inc, i) for i in range(WIDTH)})
    graph.update({f"{name}high-{i}": (f.first, f"{name}low-{i}", f"{name}gate") for i in range(WIDTH)})
    graph[f"{name}sum"] = (f.total, [f"{name}high-{i}" for i in range(WIDTH)])
    return graph, f"{name}sum"


TOTAL = sum(range(1, WIDTH + 1))


def counted(client: Client) -> dict[str, int]:
    """Tasks by state, as Prometheus is told."""
    return {state: int(float(n)) for state, n in re.findall(r'^dask_scheduler_tasks{state="(.*)"} (.*)$', get(client, "metrics"), re.M)}


def test_pages(watched: Cluster, client: Client, gate: Path) -> None:
    client.run_on_scheduler(f.draw_pages)
    graph, last = half_done(gate, "pg")
    future = client.get(graph, last, sync=False)
    until(lambda: client.run_on_scheduler(f.group_counts).get("pggate", {}).get("processing"), "it runs")
    for page in PAGES:
        assert "bokeh" in get(client, page).lower(), page
    shown = client.run_on_scheduler(f.draw_pages)
    assert {name: shown["progress"][name] for name in ("pggate", "pglow", "pghigh", "pgsum")} == {
        "pggate": 1,
        "pglow": WIDTH,
        "pghigh": WIDTH,
        "pgsum": 1,
    }
    gate.touch()
    assert future.result(timeout=30) == TOTAL
    shown = client.run_on_scheduler(f.draw_pages)
    assert shown["progress"]["pghigh"] == WIDTH
    assert shown["stream"] >= len(graph)
    del future
    until(lambda: not client.run_on_scheduler(f.resident), "all is forgotten")
    shown = client.run_on_scheduler(f.draw_pages)
    assert (shown["nodes"], shown["links"]) == (0, 0), "what has left is on no page"
    client.run_on_scheduler(f.close_pages)
    futures = client.map(f.inc, range(WIDTH), key=[f"pgroup-{i}" for i in range(WIDTH)])
    assert client.gather(futures) == list(range(1, WIDTH + 1))
    assert "bokeh" in get(client, "groups").lower()
    assert client.run_on_scheduler(f.draw_groups) == {"pgroup": WIDTH}
    assert "Traceback" not in watched.scheduler_log()


def test_info_pages(client: Client, gate: Path) -> None:
    graph, last = half_done(gate, "in")
    future = client.get(graph, last, sync=False)
    until(lambda: client.run_on_scheduler(f.resident).get("ingate") == "processing", "it runs")
    (address,) = client.scheduler_info()["workers"]
    quoted = urllib.request.quote(address, safe="")  # type: ignore[attr-defined]
    for page in ("main/workers.html", "main/exceptions.html", f"worker/{quoted}.html", f"call-stacks/{quoted}.html", "main/logs.html"):
        assert "<html" in get(client, f"info/{page}"), page
    assert "ingate" in get(client, "info/task/ingate.html")
    assert "insum" in get(client, "info/task/insum.html")
    assert "json" in get(client, "json/index.html")
    gate.touch()
    assert future.result(timeout=30) == TOTAL


def test_prometheus(client: Client, gate: Path) -> None:
    graph, last = half_done(gate, "pr")
    future = client.get(graph, last, sync=False)
    until(lambda: client.run_on_scheduler(f.resident).get("prgate") == "processing", "it runs")
    counts = counted(client)
    assert sum(n for state, n in counts.items() if state != "forgotten") == len(graph), counts
    assert re.search(r"^dask_scheduler_clients 1\.0$", get(client, "metrics"), re.M)
    gate.touch()
    assert future.result(timeout=30) == TOTAL
    counts = counted(client)
    assert counts["memory"] == 1
    assert not any(counts[state] for state in ("waiting", "processing", "no-worker", "queued", "erred")), counts


def test_task_stream(client: Client, gate: Path) -> None:
    gate.touch()
    graph, last = half_done(gate, "st")
    with get_task_stream(client) as stream:
        assert client.get(graph, last) == TOTAL
    computed = [task["key"] for task in stream.data if task["status"] == "OK"]
    assert sorted(computed) == sorted(graph)


def test_story_and_status(client: Client, gate: Path) -> None:
    graph, last = half_done(gate, "so")
    future = client.get(graph, last, sync=False)
    until(lambda: client.run_on_scheduler(f.resident).get("sogate") == "processing", "it runs")
    status = client.sync(client.scheduler.get_task_status, keys=[*graph, "nobody's"])
    assert status.pop("nobody's") is None
    assert set(status) == set(graph)
    assert status["sogate"] == "processing"
    assert {status[f"sohigh-{i}"] for i in range(WIDTH)} == {"waiting"}
    gate.touch()
    assert future.result(timeout=30) == TOTAL
    story = client.story("sohigh-3")
    assert any(tuple(entry[:2]) == ("scheduler", "sohigh-3") and entry[3] == "memory" for entry in story), story


def test_dump_of_the_cluster(client: Client, gate: Path, tmp_path: Path) -> None:
    from distributed.cluster_dump import DumpArtefact

    graph, last = half_done(gate, "du")
    future = client.get(graph, last, sync=False)
    until(lambda: client.run_on_scheduler(f.resident).get("dugate") == "processing", "it runs")
    client.dump_cluster_state(str(tmp_path / "dump"))
    with gzip.open(tmp_path / "dump.msgpack.gz") as file:
        # Stock's own reader refuses integers as keys, which stock's events may hold.
        dump = DumpArtefact(msgpack.load(file, strict_map_key=False))
    held = client.run_on_scheduler(f.resident)
    assert set(dump["scheduler"]["tasks"]) == set(held)
    assert "dugate" in {task["key"] for task in dump.scheduler_tasks_in_state("processing")}
    gate.touch()
    assert future.result(timeout=30) == TOTAL
