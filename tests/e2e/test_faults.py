"""Processes that die and come back, and starts that must fail. Each test has a cluster of its own; right results are the measure."""

from __future__ import annotations

import random
import signal
import time
from pathlib import Path

import psutil
import pytest
from distributed import Client, wait

from tests.e2e import functions as f
from tests.support.cluster import PATIENCE_SECONDS, Cluster, dask, descendants, free_port, run, until

pytestmark = pytest.mark.e2e


def long_graph(runs: Path, n: int, seconds: float = 0.01) -> tuple[dict[str, tuple[object, ...]], str, int]:
    """Two rows and a sum, some seconds of work; leaves a line in `runs` for each task of the first row that ran."""
    graph: dict[str, tuple[object, ...]] = {}
    for i in range(n):
        graph[f"a-{i}"] = (f.count_run, str(runs), i)
        graph[f"b-{i}"] = (f.slow_inc, f"a-{i}", seconds)
    graph["sum"] = (f.total, [f"b-{i}" for i in range(n)])
    return graph, "sum", sum(range(1, n + 1))


def lines(path: Path) -> int:
    return len(path.read_text().splitlines()) if path.exists() else 0


def test_worker_dies_in_mid_graph(tmp_path: Path, window: int | None) -> None:
    graph, last, expected = long_graph(tmp_path / "runs", 300)
    with Cluster(tmp_path, window=window, workers=2) as cluster, Client(cluster.address) as client:
        future = client.get(graph, last, sync=False)
        until(lambda: lines(tmp_path / "runs") > 80, "some are done")
        cluster.kill(cluster.workers[0])
        cluster.start_worker(wait=False)
        assert future.result(timeout=60) == expected
        assert cluster.faults() == []


def test_what_is_not_lost_is_not_computed_again(tmp_path: Path) -> None:
    """One input of a task that waits is lost, and what that was made of is on disk: so both leave the scheduler. The other input stays."""
    runs, gate = tmp_path / "runs", tmp_path / "gate"
    paged = {f"a-{i}": (f.inc, i) for i in range(20)} | {"base": (f.total, [f"a-{i}" for i in range(20)])}
    names = (("--name", "dies"), ("--name", "stays"))
    with Cluster(tmp_path, window=10, workers=2, worker_args=names) as cluster, Client(cluster.address) as client:
        base = client.get(paged, "base", sync=False)
        kept = client.submit(f.count_run, str(runs), 1, key="kept", workers=["stays"])
        lost = client.submit(f.inc, base, key="lost", workers=["dies"], allow_other_workers=True)
        wait([kept, lost])
        del base
        until(lambda: "base" not in client.run_on_scheduler(f.resident), "it has left")
        gated = client.submit(f.wait_for_file, str(gate), 3, key="gated", workers=["stays"])
        end = client.submit(f.total_of, kept, lost, gated, key="end")
        del kept, lost, gated
        cluster.kill(cluster.workers[0])
        until(lambda: len(client.nthreads()) == 1, "the scheduler knows")
        gate.touch()
        assert end.result(timeout=PATIENCE_SECONDS) == 1 + 211 + 3
        assert lines(runs) == 1
        assert cluster.faults() == []


def test_a_changed_restriction_outlives_its_worker(tmp_path: Path, window: int | None) -> None:
    names = (("--name", "dies"), ("--name", "stays"))
    with Cluster(tmp_path, window=window, workers=2, worker_args=names) as cluster, Client(cluster.address) as client:
        future = client.submit(f.inc, 1, workers=["dies"])
        assert future.result(timeout=PATIENCE_SECONDS) == 2
        addresses = {worker["name"]: address for address, worker in client.scheduler_info()["workers"].items()}
        client.sync(client.scheduler.set_restrictions, worker={future.key: addresses["stays"]})
        cluster.kill(cluster.workers[0])
        until(lambda: len(client.nthreads()) == 1, "the scheduler knows")
        assert future.result(timeout=PATIENCE_SECONDS) == 2
        assert cluster.faults() == []


