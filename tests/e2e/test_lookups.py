"""What clients and dashboards ask about tasks that are on disk, and what they must not see of the adapter."""

from __future__ import annotations

import asyncio
import inspect
import itertools
from pathlib import Path
from typing import Any

import pytest
from distributed import Client, Queue, Variable
from distributed.client import futures_of
from distributed.diagnostics.progressbar import MultiProgressBar, ProgressBar

from tests.e2e import functions as f
from tests.support.cluster import Cluster, until

pytestmark = pytest.mark.e2e


def layers(gate: Path, name: str, width: int, depth: int) -> tuple[dict[str, tuple[object, ...]], str]:
    """`depth` rows of `width` tasks over one that waits for the gate; and the key of their sum."""
    graph: dict[str, tuple[object, ...]] = {f"{name}gate": (f.wait_for_file, str(gate), 1)}
    below = [f"{name}gate"] * width
    for level in range(depth):
        row = [f"{name}row{level}-{i}" for i in range(width)]
        graph.update({key: (f.inc, dep) for key, dep in zip(row, below, strict=True)})
        below = row
    graph[f"{name}sum"] = (f.total, below)
    return graph, f"{name}sum"


def test_variable_of_a_future_on_disk(client: Client, address: str, gate: Path) -> None:
    head = client.submit(f.wait_for_file, str(gate), 1)
    deep = client.submit(f.inc, client.submit(f.inc, client.submit(f.inc, head)))
    variable = Variable("on-disk", client=client)
    variable.set(deep, timeout="20s")
    del deep, head
    with Client(address) as other:
        future = Variable("on-disk", client=other).get(timeout=20)
        assert future.status == "pending"
        gate.touch()
        assert future.result(timeout=30) == 4
        del future
    variable.delete()


def test_queue_of_a_future_on_disk(client: Client, address: str, gate: Path) -> None:
    head = client.submit(f.wait_for_file, str(gate), 1)
    futures = [client.submit(f.add, client.submit(f.inc, head), i) for i in range(3)]
    queue = Queue("on-disk", client=client)
    for future in futures:
        queue.put(future, timeout=20)
    del futures, future, head
    with Client(address) as other:
        theirs = Queue("on-disk", client=other).get(timeout=20, batch=True)
        gate.touch()
        assert other.gather(theirs) == [2, 3, 4]
        del theirs
    queue.close()


def test_published_work_runs_on_without_its_client(client: Client, address: str, gate: Path) -> None:
    import dask
    from dask import delayed

    with Client(address) as other:
        head = delayed(f.wait_for_file)(str(gate), 1)
        (kept,) = dask.persist([delayed(f.inc)(delayed(f.inc)(head)) for _ in range(10)])
        other.publish_dataset(kept, name="kept")
        del kept, head
    gate.touch()
    kept = client.get_dataset("kept")
    assert client.gather(futures_of(kept)) == [3] * 10
    keys = [x.key for x in futures_of(kept)]
    client.unpublish_dataset("kept")
    assert client.gather(futures_of(kept)) == [3] * 10
    del kept
    until(lambda: not any(client.who_has(keys).values()), "let go after unpublish")


def test_task_status_of_tasks_on_disk(client: Client, gate: Path) -> None:
    async def status(dask_scheduler: Any, keys: list[str]) -> dict[str, Any]:
        found = dask_scheduler.handlers["get_task_status"](keys=keys)
        return await found if inspect.isawaitable(found) else found

    graph, last = layers(gate, "st", 40, 4)
    future = client.get(graph, last, sync=False)
    keys = ["stgate", "strow3-7", last, "nowhere"]
    until(lambda: client.run_on_scheduler(status, keys=keys)["stgate"] == "processing", "it runs")
    seen = client.run_on_scheduler(status, keys=keys)
    assert seen["strow3-7"] in ("waiting", "queued", "released")
    assert seen[last] in ("waiting", "queued", "released")
    assert seen["nowhere"] is None
    gate.touch()
    assert future.result(timeout=30) == 40 * 5


def test_who_has_and_story_of_tasks_on_disk(client: Client, gate: Path) -> None:
    graph, last = layers(gate, "wh", 10, 4)
    future = client.get(graph, last, sync=False)
    until(lambda: "whgate" in client.run_on_scheduler(f.resident), "it runs")
    assert client.who_has([future]) == {last: ()}
    assert client.run_on_scheduler(lambda dask_scheduler: dask_scheduler.story("nowhere-at-all")) == []
    gate.touch()
    assert future.result(timeout=30) == 50
    (place,) = client.who_has([future])[last]
    assert place in client.scheduler_info()["workers"]
    assert client.story(last), "its transitions are told"


