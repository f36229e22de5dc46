"""Where the stock scheduler fails its users. Each of these tests fails with TASKDB_TEST_STOCK=1."""

from __future__ import annotations

from pathlib import Path

import dask
import pytest
from distributed import Client, fire_and_forget
from distributed.client import wait

from tests.e2e import functions as f
from tests.support.cluster import until

pytestmark = pytest.mark.e2e

#: Stock's cancel is quadratic: so many siblings keep its scheduler, with `validate` as here, busy for some fifteen seconds.
SIBLINGS = 12_000
#: Levels at which stock's cancel raises RecursionError.
LEVELS = 2_000
#: Of what goes wrong now and then in stock, so many rounds.
ROUNDS = 12


def nothing_is_resident(client: Client) -> bool:
    return not client.run_on_scheduler(f.resident)


def test_cancel_of_many_siblings(client: Client, gate: Path) -> None:
    head = client.submit(f.wait_for_file, str(gate), 1)
    graph = {f"sibling-{i}": (f.add, head.key, i) for i in range(SIBLINGS)}
    futures = client.get(graph, list(graph), sync=False)
    until(lambda: f.all_known(client, [futures[-1].key]), "they have arrived")
    client.cancel(futures)
    # Stock's scheduler answers nobody meanwhile.
    assert client.submit(f.inc, 1).result(timeout=8) == 2
    assert {x.status for x in futures} == {"cancelled"}
    head.release()
    until(lambda: nothing_is_resident(client), "none is left in the scheduler")


def test_cancel_above_a_deep_chain(client: Client, gate: Path) -> None:
    other = client.submit(f.inc, 1, key="of-the-same-client")
    assert other.result(timeout=30) == 2
    graph: dict[str, tuple[object, ...]] = {"deep-0": (f.wait_for_file, str(gate), 0)}
    graph.update({f"deep-{i}": (f.inc, f"deep-{i - 1}") for i in range(1, LEVELS)})
    futures = client.get(graph, list(graph), sync=False)
    until(lambda: f.all_known(client, [futures[-1].key]), "it has arrived")
    client.cancel(futures[0])
    until(lambda: all(x.status == "cancelled" for x in futures), "the whole chain is told")
    assert other.status == "finished"
    assert client.submit(f.inc, 2).result(timeout=30) == 3


def test_names_of_what_was_just_cancelled(client: Client) -> None:
    """Submitted again at once: the new futures hold the new values."""
    keys = [f"name-{i}" for i in range(20)]
    # Futures that are let go of would end the wants of those with their names.
    every = []
    for number in range(ROUNDS):
        old = client.map(f.slow_inc, range(20), key=keys)
        wait(old[:1])
        client.cancel(old)
        new = client.map(f.add, range(20), [number * 100] * 20, key=keys)
        assert client.gather(new) == [number * 100 + i for i in range(20)]
        assert {x.status for x in old} == {"cancelled"}
        client.cancel(new)
        every += [old, new]


@pytest.mark.parametrize("chained", [False, True], ids=["plain", "chained"])
def test_a_client_that_closes_right_after_fire_and_forget(client: Client, address: str, tmp_path: Path, chained: bool) -> None:
    """With the client's preload. Without, what it has not sent when it closes its socket may be lost on the way, as in stock."""
    n = 250
    with dask.config.set({"distributed.client.preload": ["scheduler_adapter.client"]}), Client(address, set_as_default=False) as other:
        for i in range(n):
            first = [other.submit(f.inc, i, pure=False)] if chained else []
            fire_and_forget(other.submit(f.touch, str(tmp_path / f"{i}"), *first, pure=False))
        del first
    until(lambda: len(list(tmp_path.iterdir())) == n, "all of them run")


def test_resources_set_on_a_running_worker_wake_what_waits_for_them(client: Client) -> None:
    future = client.submit(f.inc, 1, resources={"LATE": 1})
    until(lambda: client.run_on_scheduler(f.resident).get(future.key) == "no-worker", "no worker has the resource")
    (worker, *_) = client.scheduler_info()["workers"]
    client.run(f.set_resources, workers=[worker], LATE=1)
    assert future.result(timeout=30) == 2
