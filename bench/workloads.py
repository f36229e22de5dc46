"""The workloads everything is measured on: the shapes of public reports, with chunks of a few numbers.

Each builder takes the number of tasks that is asked for and returns a job of about that many. The constants in the
builders (`per_row`, `per_level`) were counted on dask 2026.8.0 after optimisation; they size the job and are not
figures: a run counts the tasks that really ran.

A job's graph is built before the clock starts; `run` submits it and waits. `expected` computes the right answer in
another way, and is only called where results can be fetched.
"""

from __future__ import annotations

import itertools
import math
import random
import uuid
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import dask
from distributed import Client, Future, futures_of, wait


class WrongAnswer(AssertionError):
    """A run gave another result than the known right one."""


class TaskFailed(RuntimeError):
    """A task of the workload ended in an error, or its future was cancelled."""


@dataclass(frozen=True)
class Job:
    """One submission, ready to go."""

    #: Submits and waits; returns the futures to check. The flag says whether results may be fetched.
    run: Callable[[Client, bool], Any]
    #: The right answer, in the shape that gathering those futures gives.
    expected: Callable[[], Any]
    #: Only submits; returns the futures. None for jobs of more than one submission.
    submit: Callable[[Client], list[Future]] | None = None


@dataclass(frozen=True)
class Workload:
    """A named way to make jobs."""

    name: str
    #: One line for `bench list`.
    shape: str
    build: Callable[[int], Job]


WORKLOADS: dict[str, Workload] = {}


def _workload(name: str, shape: str) -> Callable[[Callable[[int], Job]], Callable[[int], Job]]:
    """Register a builder."""

    def register(build: Callable[[int], Job]) -> Callable[[int], Job]:
        WORKLOADS[name] = Workload(name, shape, build)
        return build

    return register


def settle(futures: Iterable[Future]) -> None:
    """Wait until all are done. Raises TaskFailed, with the reason, if one did not end well."""
    futures = list(futures)
    wait(futures)
    for future in futures:
        if future.status != "finished":
            reason = future.exception() if future.status == "error" else None
            raise TaskFailed(f"{future.key!r} is {future.status}: {reason!r}")


def _compute(collection: Any) -> Job:
    """Compute one collection. The right answer is what Dask's own synchronous scheduler makes of the same graph."""

    def run(client: Client, fetch: bool) -> Future:
        future = client.compute(collection)
        settle([future])
        return future

    return Job(run, lambda: dask.compute(collection, scheduler="sync")[0], lambda client: [client.compute(collection)])


def check(got: Any, expected: Any) -> None:
    """Raise WrongAnswer unless both are equal, floats up to rounding (sums are added up in another order)."""
    import numpy as np

    try:
        one, other = np.asarray(got, dtype=float), np.asarray(expected, dtype=float)
        np.testing.assert_allclose(one, other, rtol=1e-9, atol=1e-9)
    except AssertionError as exc:
        raise WrongAnswer(str(exc)) from exc


# What the tasks do. Top-level functions: they are pickled by name.


def inc(x: int) -> int:
    """The smallest task with an input."""
    return x + 1


def add(*xs: int) -> int:
    """A task with any number of inputs."""
    return sum(xs)


def total(xs: list[int]) -> int:
    """A task with one list of inputs."""
    return sum(xs)


def block_sum(blocks: Any) -> Any:
    """The sum of a block, or of a list of them."""
    return sum(map(block_sum, blocks)) if isinstance(blocks, list) else blocks.sum()


# Arrays


