"""Programs that live on Dask: each gives the answer it gives without a cluster."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import dask
import numpy as np
import pytest
from distributed import Client, LocalCluster, as_completed, performance_report

from tests.e2e import functions as f
from tests.support.cluster import until

pytestmark = pytest.mark.e2e


def weather() -> Any:
    """A year and more of daily values on a small grid, in 4 chunks."""
    pd, xr = pytest.importorskip("pandas"), pytest.importorskip("xarray")
    days = pd.date_range("2001-01-01", periods=400)
    values = np.random.default_rng(1).normal(size=(400, 4, 6))
    data = xr.DataArray(values, coords={"time": days, "y": range(4), "x": range(6)}, dims=("time", "y", "x"), name="t")
    return data.chunk({"time": 100})


def plain(collection: Any) -> Any:
    """Computed without a cluster."""
    return collection.compute(scheduler="synchronous")


def test_xarray_anomaly(client: Client) -> None:
    data = weather()
    groups = data.groupby("time.month")
    anomaly = groups - groups.mean("time")
    np.testing.assert_allclose(anomaly.compute().values, plain(anomaly).values)


@pytest.mark.slow
def test_xarray_resample_and_rolling(client: Client) -> None:
    data = weather()
    for result in (data.resample(time="MS").mean(), data.rolling(time=30, min_periods=1).mean()):
        np.testing.assert_allclose(result.compute().values, plain(result).values)


def test_xarray_to_zarr_and_back(client: Client, tmp_path: Path) -> None:
    pytest.importorskip("zarr")
    xr = pytest.importorskip("xarray")
    data = weather().to_dataset()
    data.to_zarr(str(tmp_path / "store.zarr"))
    again = xr.open_zarr(str(tmp_path / "store.zarr"))
    np.testing.assert_array_equal(again.t.compute().values, plain(data.t).values)


def test_dataframe_parquet_shuffle_and_merge(client: Client, tmp_path: Path) -> None:
    pd, dd = pytest.importorskip("pandas"), pytest.importorskip("dask.dataframe")
    pytest.importorskip("pyarrow")
    rng = np.random.default_rng(2)
    left = pd.DataFrame({"key": rng.integers(0, 50, 2000), "value": rng.normal(size=2000)})
    right = pd.DataFrame({"key": range(50), "weight": rng.normal(size=50)})
    dd.from_pandas(left, npartitions=8).to_parquet(str(tmp_path / "left"))
    with dask.config.set({"dataframe.shuffle.method": "p2p"}):
        merged = dd.read_parquet(str(tmp_path / "left")).merge(dd.from_pandas(right, npartitions=4), on="key", how="inner")
        by_key = merged.shuffle("key").groupby("key").agg({"value": "sum", "weight": "max"})
        found = by_key.compute().sort_index()
    expected = left.merge(right, on="key").groupby("key").agg({"value": "sum", "weight": "max"}).sort_index()
    pd.testing.assert_frame_equal(found, expected, check_index_type=False)


def test_bag_of_many_files(client: Client, tmp_path: Path) -> None:
    db = pytest.importorskip("dask.bag")
    words = random.Random(3)
    for number in range(40):
        lines = [json.dumps({"name": words.choice("abcde"), "n": words.randrange(10)}) for _ in range(20)]
        (tmp_path / f"{number:02}.json").write_text("\n".join(lines) + "\n")
    records = db.read_text(str(tmp_path / "*.json")).map(json.loads)
    sums = records.foldby("name", lambda total, record: total + record["n"], 0, lambda a, b: a + b, 0)
    assert sorted(sums.compute()) == sorted(plain(sums))


def test_map_that_feeds_on_what_is_completed(client: Client) -> None:
    """A search: each result says where to look next."""

    def look(x: float) -> tuple[float, float]:
        return x, (x - 3.0) ** 2

    def search(first: list[tuple[float, float]], ask: Any) -> float:
        best = min(first, key=lambda found: found[1])
        for number in range(6):
            step = 2.0**-number
            best = min([best, *ask([best[0] - step, best[0] + step])], key=lambda found: found[1])
        return best[0]

    def on_cluster(xs: list[float]) -> list[tuple[float, float]]:
        seq = as_completed(client.map(look, xs, pure=False), with_results=True)
        return sorted(result for _, result in seq)

    starts = [float(x) for x in range(-8, 9)]
    assert search(on_cluster(starts), on_cluster) == search([look(x) for x in starts], lambda xs: sorted(map(look, xs)))


def test_performance_report(client: Client, tmp_path: Path) -> None:
    pytest.importorskip("bokeh")
    with performance_report(filename=str(tmp_path / "report.html")):
        assert sum(client.gather(client.map(f.inc, range(50), pure=False))) == sum(range(1, 51))
    report = (tmp_path / "report.html").read_text()
    assert "Number of tasks: 50" in report
    assert "Total number of tasks" in report or "bk" in report


@pytest.mark.parametrize("window", [0, 10_000])
def test_adaptive_scaling(window: int) -> None:
    options = {"n_workers": 0, "threads_per_worker": 1, "processes": False, "dashboard_address": None}
    preload = ["scheduler_adapter"]
    with (
        dask.config.set({"taskdb.window": window}),
        LocalCluster(**options, scheduler_kwargs={"preload": preload}) as local,
        Client(local) as client,
    ):
        local.adapt(minimum=0, maximum=3, interval="100ms", target_duration="1s", wait_count=3)
        futures = client.map(f.slow_inc, range(40), [0.1] * 40, pure=False)
        until(lambda: len(client.scheduler_info(n_workers=-1)["workers"]) == 3, "it scales up")
        assert sum(client.gather(futures)) == sum(range(1, 41))
        del futures
        until(lambda: not client.scheduler_info(n_workers=-1)["workers"], "it scales down")