def test_only_worker_dies_and_another_comes(tmp_path: Path, window: int | None) -> None:
    """Everything that was in memory is lost, also what has long been let go of because it was used."""
    graph, last, expected = long_graph(tmp_path / "runs", 150)
    with Cluster(tmp_path, window=window, workers=1) as cluster, Client(cluster.address) as client:
        future = client.get(graph, last, sync=False)
        until(lambda: lines(tmp_path / "runs") > 60, "some are done")
        cluster.kill(cluster.workers[0])
        until(lambda: not client.run_on_scheduler(lambda dask_scheduler: list(dask_scheduler.workers)), "no worker left")
        cluster.start_worker(wait=False)
        assert future.result(timeout=60) == expected
        assert cluster.faults() == []


def test_task_that_kills_its_worker_once(tmp_path: Path, window: int | None) -> None:
    with Cluster(tmp_path, window=window, workers=2) as cluster, Client(cluster.address) as client:
        head = client.submit(f.inc, 1)
        killer = client.submit(f.die_once, str(tmp_path / "died"), head)
        assert client.submit(f.inc, killer).result(timeout=60) == 3
        assert cluster.faults() == []


def test_lost_scattered_data_cancels_what_needs_it(tmp_path: Path, window: int | None) -> None:
    gate = tmp_path / "gate"
    with Cluster(tmp_path, window=window, workers=2) as cluster, Client(cluster.address) as client:
        victim = next(iter(client.scheduler_info()["workers"]))
        pid = client.run(lambda: __import__("os").getpid())[victim]
        (data,) = client.scatter([41], workers=[victim])
        head = client.submit(f.wait_for_file, str(gate), 1)
        uses = client.submit(f.add, data, head)
        last = client.submit(f.inc, uses)
        other = client.submit(f.inc, head)
        cluster.kill(next(w for w in cluster.workers if w.pid == pid))
        until(lambda: data.status in ("cancelled", "lost"), "the client hears of the lost data")
        until(lambda: uses.status == "cancelled" and last.status == "cancelled", "and of what needs it")
        gate.touch()
        assert other.result(timeout=60) == 2
        assert cluster.faults() == []


def test_worker_joins_late(tmp_path: Path, window: int | None) -> None:
    """With no worker at all the scheduler says so for one task; all run when a worker comes."""
    with Cluster(tmp_path, window=window, workers=0) as cluster, Client(cluster.address) as client:
        futures = client.map(f.inc, range(50))
        last = client.submit(f.total, futures)
        until(
            lambda: client.run_on_scheduler(lambda dask_scheduler: len(dask_scheduler.unrunnable) + len(dask_scheduler.queued)),
            "stock sees that there is no worker",
        )
        cluster.start_worker(wait=False)
        assert last.result(timeout=60) == sum(range(1, 51))


def test_retire_worker_in_mid_graph(tmp_path: Path, window: int | None) -> None:
    graph, last, expected = long_graph(tmp_path / "runs", 200)
    with Cluster(tmp_path, window=window, workers=2) as cluster, Client(cluster.address) as client:
        kept = client.map(f.inc, range(20))
        client.gather(kept)
        future = client.get(graph, last, sync=False)
        until(lambda: lines(tmp_path / "runs") > 50, "some are done")
        client.retire_workers([next(iter(client.scheduler_info()["workers"]))])
        assert future.result(timeout=60) == expected
        assert client.gather(kept) == list(range(1, 21))
        assert cluster.faults() == []


def test_client_restart(tmp_path: Path, window: int | None) -> None:
    gate = tmp_path / "gate"
    with Cluster(tmp_path, window=window, workers=1) as cluster, Client(cluster.address) as client:
        head = client.submit(f.wait_for_file, str(gate), 1)
        futures = [client.submit(f.add, head, i) for i in range(300)]
        until(lambda: client.run_on_scheduler(f.processing), "it runs")
        # Workers without a nanny close on restart.
        client.restart(timeout=30, wait_for_workers=False)
        assert all(x.status == "cancelled" for x in futures)
        assert client.run_on_scheduler(f.resident) == {}
        gate.touch()
        cluster.start_worker()
        assert client.submit(f.inc, 1).result(timeout=60) == 2
        assert client.gather(client.map(f.inc, range(30))) == list(range(1, 31))
        assert cluster.faults() == []


