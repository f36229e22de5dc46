"""One cluster for each regime and module, with processes as users have them, and the answer of the same code without a cluster."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from distributed import Client

from tests.e2e.conftest import REGIMES
from tests.support.cluster import Cluster


@pytest.fixture(scope="module", params=list(REGIMES))
def cluster(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("ecosystem")
    with Cluster(folder, window=REGIMES[request.param], stock=request.param == "stock") as cluster:
        yield cluster


@pytest.fixture
def client(cluster: Cluster) -> Iterator[Client]:
    cluster.faults()
    with Client(cluster.address) as client:
        yield client
    assert cluster.faults() == []
