"""Graphs of several shapes, each with the closed form of its result. A job runs in a thread of its own; all share one client."""

from __future__ import annotations

import random
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from dask import delayed
from distributed import Client, Variable, as_completed, fire_and_forget, wait

from scheduler_adapter.client import SchedulerLost
from scheduler_adapter.selftest import work

T = TypeVar("T")

#: How long one result may take, with the restarts that come between.
PATIENCE_SECONDS = 120.0
#: Longest time a task takes.
TASK_SECONDS = 0.03


class Wrong(Exception):
    """A result is not what it must be."""


@dataclass
class Promises:
    """What calls that returned have promised to be kept, by name. Shared by all jobs of a round."""

    datasets: set[str] = field(default_factory=set)
    variables: set[str] = field(default_factory=set)
    #: Keys that were found again by somebody's name for them: a want that is not acknowledged.
    found: set[str] = field(default_factory=set)


class Job:
    """One shape's run. `tasks`: how many it has in all. `pause`: seconds until it begins."""

    def __init__(
        self,
        shape: Callable[[Job], None],
        tasks: int,
        client: Client,
        name: str,
        path: Path,
        seed: int,
        pause: float,
        promises: Promises,
    ):
        self._shape = shape
        self.tasks = tasks
        self.client = client
        self.name = name
        self.path = str(path)
        self.chance = random.Random(seed)
        self.promises = promises
        #: Results that were compared with the closed form.
        self.checked = 0
        self.problem = ""
        self._pause = pause
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    @property
    def done(self) -> bool:
        return not self._thread.is_alive()

    def _run(self) -> None:
        time.sleep(self._pause)
        try:
            self._shape(self)
        except Wrong as e:
            self.problem = f"{self.name}: {e}"
        except Exception:
            self.problem = f"{self.name}: {traceback.format_exc()}"

    # ------------------------------------------------------------------------------------------------- used by shapes

    def seconds(self) -> float:
        return self.chance.uniform(0, TASK_SECONDS)

    def key(self, *parts: object) -> str:
        return "-".join(map(str, (self.name, *parts)))

    def check(self, what: str, got: Any, expected: Any) -> None:
        self.checked += 1
        if got != expected:
            raise Wrong(f"{what} is {got!r} and not {expected!r}")

    def result(self, future: Any) -> Any:
        return future.result(timeout=PATIENCE_SECONDS)

    def value(self, x: int, *key: object) -> Any:
        name = self.key(*key)
        return self.client.submit(work.value, self.path, label(name), self.seconds(), x, key=name, pure=False)

    def total(self, xs: Any, *key: object) -> Any:
        name = self.key(*key)
        return self.client.submit(work.total, self.path, label(name), self.seconds(), xs, key=name, pure=False)

    def graph_value(self, x: int, *key: object) -> dict[str, Any]:
        name = self.key(*key)
        return {name: (work.value, self.path, label(name), self.seconds(), x)}

    def graph_total(self, xs: list[str], *key: object) -> dict[str, Any]:
        name = self.key(*key)
        return {name: (work.total, self.path, label(name), self.seconds(), xs)}


def label(key: str) -> str:
    """Of the lines a task leaves. Not its key: in a graph a text that is a key stands for its result."""
    return "@" + key


def until_done(call: Callable[[], T]) -> T:
    """Make a call that changes something until it is answered: one that was interrupted may or may not have been done."""
    while True:
        try:
            return call()
        except SchedulerLost:
            pass


# ---------------------------------------------------------------------------------------------------------------- shapes