def test_daemon_killed_and_restarted_in_mid_run(tmp_path: Path, window: int | None) -> None:
    graph, last, expected = long_graph(tmp_path / "runs", 400)
    with Cluster(tmp_path, window=window, workers=2) as cluster, Client(cluster.address) as client:
        future = client.get(graph, last, sync=False)
        for seen in (60, 200):
            until(lambda seen=seen: lines(tmp_path / "runs") > seen, "some are done", 60)
            assert cluster.daemon is not None
            cluster.kill(cluster.daemon)
            until(
                lambda: not client.run_on_scheduler(lambda dask_scheduler: dask_scheduler.taskdb.session.connected), "the scheduler sees it"
            )
            cluster.start_daemon()
        assert future.result(timeout=60) == expected
        assert client.gather(client.map(f.inc, range(50))) == list(range(1, 51))
        assert "the daemon is gone" in cluster.scheduler_log()
        # What is resident may all be done before.
        until(lambda: "the daemon is back" in cluster.scheduler_log(), "the daemon is back")
        assert cluster.faults() == []


def test_daemon_gone_resident_work_goes_on(tmp_path: Path, window: int | None) -> None:
    gate = tmp_path / "gate"
    with Cluster(tmp_path, window=window, workers=1) as cluster, Client(cluster.address) as client:
        running = client.submit(f.mark_until, str(tmp_path / "started"), str(gate), 3)
        until((tmp_path / "started").exists, "it runs")
        assert cluster.daemon is not None
        cluster.daemon.popen.send_signal(signal.SIGTERM)
        assert cluster.daemon.popen.wait(PATIENCE_SECONDS) == 0
        gate.touch()
        assert running.result(timeout=30) == 3
        assert cluster.scheduler.alive
        later = client.submit(f.inc, running)
        cluster.start_daemon()
        assert later.result(timeout=60) == 4
        assert cluster.faults() == []


def test_graph_submitted_while_the_daemon_is_gone(tmp_path: Path, window: int | None) -> None:
    with Cluster(tmp_path, window=window, workers=1) as cluster, Client(cluster.address) as client:
        assert client.submit(f.inc, 1).result(timeout=30) == 2
        assert cluster.daemon is not None
        cluster.kill(cluster.daemon)
        small = client.submit(f.inc, 2)
        large = client.map(f.inc, range(3000), batch_size=3000)
        cluster.start_daemon()
        assert small.result(timeout=60) == 3
        assert sum(client.gather(large)) == sum(range(1, 3001))
        assert cluster.faults() == []


def test_newer_scheduler_fences_the_older_one(tmp_path: Path) -> None:
    with Cluster(tmp_path, window=0, workers=1) as cluster, Client(cluster.address) as client:
        assert client.submit(f.inc, 1).result(timeout=30) == 2
        second = cluster.processes.start("second", cluster.scheduler_command(free_port()))
        cluster.scheduler.popen.wait(PATIENCE_SECONDS)
        assert second.alive
        words = [line for line in cluster.scheduler_log().splitlines() if "taskdb" in line]
        assert any("newer" in line or "epoch" in line for line in words), words
        assert not [line for line in words if "Traceback" in line]


def test_full_store(tmp_path: Path, window: int | None) -> None:
    """The submission that does not fit fails in its client; what was there finishes, and there is room again afterwards."""
    gate = tmp_path / "gate"
    # 64 MiB of it are kept for graphs that are running.
    with Cluster(tmp_path, window=window, workers=1, serve=("--store-bytes-max", "80M")) as cluster, Client(cluster.address) as client:
        head = client.submit(f.wait_for_file, str(gate), 1)
        before = client.submit(f.total, [client.submit(f.add, head, i) for i in range(50)])
        n = 12_000
        noise = random.Random(1)  # specs of a group are compressed
        graph: dict[str, tuple[object, ...]] = {f"fat-{i}": (f.first, i, noise.randbytes(3000)) for i in range(n)}
        graph["fat-sum"] = (f.total, [f"fat-{i}" for i in range(n)])
        with pytest.raises(Exception, match=r"left in the store|at its limit"):
            client.get(graph, "fat-sum", sync=False).result(timeout=60)
        assert cluster.daemon is not None
        assert cluster.daemon.alive
        gate.touch()
        assert before.result(timeout=60) == sum(range(1, 51))
        assert client.gather(client.map(f.inc, range(20))) == list(range(1, 21))
        assert cluster.faults() == []


