"""Futures: submit, cancel, release, retry, errors, and the order in which a client's messages take effect."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest
from dask._task_spec import Task, TaskRef
from distributed import Client, fire_and_forget, worker_client
from distributed.client import FutureCancelledError, futures_of, wait

from tests.e2e import functions as f
from tests.support.cluster import Cluster, until

pytestmark = pytest.mark.e2e


def chain(name: str, length: int) -> dict[str, tuple[object, ...]]:
    graph: dict[str, tuple[object, ...]] = {f"{name}-0": (f.inc, 0)}
    graph.update({f"{name}-{i}": (f.inc, f"{name}-{i - 1}") for i in range(1, length)})
    return graph


def test_submit_map_gather(client: Client) -> None:
    futures = client.map(f.inc, range(200))
    assert client.gather(futures) == list(range(1, 201))
    assert client.submit(f.total, futures).result(timeout=30) == sum(range(1, 201))


def test_only_a_part_is_resident(client: Client, paged: bool) -> None:
    """A graph larger than the window never is in the scheduler as a whole."""
    if not paged:
        pytest.skip("this graph fits the window")
    states: list[int] = []
    future = client.get(
        {**{f"wide-{i}": (f.slow_inc, i, 0.002) for i in range(1500)}, "wide-sum": (f.total, [f"wide-{i}" for i in range(1500)])},
        "wide-sum",
        sync=False,
    )
    while not future.done():
        states.append(sum(s in ("waiting", "released", "queued") for s in client.run_on_scheduler(f.resident).values()))
    assert future.result() == sum(range(1, 1501))
    assert max(states) < 500, "held back tasks were resident"


def test_cancel_of_a_running_future_stops_it(client: Client, tmp_path: Path, gate: Path) -> None:
    started = tmp_path / "started"
    running = client.submit(f.mark_until, str(started), str(gate))
    after = client.submit(f.touch, str(tmp_path / "after"), running)
    until(started.exists, "the task runs")
    until(lambda: f.all_known(client, [after.key]), "both are there")
    running.cancel()
    until(lambda: running.status == "cancelled", "told cancelled")
    until(lambda: after.status == "cancelled", "the dependent is told too")
    with pytest.raises(FutureCancelledError):
        running.result(timeout=10)
    # Really stopped: the scheduler does not count it, and the worker drops it when it returns.
    until(lambda: not client.run_on_scheduler(f.resident), "it is not in the scheduler any more")
    gate.touch()
    until(lambda: not any(client.run(lambda dask_worker: list(dask_worker.state.tasks)).values()), "no worker holds it")
    assert not (tmp_path / "after").exists()


def test_a_client_that_takes_no_pickle(address: str, client: Client) -> None:
    with Client(address, set_as_default=False, serializers=["dask", "msgpack"]) as other:
        assert other.submit(f.inc, 1).result(timeout=30) == 2
        function = other.submit(lambda: f.inc)
        with pytest.raises(TypeError, match="serialize"):
            other.gather(function, direct=False)


def test_cancelled_keys_stand_in_the_schedulers_log(client: Client, gate: Path) -> None:
    running = client.submit(f.wait_for_file, str(gate))
    after = client.submit(f.inc, running)
    until(lambda: f.all_known(client, [after.key]), "both have arrived")
    running.cancel()
    until(lambda: after.status == "cancelled", "told")
    log = "\n".join(line for _, line in client.get_scheduler_logs())
    assert f"Client {client.id} requests to cancel 1 keys" in log
    assert f"Scheduler cancels key {running.key}" in log
    assert f"Scheduler cancels key {after.key}" in log


def test_cancel_takes_along_a_graph_that_is_still_arriving(client: Client, tmp_path: Path, gate: Path) -> None:
    """It depends on what is cancelled, and was sent before. A dependent that runs and holds its result would be a surprise."""
    started = tmp_path / "started"
    running = client.submit(f.mark_until, str(started), str(gate))
    until(started.exists, "the task runs")
    n = 3000
    graph = {f"arriving-{i}": Task(f"arriving-{i}", f.add, TaskRef(running.key), i) for i in range(n)}
    futures = client.get(graph, list(graph), sync=False)
    running.cancel()
    until(lambda: running.status == "cancelled", "told cancelled")
    until(lambda: all(x.status == "cancelled" for x in futures), "the dependents are told too", 10)


def test_cancel_of_a_future_on_disk(client: Client, tmp_path: Path, gate: Path) -> None:
    head = client.submit(f.wait_for_file, str(gate), 1)
    futures = [client.submit(f.add, head, i) for i in range(5)]
    last = client.submit(f.total, futures)
    client.cancel(futures[2])
    until(lambda: futures[2].status == "cancelled" and last.status == "cancelled", "it and its dependent are cancelled")
    assert futures[1].status == "pending"
    gate.touch()
    assert client.gather([x for i, x in enumerate(futures) if i != 2]) == [1, 2, 4, 5]


def test_cancelled_work_can_be_submitted_again(client: Client, gate: Path) -> None:
    future = client.submit(f.wait_for_file, str(gate), 7, key="again")
    client.cancel(future)
    until(lambda: future.status == "cancelled", "cancelled")
    # A client takes a late word of the old one for the new one, also with stock: so hear all of it.
    until(lambda: not client.run_on_scheduler(f.resident), "forgotten")
    assert client.submit(f.inc, -1).result(timeout=30) == 0
    # The same function: a worker that still runs the old call takes it for the new one.
    again = client.submit(f.wait_for_file, str(gate), 7, key="again")
    gate.touch()
    assert again.result(timeout=30) == 7


def test_cancel_without_force_leaves_others_their_future(client: Client, address: str, gate: Path) -> None:
    mine = client.submit(f.wait_for_file, str(gate), 3, key="shared-cancel")
    with Client(address) as other:
        theirs = other.submit(f.wait_for_file, str(gate), 3, key="shared-cancel")
        until(lambda: len(_wanting(client, "shared-cancel")) == 2, "both want it")
        client.cancel(mine)
        until(lambda: mine.status == "cancelled", "cancelled")
        gate.touch()
        assert theirs.result(timeout=30) == 3


def _wanting(client: Client, key: str) -> list[str]:
    return client.run_on_scheduler(
        lambda dask_scheduler: [
            c.client_key for c in (dask_scheduler.tasks[key].who_wants if key in dask_scheduler.tasks else ()) if c.client_key != "taskdb"
        ]
    )


def test_release_right_after_submit(client: Client, tmp_path: Path) -> None:
    """The want of the graph must not survive a release that was sent after it."""
    for i in range(30):
        client.submit(f.count_run, str(tmp_path / "runs"), i).release()
    assert client.submit(f.inc, 1).result(timeout=30) == 2
    until(lambda: not client.run_on_scheduler(f.resident) or list(client.run_on_scheduler(f.resident).values()) == [], "all gone")


def test_second_graph_on_top_of_a_large_first(client: Client) -> None:
    """Sent at once after a graph that takes long to take in: it must see the first graph's keys."""
    n = 3000
    first = client.map(f.inc, range(n), key=[f"first-{i}" for i in range(n)])
    second = client.submit(f.total, first[-50:])
    third = client.submit(f.inc, second)
    assert third.result(timeout=60) == sum(range(n - 49, n + 1)) + 1
    del second, third


