"""A large graph that the scheduler has to hold whole goes through the ingest process, and comes back."""

from __future__ import annotations

from pathlib import Path

import dask
import numpy as np
import pytest
from distributed import Client

from tests.e2e import functions as f
from tests.support.cluster import PATIENCE_SECONDS, Cluster

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


def test_a_shuffle_of_what_failed_on_disk(tmp_path: Path) -> None:
    """It waits until its inputs are resident; this one never will be."""
    dd = pytest.importorskip("dask.dataframe")
    pd = pytest.importorskip("pandas")
    # Longer than look-ahead: the end of it never comes to the scheduler.
    links = 400
    chain = {f"c-{i}": (f.inc, f"c-{i - 1}") for i in range(1, links)} | {"c-0": (f.fail, 1)}
    meta = pd.DataFrame({"key": [1], "value": [1]})
    with (
        dask.config.set({"dataframe.shuffle.method": "p2p"}),
        Cluster(tmp_path, window=0, env=ENV) as cluster,
        Client(cluster.address) as client,
    ):
        last = client.get(chain, f"c-{links - 1}", sync=False)
        assert isinstance(last.exception(timeout=PATIENCE_SECONDS), ValueError)
        assert last.key not in client.run_on_scheduler(f.resident)
        shuffled = dd.from_delayed([last, client.submit(f.first, meta)], meta=meta, verify_meta=False).shuffle("key", npartitions=3)
        future = client.compute(shuffled.value.sum())
        assert isinstance(future.exception(timeout=PATIENCE_SECONDS), ValueError)
        assert client.submit(f.inc, 1).result(timeout=PATIENCE_SECONDS) == 2, "what came after it is not held up"
        assert cluster.faults() == []
