"""What happens while a large graph arrives: one task in it is pickled only when a gate opens."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from distributed import CancelledError, Client

from taskdb.wire.reader import Client as Reader
from tests.e2e import functions as f
from tests.e2e.conftest import REGIMES, nothing_is_left
from tests.support.cluster import PATIENCE_SECONDS, Cluster, run, until

pytestmark = pytest.mark.e2e

ENV = {"DASK_TASKDB__LOCAL_BYTES": "1kiB", "DASK_TASKDB__LOCAL_TASKS": "20"}
#: More than two runs of tasks.
TASKS = 1_200


def graph(gate: Path, folder: Path, at: int = 0, fails: bool = False) -> dict[str, Any]:
    """Independent tasks, one of which holds up those after it; the first says that it has run; and their sum. Of such tasks `dask.order`
    takes the last name first."""
    found: dict[str, Any] = {f"a-{i:04}": (f.inc, i) for i in range(TASKS)}
    found[f"a-{TASKS - 1:04}"] = (f.count_run, str(folder / "first"), TASKS)
    found[f"a-{at:04}"] = (f.inc, (int, f.Gate(at, str(gate), fails)))
    found["sum"] = (f.total, list(found))
    return found


SUM = TASKS * (TASKS + 1) // 2


def begun(cluster: Cluster) -> bool:
    with Reader(cluster.url) as reader:
        return any(not graph.sealed and graph.tasks for graph in reader.status().graphs)


@pytest.fixture(scope="module", params=list(REGIMES))
def shared(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with Cluster(tmp_path_factory.mktemp(request.param), window=REGIMES[request.param], env=ENV) as cluster:
        yield cluster


def test_the_first_tasks_run_before_the_last_have_come(tmp_path: Path, gate: Path, cluster: Cluster, client: Client) -> None:
    result = client.get(graph(gate, tmp_path), "sum", sync=False)
    until((tmp_path / "first").exists, "the first task has run")
    with Reader(cluster.url) as reader:
        assert [graph.sealed for graph in reader.status().graphs] == [False]
    gate.touch()
    assert result.result(timeout=PATIENCE_SECONDS) == SUM
    del result
    nothing_is_left(cluster)


def test_a_later_graph_uses_what_has_yet_to_come(tmp_path: Path, gate: Path, cluster: Cluster, client: Client) -> None:
    first = client.get(graph(gate, tmp_path), "sum", sync=False)
    until(lambda: begun(cluster), "some of the graph is there")
    later = client.submit(f.inc, first, key="later")
    again = client.get({"twice": (f.add, "sum", "sum"), **graph(gate, tmp_path)}, "twice", sync=False)
    assert [future.status for future in (first, later, again)] == ["pending"] * 3
    gate.touch()
    assert client.gather([first, later, again]) == [SUM, SUM + 1, 2 * SUM]
    del first, later, again
    nothing_is_left(cluster)


def test_let_go_of_while_it_arrives(tmp_path: Path, gate: Path, cluster: Cluster, client: Client) -> None:
    first = client.get(graph(gate, tmp_path), "sum", sync=False)
    until(lambda: begun(cluster), "some of the graph is there")
    del first
    # Behind the release in the order of messages, so it has been said.
    kept = client.submit(f.inc, 1, key="kept")
    gate.touch()
    assert kept.result(timeout=PATIENCE_SECONDS) == 2
    del kept
    nothing_is_left(cluster)


def test_cancelled_while_it_arrives(tmp_path: Path, gate: Path, cluster: Cluster, client: Client) -> None:
    first = client.get(graph(gate, tmp_path), "sum", sync=False)
    until(lambda: begun(cluster), "some of the graph is there")
    first.cancel()
    with pytest.raises(CancelledError):
        first.result(timeout=PATIENCE_SECONDS)
    assert client.submit(f.inc, 1, key="next").result(timeout=PATIENCE_SECONDS) == 2
    # The gate is still closed: what was arriving was stopped, and taken back.
    nothing_is_left(cluster)


def test_its_client_leaves_while_it_arrives(tmp_path: Path, gate: Path, cluster: Cluster) -> None:
    with Client(cluster.address) as client:
        first = client.get(graph(gate, tmp_path), "sum", sync=False)
        until(lambda: begun(cluster), "some of the graph is there")
        client.close()
        assert first.status == "cancelled"
    nothing_is_left(cluster)


def test_half_of_it_cannot_be_pickled(tmp_path: Path, gate: Path, cluster: Cluster, client: Client) -> None:
    gate.touch()
    first = client.get(graph(gate, tmp_path, at=TASKS // 2 - 200, fails=True), "sum", sync=False)
    with pytest.raises(ValueError, match="this number does not travel"):
        first.result(timeout=PATIENCE_SECONDS)
    # The same names again are other tasks.
    good = client.get({"more": (f.inc, "sum"), **graph(gate, tmp_path)}, "more", sync=False)
    assert good.result(timeout=PATIENCE_SECONDS) == SUM + 1
    del first, good
    nothing_is_left(cluster)


def test_scheduler_is_told_to_end_while_it_arrives(tmp_path: Path, gate: Path, window: int | None) -> None:
    with Cluster(tmp_path, window=window, workers=0, env=ENV) as cluster:
        client = Client(cluster.address)
        first = client.get(graph(gate, tmp_path), "sum", sync=False)
        until(lambda: begun(cluster), "some of the graph is there")
        cluster.scheduler.popen.send_signal(signal.SIGTERM)
        assert cluster.scheduler.popen.wait(PATIENCE_SECONDS) == 0
        cluster.processes.ended(cluster.scheduler)
        assert cluster.faults() == []
        client.close()
        assert first.status != "finished"
        checked = run(["-m", "taskdb", "verify", "--data", str(cluster.data)])
        assert checked.returncode == 0, checked.stdout
        cluster.start_scheduler()
        nothing_is_left(cluster)