def test_two_graphs_share_keys(client: Client, tmp_path: Path, gate: Path) -> None:
    runs = tmp_path / "runs"
    common = {f"common-{i}": (f.count_run, str(runs), i) for i in range(20)}
    held = {"held": (f.wait_for_file, str(gate), 0)}
    one = client.get({**held, **common, "one": (f.total, [*common, "held"])}, "one", sync=False)
    two = client.get({**held, **common, "two": (f.total, [*common, "held"])}, "two", sync=False)
    gate.touch()
    assert one.result(timeout=30) == two.result(timeout=30) == sum(range(20))
    assert sorted(map(int, runs.read_text().split())) == list(range(20)), "each runs once"


def test_two_clients_share_keys(client: Client, address: str, tmp_path: Path, gate: Path) -> None:
    runs = tmp_path / "runs"
    with Client(address) as other:
        mine = client.map(f.count_run, [str(runs)] * 50, range(50), pure=True)
        theirs = other.map(f.count_run, [str(runs)] * 50, range(50), pure=True)
        assert client.gather(mine) == other.gather(theirs)
        assert len(runs.read_text().split()) == 50
        del mine
        until(lambda: not client.futures, "released")
        assert other.gather(theirs) == list(range(50)), "still wanted by the other"
        del theirs


def test_a_result_stays_while_anybody_wants_it(client: Client, address: str) -> None:
    mine = client.submit(f.inc, 41, key="stay")
    assert mine.result(timeout=30) == 42
    with Client(address) as other:
        theirs = other.submit(f.inc, 41, key="stay")
        assert theirs.result(timeout=30) == 42
    assert mine.result(timeout=30) == 42
    assert client.submit(f.inc, mine).result(timeout=30) == 43


