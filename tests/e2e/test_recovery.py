"""A scheduler that was killed and started again goes on where the one before ended. Tasks count their runs: that is the measure."""

from __future__ import annotations

import os
import signal
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import dask
import pytest
from distributed import Client, Future, KilledWorker, wait

from taskdb.wire.reader import Client as Reader
from tests.e2e import functions as f
from tests.support.cluster import PATIENCE_SECONDS, Cluster, free_port, until

pytestmark = pytest.mark.e2e


@pytest.fixture(autouse=True)
def our_preload() -> Iterator[None]:
    """Clients made here outlive their scheduler."""
    with dask.config.set({"distributed.client.preload": ["scheduler_adapter.client"]}):
        yield


def runs(path: Path) -> Counter[str]:
    return Counter(path.read_text().split()) if path.exists() else Counter()


def twice(path: Path) -> dict[str, int]:
    return {x: n for x, n in runs(path).items() if n > 1}


def results_of(tmp_path: Path, client: Client, n: int, release: Path) -> tuple[list[Future], list[Future], Future]:
    """Finished tasks, running ones that wait for a file, and one that needs all of them."""
    done = [client.submit(f.count_run, str(tmp_path / "runs"), i, key=f"done-{i}") for i in range(n)]
    wait(done, timeout=PATIENCE_SECONDS)
    running = [
        client.submit(f.run_until, str(tmp_path / "runs"), f"r{i}", str(tmp_path / f"started-{i}"), str(release), key=f"running-{i}")
        for i in range(2)
    ]
    last = client.submit(f.total, [*done, *running], key="last")
    for i in range(2):
        until(lambda i=i: (tmp_path / f"started-{i}").exists(), "the tasks run")
    return done, running, last


def test_results_are_kept_and_running_tasks_adopted(tmp_path: Path, window: int | None) -> None:
    release = tmp_path / "release"
    with Cluster(tmp_path, window=window, survive=True) as cluster, Client(cluster.address) as client:
        done, running, last = results_of(tmp_path, client, 30, release)
        cluster.restart_scheduler()
        assert [x.status for x in running] == ["pending", "pending"]
        until(lambda: len(client.scheduler_info()["workers"]) == 2, "the workers are back")
        release.touch()
        assert last.result(timeout=60) == sum(range(30)) + 2
        assert client.gather(done) == list(range(30))
        assert client.submit(f.inc, last).result(timeout=30) == sum(range(30)) + 3
        assert twice(tmp_path / "runs") == {}
        assert cluster.faults() == []
        del done, running, last
        nothing_left(cluster, client)


def nothing_left(cluster: Cluster, client: Client) -> None:
    until(lambda: not client.run_on_scheduler(f.left_behind), "nothing is left in the scheduler")
    with Reader(cluster.url) as reader:
        until(lambda: not reader.list_tasks(limit=5).tasks, "nothing is left in the database")


def test_a_graph_in_the_middle(tmp_path: Path, window: int | None) -> None:
    """Rows of a graph that is larger than what is resident, killed again and again."""
    n = 400
    with Cluster(tmp_path, window=window, survive=True) as cluster, Client(cluster.address) as client:
        graph: dict[str, tuple[Any, ...]] = {}
        for i in range(n):
            graph[f"a-{i}"] = (f.count_run, str(tmp_path / "runs"), i)
            graph[f"b-{i}"] = (f.slow_inc, f"a-{i}", 0.02)
        graph["sum"] = (f.total, [f"b-{i}" for i in range(n)])
        future = client.get(graph, "sum", sync=False)
        for part in (0.2, 0.5):
            until(lambda part=part: len(runs(tmp_path / "runs")) > part * n, "some are done")
            cluster.restart_scheduler()
        assert future.result(timeout=120) == sum(range(1, n + 1))
        assert twice(tmp_path / "runs") == {}
        assert cluster.faults() == []
        del future
        nothing_left(cluster, client)


