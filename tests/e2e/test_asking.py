"""What the command line asks of a cluster that works: what ran where, what failed, cancel and retry by query. Small graphs are followed by
the scheduler, large ones paged: both are asked alike."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from distributed import Client

from taskdb.cli.main import cli
from tests.e2e import functions as f
from tests.support.cluster import Cluster, until

pytestmark = pytest.mark.e2e

#: Tasks of a graph that fits the window, and of one that does not.
SIZES = [4, 60]


@pytest.fixture(scope="module")
def asked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with Cluster(tmp_path_factory.mktemp("asked"), window=20) as cluster:
        yield cluster
        cluster.processes.check()
        assert cluster.faults() == []


@pytest.fixture
def client(asked: Cluster) -> Iterator[Client]:
    with Client(asked.address, set_as_default=False) as client:
        yield client


@pytest.fixture
def gate(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "gate"
    yield path
    path.touch()


def ask(cluster: Cluster, *args: str) -> Any:
    done = CliRunner().invoke(cli, [*args, "--output", "json"], env={"TASKDB_URL": cluster.url})
    assert done.exit_code == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("size", SIZES)
def test_where_and_how_long_tasks_ran(asked: Cluster, client: Client, size: int) -> None:
    futures = client.map(f.slow_inc, range(size), seconds=0.001, pure=False)
    assert client.gather(futures) == list(range(1, size + 1))
    group = futures[0].key.rpartition("-")[0]
    until(lambda: len(ask(asked, "tasks", "--state", "memory", "--prefix", group, "--limit", "100")["tasks"]) == size, "all is told")
    events = ask(asked, "story", futures[0].key)["events"]
    # In the order of time: what ran may have begun before the database had heard that it was leased.
    assert {event["what"] for event in events} >= {"came", "processing", "ran", "memory"}
    (ran,) = [event for event in events if event["what"] == "ran"]
    assert 0.001 <= ran["seconds"] < 60
    assert ran["worker"] in client.scheduler_info()["workers"]
    by_worker = [
        ask(asked, "tasks", "--worker", worker, "--prefix", group, "--limit", "100")["tasks"]
        for worker in client.scheduler_info()["workers"]
    ]
    assert sorted(task["key"] for tasks in by_worker for task in tasks) == sorted(future.key for future in futures)


def test_errors_have_tracebacks(asked: Cluster, client: Client) -> None:
    future = client.submit(f.fail, 7, pure=False)
    until(lambda: future.status == "error", "it fails")
    until(lambda: ask(asked, "errors")["errors"], "that is told")
    (group,) = ask(asked, "errors")["errors"]
    assert (group["exception"], group["prefix"], group["failed"]) == ("ValueError", "fail", 1)
    assert "bad input 7" in group["text"]
    assert "functions.py" in group["traceback"]


@pytest.mark.parametrize("size", SIZES)
def test_cancel_by_query(asked: Cluster, client: Client, gate: Path, size: int) -> None:
    stay = client.submit(f.wait_for_file, str(gate), 1, pure=False)
    futures = client.map(f.wait_for_file, [str(gate)] * size, range(size), pure=False, key="cancelled")
    until(lambda: ask(asked, "cancel", "--prefix", "cancelled", "--dry-run")["found"] == size, "they are there")
    assert ask(asked, "cancel", "--prefix", "cancelled", "--yes")["cancelled"] == size
    until(lambda: all(future.status == "cancelled" for future in futures), "the client is told of all")
    assert stay.status == "pending"
    gate.touch()
    assert stay.result(timeout=30) == 1


@pytest.mark.parametrize("size", SIZES)
def test_retry_by_query(asked: Cluster, client: Client, gate: Path, size: int) -> None:
    futures = client.map(f.fail_unless, [str(gate)] * size, range(size), pure=False, key="failing")
    # One each: stock's own check (validate) refuses to retry one of several failed inputs of a task.
    after = client.map(f.inc, futures, pure=False)
    until(lambda: all(future.status == "error" for future in futures + after), "all have failed")
    until(lambda: sum(x["failed"] for x in ask(asked, "errors")["errors"] if x["prefix"] == "failing") == size, "that is told")
    gate.touch()
    assert ask(asked, "retry", "--prefix", "failing", "--yes")["retried"] == size
    # The client hears of it on its own stream, perhaps after we do.
    until(lambda: all(future.status == "finished" for future in futures + after), "all run again")
    assert client.gather(futures) == list(range(size))
    assert client.gather(after) == list(range(1, size + 1))