def test_error_reaches_the_client_with_its_traceback(client: Client) -> None:
    future = client.submit(f.fail, 3)
    with pytest.raises(ValueError, match="bad input 3") as caught:
        future.result(timeout=30)
    assert any(entry.name == "fail" for entry in caught.traceback)


def test_errors_of_dependents_that_never_were_resident(client: Client, gate: Path) -> None:
    """They fail on disk; their client must hear of each."""
    graph: dict[str, tuple[object, ...]] = {"gate": (f.wait_for_file, str(gate), 1), "broken": (f.fail, "gate")}
    graph.update({f"after-{i}": (f.add, "broken", i) for i in range(300)})
    graph.update({f"later-{i}": (f.inc, f"after-{i}") for i in range(300)})
    futures = client.get(graph, ["broken", *[f"later-{i}" for i in range(300)]], sync=False)
    gate.touch()
    until(lambda: all(x.status == "error" for x in futures), "all told")
    for future in (futures[0], futures[1], futures[300]):
        with pytest.raises(ValueError, match="bad input 1"):
            future.result(timeout=10)


def test_want_of_an_erred_task_on_disk(client: Client, address: str) -> None:
    """A second client that submits it hears at once, and it does not run again."""
    first = client.submit(f.fail, 9, key="erred-shared")
    until(lambda: first.status == "error", "failed")
    with Client(address) as other:
        second = other.submit(f.fail, 9, key="erred-shared")
        until(lambda: second.status == "error", "the second client is told")


@pytest.mark.parametrize("width", [1, 4])
def test_retry_of_a_failed_task_with_its_dependents(client: Client, tmp_path: Path, paged: bool, width: int) -> None:
    if width > 1 and not paged:
        pytest.skip("stock, which does it for resident graphs, fails its own validation here")
    allow = tmp_path / "allow"
    failed = client.submit(f.fail_unless, str(allow), 5)
    middle = [client.submit(f.add, failed, i) for i in range(width)]
    last = client.submit(f.total, middle)
    until(lambda: last.status == "error", "failed to the end")
    allow.touch()
    last.retry()
    assert last.result(timeout=30) == sum(5 + i for i in range(width))
    assert client.gather(middle) == [5 + i for i in range(width)]
    assert failed.result(timeout=30) == 5


def test_retry_of_the_failed_task_itself(client: Client, tmp_path: Path) -> None:
    allow = tmp_path / "allow"
    failed = client.submit(f.fail_unless, str(allow), 5)
    after = client.submit(f.inc, failed)
    until(lambda: after.status == "error", "failed")
    allow.touch()
    failed.retry()
    assert failed.result(timeout=30) == 5
    after.retry()
    assert after.result(timeout=30) == 6


@pytest.mark.parametrize("at_once", [False, True], ids=["later", "at-once"])
def test_fire_and_forget_runs_to_its_end(client: Client, address: str, tmp_path: Path, gate: Path, at_once: bool) -> None:
    """Also if its client leaves while it arrives."""
    done = tmp_path / "done"
    with Client(address) as other:
        head = other.submit(f.wait_for_file, str(gate), 1)
        last = other.submit(f.touch, str(done), head)
        fire_and_forget(last)
        key = last.key
        del head, last
        if not at_once:
            until(lambda: f.all_known(client, [key]), "it is there")
    gate.touch()
    until(done.exists, "it ran although its client is gone", 10)
    until(lambda: not client.run_on_scheduler(f.resident), "and is forgotten")


def test_fire_and_forget_of_a_failing_task_is_forgotten(client: Client) -> None:
    fire_and_forget(client.submit(f.fail, 1, key="fire-fail"))
    until(lambda: not client.run_on_scheduler(f.resident), "forgotten")


def test_actor(client: Client) -> None:
    counter = client.submit(f.Counter, actor=True).result(timeout=30)
    assert [counter.increment().result(timeout=30) for _ in range(3)] == [1, 2, 3]
    assert counter.n == 3


