"""Clusters for end-to-end tests: one for each regime a session, and a look at what every test leaves behind."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import dask
import pytest
from distributed import Client

from tests.e2e import functions
from tests.support.cluster import Cluster, until

#: Everything paged, and the default window.
REGIMES = {"paged": 0, "default": None}


@pytest.fixture(scope="session", params=list(REGIMES))
def shared(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp(request.param)
    with Cluster(folder, window=REGIMES[request.param], worker_args=(("--resources", "GPU=1"),)) as cluster:
        yield cluster


@pytest.fixture(params=list(REGIMES))
def window(request: pytest.FixtureRequest) -> int | None:
    """For tests that need a cluster of their own."""
    return REGIMES[request.param]


@pytest.fixture
def paged(shared: Cluster) -> bool:
    """Whether everything is paged."""
    return shared.window == 0


@pytest.fixture
def cluster(shared: Cluster) -> Iterator[Cluster]:
    """The shared cluster. Afterwards: all processes live, no fault in the log, nothing left in the scheduler or the database."""
    shared.processes.check()
    shared.faults()
    yield shared
    shared.processes.check()
    with dask.config.set({"distributed.comm.timeouts.connect": "20s"}), Client(shared.address) as client:
        until(lambda: not client.run_on_scheduler(functions.resident), "no task left in the scheduler", 15)
        until(lambda: not client.run_on_scheduler(functions.submissions), "no submission left in the adapter", 15)
        assert client.run_on_scheduler(functions.group_negatives) == []
        assert client.run_on_scheduler(functions.group_counts) == {}
    assert shared.faults() == []


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
