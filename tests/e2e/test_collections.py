"""Dask's collections and annotations: right results, with everything paged and with the default window."""

from __future__ import annotations

import operator
from pathlib import Path

import dask
import dask.array as da
import dask.bag as db
import numpy as np
import pytest
from dask import delayed
from distributed import Client

from tests.e2e import functions as f
from tests.support.cluster import Cluster, until

pytestmark = pytest.mark.e2e


def test_array(client: Client) -> None:
    x = da.arange(4000, chunks=100).reshape((40, 100))
    y = (x - x.mean(axis=0)).std(axis=1).rechunk(7)
    expected = np.arange(4000).reshape(40, 100)
    expected = (expected - expected.mean(axis=0)).std(axis=1)
    np.testing.assert_allclose(client.compute(y).result(timeout=60), expected)


def test_persisted_array_is_used_again(client: Client) -> None:
    x = da.ones((40, 40), chunks=5).persist()
    assert (x + 1).sum().compute() == 3200
    assert (x * 2).sum().compute() == 3200
    assert x.sum().compute() == 1600


def test_overlap_and_store_order(client: Client) -> None:
    x = da.random.default_rng(1).random((60, 60), chunks=10)
    y = da.overlap.overlap(x, depth=1, boundary="reflect")
    local = y.sum().compute(scheduler="sync")
    assert y.sum().compute() == pytest.approx(local)


def test_bag(client: Client) -> None:
    bag = db.from_sequence(range(300), npartitions=30)
    assert bag.map(f.inc).filter(lambda x: x % 2).fold(operator.add).compute() == sum(x for x in range(1, 301) if x % 2)
    assert dict(bag.groupby(lambda x: x % 3, shuffle="tasks").map(lambda kv: (kv[0], len(kv[1]))).compute()) == {0: 100, 1: 100, 2: 100}


def test_delayed_with_several_outputs(client: Client) -> None:
    parts = [delayed(f.inc)(i) for i in range(50)]
    a = delayed(f.total)(parts)
    b = delayed(max)(parts)
    assert dask.compute(a, b, a + b) == (sum(range(1, 51)), 50, sum(range(1, 51)) + 50)


@pytest.mark.parametrize("method", ["p2p", "tasks"])
def test_shuffle(client: Client, method: str) -> None:
    dd = pytest.importorskip("dask.dataframe")
    pd = pytest.importorskip("pandas")
    frame = pd.DataFrame({"key": np.arange(400) % 17, "value": np.arange(400)})
    with dask.config.set({"dataframe.shuffle.method": method}):
        shuffled = dd.from_pandas(frame, npartitions=8).shuffle("key")
        parts = client.gather(client.compute([shuffled.get_partition(i) for i in range(shuffled.npartitions)]))
        places: dict[int, set[int]] = {}
        for number, part in enumerate(parts):
            for key in part.key.unique():
                places.setdefault(int(key), set()).add(number)
        assert all(len(where) == 1 for where in places.values()), "a key is in one partition only"
        assert sorted(v for part in parts for v in part.value) == list(range(400))


@pytest.mark.parametrize("method", ["p2p", "tasks"])
def test_merge_and_groupby(client: Client, method: str) -> None:
    dd = pytest.importorskip("dask.dataframe")
    pd = pytest.importorskip("pandas")
    left = pd.DataFrame({"k": np.arange(300) % 23, "x": np.arange(300)})
    right = pd.DataFrame({"k": np.arange(23), "y": np.arange(23) * 10})
    with dask.config.set({"dataframe.shuffle.method": method}):
        merged = dd.from_pandas(left, npartitions=6).merge(dd.from_pandas(right, npartitions=4), on="k", shuffle_method=method)
        result = merged.groupby("k").agg({"x": "sum", "y": "max"}).compute().sort_index()
    expected = left.merge(right, on="k").groupby("k").agg({"x": "sum", "y": "max"}).sort_index()
    pd.testing.assert_frame_equal(result, expected, check_dtype=False)


def test_p2p_rechunk(client: Client) -> None:
    x = da.arange(10_000, chunks=500).reshape((100, 100)).rechunk((100, 10))
    y = x.rechunk((10, 100), method="p2p")
    np.testing.assert_array_equal(y.compute(), np.arange(10_000).reshape(100, 100))


