"""A large graph that the scheduler has to hold whole goes through the ingest process, and comes back."""

from __future__ import annotations

from pathlib import Path

import dask
import numpy as np
import pytest
from distributed import Client

from tests.support.cluster import Cluster

pytestmark = pytest.mark.e2e

ENV = {"DASK_TASKDB__LOCAL_TASKS": "20"}


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