@_workload("tree-sum", "one-number chunks and a tree of sums, eight at a time")
def tree_sum(tasks: int) -> Job:
    import dask.array as da

    return _compute(da.ones((max(8, tasks * 7 // 8),), chunks=1).sum(split_every=8))


@_workload("basic-sum", "wide random rows of 32 chunks, a tree of sums along each row")
def basic_sum(tasks: int) -> Job:
    import dask.array as da

    per_row = 32 * 2 + 11
    return _compute(da.random.random((max(1, tasks // per_row), 32 * 4), chunks=(1, 4)).sum(axis=1))


@_workload("grid", "map_blocks over a cube of chunks, contracted axis by axis with blockwise")
def grid(tasks: int) -> Job:
    return _compute(cube(max(2, round(tasks ** (1 / 3)))))


def cube(n: int) -> Any:
    """An array of one number made of n³ + n² + n + 1 tasks."""
    import dask.array as da
    import numpy as np

    y = da.ones((n, n, n), chunks=1).map_blocks(inc, dtype=float)
    for i, o in (("ijk", "jk"), ("jk", "k"), ("k", "")):
        y = da.blockwise(block_sum, o, y, i, dtype=float, meta=np.empty((0,) * len(o)))
    return y


@_workload("map-blocks", "one function over as many chunks as tasks, all results wanted")
def map_blocks(tasks: int) -> Job:
    import dask.array as da
    import numpy as np

    y = da.ones((tasks,), chunks=1).map_blocks(inc, dtype=float)

    def run(client: Client, fetch: bool) -> list[Future]:
        futures = futures_of(client.persist(y))
        settle(futures)
        return list(futures)

    return Job(run, lambda: np.full((tasks, 1), 2.0))


@_workload("persisted", "ten collections persisted one after the other and kept, a small result a task")
def persisted(tasks: int) -> Job:
    import dask.array as da
    import numpy as np

    chunks = max(1, tasks // 10)
    kept = [da.full((chunks,), i, chunks=1).map_blocks(inc, dtype=float) for i in range(10)]

    def run(client: Client, fetch: bool) -> list[Future]:
        futures: list[Future] = []
        for y in kept:
            futures.extend(futures_of(client.persist(y)))
            settle(futures[-chunks:])
        return futures

    return Job(run, lambda: np.repeat(np.arange(10.0) + 1, chunks)[:, None])


@_workload("anom-mean", "group by day, mean, subtract from each day, mean (xarray)")
def anom_mean(tasks: int) -> Job:
    import dask.array as da
    import numpy as np
    import xarray as xr

    per_step, days = 12, 10
    steps = max(2 * days, tasks // per_step)
    data = da.random.random((steps, 2, 2), chunks=(1, 1, 2))
    array = xr.DataArray(data, dims=("time", "y", "x"), coords={"day": ("time", np.arange(steps) % days)})
    by_day = array.groupby("day")
    return _compute((by_day - by_day.mean("time")).mean("time"))


@_workload("climatic-mean", "mean by month of six-dimensional data (xarray)")
def climatic_mean(tasks: int) -> Job:
    import dask.array as da
    import pandas as pd  # type: ignore[import-untyped,unused-ignore]
    import xarray as xr

    # Two years at least, so that there is something to group; small jobs have fewer members instead.
    members = min(4, max(1, tasks // 300))
    per_month = 10 * members + 1
    months = max(24, tasks // per_month)
    data = da.random.random((members, months, 2, 3, 2, 2), chunks=(1, 1, 2, 1, 2, 2))
    array = xr.DataArray(
        data,
        dims=("ensemble", "init_date", "lat", "lead_time", "lon", "level"),
        coords={"init_date": pd.date_range("1700-01-01", periods=months, freq="MS")},
    )
    return _compute(array.groupby("init_date.month").mean("init_date"))


@_workload("vorticity", "two random fields, padded and rechunked by one, then combined elementwise")
def vorticity(tasks: int) -> Job:
    import dask.array as da

    per_level = 14
    levels = max(2, tasks // per_level)
    u, v = (da.random.random((6, 6, levels), chunks=(6, 6, 1)) for _ in range(2))

    def padded(field: Any) -> Any:
        # Wrap one row round, and merge the chunk of one that this makes into its neighbour.
        wide = da.pad(field, [(0, 1), (0, 0), (0, 0)], mode="wrap")
        first = wide.chunks[0]
        return wide.rechunk({0: (*first[:-2], first[-2] + first[-1])})

    dudy = padded(u)[1:] - u
    dvdx = padded(v)[1:] - v
    return _compute((dvdx - dudy).mean(axis=(0, 1)))


@_workload("spilling", "random chunks persisted, and in a second step their sum")
def spilling(tasks: int) -> Job:
    import dask.array as da

    chunks = max(4, tasks * 3 // 7)
    x = da.random.random((chunks * 4,), chunks=4)

    def run(client: Client, fetch: bool) -> Future:
        held = client.persist(x)
        settle(futures_of(held))
        future = client.compute(held.sum())
        settle([future])
        return future

    return Job(run, lambda: x.sum().compute(scheduler="sync"))


# Data frames


def _part(index: int, rows: int, shift: int) -> Any:
    """Rows of one partition: an index that goes on from the partition before, a key and a number."""
    import numpy as np
    import pandas as pd  # type: ignore[import-untyped,unused-ignore]

    number = np.arange(index * rows, (index + 1) * rows)
    return pd.DataFrame({"key": number * 7919 % 1009, "x": number * 0.5}, index=number + shift)


def _frame(partitions: int, rows: int, shift: int = 0) -> Any:
    import dask.dataframe as dd

    divisions = [i * rows + shift for i in range(partitions)]
    return dd.from_map(
        _part,
        range(partitions),
        rows=rows,
        shift=shift,
        meta=_part(0, rows, shift).iloc[:0],
        divisions=[*divisions, partitions * rows + shift - 1],
    )


@_workload("dataframe-align", "difference of two frames whose partitions overlap by half, mean")
def dataframe_align(tasks: int) -> Job:
    per_partition = 18
    partitions, rows = max(2, tasks // per_partition), 10
    return _compute((_frame(partitions, rows, rows // 2) - _frame(partitions, rows)).mean())


def _spread(part: Any) -> Any:
    """How many rows and how many different keys one partition has, as a frame of one row."""
    import pandas as pd  # type: ignore[import-untyped,unused-ignore]

    return pd.DataFrame({"rows": [len(part)], "keys": [part["key"].nunique()]})


def _shuffle(partitions: int, method: str) -> Job:
    """Shuffle by key. Only if each key ends up in one partition do the numbers of keys add up to the number of keys."""
    rows = 20
    shuffled = _frame(partitions, rows).shuffle("key", shuffle_method=method)
    job = _compute(shuffled.map_partitions(_spread, meta={"rows": int, "keys": int}).sum())
    numbers = range(partitions * rows)
    return Job(job.run, lambda: [len(numbers), len({number * 7919 % 1009 for number in numbers})])


@_workload("shuffle-tasks", "all-to-all exchange of a frame by tasks")
def shuffle_tasks(tasks: int) -> Job:
    def about(partitions: int) -> int:
        # Dask exchanges between 32 partitions at a time, so more of them take several stages.
        stages = max(1, math.ceil(math.log(partitions, 32)))
        return int(stages * partitions * partitions ** (1 / stages)) + 8 * partitions

    partitions = 2
    while about(partitions + 1) <= tasks:
        partitions += 1
    return _shuffle(partitions, "tasks")


@_workload("shuffle-p2p", "all-to-all exchange of a frame from worker to worker")
def shuffle_p2p(tasks: int) -> Job:
    per_partition = 7
    return _shuffle(max(2, tasks // per_partition), "p2p")


# Delayed, futures and raw graphs


@_workload("chain", "each task needs the one before (a raw graph)")
def chain(tasks: int) -> Job:
    token = uuid.uuid4().hex[:8]
    keys = [(f"chain-{token}", i) for i in range(tasks)]
    graph: dict[Any, Any] = {key: (inc, before) for before, key in itertools.pairwise(keys)}
    graph[keys[0]] = (inc, 0)

    def run(client: Client, fetch: bool) -> Future:
        future = client.get(graph, keys[-1], sync=False)
        settle([future])
        return future

    return Job(run, lambda: tasks)


@_workload("jobqueue", "independent tasks and one sum over all of them (delayed)")
def jobqueue(tasks: int) -> Job:
    step = dask.delayed(inc, pure=False)
    count = max(1, tasks - 1)
    job = _compute(dask.delayed(total, pure=False)([step(i) for i in range(count)]))
    return Job(job.run, lambda: count * (count + 1) // 2, job.submit)


@_workload("delayed-graph", "blocks of eight random layers of eight tasks, and one sum (delayed)")
def delayed_graph(tasks: int) -> Job:
    # Blocks, because every call of a delayed function copies the graph so far.
    draw = random.Random(tasks)
    step = dask.delayed(add, pure=False)
    width, layers = 8, 8
    ends: list[Any] = []
    answer = 0
    for block in range(max(1, tasks // (width * (layers - 1) + 1))):
        numbers = [block + i for i in range(width)]
        nodes = [step(number) for number in numbers]
        for _ in range(layers - 1):
            picks = [draw.sample(range(width), 2) for _ in range(width)]
            nodes = [step(1, nodes[a], nodes[b]) for a, b in picks]
            numbers = [1 + numbers[a] + numbers[b] for a, b in picks]
        ends.append(step(*nodes))
        answer += sum(numbers)
    job = _compute(dask.delayed(total, pure=False)(ends))
    return Job(job.run, lambda: answer, job.submit)


@_workload("client-map", "client.map of one function, all results wanted")
def client_map(tasks: int) -> Job:
    def submit(client: Client) -> list[Future]:
        return list(client.map(inc, range(tasks), pure=False))

    def run(client: Client, fetch: bool) -> list[Future]:
        futures = submit(client)
        settle(futures)
        return futures

    return Job(run, lambda: list(range(1, tasks + 1)), submit)


@_workload("submit-result", "client.submit, wait for the result, the next (one task at a time)")
def submit_result(tasks: int) -> Job:
    def run(client: Client, fetch: bool) -> Future:
        for i in range(tasks):
            future = client.submit(inc, i, pure=False)
            if fetch:
                check(future.result(), i + 1)
            else:
                settle([future])
        return future

    return Job(run, lambda: tasks)