def test_p2p_on_top_of_persisted_results(client: Client) -> None:
    x = da.ones((60, 60), chunks=(60, 5)).persist()
    y = (x + 1).rechunk((5, 60), method="p2p").persist()
    assert y.sum().compute() == 7200
    assert (y[:10] + x[:10]).sum().compute() == 1800


# --------------------------------------------------------------------------------------------------------- annotations


def test_resources(client: Client) -> None:
    """Only one of the workers has a GPU."""
    (gpu,) = [a for a, w in client.scheduler_info()["workers"].items() if w["resources"].get("GPU")]
    heads = client.map(f.inc, range(10))
    futures = [client.submit(f.where, h, resources={"GPU": 1}, pure=False) for h in heads]
    assert set(client.gather(futures)) == {gpu}
    with dask.annotate(resources={"GPU": 1}):
        x = delayed(f.where)(delayed(f.inc)(1))
    assert client.compute(x, optimize_graph=False).result(timeout=30) == gpu


def test_resources_nobody_has_leave_others_alone(client: Client) -> None:
    waiting = client.submit(f.inc, 1, resources={"FPGA": 1})
    assert client.gather(client.map(f.inc, range(50))) == list(range(1, 51))
    assert waiting.status == "pending"


def test_workers(client: Client) -> None:
    addresses = list(client.scheduler_info()["workers"])
    for address in addresses:
        heads = client.map(f.inc, range(6))
        futures = [client.submit(f.where, h, workers=[address], pure=False) for h in heads]
        assert set(client.gather(futures)) == {address}
    future = client.submit(f.where, 1, workers=["tcp://127.0.0.1:1"], allow_other_workers=True)
    assert future.result(timeout=30) in addresses


def test_retries(client: Client, tmp_path: Path) -> None:
    head = client.submit(f.inc, 1)
    assert client.submit(f.fail_times, str(tmp_path / "two"), 2, head, retries=2).result(timeout=30) == 2
    with pytest.raises(OSError, match="flaky"):
        client.submit(f.fail_times, str(tmp_path / "three"), 3, head, retries=2).result(timeout=30)
    with dask.annotate(retries=3):
        x = delayed(f.fail_times)(str(tmp_path / "four"), 3, delayed(f.inc)(4))
    assert client.compute(x, optimize_graph=False).result(timeout=30) == 5


def test_priority(client: Client, gate: Path, tmp_path: Path) -> None:
    """Higher first, whatever was submitted first. The workers are kept busy until all is there."""
    log = tmp_path / "log"
    busy = [client.submit(f.wait_for_file, str(gate), i, pure=False, priority=100) for i in range(2)]
    until(lambda: client.run_on_scheduler(f.processing) >= 2, "workers are busy")
    low = [client.submit(f.count_run, str(log), i, priority=-10) for i in range(40)]
    high = [client.submit(f.count_run, str(log), 100 + i, priority=10) for i in range(20)]
    until(lambda: f.all_known(client, [x.key for x in (*low, *high)]), "all is there")
    gate.touch()
    client.gather([*busy, *low, *high])
    order = [int(line) for line in log.read_text().split()]
    assert len(order) == 60
    # What was handed to a worker before, or queued in look-ahead, may come earlier: a few.
    late = [i for i, x in enumerate(order) if x >= 100]
    assert sum(late) / len(late) < 25, order


def test_annotated_layers(client: Client) -> None:
    """Different annotations of several layers of one graph, none lost by fusion or paging."""
    (gpu,) = [a for a, w in client.scheduler_info()["workers"].items() if w["resources"].get("GPU")]
    other = next(a for a in client.scheduler_info()["workers"] if a != gpu)
    with dask.annotate(workers=[other]):
        a = [delayed(f.where)(i, dask_key_name=f"ann-a-{i}") for i in range(20)]
    with dask.annotate(resources={"GPU": 1}):
        b = [delayed(f.where)(x, dask_key_name=f"ann-b-{i}") for i, x in enumerate(a)]
    got = client.gather(client.compute([*a, *b], optimize_graph=False))
    assert got == [other] * 20 + [gpu] * 20


def test_results_are_the_same_as_without_a_cluster(cluster: Cluster, client: Client) -> None:
    x = da.random.default_rng(3).random((200, 50), chunks=(10, 50))
    _, s, _ = da.linalg.svd(x)
    np.testing.assert_allclose(s.compute(), s.compute(scheduler="sync"))