def test_ingest_process_killed(tmp_path: Path, window: int | None) -> None:
    """A large submission under way fails with a reason; the scheduler goes on, and takes the next one in."""
    gate = tmp_path / "gate"
    with Cluster(tmp_path, window=window, workers=1) as cluster, Client(cluster.address) as client:
        assert client.submit(f.inc, 1).result(timeout=30) == 2
        large = {f"l-{i}": (f.first, i, bytes(200)) for i in range(20_000)}
        large["l-sum"] = (f.total, [f"l-{i}" for i in range(20_000)])
        server = until(lambda: client.run_on_scheduler(f.ingest_pid), "there is an ingest process")
        future = client.get({**large, "l-0": (f.wait_for_file, str(gate), 0)}, "l-sum", sync=False)
        children = until(lambda: descendants(server), "a child reads the graph")
        # It has all of it, and is at work.
        until(lambda: children[0].cpu_times().user > 0.2, "it works")
        children[0].kill()
        with pytest.raises(Exception, match="ingest process ended"):
            future.result(timeout=60)
        del future
        gate.touch()
        assert client.submit(f.inc, 2).result(timeout=30) == 3
        psutil.Process(server).kill()
        until(lambda: not psutil.pid_exists(server), "the scheduler knows that it is gone")
        # Another process takes it in: it is over what is read in the scheduler.
        other = {f"o-{i}": (f.first, i, bytes(1000)) for i in range(1500)}
        other["o-sum"] = (f.total, list(other))
        assert client.get(other, "o-sum", sync=False).result(timeout=50) == sum(range(1500))
        assert client.run_on_scheduler(f.ingest_pid) != server
        assert cluster.faults() == []


# ------------------------------------------------------------------------------------------------------------- starts


def start_scheduler(*options: str, env: dict[str, str] | None = None, cwd: Path | None = None) -> tuple[int, str]:
    """Exit code and what it said, of a scheduler that is to end by itself."""
    args = dask("scheduler", "--host", "127.0.0.1", "--port", "0", "--no-dashboard", "--dashboard-address", "127.0.0.1:0")
    done = run([*args, "--preload", "scheduler_adapter", *options], env=env, cwd=cwd)
    return done.returncode, done.stdout + done.stderr


def one_line(said: str, *words: str) -> None:
    """One line of ours says why, and there is no traceback."""
    ours = [line for line in said.splitlines() if "taskdb" in line and "INFO" not in line]
    assert len(ours) == 1, said
    assert all(word in ours[0] for word in words), ours
    assert "Traceback" not in said


def test_start_without_its_daemon_fails(tmp_path: Path) -> None:
    port = free_port()
    code, said = start_scheduler("--taskdb-url", f"127.0.0.1:{port}", env={"DASK_TASKDB__CONNECT_TIMEOUT": "1s"})
    assert code != 0
    one_line(said, str(port), "taskdb serve")


def test_start_with_a_bad_window_fails() -> None:
    code, said = start_scheduler("--taskdb-window", "-1")
    assert code != 0
    assert "--taskdb-window" in said
    assert "Traceback" not in said


def test_start_with_a_bad_setting_fails() -> None:
    code, said = start_scheduler(env={"DASK_TASKDB__WINDOW": "many"})
    assert code != 0
    one_line(said, "many")