def test_inputs_of_what_is_done_do_not_run_again(tmp_path: Path) -> None:
    """Nothing of it is on disk: all is said again, inputs first, and the workers have only what came of them."""
    n, path = 20, tmp_path / "runs"
    with Cluster(tmp_path, survive=True) as cluster, Client(cluster.address) as client:
        assert cluster.daemon is not None
        cluster.kill(cluster.daemon)
        head = client.submit(f.count_run, str(path), 100, key="head")
        after = [client.submit(f.count_run, str(path), i, head, key=f"after-{i}") for i in range(n)]
        wait(after, timeout=PATIENCE_SECONDS)
        del head
        until(lambda: "head" not in str(client.run(lambda dask_worker: list(dask_worker.data))), "it is let go of")
        cluster.kill(cluster.scheduler)
        cluster.start_daemon()
        cluster.start_scheduler()
        assert client.gather(after) == list(range(n))
        assert twice(path) == {}
        assert cluster.faults() == []
        del after
        nothing_left(cluster, client)


def test_stock_workers_compute_it_again(tmp_path: Path, window: int | None) -> None:
    with Cluster(tmp_path, window=window) as cluster, Client(cluster.address) as client:
        futures = client.map(f.inc, range(50))
        wait(futures, timeout=PATIENCE_SECONDS)
        total = client.submit(f.total, futures)
        assert total.result(timeout=30) == 1275
        cluster.restart_scheduler()
        cluster.start_worker(wait=False)
        assert client.submit(f.inc, total).result(timeout=60) == 1276
        assert client.gather(futures) == list(range(1, 51))
        assert cluster.faults() == []


def test_a_worker_dies_with_the_scheduler(tmp_path: Path, window: int | None) -> None:
    """What it held runs again; what the other holds does not. Nobody comes in its place: it is waited for, not for ever."""
    env = {"DASK_TASKDB__WORKERS_RETURN": "8s"}
    with Cluster(tmp_path, window=window, survive=True, env=env) as cluster, Client(cluster.address) as client:
        futures = [client.submit(f.count_run, str(tmp_path / "runs"), i) for i in range(40)]
        wait(futures, timeout=PATIENCE_SECONDS)
        held = client.has_what()
        _, lost = sorted(held, key=lambda worker: len(held[worker]), reverse=True)
        pid = client.run(os.getpid)[lost]
        cluster.kill(cluster.scheduler)
        cluster.kill(next(w for w in cluster.workers if w.pid == pid))
        cluster.start_scheduler()
        assert client.submit(f.total, futures).result(timeout=60) == sum(range(40))
        again = twice(tmp_path / "runs")
        assert set(again) <= {str(client.gather(Future(key, client))) for key in held[lost]}
        assert cluster.faults() == []


def test_everything_is_killed_at_once(tmp_path: Path, window: int | None) -> None:
    with Cluster(tmp_path, window=window, survive=True) as cluster, Client(cluster.address) as client:
        future = client.get(
            {**{f"a-{i}": (f.slow_inc, i, 0.05) for i in range(60)}, "sum": (f.total, [f"a-{i}" for i in range(60)])}, "sum", sync=False
        )
        until(lambda: client.run_on_scheduler(lambda dask_scheduler: dask_scheduler.taskdb.pager.session.last_seq) > 5, "some is told")
        assert cluster.daemon is not None
        for process in (cluster.scheduler, cluster.daemon, *cluster.workers):
            cluster.kill(process)
        cluster.start_daemon()
        cluster.start_scheduler()
        for _ in range(2):
            cluster.start_worker(wait=False)
        client.run_on_scheduler(f.wait_for_workers_no_more)
        assert future.result(timeout=60) == sum(range(1, 61))
        assert cluster.faults() == []


def test_scattered_data_is_kept(tmp_path: Path, window: int | None) -> None:
    with Cluster(tmp_path, window=window, survive=True) as cluster, Client(cluster.address) as client:
        data = client.scatter(list(range(10)))
        used = client.submit(f.total, data)
        assert used.result(timeout=30) == 45
        cluster.restart_scheduler()
        assert client.gather(data) == list(range(10))
        assert client.submit(f.add, data[3], used).result(timeout=60) == 48
        assert cluster.faults() == []