def test_replay_of_an_error(client: Client, gate: Path) -> None:
    """What `recreate_error_locally` asks; its last step, fetching the inputs, fails in this release of stock."""
    head = client.submit(f.wait_for_file, str(gate), 1)
    broken = client.submit(f.fail, client.submit(f.inc, head))
    last = client.submit(f.inc, client.submit(f.inc, broken))
    gate.touch()
    until(lambda: last.status == "error", "failed")
    cause = client.sync(client._get_errored_future, last)
    assert cause == broken.key
    spec = client.sync(client._get_raw_components_from_future, cause)
    (dependency,) = spec.dependencies
    with pytest.raises(ValueError, match="bad input 2"):
        spec({dependency: 2})


def test_replay_of_a_task(client: Client) -> None:
    future = client.submit(f.add, client.submit(f.inc, 1), 5)
    assert future.result(timeout=30) == 7
    spec = client.sync(client._get_raw_components_from_future, future)
    (dependency,) = spec.dependencies
    assert spec({dependency: 10}) == 15


def test_progress_counts_the_whole_graph(client: Client, address: str, gate: Path) -> None:
    """Also what is on disk."""
    graph, last = layers(gate, "pb", 100, 4)
    future = client.get(graph, last, sync=False)
    until(lambda: "pbgate" in client.run_on_scheduler(f.resident), "it runs")
    seen: list[tuple[int, int]] = []

    class Bar(ProgressBar):
        def _draw_bar(self, remaining: int, all: int, **kwargs: Any) -> None:
            seen.append((remaining, all))
            if len(seen) == 2:
                gate.touch()

        def _draw_stop(self, **kwargs: Any) -> None:
            self.stopped = kwargs.get("status")

    bar = Bar([future.key], scheduler=address, interval="50ms")
    asyncio.run(asyncio.wait_for(bar.listen(), 60))
    assert seen[0] == (len(graph), len(graph))
    assert seen[-1] == (0, len(graph))
    assert bar.stopped == "finished"


def test_multi_progress_counts_the_whole_graph(client: Client, address: str, gate: Path) -> None:
    graph, last = layers(gate, "mp", 50, 3)
    future = client.get(graph, last, sync=False)
    until(lambda: "mpgate" in client.run_on_scheduler(f.resident), "it runs")
    seen: list[tuple[dict[str, int], dict[str, int]]] = []

    class Bar(MultiProgressBar):
        def _draw_bar(self, remaining: dict[str, int], all: dict[str, int], **kwargs: Any) -> None:
            seen.append((dict(remaining), dict(all)))
            gate.touch()

        def _draw_stop(self, **kwargs: Any) -> None:
            self.stopped = kwargs.get("status")

    bar = Bar([future.key], scheduler=address, interval="50ms")
    asyncio.run(asyncio.wait_for(bar.listen(), 60))
    whole = {"mpgate": 1, "mprow0": 50, "mprow1": 50, "mprow2": 50, "mpsum": 1}
    assert seen[0][1] == whole
    assert seen[0][0] == whole
    assert not any(seen[-1][0].values())


def test_progress_of_a_failing_graph_ends(client: Client, address: str, gate: Path) -> None:
    broken = client.submit(f.fail, client.submit(f.wait_for_file, str(gate), 1))
    last = client.submit(f.inc, broken)

    class Bar(ProgressBar):
        def _draw_bar(self, **kwargs: Any) -> None:
            gate.touch()

        def _draw_stop(self, **kwargs: Any) -> None:
            self.stopped = kwargs.get("status")

    bar = Bar([last.key], scheduler=address, interval="50ms")
    asyncio.run(asyncio.wait_for(bar.listen(), 60))
    assert bar.stopped == "error"


def test_group_counts_show_the_whole_graph_and_go_to_nothing(client: Client, gate: Path) -> None:
    graph, last = layers(gate, "gc", 60, 3)
    future = client.get(graph, last, sync=False)
    until(lambda: client.run_on_scheduler(f.group_counts).get("gcgate", {}).get("processing"), "it runs")
    counts = client.run_on_scheduler(f.group_counts)
    assert {name: sum(states.values()) for name, states in counts.items()} == {
        "gcgate": 1,
        "gcrow0": 60,
        "gcrow1": 60,
        "gcrow2": 60,
        "gcsum": 1,
    }
    assert counts["gcrow2"] == {"waiting": 60}
    prefixes = client.run_on_scheduler(f.prefix_counts)
    assert sum(prefixes["gcrow1"].values()) == 60
    gate.touch()
    assert future.result(timeout=30) == 60 * 4
    assert client.run_on_scheduler(f.group_negatives) == []
    counts = client.run_on_scheduler(f.group_counts)
    assert counts["gcsum"].get("memory") == 1
    # Of released tasks stock keeps those that somebody may need again; all others are forgotten.
    assert all(set(states) <= {"released", "forgotten", "memory"} for states in counts.values()), counts
    del future
    until(lambda: client.run_on_scheduler(f.group_counts) == {}, "groups are gone")
    prefixes = client.run_on_scheduler(f.prefix_counts)
    assert all(set(states) <= {"forgotten"} for name, states in prefixes.items() if name.startswith("gc"))