def test_start_with_an_unsupported_dask_fails(tmp_path: Path) -> None:
    (tmp_path / "older.py").write_text("import scheduler_adapter.supported as supported\nsupported.SUPPORTED = ((2030, 1), (2030, 2))\n")
    args = dask("scheduler", "--host", "127.0.0.1", "--port", "0", "--no-dashboard", "--dashboard-address", "127.0.0.1:0")
    done = run([*args, "--preload", str(tmp_path / "older.py"), "--preload", "scheduler_adapter"])
    assert done.returncode != 0
    one_line(done.stdout + done.stderr, "2030.1", "not supported")


def test_embedded_daemon_lives_and_ends_with_the_scheduler(tmp_path: Path) -> None:
    with Cluster(tmp_path, workers=1, embedded=True) as cluster, Client(cluster.address) as client:
        assert client.gather(client.map(f.inc, range(20))) == list(range(1, 21))
        family = descendants(cluster.scheduler.pid)
        assert any("serve" in p.cmdline() for p in family), [p.cmdline() for p in family]
        cluster.scheduler.popen.send_signal(signal.SIGTERM)
        cluster.scheduler.popen.wait(PATIENCE_SECONDS)
        assert psutil.wait_procs(family, timeout=15)[1] == []


def test_nothing_survives_a_killed_scheduler(tmp_path: Path) -> None:
    with Cluster(tmp_path, workers=0, embedded=True) as cluster:
        with Client(cluster.address) as client:
            assert client.run_on_scheduler(f.processing) == 0
        family = descendants(cluster.scheduler.pid)
        assert len(family) >= 2
        (folder,) = [Path(word).parent for p in family for word in p.cmdline() if "/taskdb-ingest-" in word]
        assert folder.exists()
        cluster.kill(cluster.scheduler)
        assert psutil.wait_procs(family, timeout=15)[1] == []
        assert not folder.exists()


LOCAL = """
import sys

from distributed import Client, LocalCluster

if __name__ == "__main__":
    kwargs = {"preload": "scheduler_adapter", "preload_argv": sys.argv[1:]}
    options = {"n_workers": 1, "threads_per_worker": 1, "processes": False, "dashboard_address": None}
    with LocalCluster(**options, scheduler_kwargs=kwargs) as cluster, Client(cluster) as client:
        assert cluster.scheduler.taskdb is not None
        assert client.gather(client.map(lambda x: x + 1, range(50))) == list(range(1, 51))
        assert client.submit(sum, client.map(lambda x: x * 2, range(500))).result(timeout=60) == 249500
    print("right")
"""


@pytest.mark.parametrize("argv", [[], ["--taskdb-window", "0"]], ids=["default", "paged"])
def test_local_cluster(tmp_path: Path, argv: list[str]) -> None:
    (tmp_path / "local.py").write_text(LOCAL)
    done = run([str(tmp_path / "local.py"), *argv], cwd=tmp_path)
    assert (done.returncode, done.stdout.strip()) == (0, "right"), done.stdout + done.stderr
    left = [p for p in psutil.process_iter(["cmdline"]) if str(tmp_path) in " ".join(p.info["cmdline"] or ())]
    assert left == []


def test_local_cluster_that_cannot_start_says_why(tmp_path: Path) -> None:
    (tmp_path / "local.py").write_text(LOCAL)
    url = f"127.0.0.1:{free_port()}"
    done = run([str(tmp_path / "local.py"), "--taskdb-url", url], cwd=tmp_path, env={"DASK_TASKDB__CONNECT_TIMEOUT": "1s"}, timeout=20)
    assert done.returncode != 0
    assert url in done.stderr, done.stderr


def test_scheduler_closes_in_good_time(tmp_path: Path, window: int | None) -> None:
    with Cluster(tmp_path, window=window, workers=1) as cluster:
        with Client(cluster.address) as client:
            client.gather(client.map(f.inc, range(30)))
        family = descendants(cluster.scheduler.pid)
        started = time.monotonic()
        cluster.scheduler.popen.send_signal(signal.SIGTERM)
        cluster.scheduler.popen.wait(PATIENCE_SECONDS)
        assert time.monotonic() - started < 10
        assert psutil.wait_procs(family, timeout=10)[1] == []
        assert "Traceback" not in cluster.scheduler_log()
