"""Clusters for end-to-end tests: one for each regime a session, and a look at what every test leaves behind."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import dask
import pytest
from distributed import Client

from taskdb.wire.reader import Client as Reader
from tests.e2e import functions
from tests.support.cluster import Cluster, until

#: Everything paged, and the default window.
REGIMES = {"paged": 0, "default": None}
if os.environ.get("TASKDB_TEST_STOCK"):
    # To see whether a test asks what stock does: the same without the adapter. Tests that look into the adapter fail then.
    REGIMES = {"stock": None}


@pytest.fixture(scope="session", params=list(REGIMES))
def shared(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp(request.param)
    with Cluster(folder, window=REGIMES[request.param], stock=request.param == "stock", worker_args=(("--resources", "GPU=1"),)) as cluster:
        yield cluster


@pytest.fixture(params=list(REGIMES))
def window(request: pytest.FixtureRequest) -> int | None:
    """For tests that need a cluster of their own."""
    return REGIMES[request.param]


@pytest.fixture(params=[0, 50], ids=["paged", "small"])
def few(request: pytest.FixtureRequest) -> int:
    """A window that graphs of a hundred tasks do not fit."""
    return int(request.param)


@pytest.fixture
def clients_return() -> Iterator[None]:
    """Clients made here outlive their scheduler."""
    with dask.config.set({"distributed.client.preload": ["scheduler_adapter.client"]}):
        yield


@pytest.fixture
def paged(shared: Cluster) -> bool:
    """Whether everything is paged."""
    return shared.window == 0


@pytest.fixture
def cluster(shared: Cluster) -> Iterator[Cluster]:
    """The shared cluster. Afterwards: all processes live, no fault in the log, nothing left in the scheduler or the database.

    A test that leaves something behind fails, and the next one gets a fresh cluster.
    """
    shared.faults()
    yield shared
    try:
        nothing_is_left(shared)
    except BaseException:
        shared.start_anew()
        raise


def nothing_is_left(cluster: Cluster) -> None:
    cluster.processes.check()
    with Client(cluster.address) as client:
        deadline = time.monotonic() + 30
        while left := client.run_on_scheduler(functions.left_behind):
            assert time.monotonic() < deadline, f"left behind in the scheduler: {left}"
            time.sleep(0.05)
        assert client.run_on_scheduler(functions.group_negatives) == []
    if cluster.stock:
        return
    with Reader(cluster.url) as reader:
        deadline = time.monotonic() + 30
        while tasks := list(reader.list_tasks(limit=5).tasks):
            assert time.monotonic() < deadline, f"left behind in the database: {tasks}"
            time.sleep(0.05)
        until(lambda: not reader.status().graphs, "nothing is left of any graph in the database")
    assert cluster.faults() == []


@pytest.fixture
def client(cluster: Cluster) -> Iterator[Client]:
    with Client(cluster.address) as client:
        yield client


@pytest.fixture
def address(cluster: Cluster) -> str:
    return cluster.address


@pytest.fixture
def gate(tmp_path: Path) -> Iterator[Path]:
    """A file that tasks wait for; made at the end in any case, so that no worker is held up."""
    path = tmp_path / "gate"
    yield path
    path.touch()
