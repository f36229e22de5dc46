"""Graphs that cannot be run: one clear error in the client that sent them, the same as stock's where stock has one; others go on."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from dask._task_spec import Task, TaskRef
from distributed import Client

from tests.e2e import functions as f
from tests.support.cluster import Cluster, until

pytestmark = pytest.mark.e2e


@pytest.fixture(autouse=True)
def others_go_on(client: Client, gate: Path) -> Iterator[None]:
    """A graph that was there before finishes, and the next one too."""
    head = client.submit(f.wait_for_file, str(gate), 1)
    futures = [client.submit(f.add, head, i) for i in range(10)]
    yield
    gate.touch()
    assert client.gather(futures) == list(range(1, 11))
    assert client.submit(f.inc, 1).result(timeout=30) == 2


def test_cycle(client: Client) -> None:
    """Stock: RuntimeError of `dask.order`."""
    graph = {"cy-a": (f.inc, "cy-b"), "cy-b": (f.inc, "cy-c"), "cy-c": (f.inc, "cy-a")}
    with pytest.raises(RuntimeError, match=r"[Cc]ycle"):
        client.get(graph, "cy-a", sync=False).result(timeout=30)


def test_task_that_depends_on_itself(client: Client) -> None:
    with pytest.raises(Exception, match=r"(?i)cycle|itself"):
        client.get({"self": Task("self", f.inc, TaskRef("self"))}, "self", sync=False).result(timeout=30)


def test_dangling_dependency(client: Client) -> None:
    """A reference to a key nobody has. Stock: cancelled, for lost dependencies."""
    future = client.get({"dangling": Task("dangling", f.inc, TaskRef("nobody-has-it"))}, "dangling", sync=False)
    until(future.done, "it is over")
    assert future.status == "cancelled"


def test_released_dependency(client: Client) -> None:
    """A future that the client itself has let go of before."""
    gone = client.submit(f.inc, 1, key="gone")
    assert gone.result(timeout=30) == 2
    key = gone.key
    del gone
    until(lambda: key not in client.run_on_scheduler(f.resident), "it is gone")
    future = client.get({"late": Task("late", f.inc, TaskRef(key))}, "late", sync=False)
    until(future.done, "it is over")
    assert future.status == "cancelled"


@pytest.mark.parametrize("width", [1, 3000], ids=["small", "large"])
def test_key_too_long(cluster: Cluster, client: Client, width: int) -> None:
    graph: dict[str, Any] = {f"short-{i}": (f.inc, i) for i in range(width)}
    long = "k" * 70_000
    graph[long] = (f.total, list(graph))
    with Client(cluster.address) as mine:
        name = mine.id
        with pytest.raises(Exception, match="65,536") as caught:
            mine.get(graph, long, sync=False).result(timeout=60)
        assert "shorter" in str(caught.value)
    until(
        lambda: name not in client.run_on_scheduler(f.clients) or cluster.scheduler_log().count("Exception while handling op"),
        "it has left",
    )
    assert cluster.faults() == []
    assert name not in client.run_on_scheduler(f.clients)


@pytest.mark.parametrize("size", [10, 2 << 20], ids=["small", "large"])
def test_expression_that_cannot_be_unpickled(client: Client, size: int) -> None:
    """The same words as stock's, wherever the graph is read."""
    future = client.submit(f.first, b"x" * size, f.CannotBeUnpickled())
    with pytest.raises(RuntimeError, match="Error during deserialization of the task graph"):
        future.result(timeout=30)


def test_task_that_cannot_be_pickled(client: Client) -> None:
    """Fails in the client already, as in stock."""
    import threading

    with pytest.raises(TypeError, match=r"(?i)pickle|serialize"):
        client.submit(f.first, threading.Lock()).result(timeout=30)


def test_long_key_within_the_bound(client: Client) -> None:
    key = "k" * 60_000
    assert client.submit(f.inc, 1, key=key).result(timeout=30) == 2


@pytest.mark.parametrize("key", [("t", 1, ("n", 2.5)), 7, 2.5, ("x", -(2**63))], ids=str)
def test_odd_keys(client: Client, key: Any) -> None:
    graph = {key: (f.inc, 1), "odd-after": Task("odd-after", f.inc, TaskRef(key))}
    one, two = client.get(graph, [key, "odd-after"], sync=False)
    assert (one.result(timeout=30), two.result(timeout=30)) == (2, 3)