def test_one_span_for_a_long_chain_of_distinct_prefixes(client: Client, gate: Path) -> None:
    before = client.run_on_scheduler(f.spans)
    names = [f"link{chr(97 + i // 26)}{chr(97 + i % 26)}" for i in range(200)]
    graph: dict[str, tuple[object, ...]] = {names[0]: (f.wait_for_file, str(gate), 0)}
    graph.update({b: (f.inc, a) for a, b in itertools.pairwise(names)})
    future = client.get(graph, names[-1], sync=False)
    gate.touch()
    assert future.result(timeout=60) == 199
    assert client.run_on_scheduler(f.spans) - before <= 1


def test_holder_is_not_a_client(cluster: Cluster, client: Client, gate: Path) -> None:
    graph, last = layers(gate, "ho", 20, 3)
    future = client.get(graph, last, sync=False)
    until(lambda: "hogate" in client.run_on_scheduler(f.resident), "it runs")
    names = client.run_on_scheduler(f.clients)
    # Stock's own pseudo clients and those of workers stay.
    # What the Prometheus collector counts is this table; and heartbeats go through it.
    names = [n for n in names if not n.startswith(("queue-", "variable-", "published-", "Client-worker-"))]
    assert set(names) <= {client.id, "fire-and-forget"}, names
    assert client.scheduler_info()["type"] == "Scheduler"
    assert not any("taskdb" in c for c in client.run_on_scheduler(lambda dask_scheduler: list(dask_scheduler.client_comms)))
    gate.touch()
    assert future.result(timeout=30) == 20 * 4


def test_adaptive_target_sees_work_on_disk(client: Client, gate: Path) -> None:
    assert client.run_on_scheduler(f.adaptive_target) <= 2
    n = 600
    futures = client.map(f.wait_for_file, [str(gate)] * n, range(n), pure=False)
    until(lambda: client.run_on_scheduler(f.processing) >= 2, "some run")
    # Unknown durations count half a second each, and a target duration is five seconds: 60 workers of one thread.
    until(lambda: client.run_on_scheduler(f.adaptive_target) >= 50, "the target counts all of them")
    assert not client.run_on_scheduler(lambda dask_scheduler: dask_scheduler.check_idle())
    gate.touch()
    assert sum(client.gather(futures)) == sum(range(n))


def test_scheduler_is_not_idle_while_work_is_on_disk(client: Client, gate: Path) -> None:
    graph, last = layers(gate, "id", 20, 3)
    future = client.get(graph, last, sync=False)
    until(lambda: "idgate" in client.run_on_scheduler(f.resident), "it runs")
    assert client.run_on_scheduler(lambda dask_scheduler: dask_scheduler.check_idle()) is None
    gate.touch()
    assert future.result(timeout=30) == 80
    del future
    until(lambda: client.run_on_scheduler(lambda dask_scheduler: dask_scheduler.is_idle), "idle at the end")
    assert client.run_on_scheduler(lambda dask_scheduler: dask_scheduler._active_graph_updates) == 0


def test_one_computation_shows_a_graph(client: Client) -> None:
    future = client.get({"co-a": (f.inc, 1), "co-b": (f.inc, "co-a"), "co-c": (f.inc, "co-b")}, "co-c", sync=False)
    assert future.result(timeout=30) == 4
    groups = client.run_on_scheduler(lambda dask_scheduler: {g.name for g in dask_scheduler.computations[-1].groups})
    assert {"co-a", "co-b", "co-c"} & groups or groups, groups


def test_taskdb_status_and_explain(cluster: Cluster, client: Client, gate: Path) -> None:
    graph, last = layers(gate, "ex", 10, 2)
    future = client.get(graph, last, sync=False)
    until(lambda: "exgate" in client.run_on_scheduler(f.resident), "it runs")
    found = until(lambda: cluster.taskdb("tasks", "--prefix", "exrow1"), "the database lists them")
    assert "exrow1" in str(found)
    assert "exgate" in str(cluster.taskdb("explain", "exrow1-3"))
    gate.touch()
    assert future.result(timeout=30) == 30
