"""What belongs to the work and lives in a scheduler besides tasks is there again after the scheduler was killed. Stock workers and clients,
which die with it."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import dask
import pytest
from distributed import Client, Queue, Variable, fire_and_forget
from distributed.client import futures_of

from taskdb.wire.reader import Client as Reader
from tests.e2e import functions as f
from tests.e2e.plugins import FailingOn, Noting, NotingNanny, NotingWorker
from tests.support.cluster import Cluster, until

pytestmark = pytest.mark.e2e

#: Clients that died with the scheduler are not waited for.
ENV = {"DASK_TASKDB__CLIENTS_RETURN": "1s"}


@contextmanager
def dies_at_end(cluster: Cluster) -> Iterator[Client]:
    """A client; at the end the scheduler is killed, and workers and client with it."""
    client = Client(cluster.address)
    try:
        yield client
    finally:
        client._timeout = 1  # seconds in which it tries to reconnect, and cannot be closed
        cluster.kill(cluster.scheduler)
        for worker in cluster.workers:
            cluster.kill(worker)
        cluster.workers.clear()
        client.close()


@contextmanager
def comes_back(cluster: Cluster, *worker_args: str) -> Iterator[Client]:
    """A new scheduler under the same address, with one worker and a client."""
    cluster.start_scheduler()
    cluster.start_worker(*worker_args)
    with Client(cluster.address) as client:
        yield client
        assert cluster.faults() == []


def barrier(client: Client) -> None:
    """Everything before this is on disk."""
    client.set_metadata(["barrier"], 1)


def nothing_is_left(cluster: Cluster, client: Client) -> None:
    gc.collect()  # a future that has raised its error is in a cycle with it
    until(lambda: client.run_on_scheduler(f.left_behind) == {}, "nothing is left in the scheduler")
    with Reader(cluster.url) as reader:
        until(lambda: not list(reader.list_tasks(limit=5).tasks), "nothing is left in the database")


def deep(client: Client, gate: Path, x: int) -> Any:
    """A chain of four behind a gate; its result is x + 3."""
    future = client.submit(f.wait_for_file, str(gate), x)
    for _ in range(3):
        future = client.submit(f.inc, future)
    return future


def lines(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []


# ------------------------------------------------------------------------------------------------------------ datasets


def test_published_datasets(tmp_path: Path, window: int | None, gate: Path) -> None:
    with Cluster(tmp_path, window=window, workers=1, env=ENV) as cluster:
        with dies_at_end(cluster) as client:
            head = dask.delayed(f.wait_for_file)(str(gate), 1)
            (unfinished,) = dask.persist([dask.delayed(f.inc)(dask.delayed(f.inc)(head)) for _ in range(20)])
            client.publish_dataset(unfinished, name="unfinished")
            client.publish_dataset({"a": 1, "b": [1, 2]}, name=("plain", 2))
            client.publish_dataset(1, name="gone")
            client.publish_dataset(1, name="again")
            client.publish_dataset(2, name="again", override=True)
            client.unpublish_dataset("gone")
            # No word after the last call returned: it is on disk.
        with comes_back(cluster) as client:
            assert set(client.list_datasets()) == {"unfinished", ("plain", 2), "again"}
            assert client.get_dataset(("plain", 2)) == {"a": 1, "b": [1, 2]}
            assert client.get_dataset("again") == 2
            found = client.get_dataset("unfinished")
            gate.touch()
            assert client.gather(futures_of(found)) == [3] * 20
            client.unpublish_dataset("unfinished")
            assert client.gather(futures_of(found)) == [3] * 20
            del found
            nothing_is_left(cluster, client)


def test_published_work_runs_on_with_nobody_there(tmp_path: Path, window: int | None, gate: Path) -> None:
    """Nobody asks for it: that it is published is enough. And it is published again for whoever restarts the scheduler next."""
    done = tmp_path / "done"
    with Cluster(tmp_path, window=window, workers=1, env=ENV) as cluster:
        with dies_at_end(cluster) as client:
            client.publish_dataset(client.submit(f.touch, str(done), deep(client, gate, 1)), name="work")
        gate.touch()
        with comes_back(cluster) as client:
            until(done.exists, "the published work is done")
        with dies_at_end(cluster):
            pass
        done.unlink()
        with comes_back(cluster) as client:
            assert client.get_dataset("work").result(timeout=30) == str(done)
            client.unpublish_dataset("work")
            nothing_is_left(cluster, client)


def test_dataset_outlives_scheduler_and_daemon_killed_at_once(tmp_path: Path) -> None:
    with Cluster(tmp_path, workers=1, env=ENV) as cluster:
        with dies_at_end(cluster) as client:
            client.publish_dataset(client.submit(f.inc, 1), name="one")
            assert cluster.daemon is not None
            cluster.kill(cluster.daemon)
        cluster.start_daemon()
        with comes_back(cluster) as client:
            assert client.get_dataset("one").result(timeout=30) == 2


# ------------------------------------------------------------------------------------------------- variables and queues


def test_variables(tmp_path: Path, window: int | None, gate: Path) -> None:
    with Cluster(tmp_path, window=window, workers=1, env=ENV) as cluster:
        with dies_at_end(cluster) as client:
            Variable("value", client=client).set({"step": 7})
            Variable("future", client=client).set(client.submit(f.inc, 1))  # replaced below
            Variable("future", client=client).set(deep(client, gate, 1))
            Variable("broken", client=client).set(client.submit(f.fail, deep(client, gate, 1)))
            Variable("deleted", client=client).set(1)
            Variable("deleted", client=client).delete()
            barrier(client)
        with comes_back(cluster) as client:
            assert Variable("value", client=client).get(timeout=10) == {"step": 7}
            future = Variable("future", client=client).get(timeout=10)
            broken = Variable("broken", client=client).get(timeout=10)
            assert future.status == "pending"
            gate.touch()
            assert future.result(timeout=30) == 4
            with pytest.raises(ValueError, match="bad input 4"):
                broken.result(timeout=30)
            with Client(cluster.address) as other, pytest.raises(ValueError, match="bad input 4"):
                Variable("broken", client=other).get(timeout=10).result(timeout=30)
            with pytest.raises(TimeoutError):
                Variable("deleted", client=client).get(timeout="200ms")
            cluster.faults()  # stock logs that
            for name in ("value", "future", "broken"):
                Variable(name, client=client).delete()
            assert future.result(timeout=30) == 4
            del future, broken
            nothing_is_left(cluster, client)


def test_queues(tmp_path: Path, window: int | None, gate: Path) -> None:
    with Cluster(tmp_path, window=window, workers=1, env=ENV) as cluster:
        with dies_at_end(cluster) as client:
            values = Queue("values", client=client, maxsize=6)
            for x in range(6):
                values.put(x)
            assert [values.get(), values.get()] == [0, 1]
            values.put({"last": 6})
            futures = Queue("futures", client=client)
            taken = client.submit(f.inc, 10)
            futures.put(taken)
            for x in range(3):
                futures.put(deep(client, gate, x))
            assert futures.get(timeout=10).result(timeout=30) == 11
            released = Queue("released", client=client)
            released.put(1)
            released.close()
            barrier(client)
        with comes_back(cluster) as client:
            values = Queue("values", client=client, maxsize=6)
            assert values.qsize() == 5
            assert [values.get(timeout=10) for _ in range(5)] == [2, 3, 4, 5, {"last": 6}]
            for x in range(6):
                values.put(x)
            with pytest.raises(TimeoutError):
                values.put("one too many", timeout="100ms")
            cluster.faults()  # stock logs that
            futures = Queue("futures", client=client)
            first = futures.get(timeout=10)
            assert first.status == "pending"
            rest = futures.get(batch=True)
            gate.touch()
            assert client.gather([first, *rest]) == [3, 4, 5]
            assert Queue("released", client=client).qsize() == 0
            del first, rest
            nothing_is_left(cluster, client)


def test_queue_is_put_back_twice(tmp_path: Path) -> None:
    """What was put into it by two schedulers comes out in order under a third."""
    with Cluster(tmp_path, workers=1, env=ENV) as cluster:
        with dies_at_end(cluster) as client:
            Queue("q", client=client).put("a")
            Queue("q", client=client).put("b")
        with comes_back(cluster) as client:
            queue = Queue("q", client=client)
            queue.put("c")
            assert queue.get() == "a"
            queue.put("d")
        with dies_at_end(cluster):
            pass
        with comes_back(cluster) as client:
            assert Queue("q", client=client).get(batch=True) == ["b", "c", "d"]


# ----------------------------------------------------------------------------------------------------- fire and forget


def test_fire_and_forget(tmp_path: Path, window: int | None, gate: Path) -> None:
    done, failed = tmp_path / "done", tmp_path / "failed"
    with Cluster(tmp_path, window=window, workers=1, env=ENV) as cluster:
        with dies_at_end(cluster) as client:
            head = deep(client, gate, 1)
            fire_and_forget(client.submit(f.touch, str(done), head))
            fire_and_forget(client.submit(f.fail, client.submit(f.touch, str(failed), head)))
            until(lambda: len(client.run_on_scheduler(f.fire_and_forget)) == 2, "it is wanted")
            barrier(client)
        with comes_back(cluster) as client:
            gate.touch()
            until(lambda: done.exists() and failed.exists(), "the tasks have run")
            nothing_is_left(cluster, client)
            assert client.run_on_scheduler(f.fire_and_forget) == set()


# ------------------------------------------------------------------------------------------------- metadata and plugins


def test_metadata(tmp_path: Path) -> None:
    with Cluster(tmp_path, workers=0, env=ENV) as cluster:
        with dies_at_end(cluster) as client:
            client.set_metadata("plain", 1)
            client.set_metadata(["deep", "er", "still"], {"x": [1, 2]})
            client.set_metadata(["deep", "er", "too"], None)
            client.set_metadata(["deep", 1], "one")
            client.set_metadata("plain", 2)
        with comes_back(cluster) as client:
            assert client.get_metadata("plain") == 2
            assert client.get_metadata(["deep"]) == {"er": {"still": {"x": (1, 2)}, "too": None}, 1: "one"}


def test_plugins(tmp_path: Path) -> None:
    notes, worker_notes, nanny_notes, poison = (tmp_path / name for name in ("notes", "worker-notes", "nanny-notes", "poison"))
    with Cluster(tmp_path, workers=0, env=ENV) as cluster:
        with dies_at_end(cluster) as client:
            names = ("one", "gone", "two", "three")
            for name in names:
                client.register_plugin(Noting(str(notes), name))
                client.register_plugin(NotingWorker(str(worker_notes), name))
                client.register_plugin(NotingNanny(str(nanny_notes), name))
                if name == "one":
                    client.register_plugin(FailingOn(str(poison)))
            client.unregister_scheduler_plugin("gone")
            client.unregister_worker_plugin("gone")
            client.unregister_worker_plugin("gone", nanny=True)
        assert lines(notes) == [f"start {name}" for name in names]
        notes.unlink()
        poison.touch()
        with comes_back(cluster) as client:
            kept = ("one", "two", "three")
            assert lines(notes) == [f"start {name}" for name in kept] + [f"worker {name}" for name in kept]
            assert lines(worker_notes) == [f"setup {name}" for name in kept]
            assert cluster.scheduler_log().count("scheduler plugin 'failing' could not be put back") == 1
            nanny = cluster.processes.start("nanny", nanny_command(cluster))
            until(lambda: lines(nanny_notes), f"the nanny has its plugins: {nanny.tail()}")
            until(lambda: lines(nanny_notes) == [f"setup {name}" for name in kept], "all of them, in order")
            client.unregister_scheduler_plugin("two")


def nanny_command(cluster: Cluster) -> list[str]:
    local = ["--local-directory", str(cluster.folder), "--nthreads", "1", "--nanny", "--no-dashboard"]
    return ["-m", "dask", "worker", cluster.address, *local]


def test_uploaded_file(tmp_path: Path) -> None:
    module = tmp_path / "uploaded_module.py"
    module.write_text(
        "from distributed.diagnostics.plugin import SchedulerPlugin\n\n\n"
        "class Uploaded(SchedulerPlugin):\n    name = 'uploaded'\n\n\ndef twice(x):\n    return 2 * x\n"
    )

    def use(x: int) -> Any:
        import uploaded_module  # type: ignore[import-not-found]

        return uploaded_module.twice(x)

    def plugin(dask_scheduler: Any) -> Any:
        import uploaded_module

        return uploaded_module.twice(1), type(dask_scheduler.plugins["uploaded"]).__module__

    async def register(dask_scheduler: Any) -> None:
        import uploaded_module
        from distributed.protocol.pickle import dumps

        plugin = dumps(uploaded_module.Uploaded())
        await dask_scheduler.handlers["register_scheduler_plugin"](plugin=plugin, name="uploaded", idempotent=False)

    folder = tmp_path / "cluster"
    folder.mkdir()
    with Cluster(folder, workers=1, env=ENV) as cluster:
        with dies_at_end(cluster) as client:
            client.upload_file(str(module))
            assert client.submit(use, 1).result(timeout=30) == 2
            client.run_on_scheduler(register)
        module.unlink()
        with comes_back(cluster) as client:
            assert client.submit(use, 2).result(timeout=30) == 4
            assert client.run_on_scheduler(plugin) == (2, "uploaded_module")


# --------------------------------------------------------------------------------------------- durations, numbers


def test_learned_durations(tmp_path: Path, window: int | None, gate: Path) -> None:
    def learned(dask_scheduler: Any) -> float | None:
        return dask_scheduler.taskdb.kept.durations.learned.get("slow_inc")

    def expected(dask_scheduler: Any) -> float:
        return dask_scheduler.task_prefixes["slow_inc"].duration_average

    with Cluster(tmp_path, window=window, workers=1, env=ENV) as cluster:
        with dies_at_end(cluster) as client:
            assert client.submit(f.slow_inc, 1, 0.3).result(timeout=30) == 2
            until(lambda: client.run_on_scheduler(learned), "the duration is written")
            before = client.run_on_scheduler(expected)
            barrier(client)
        with comes_back(cluster) as client:
            head = client.submit(f.wait_for_file, str(gate), 1)
            future = client.submit(f.slow_inc, head)
            until(lambda: f.all_known(client, [future.key]), "it has come")
            until(lambda: client.run_on_scheduler(f.has_prefix, "slow_inc"), "the prefix is there")
            assert client.run_on_scheduler(expected) == pytest.approx(before, rel=0.1)
            gate.touch()


def test_numbers_continue_above_those_before(tmp_path: Path, window: int | None, gate: Path) -> None:
    """Earlier graphs come first, and no run id is used twice."""
    with Cluster(tmp_path, window=window, workers=1, env=ENV) as cluster:
        with dies_at_end(cluster) as client:
            for i in range(5):
                assert client.submit(f.inc, i, fifo_timeout="0s").result(timeout=30) == i + 1
            future = client.submit(f.wait_for_file, str(gate), 1, key="first", fifo_timeout="0s")
            client.publish_dataset(future, name="first")
            until(lambda: client.run_on_scheduler(f.run_of, "first")[0] is not None, "it runs")
            run_before, priority_before = client.run_on_scheduler(f.run_of, "first")
        with comes_back(cluster) as client:
            until(lambda: (client.run_on_scheduler(f.run_of, "first") or (None,))[0] is not None, "it runs again")
            run, priority = client.run_on_scheduler(f.run_of, "first")
            assert run > run_before
            assert priority == priority_before
            cluster.start_worker()
            second = client.submit(f.wait_for_file, str(gate), 2, key="second", fifo_timeout="0s")
            until(lambda: (client.run_on_scheduler(f.run_of, "second") or (None,))[0] is not None, "it runs")
            assert client.run_on_scheduler(f.run_of, "second")[1] > priority
            gate.touch()
            assert second.result(timeout=30) == 2