def test_scatter_and_graphs_that_use_it(client: Client) -> None:
    data = client.scatter(list(range(100)))
    assert client.submit(f.total, data).result(timeout=30) == sum(range(100))
    named = client.scatter({"x": 1, "y": 2})
    assert client.submit(f.add, named["x"], named["y"]).result(timeout=30) == 3
    (copied,) = client.scatter([5], broadcast=True)
    futures = [client.submit(f.add, copied, i) for i in range(20)]
    del copied
    assert client.gather(futures) == [5 + i for i in range(20)]


def test_worker_client_and_nested_submission(client: Client) -> None:
    def parent(n: int) -> int:
        with worker_client(timeout=60) as inner:
            return sum(inner.gather(inner.map(f.inc, range(n))))

    assert client.submit(parent, 40).result(timeout=60) == sum(range(1, 41))

    def fib(n: int) -> int:
        if n < 2:
            return n
        with worker_client(timeout=60) as inner:
            return sum(inner.gather([inner.submit(fib, n - 1), inner.submit(fib, n - 2)]))

    assert client.submit(fib, 5).result(timeout=60) == 5


def test_as_completed_in_small_pieces(client: Client) -> None:
    from distributed import as_completed

    seq = as_completed([client.submit(f.inc, i) for i in range(5)])
    results = []
    for future in seq:
        results.append(future.result())
        if len(results) < 40:
            seq.add(client.submit(f.inc, 100 + len(results)))
    assert len(results) >= 40


def test_cancel_overtakes_a_large_submission(cluster: Cluster, client: Client) -> None:
    """The client's other messages wait behind the graph; its cancel does not."""
    n = 20_000
    futures = client.map(f.slow_inc, range(n), [0.01] * n, key=[f"overtake-{i}" for i in range(n)], batch_size=n)
    client.cancel(futures)
    until(lambda: all(x.status == "cancelled" for x in futures), "all cancelled", 20)
    until(lambda: not client.run_on_scheduler(f.resident), "none is left in the scheduler", 30)
    assert client.submit(f.inc, 1).result(timeout=30) == 2


def test_cancel_of_a_graph_that_is_on_its_way_to_the_database(client: Client) -> None:
    """Held whole: its tasks are in the scheduler at once, and told run by run."""
    n = 8000
    futures = client.map(f.slow_inc, range(n), pure=False, batch_size=n)
    until(lambda: f.all_known(client, [futures[-1].key]), "they are there")
    client.cancel(futures)
    until(lambda: not client.run_on_scheduler(f.resident), "none is left in the scheduler")
    assert client.submit(f.inc, 1).result(timeout=30) == 2


def test_disconnect_overtakes_a_large_submission(client: Client, address: str) -> None:
    n = 20_000
    with Client(address) as other:
        name = other.id
        futures = other.map(f.slow_inc, range(n), [0.01] * n, key=[f"leaving-{i}" for i in range(n)], batch_size=n)
        started = time.monotonic()
    until(lambda: name not in client.run_on_scheduler(f.clients), "the client is gone")
    assert time.monotonic() - started < 30
    del futures
    until(lambda: not client.run_on_scheduler(f.resident), "its graph is gone")


def test_other_clients_are_served_while_a_graph_arrives(client: Client, address: str) -> None:
    n = 30_000
    graph = {f"big-{i}": (f.inc, i) for i in range(n)}
    graph["big-sum"] = (f.add, "big-0", f"big-{n - 1}")
    with Client(address) as other:
        assert other.submit(f.inc, 1).result(timeout=30) == 2
        future = client.get(graph, "big-sum", sync=False)
        slowest = 0.0
        while not future.done():
            start = time.monotonic()
            assert other.submit(f.inc, start).result(timeout=30) == start + 1
            slowest = max(slowest, time.monotonic() - start)
        assert future.result() == n + 1
    assert slowest < 10


def test_wait_and_timeouts(client: Client, gate: Path) -> None:
    future = client.submit(f.wait_for_file, str(gate), 1)
    with pytest.raises(TimeoutError):
        future.result(timeout=0.3)
    threading.Timer(0.2, gate.touch).start()
    wait([future], timeout=30)
    assert futures_of(future)[0].result() == 1