def test_what_is_scattered_meanwhile_is_kept(tmp_path: Path, window: int | None) -> None:
    """What the client says it wants when it comes back replaces all; a scatter that waited for the scheduler comes after that."""
    with Cluster(tmp_path, window=window, survive=True) as cluster, Client(cluster.address) as client:
        futures = client.map(f.inc, range(200))
        wait(futures, timeout=PATIENCE_SECONDS)
        cluster.kill(cluster.scheduler)
        until(lambda: client.status == "connecting", "the client notices")
        scattering = ThreadPoolExecutor(1).submit(client.scatter, list(range(10)), hash=False)
        cluster.start_scheduler()
        data = scattering.result(timeout=60)
        assert client.submit(f.total, data).result(timeout=60) == 45


def test_scattered_data_that_is_lost_is_said_to_be(tmp_path: Path, window: int | None) -> None:
    with Cluster(tmp_path, window=window) as cluster, Client(cluster.address) as client:
        (data,) = client.scatter([41])
        gate = tmp_path / "gate"
        uses = client.submit(f.add, data, client.submit(f.wait_for_file, str(gate), 1))
        cluster.restart_scheduler()
        cluster.start_worker(wait=False)
        gate.touch()
        until(lambda: uses.status in ("cancelled", "lost", "error"), "who needs it hears of it")


def test_a_failure_is_kept(tmp_path: Path, window: int | None) -> None:
    with Cluster(tmp_path, window=window, survive=True) as cluster, Client(cluster.address) as client:
        bad = client.submit(f.fail, 3)
        after = client.submit(f.inc, bad)
        wait([bad, after], timeout=30)
        cluster.restart_scheduler()
        with pytest.raises(ValueError, match="bad input 3"):
            client.submit(f.inc, after).result(timeout=60)
        assert cluster.faults() == []


def test_a_task_that_fails_while_there_is_no_scheduler(tmp_path: Path, window: int | None) -> None:
    release = tmp_path / "release"
    with Cluster(tmp_path, window=window, survive=True) as cluster, Client(cluster.address) as client:
        bad = client.submit(f.fail_when, str(tmp_path / "started"), str(release))
        until((tmp_path / "started").exists, "it runs")
        cluster.kill(cluster.scheduler)
        release.touch()
        until((tmp_path / "started.failed").exists, "it has failed")
        cluster.start_scheduler()
        with pytest.raises(ValueError, match="at last"):
            bad.result(timeout=60)


def test_a_failure_that_is_not_on_disk_is_taken_over(tmp_path: Path, window: int | None) -> None:
    """What it was computed from has been let go of, and does not run again."""
    path, release = tmp_path / "runs", tmp_path / "release"
    with Cluster(tmp_path, window=window, survive=True) as cluster, Client(cluster.address) as client:
        assert cluster.daemon is not None
        head = client.submit(f.count_run, str(path), 1, key="head")
        bad = client.submit(f.fail_when, str(tmp_path / "started"), str(release), head, key="bad")
        after = client.submit(f.inc, bad)
        until((tmp_path / "started").exists, "it runs")
        del head
        client.run_on_scheduler(f.told_all)
        with Reader(cluster.url) as reader:
            until(lambda: len(reader.list_tasks(limit=5).tasks) == 3, "the graph is on disk")
        cluster.kill(cluster.daemon)
        release.touch()
        until(lambda: after.status == "error", "it has failed")
        if window is None:  # of what is paged only the database says that it is not needed
            until(lambda: "head" not in str(client.run(lambda dask_worker: list(dask_worker.data))), "its input is let go of")
        cluster.kill(cluster.scheduler)
        cluster.start_daemon()
        cluster.start_scheduler()
        with pytest.raises(ValueError, match="at last"):
            client.submit(f.inc, after).result(timeout=60)
        assert twice(path) == {}
        assert cluster.faults() == []