def wide(job: Job, n: int = 200) -> None:
    """A row, and its sum; the row is watched as it completes."""
    row = [job.value(i, "row", i) for i in range(n)]
    last = job.total(row, "sum")
    seen = sum(result for _, result in as_completed(row, with_results=True, timeout=PATIENCE_SECONDS))
    job.check("the sum of what completed", seen, n * (n - 1) // 2)
    job.check("the sum", job.result(last), n * (n - 1) // 2)


def chain(job: Job, n: int = 60) -> None:
    graph = job.graph_value(1, 0)
    for i in range(1, n):
        graph.update(job.graph_total([job.key(i - 1), job.key(i - 1)] if i % 10 == 0 else [job.key(i - 1)], i))
    job.check("the end of the chain", job.result(job.client.get(graph, job.key(n - 1), sync=False)), 2 ** ((n - 1) // 10))


def tree(job: Job, leaves: int = 128) -> None:
    graph: dict[str, Any] = {}
    for i in range(leaves):
        graph.update(job.graph_value(i, 0, i))
    level, width = 0, leaves
    while width > 1:
        for i in range(width // 2):
            graph.update(job.graph_total([job.key(level, 2 * i), job.key(level, 2 * i + 1)], level + 1, i))
        level, width = level + 1, width // 2
    job.check("the root", job.result(job.client.get(graph, job.key(level, 0), sync=False)), leaves * (leaves - 1) // 2)


def large(job: Job, n: int = 700, parts: int = 20) -> None:
    """Two rows and a sum, more tasks than the scheduler takes in by itself: through the ingest process."""
    graph: dict[str, Any] = {}
    for i in range(n):
        a, b = job.key("a", i), job.key("b", i)
        graph[a] = (work.value, job.path, label(a), 0.0, i)
        graph[b] = (work.total, job.path, label(b), 0.0, [a, job.key("a", (i + 1) % n)])
    for i in range(parts):
        graph.update(job.graph_total([job.key("b", k) for k in range(i, n, parts)], "c", i))
    graph.update(job.graph_total([job.key("c", i) for i in range(parts)], "sum"))
    job.check("the sum", job.result(job.client.get(graph, job.key("sum"), sync=False)), n * (n - 1))


def reuse(job: Job, n: int = 50, times: int = 3) -> None:
    """A persisted collection that several later graphs need."""
    names = [job.key("part", i) for i in range(n)]
    parts = [delayed(work.value)(job.path, label(name), job.seconds(), i, dask_key_name=name) for i, name in enumerate(names)]
    parts = list(job.client.persist(parts))
    for k in range(times):
        time.sleep(job.chance.uniform(0, 1))
        name = job.key("sum", k)
        last = delayed(work.total)(job.path, label(name), job.seconds(), parts[k:], dask_key_name=name)
        job.check(f"sum {k}", job.result(job.client.compute(last)), n * (n - 1) // 2 - sum(range(k)))


def loop(job: Job, n: int = 30) -> None:
    """One task at a time, each from the result before."""
    x = 0
    for i in range(n):
        x = job.result(job.value(x + i, i))
    job.check("the last", x, n * (n - 1) // 2)


def published(job: Job, n: int = 30) -> None:
    """A dataset and a Variable are found again by their names, when nobody else has a future of them."""
    client, name = job.client, job.key("dataset")
    row = [job.value(i, "row", i) for i in range(n)]
    until_done(lambda: client.publish_dataset(row, name=name, override=True))
    job.promises.datasets.add(name)
    variable = Variable(job.key("variable"), client=client)
    last = job.total(row, "sum")
    until_done(lambda: variable.set(last))
    job.promises.variables.add(variable.name)
    job.promises.found.update(x.key for x in (*row, last))
    row, last = [], None
    time.sleep(job.chance.uniform(0, 3))
    found = client.get_dataset(name)
    job.check("the dataset", client.gather(found), list(range(n)))
    job.check("the Variable", job.result(variable.get(timeout=PATIENCE_SECONDS)), n * (n - 1) // 2)
    job.promises.datasets.discard(name)
    until_done(lambda: client.unpublish_dataset(name))
    job.promises.variables.discard(variable.name)
    variable.delete()


def forgotten(job: Job, n: int = 20) -> None:
    """Fired and forgotten: nobody waits for it, and it runs all the same."""
    head = job.value(1, "head")
    for i in range(n):
        fire_and_forget(job.total([head], "late", i))
    del head
    labels = {label(job.key("late", i)) for i in range(n)}
    deadline = time.monotonic() + PATIENCE_SECONDS
    while left := labels - set(work.Runs.read(Path(job.path)).ended):
        if time.monotonic() > deadline:
            raise Wrong(f"{len(left)} of {n} tasks that were fired and forgotten never ran")
        time.sleep(0.1)
    job.checked += 1


def failing(job: Job, n: int = 20) -> None:
    """One task fails, and so does what needs it; the others do not."""
    row = [job.value(i, "row", i) for i in range(n)]
    name = job.key("bad")
    bad = job.client.submit(work.fail, job.path, label(name), job.seconds(), row, key=name, pure=False)
    after = [job.total([bad, x], "after", i) for i, x in enumerate(row)]
    good = job.total(row, "good")
    wait([bad, *after], timeout=PATIENCE_SECONDS)
    for future in (bad, after[-1]):
        error = future.exception(timeout=PATIENCE_SECONDS)
        job.check("the error", (type(error), str(error)), (work.Planned, f"{label(name)} {n * (n - 1) // 2}"))
    job.check("what does not need it", job.result(good), n * (n - 1) // 2)


def scattered(job: Job, n: int = 10) -> None:
    """Data that nothing can compute again."""
    data = until_done(lambda: job.client.scatter(list(range(n)), hash=False))
    time.sleep(job.chance.uniform(0, 2))
    job.check("the sum", job.result(job.total(data, "sum")), n * (n - 1) // 2)
    job.check("the data", job.client.gather(data), list(range(n)))


#: Tasks of each.
SHAPES: dict[Callable[[Job], None], int] = {
    wide: 201,
    chain: 60,
    tree: 255,
    large: 1421,
    reuse: 53,
    loop: 30,
    published: 31,
    forgotten: 21,
    failing: 22,
    scattered: 1,
}
#: Those that need a worker to live.
NEED_WORKERS = {scattered}
