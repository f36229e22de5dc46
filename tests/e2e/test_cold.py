"""Results that nothing resident needs leave the scheduler, and are there for whoever needs them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import dask
import pytest
from dask import delayed, persist
from dask.delayed import Delayed
from distributed import Client, Future, Queue, Variable, futures_of, wait

from tests.e2e import functions as f
from tests.support.cluster import Cluster, until

pytestmark = pytest.mark.e2e

#: Results of a test, and most that stay warm.
MANY, WARM = 300, 20
#: So many are paged in the default regime, too.
WINDOW = 60


@pytest.fixture(scope="module", params=[0, WINDOW], ids=["paged", "small window"])
def shared(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp(f"cold-{request.param}")
    with Cluster(folder, window=request.param, env={"DASK_TASKDB__WARM": str(WARM)}) as cluster:
        yield cluster


@pytest.fixture
def client(cluster: Cluster) -> Iterator[Client]:
    with Client(cluster.address) as client:
        yield client
        client.run_on_scheduler(f.validate_state)


def many(count: int = MANY) -> list[Delayed]:
    """Persisted, all done."""
    kept: tuple[Delayed, ...] = persist(*[delayed(f.inc)(i) for i in range(count)])
    wait(futures_of(kept))
    return list(kept)


def cool(client: Client, most: int = WARM + WINDOW) -> dict[str, Any]:
    """Wait until no more than so many results are resident."""
    return until(lambda: (found := client.run_on_scheduler(f.cold))["tasks"] <= most and found, f"at most {most} resident")


def copies(client: Client, futures: list[Future]) -> set[int]:
    """How many workers have each of them."""
    found = client.who_has(futures)
    assert set(found) == {future.key for future in futures}
    return set(map(len, found.values()))


def test_results_leave_the_scheduler_and_are_gathered(client: Client) -> None:
    kept = many()
    found = cool(client)
    assert found["cold"] >= MANY - WARM - WINDOW
    assert found["memory"] == MANY, "groups count them"
    client.run_on_scheduler(f.validate_state)
    futures = futures_of(kept)
    assert client.gather(futures) == [i + 1 for i in range(MANY)]
    assert client.gather(futures, direct=True) == [i + 1 for i in range(MANY)]
    assert client.run_on_scheduler(f.cold)["cold"] >= found["cold"], "gathering makes no tasks of them"


def test_a_graph_uses_them(client: Client) -> None:
    kept = many()
    cool(client)
    assert delayed(f.total)(kept).compute() == sum(range(1, MANY + 1))
    assert client.submit(f.add, futures_of(kept)[0], 10).result() == 11
    again = persist(*kept)  # the same keys
    assert client.gather(futures_of(again)) == [i + 1 for i in range(MANY)]
    cool(client)
    del kept
    assert client.gather(futures_of(again)) == [i + 1 for i in range(MANY)]


def test_what_is_asked_of_them(client: Client) -> None:
    kept = many()
    found = cool(client)
    keys = {future.key for future in futures_of(kept)}
    per_worker = client.has_what()
    assert {key for held in per_worker.values() for key in held} == keys
    assert sum(map(len, per_worker.values())) == MANY
    assert {key for address in per_worker for key in client.has_what([address])[address]} == keys
    assert set(client.who_has()) == keys
    assert copies(client, futures_of(kept)) == {1}
    sizes = client.nbytes(summary=False)
    assert set(sizes) == keys
    assert client.nbytes(list(keys)[:3], summary=False) == {key: sizes[key] for key in list(keys)[:3]}
    assert sum(client.nbytes().values()) == sum(sizes.values()) == sum(found["nbytes"].values())
    key = next(iter(keys))
    assert client.run_on_scheduler(f.task_status, keys=[key]) == {key: "memory"}
    assert client.call_stack(keys=[key]) == {}


def test_what_is_released_is_freed_on_workers(client: Client) -> None:
    kept = many()
    cool(client)
    half = kept[::2]
    del kept
    until(lambda: sum(map(len, client.run(f.held_keys).values())) == MANY // 2, "half is freed")
    assert client.gather(futures_of(half)) == [i + 1 for i in range(0, MANY, 2)]
    del half
    until(lambda: sum(map(len, client.run(f.held_keys).values())) == 0, "all is freed")
    until(lambda: set(client.run_on_scheduler(f.cold)["nbytes"].values()) == {0}, "no bytes are left")


def test_a_client_that_leaves_lets_go(cluster: Cluster, client: Client) -> None:
    with Client(cluster.address, set_as_default=False) as other:
        theirs = other.map(f.inc, range(MANY), key=[f"theirs-{i}" for i in range(MANY)])
        wait(theirs)
        cool(client)
        mine = client.map(f.inc, range(10), key=[f"theirs-{i}" for i in range(10)])
        wait(mine)
    until(lambda: sum(map(len, client.run(f.held_keys).values())) == 10, "all but ten are freed")
    assert client.gather(mine) == list(range(1, 11))


def test_another_client_wants_them(cluster: Cluster, client: Client) -> None:
    keys = [f"both-{i}" for i in range(MANY)]
    mine = client.map(f.inc, range(MANY), key=keys)
    wait(mine)
    cool(client)
    with Client(cluster.address, set_as_default=False) as other:
        theirs = other.map(f.inc, range(MANY), key=keys)
        assert other.gather(theirs) == [i + 1 for i in range(MANY)]
        mine.clear()
        cool(client)
        assert other.gather(theirs) == [i + 1 for i in range(MANY)]
        theirs.clear()


def test_published_and_passed_on(cluster: Cluster, client: Client) -> None:
    kept = many()
    cool(client)
    client.publish_dataset(kept, name="cold")
    futures = futures_of(kept)
    variable, queue = Variable("cold", client=client), Queue("cold", client=client)
    variable.set(futures[0], timeout=30)
    queue.put(futures[1], timeout=30)
    cool(client)
    kept.clear()
    futures.clear()
    with Client(cluster.address, set_as_default=False) as other:
        assert Variable("cold", client=other).get(timeout=30).result() == 1
        assert Queue("cold", client=other).get(timeout=30).result() == 2
        assert other.gather(futures_of(other.get_dataset("cold"))) == [i + 1 for i in range(MANY)]
        other.unpublish_dataset("cold")
    variable.delete()
    queue.close()


def test_cancel_and_retry(client: Client) -> None:
    kept = many()
    cool(client)
    futures = futures_of(kept)
    client.retry(futures[:5])
    assert client.gather(futures[:5]) == [1, 2, 3, 4, 5]
    client.cancel(futures[:5])
    until(lambda: {x.status for x in futures[:5]} == {"cancelled"}, "cancelled")
    until(lambda: sum(map(len, client.run(f.held_keys).values())) == MANY - 5, "five are freed")
    assert client.gather(futures[5:]) == [i + 1 for i in range(5, MANY)]
    kept.clear()
    futures.clear()


def test_replicate_and_rebalance(client: Client) -> None:
    kept = many()
    cool(client)
    futures = futures_of(kept)[:20]
    client.amm.stop()  # it takes back what is replicated
    try:
        client.replicate(futures)
        assert copies(client, futures) == {2}
        client.rebalance()
        client.rebalance(futures_of(kept)[20:40])
        assert client.gather(futures_of(kept)) == [i + 1 for i in range(MANY)]
    finally:
        client.amm.start()
    cool(client)
    del futures
    assert client.gather(futures_of(kept)) == [i + 1 for i in range(MANY)]


def small(folder: Path, window: int, **options: Any) -> Cluster:
    """One that few results stay warm in, for tests that end processes."""
    return Cluster(folder, window=window, env={"DASK_TASKDB__WARM": str(WARM)}, **options)


def counted(client: Client, runs: Path) -> list[Delayed]:
    """The same as `many`, cold; tasks count their runs."""
    kept = list(persist(*[delayed(f.count_run)(str(runs), i) for i in range(MANY)]))
    wait(futures_of(kept))
    cool(client)
    return kept


def check(client: Client, cluster: Cluster, kept: list[Delayed]) -> None:
    """All is there, also once it is cold again."""
    assert client.gather(futures_of(kept)) == list(range(MANY))
    cool(client)
    client.run_on_scheduler(f.validate_state)
    assert client.gather(futures_of(kept)) == list(range(MANY))
    assert cluster.faults() == []


@pytest.mark.parametrize("window", [0, WINDOW])
def test_a_retired_worker_hands_them_on(tmp_path: Path, window: int) -> None:
    runs = tmp_path / "runs"
    with small(tmp_path, window, workers=3) as cluster, Client(cluster.address) as client:
        client.wait_for_workers(3)
        kept = counted(client, runs)
        going = max(client.has_what().items(), key=lambda item: len(item[1]))[0]
        retired = client.retire_workers([going], close_workers=True)
        assert set(retired) == {going}
        assert going not in client.scheduler_info(n_workers=-1)["workers"]
        check(client, cluster, kept)
        assert len(runs.read_text().split()) == MANY, "nothing ran again"


@pytest.mark.parametrize("window", [0, WINDOW])
def test_a_lost_worker_is_computed_again(tmp_path: Path, window: int) -> None:
    runs = tmp_path / "runs"
    with small(tmp_path, window) as cluster, Client(cluster.address) as client:
        kept = counted(client, runs)
        lost = len(min(client.run(f.held_keys).items(), key=lambda item: len(item[1]))[1])
        cluster.kill(cluster.workers[-1])
        until(lambda: len(client.scheduler_info(n_workers=-1)["workers"]) == 1, "it is gone")
        check(client, cluster, kept)
        assert MANY + lost <= len(runs.read_text().split()) < 2 * MANY, "what was lost, and no more, ran again"


@pytest.mark.parametrize("window", [0, WINDOW])
def test_a_scheduler_that_died(tmp_path: Path, window: int) -> None:
    runs = tmp_path / "runs"
    with (
        dask.config.set({"distributed.client.preload": ["scheduler_adapter.client"]}),
        small(tmp_path, window, survive=True) as cluster,
        Client(cluster.address) as client,
    ):
        kept = counted(client, runs)
        cluster.restart_scheduler()
        until(lambda: len(client.scheduler_info()["workers"]) == 2, "the workers are back")
        check(client, cluster, kept)
        assert delayed(f.total)(kept).compute() == sum(range(MANY))
        assert len(runs.read_text().split()) == MANY, "nothing ran again"


@pytest.mark.parametrize("window", [0, WINDOW])
def test_a_daemon_that_died(tmp_path: Path, window: int) -> None:
    runs = tmp_path / "runs"
    with small(tmp_path, window) as cluster, Client(cluster.address) as client:
        kept = counted(client, runs)
        assert cluster.daemon is not None
        cluster.kill(cluster.daemon)
        cluster.start_again(cluster.daemon)
        assert delayed(f.total)(kept).compute() == sum(range(MANY))
        check(client, cluster, kept)
        assert len(runs.read_text().split()) == MANY, "nothing ran again"