def test_deaths_of_workers_count_across_restarts(tmp_path: Path, window: int | None) -> None:
    """A task that kills every worker is given up after the allowed failures, as in stock, whoever was the scheduler meanwhile."""
    env = {"DASK_DISTRIBUTED__SCHEDULER__ALLOWED_FAILURES": "2", "DASK_TASKDB__WORKERS_RETURN": "1s"}
    with Cluster(tmp_path, window=window, survive=True, env=env) as cluster, Client(cluster.address) as client:
        killer = client.submit(f.die_always, str(tmp_path / "died"))
        until(lambda: len(runs(tmp_path / "died")) == 2, "both workers died of it")
        suspicious = "lambda dask_scheduler: max((ts.suspicious for ts in dask_scheduler.tasks.values()), default=0)"
        until(lambda: client.run_on_scheduler(eval(suspicious)) == 2, "that is counted")
        client.run_on_scheduler(f.told_all)
        cluster.restart_scheduler()
        cluster.start_worker(wait=False)
        with pytest.raises(KilledWorker):
            killer.result(timeout=60)
        assert runs(tmp_path / "died").total() == 3


def test_deaths_of_workers_count_though_an_input_is_lost_with_them(tmp_path: Path, window: int | None) -> None:
    """The task leaves the scheduler then, and comes again."""
    env = {"DASK_DISTRIBUTED__SCHEDULER__ALLOWED_FAILURES": "2"}
    with Cluster(tmp_path, window=window, workers=1, worker_args=(("--nanny",),), env=env) as cluster, Client(cluster.address) as client:
        killer = client.submit(f.die_always, str(tmp_path / "died"), client.submit(f.inc, 1))
        with pytest.raises(KilledWorker):
            killer.result(timeout=60)
        assert runs(tmp_path / "died").total() == 3
        assert cluster.faults() == []


def test_a_shuffle_begins_anew(tmp_path: Path, window: int | None) -> None:
    pd = pytest.importorskip("pandas")
    dd = pytest.importorskip("dask.dataframe")
    with (
        dask.config.set({"dataframe.shuffle.method": "p2p", "dataframe.convert-string": False}),
        Cluster(tmp_path, window=window, survive=True) as cluster,
        Client(cluster.address) as client,
    ):
        frame = dd.from_pandas(pd.DataFrame({"a": range(2000), "b": [i % 17 for i in range(2000)]}), npartitions=20)
        frame = frame.map_partitions(f.slow_identity, 0.1, meta=frame._meta)
        shuffled = frame.shuffle("b").map_partitions(f.slow_identity, 0.1, meta=frame._meta)
        future = client.compute(shuffled.a.sum() + shuffled.b.sum())
        until(lambda: client.run_on_scheduler(f.shuffle_has_begun), "the shuffle has begun")
        cluster.restart_scheduler()
        assert future.result(timeout=120) == sum(range(2000)) + sum(i % 17 for i in range(2000))
        assert cluster.faults() == []


def test_two_schedulers_on_one_store(tmp_path: Path) -> None:
    """The later one wins; the earlier one says so and ends."""
    with Cluster(tmp_path, survive=True) as cluster:
        first = cluster.scheduler
        cluster.processes.start("second", cluster.scheduler_command(free_port()))
        until(lambda: first.popen.poll() is not None, "the first ends")
        assert "this scheduler stops" in first.log.read_text()
        assert "began epoch 2" in first.log.read_text()


def test_a_scheduler_that_is_stopped_leaves_its_workers_to_the_next(tmp_path: Path, window: int | None) -> None:
    with Cluster(tmp_path, window=window, survive=True) as cluster, Client(cluster.address) as client:
        futures = [client.submit(f.count_run, str(tmp_path / "runs"), i) for i in range(20)]
        wait(futures, timeout=PATIENCE_SECONDS)
        cluster.scheduler.popen.send_signal(signal.SIGTERM)
        assert cluster.scheduler.popen.wait(PATIENCE_SECONDS) == 0
        cluster.start_scheduler()
        assert client.submit(f.total, futures).result(timeout=60) == sum(range(20))
        assert twice(tmp_path / "runs") == {}


def test_workers_under_nannies(tmp_path: Path, window: int | None) -> None:
    with (
        Cluster(tmp_path, window=window, survive=True, worker_args=(("--nanny",), ("--nanny",))) as cluster,
        Client(cluster.address) as client,
    ):
        futures = [client.submit(f.count_run, str(tmp_path / "runs"), i) for i in range(20)]
        wait(futures, timeout=PATIENCE_SECONDS)
        cluster.restart_scheduler()
        assert client.submit(f.total, futures).result(timeout=60) == sum(range(20))
        assert twice(tmp_path / "runs") == {}


