"""Large graphs that the scheduler has to hold whole: they go through the ingest process and come back."""

from __future__ import annotations

from pathlib import Path

import dask
import numpy as np
import pytest
from distributed import Client

from tests.support.cluster import Cluster

pytestmark = pytest.mark.e2e

ENV = {"DASK_TASKDB__LOCAL_TASKS": "20"}


class Tally:
    """An actor."""

    def __init__(self, start: int) -> None:
        self.count = start

    def add(self, more: int) -> int:
        self.count += more
        return self.count


@pytest.mark.parametrize("window", [0, 30])
def test_a_shuffle(tmp_path: Path, window: int) -> None:
    dd = pytest.importorskip("dask.dataframe")
    pd = pytest.importorskip("pandas")
    frame = pd.DataFrame({"key": np.arange(2000) % 17, "value": np.arange(2000)})
    with (
        dask.config.set({"dataframe.shuffle.method": "p2p"}),
        Cluster(tmp_path, window=window, env=ENV) as cluster,
        Client(cluster.address) as client,
    ):
        shuffled = dd.from_pandas(frame, npartitions=30).shuffle("key").map_partitions(lambda part: part.assign(twice=part.value * 2))
        assert client.compute(shuffled.twice.sum()).result(timeout=60) == 2 * sum(range(2000))
        assert cluster.faults() == []


@pytest.mark.parametrize("window", [0, 30])
def test_actors(tmp_path: Path, window: int) -> None:
    with Cluster(tmp_path, window=window, env=ENV) as cluster, Client(cluster.address) as client:
        futures = client.map(Tally, range(40), actors=True)
        tallies = [future.result(timeout=60) for future in futures]
        assert [tally.add(1).result() for tally in tallies] == list(range(1, 41))
        assert cluster.faults() == []