def test_an_embedded_daemon_with_a_folder(tmp_path: Path, window: int | None) -> None:
    with Cluster(tmp_path, window=window, survive=True, embedded=True, data=True) as cluster, Client(cluster.address) as client:
        futures = [client.submit(f.count_run, str(tmp_path / "runs"), i) for i in range(20)]
        wait(futures, timeout=PATIENCE_SECONDS)
        cluster.restart_scheduler()
        assert client.submit(f.total, futures).result(timeout=60) == sum(range(20))
        assert twice(tmp_path / "runs") == {}


def test_a_worker_whose_name_was_taken_ends(tmp_path: Path) -> None:
    with Cluster(tmp_path, survive=True, workers=1, worker_args=(("--name", "a"),)) as cluster, Client(cluster.address) as client:
        worker = cluster.workers[0]
        worker.popen.send_signal(signal.SIGSTOP)
        try:
            cluster.restart_scheduler()
            cluster.start_worker("--name", "a")
        finally:
            worker.popen.send_signal(signal.SIGCONT)
        until(lambda: worker.popen.poll() is not None, "the other one ends")
        assert "name taken, a" in worker.log.read_text()
        assert client.submit(f.inc, 1).result(timeout=30) == 2


def test_results_nobody_knows_are_let_go_of(tmp_path: Path) -> None:
    """The store is another one: what the workers hold means nothing to it."""
    with Cluster(tmp_path, survive=True) as cluster, Client(cluster.address) as client:
        futures = client.map(f.inc, range(10))
        wait(futures, timeout=PATIENCE_SECONDS)
        until(lambda: not len(client.taskdb.outbox), "the graph is acknowledged; else it would be said again")
        assert cluster.daemon is not None
        cluster.kill(cluster.scheduler)
        cluster.kill(cluster.daemon)
        (tmp_path / "data").rename(tmp_path / "elsewhere")
        cluster.start_daemon()
        cluster.start_scheduler()
        until(lambda: len(client.scheduler_info()["workers"]) == 2, "the workers are back")
        until(lambda: sum(map(len, client.run(f.held_keys).values())) == 0, "they have let go")
        assert all("another store" in worker.log.read_text() for worker in cluster.workers)
        until(lambda: all(x.status == "cancelled" for x in futures), "their client hears of it")


def test_the_first_task_does_not_wait_for_the_graph(tmp_path: Path) -> None:
    """What is on disk and needs nothing that is lost is leased while the workers are still waited for."""
    with Cluster(tmp_path, survive=True, window=0) as cluster, Client(cluster.address) as client:
        gate = tmp_path / "gate"
        held = [client.submit(f.wait_for_file, str(gate), i, pure=False) for i in range(2)]
        others = client.map(f.inc, range(500))
        until(lambda: client.run_on_scheduler(lambda dask_scheduler: dask_scheduler.taskdb.pager.backlog) > 0, "work is on disk")
        cluster.kill(cluster.scheduler)
        for worker in cluster.workers:
            worker.popen.send_signal(signal.SIGSTOP)
        try:
            cluster.start_scheduler()
            fresh = cluster.start_worker()
            until(lambda: any(x.status == "finished" for x in others), "others run")
            assert client.run_on_scheduler(lambda dask_scheduler: dask_scheduler.taskdb.recovery.active)
        finally:
            for worker in cluster.workers:
                if worker is not fresh:
                    worker.popen.send_signal(signal.SIGCONT)
        gate.touch()
        assert client.gather(held) == [0, 1]
        assert client.gather(others) == list(range(1, 501))


def test_a_worker_of_another_release_is_closed(tmp_path: Path) -> None:
    with Cluster(tmp_path, survive=True, workers=1) as cluster, Client(cluster.address) as client:
        futures = client.map(f.inc, range(10))
        wait(futures, timeout=PATIENCE_SECONDS)
        worker = cluster.workers[0]
        client.run(f.speak_another_protocol)
        cluster.restart_scheduler()
        until(lambda: worker.popen.poll() is not None, "it ends")
        assert "install the same dask-taskdb on both" in cluster.scheduler_log()
        cluster.start_worker(wait=False)
        assert client.gather(futures) == list(range(1, 11))
