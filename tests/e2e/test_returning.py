"""A scheduler killed with -9 and started again by the same command, seen by its clients. Each test has a cluster of its own."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import dask
import pytest
from distributed import CancelledError, Client, Future, Variable, as_completed, fire_and_forget, wait
from distributed.core import CommClosedError

from scheduler_adapter.client import SchedulerLost, future, futures
from taskdb.wire.reader import Client as Reader
from tests.e2e import functions as f
from tests.e2e.conftest import nothing_is_left
from tests.support.cluster import PATIENCE_SECONDS, Cluster, Spawned, free_port, until

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(180)]

OURS = {"distributed.client.preload": ["scheduler_adapter.client"]}
SURVIVES = ("--preload", "scheduler_adapter.worker")


@contextmanager
def returning(address: str | None, **options: Any) -> Iterator[Client]:
    """A client that outlives its scheduler."""
    with dask.config.set(OURS):
        client = Client(address, **options)
    with client:
        yield client


def kill(cluster: Cluster, *clients: Client) -> None:
    """The scheduler is gone, and these clients know."""
    cluster.kill(cluster.scheduler)
    for client in clients:
        until(lambda client=client: client.status == "connecting", "the client notices")  # type: ignore[misc]


def acknowledged(client: Client) -> None:
    """The scheduler has acknowledged all that was said to it."""

    async def left() -> int:
        return len(client.taskdb.outbox)

    until(lambda: client.sync(left) == 0, "all is acknowledged")


def in_thread(function: Callable[[], Any]) -> tuple[threading.Thread, list[Any]]:
    """Run something that waits; its result, or its error, comes into the list."""
    out: list[Any] = []

    def run() -> None:
        try:
            out.append(function())
        except BaseException as e:
            out.append(e)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread, out


def lines(path: Path) -> list[str]:
    return path.read_text().split() if path.exists() else []


def tasks_of_worker(dask_worker: Any) -> list[str]:
    return [str(key) for key in dask_worker.state.tasks]


def known_to_the_database(cluster: Cluster) -> set[str]:
    return {task["key"] for task in cluster.taskdb("tasks")["tasks"]}


def test_futures_stay_and_what_is_said_meanwhile_counts(tmp_path: Path, window: int | None) -> None:
    gate, runs = tmp_path / "gate", tmp_path / "runs"
    with Cluster(tmp_path, window=window, workers=1, worker_args=(SURVIVES,)) as cluster:
        with returning(cluster.address) as client:
            done = client.map(lambda i: f.count_run(str(runs), i), range(5), key=[f"done-{i}" for i in range(5)])
            broken = client.submit(f.fail, 1, key="broken")
            wait([*done, broken])
            head = client.submit(f.wait_for_file, str(gate), 1, key="head")
            pending = client.submit(f.add, head, done[0], key="pending")
            released = client.submit(f.touch, str(tmp_path / "released"), head, key="released")
            cancelled = client.submit(f.touch, str(tmp_path / "cancelled"), head, key="cancelled")
            below = client.submit(f.first, cancelled, key="below")
            acknowledged(client)
            waiting, answer = in_thread(lambda fs=(pending, *done): client.gather(fs))
            completed, order = in_thread(lambda fs=(pending,): [x.key for x in as_completed(fs)])
            kill(cluster, client)

            assert [x.status for x in (*done, broken, pending)] == ["finished"] * 5 + ["error", "pending"]
            new = client.submit(f.add, done[1], pending, key="new")
            gone = client.submit(f.touch, str(tmp_path / "gone"), key="gone")
            gone.cancel()
            cancelled.cancel()
            del released
            forgotten = client.submit(f.touch, str(tmp_path / "forgotten"), done[2], key="forgotten")
            fire_and_forget(forgotten)
            del forgotten
            assert new.status == "pending"
            cluster.start_scheduler()
            until(lambda: client.status == "running" and client.taskdb.epoch == 2, "the client is back")
            until(lambda below=below: below.status == "cancelled", "what depends on the cancelled one is told")
            until(lambda: client.nthreads(), "the worker is back")
            until(lambda: "released" not in str(client.run(tasks_of_worker)), "it does not have what is not wanted any more")
            gate.touch()

            assert new.result(timeout=PATIENCE_SECONDS) == 1 + 0 + 1
            waiting.join(PATIENCE_SECONDS)
            completed.join(PATIENCE_SECONDS)
            assert answer == [(1, 0, 1, 2, 3, 4)]
            assert order == [["pending"]]
            with pytest.raises(ValueError, match="bad input 1"):
                broken.result(timeout=PATIENCE_SECONDS)
            until((tmp_path / "forgotten").exists, "what was fired and forgotten runs")
            assert sorted(lines(runs)) == ["0", "1", "2", "3", "4"], "what had finished was not run again"
            assert [name for name in ("released", "cancelled", "gone") if (tmp_path / name).exists()] == []
            assert known_to_the_database(cluster) & {"released", "cancelled", "below", "gone"} == set()
            acknowledged(client)
            del done, broken, head, pending, cancelled, below, new, gone
        nothing_is_left(cluster)


@pytest.mark.timeout(400)
def test_killed_right_after_a_submission(tmp_path: Path, window: int | None) -> None:
    """Each submission runs, whatever had become of it: on its way, taken in, on disk, acknowledged, finished."""
    rounds, seed = 8, 20260801
    chance = random.Random(seed)
    with Cluster(tmp_path, window=window, workers=1, worker_args=(SURVIVES,)) as cluster:
        with returning(cluster.address) as client:
            for number in range(rounds):
                runs = tmp_path / f"runs-{number}"
                first = client.submit(f.count_run, str(runs), 1, key=f"first-{number}")
                second = client.map(lambda x, i, runs=str(runs): f.count_run(runs, x + i), [first] * 3, range(3), key=f"second-{number}")
                pause = chance.choice((0.0, chance.uniform(0, 0.08), chance.uniform(0, 0.3)))
                time.sleep(pause)
                finished = [x.key for x in (first, *second) if x.done()]
                kill(cluster, client)
                said = f"seed {seed}, round {number}, killed after {pause:.3f} s, finished: {finished}"
                if number % 2:
                    cluster.kill(cluster.workers.pop())
                    finished = []
                cluster.start_scheduler()
                if number % 2:
                    cluster.start_worker(*SURVIVES, wait=False)
                    client.run_on_scheduler(f.wait_for_workers_no_more)
                assert client.gather(second) == [1, 2, 3], said
                ran = lines(runs)
                for value, key in enumerate((first.key, *[x.key for x in second])):
                    times = ran.count(str(max(value, 1))) if value > 1 else None
                    assert times is None or times == 1 or (times == 2 and key not in finished), f"{said}; ran: {ran}"
                assert cluster.faults() == [], said
                del first, second
        nothing_is_left(cluster)


def test_what_took_effect_is_not_said_again(tmp_path: Path, window: int | None) -> None:
    """Though the client has not heard of it: the number of the last such message stands in the database."""
    runs = tmp_path / "runs"
    # So the scheduler does not hear for seconds that anything is on disk, and acknowledges nothing.
    late = ("--commit-interval-ms", "10000")
    with Cluster(tmp_path, window=window, workers=1, worker_args=(SURVIVES,), serve=late) as cluster, returning(cluster.address) as client:
        # What comes now has all of that time.
        until(lambda: client.run_on_scheduler(f.all_is_on_disk), "what was said so far is on disk")
        fired = client.submit(f.count_run, str(runs), 1, key="fired")
        fire_and_forget(fired)
        del fired
        kept = client.submit(f.count_run, str(runs), 2, key="kept")
        assert kept.result(timeout=PATIENCE_SECONDS) == 2
        until(lambda: client.run_on_scheduler(f.all_is_answered), "the daemon has taken in all of it")
        kill(cluster, client)
        if len(client.taskdb.outbox) != 3:
            pytest.skip("this machine took longer than the daemon waits")
        cluster.start_scheduler()
        until(lambda: client.status == "running" and client.taskdb.epoch == 2, "the client is back")
        assert len(client.taskdb.outbox) == 0
        assert client.submit(f.count_run, str(runs), 3, kept, key="new").result(timeout=2 * PATIENCE_SECONDS) == 3
        assert lines(runs) == ["1", "2", "3"]


def test_large_graph_in_the_middle_of_its_ingest(tmp_path: Path, window: int | None) -> None:
    n = 4_000
    graph: dict[str, tuple[object, ...]] = {f"a-{i}": (f.inc, i) for i in range(n)}
    graph.update({f"b-{i}": (f.total, [f"a-{j}" for j in range(100 * i, 100 * i + 100)]) for i in range(n // 100)})
    graph["sum"] = (f.total, [f"b-{i}" for i in range(n // 100)])
    # Stock's validation looks at every task again and again.
    env = {"DASK_TASKDB__LOCAL_BYTES": "1kiB", "DASK_DISTRIBUTED__SCHEDULER__VALIDATE": "False"}
    with Cluster(tmp_path, window=window, workers=1, worker_args=(SURVIVES,), env=env) as cluster:
        with returning(cluster.address) as client:
            result = client.get(graph, "sum", sync=False)
            with Reader(cluster.url) as reader:
                (open_graph,) = until(
                    lambda: [g for g in reader.status().graphs if not g.sealed and g.tasks > 500], "some of the graph is there"
                )
                assert len(client.taskdb.outbox) == 1
                kill(cluster, client)
                cluster.start_scheduler()
                assert result.result(timeout=120) == sum(range(1, n + 1))
                (stored,) = reader.status().graphs
                assert stored.sealed
                assert stored.submission == open_graph.submission, "sent again under its name"
            del result
        nothing_is_left(cluster)


HOLDER = """
import sys, time
from distributed import Client
import dask
dask.config.set({"distributed.client.preload": ["scheduler_adapter.client"]})
from tests.e2e import functions as f
client = Client(sys.argv[1])
kept = client.submit(f.count_run, sys.argv[2], 7, key="kept")
waits = client.submit(f.wait_for_file, sys.argv[3], 1, key="waits")
print("has", kept.result(), flush=True)
print("all", client.gather([kept, waits]), flush=True)
"""


@contextmanager
def other_client(cluster: Cluster, runs: Path, gate: Path) -> Iterator[Spawned]:
    """A process with a client that has one result and waits for another."""
    other = cluster.processes.start("other", ["-c", HOLDER, cluster.address, str(runs), str(gate)])
    until(lambda: b"has 7" in other.log.read_bytes(), "the other client has its result")
    yield other


def test_client_that_comes_back_late(tmp_path: Path, window: int | None) -> None:
    runs, gate, go = tmp_path / "runs", tmp_path / "gate", tmp_path / "go"
    with (
        Cluster(tmp_path, window=window, workers=1, worker_args=((*SURVIVES, "--nthreads", "4"),)) as cluster,
        other_client(cluster, runs, gate) as other,
        returning(cluster.address) as client,
    ):
        kept = future("kept", client)
        above = client.submit(f.inc, kept, key="above")
        assert above.result(timeout=PATIENCE_SECONDS) == 8
        below = client.submit(f.wait_for_file, str(go), 1, kept, key="below")
        del kept
        acknowledged(client)
        os.kill(other.pid, signal.SIGSTOP)
        kill(cluster, client)
        cluster.start_scheduler()
        until(lambda: client.nthreads(), "the worker is back")
        go.touch()
        # The last that needs the other client's result here is done, and the other client is not back.
        assert below.result(timeout=PATIENCE_SECONDS) == 1
        os.kill(other.pid, signal.SIGCONT)
        gate.touch()
        until(lambda: b"all [7, 1]" in other.log.read_bytes(), "the late client has its results")
        assert lines(runs) == ["7"]
        assert above.result(timeout=PATIENCE_SECONDS) == 8
        until(lambda: not other.alive, "the late client ends")
        assert other.popen.returncode == 0


def test_client_that_does_not_come_back(tmp_path: Path, window: int | None) -> None:
    env = {"DASK_TASKDB__CLIENTS_RETURN": "1s"}
    with Cluster(tmp_path, window=window, workers=1, worker_args=((*SURVIVES, "--nthreads", "4"),), env=env) as cluster:
        with other_client(cluster, tmp_path / "runs", tmp_path / "gate") as other:
            until(lambda: known_to_the_database(cluster) == {"kept", "waits"}, "what it wants is on disk")
            cluster.kill(cluster.scheduler)
            cluster.kill(other)
        cluster.start_scheduler()
        until(lambda: known_to_the_database(cluster) == set(), "what it wanted is let go of")
        assert "1 clients did not come back" in cluster.scheduler_log()
        (tmp_path / "gate").touch()
        nothing_is_left(cluster)


def test_stream_breaks_and_the_scheduler_lives(tmp_path: Path, window: int | None) -> None:
    runs, gate, go = tmp_path / "runs", tmp_path / "gate", tmp_path / "go"
    env = {"DASK_TASKDB__CLIENTS_RETURN": "5s"}
    with Cluster(tmp_path, window=window, workers=1, worker_args=((*SURVIVES, "--nthreads", "4"),), env=env) as cluster:
        with other_client(cluster, runs, gate) as other, returning(cluster.address) as client:
            done = client.map(f.inc, range(3))
            released = client.submit(f.inc, 10, key="released")
            wait([*done, released])
            pending = client.submit(f.wait_for_file, str(go), 1, done[0], key="pending")
            acknowledged(client)

            async def cut(pending: Future = pending) -> None:
                new = client.submit(f.count_run, str(runs), 8, pending, key="new")
                client.scheduler_comm.comm.abort()
                more.append(new)

            more: list[Future] = []
            client.sync(cut)
            del released
            until(lambda: client.taskdb._lives == 2 and client.taskdb._live, "the client is back")
            go.touch()
            assert client.gather([*done, pending, *more]) == [1, 2, 3, 1, 8]
            assert client.taskdb.epoch == 1
            acknowledged(client)
            until(lambda: "released" not in known_to_the_database(cluster), "what was released meanwhile is let go of")
            cluster.kill(other)
            until(lambda: not known_to_the_database(cluster) & {"kept", "waits"}, "the client that died is not waited for any more")
            assert client.gather([*done, pending, *more]) == [1, 2, 3, 1, 8], "this one is"
            assert sorted(lines(runs)) == ["7", "8"]
            del done, pending
            more.clear()
        gate.touch()
        nothing_is_left(cluster)


def test_stock_client_beside_ours(tmp_path: Path, window: int | None) -> None:
    with (
        Cluster(tmp_path, window=window, workers=1, worker_args=(SURVIVES,)) as cluster,
        Client(cluster.address) as stock,
        returning(cluster.address, set_as_default=False) as client,
    ):
        assert not hasattr(stock, "taskdb")
        ours = client.map(f.inc, range(3), key=[("ours", i) for i in range(3)])
        theirs = stock.submit(f.inc, 10, key="theirs")
        wait([*ours, theirs])
        kill(cluster, client)
        until(lambda: theirs.status == "cancelled", "the stock client cancels its futures")
        cluster.start_scheduler()
        assert client.gather(ours) == [1, 2, 3]
        until(lambda: stock.status == "running", "the stock client is back")
        found = futures([("ours", 2), ("ours", 0), ("ours", 2)], stock)
        assert stock.gather(found) == [3, 1, 3]
        assert future(("ours", 1), stock).result(timeout=PATIENCE_SECONDS) == 2
        with pytest.raises(KeyError, match=r"knows no task 'nowhere'") as caught:
            futures([("ours", 0), "nowhere"], stock)
        assert "\n" not in str(caught.value)
        # Nobody has cancelled what the stock client wanted: it is kept for the time in which it might have come back.
        assert future("theirs", client).result(timeout=PATIENCE_SECONDS) == 11
        # A bare future of a key that nobody knows is told so, when its client comes back.
        strange = Future("strange", client)
        kill(cluster, client)
        cluster.start_scheduler()
        with pytest.raises(CancelledError):
            strange.result(timeout=PATIENCE_SECONDS)
        assert "1 tasks nobody knows; they are cancelled for it: 'strange'" in cluster.scheduler_log()
        assert client.gather(ours) == [1, 2, 3]


def test_another_scheduler_comes_or_none(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with Cluster(tmp_path, window=0, workers=0) as cluster:
        with returning(cluster.address) as client, caplog.at_level(logging.WARNING, "distributed.taskdb"):
            pending = client.submit(f.inc, 1)
            kill(cluster, client)
            meanwhile = client.submit(f.inc, 2)
            cluster.stock = True
            cluster.start_scheduler()
            with pytest.raises(CancelledError):
                meanwhile.result(timeout=PATIENCE_SECONDS)
            assert pending.status == "cancelled"
            (said,) = [r.getMessage() for r in caplog.records if r.levelno == logging.ERROR]
            assert "does not keep its tasks in taskdb; the 2 futures of this client are cancelled" in said
            worker = cluster.start_worker()
            assert client.submit(f.inc, 3).result(timeout=PATIENCE_SECONDS) == 4
            with returning(cluster.address, set_as_default=False) as beside:
                assert not hasattr(beside, "taskdb")
                assert beside.submit(f.inc, 4).result(timeout=PATIENCE_SECONDS) == 5
            assert "taskdb" not in cluster.scheduler_log(), "a stock scheduler is not asked what it does not know"
            cluster.kill(worker)
            cluster.kill(cluster.scheduler)
            cluster.stock = False
        caplog.clear()
        cluster.start_scheduler()
        with dask.config.set({"taskdb.scheduler-return": "1s"}), returning(cluster.address) as client:
            pending = client.submit(f.inc, 1)
            cluster.kill(cluster.scheduler)
            with pytest.raises(CancelledError):
                pending.result(timeout=PATIENCE_SECONDS)
            until(lambda: client.status == "closed", "the client closes, as stock does")
            (said,) = [r.getMessage() for r in caplog.records if r.levelno == logging.ERROR]
            assert "no scheduler came back within 1 s" in said
            assert "\n" not in said


def test_calls_wait_or_say_why_not(tmp_path: Path) -> None:
    with Cluster(tmp_path, window=0, workers=1, worker_args=(SURVIVES,)) as cluster, returning(cluster.address) as client:
        data = client.submit(f.inc, 1, key="data")
        assert data.result(timeout=PATIENCE_SECONDS) == 2
        client.publish_dataset(data, name="before")
        client.set_metadata("x", 1)
        reading, read = in_thread(lambda: Variable("later", client=client).get(timeout=100))
        started = tmp_path / "started"
        writing, written = in_thread(lambda: client.run_on_scheduler(f.mark_until, str(started), str(tmp_path / "never")))
        until(started.exists, "a call is under way")
        kill(cluster, client)
        writing.join(PATIENCE_SECONDS)
        assert isinstance(written[0], SchedulerLost)
        assert "'run_function'; whether that was done is not known" in str(written[0])
        calls = [
            lambda: client.list_datasets(),
            lambda: client.get_metadata("x"),
            lambda: client.publish_dataset(data, name="meanwhile"),
            lambda: client.who_has([data]),
            lambda: Variable("later", client=client).set(5),
            lambda: client.get_dataset("before").result(timeout=PATIENCE_SECONDS),
        ]
        waiting = [in_thread(call) for call in calls]
        cluster.start_scheduler()
        for thread, _ in (*waiting, (reading, read)):
            thread.join(PATIENCE_SECONDS)
        listed, x, _, who, _, found = [out[0] for _, out in waiting]
        assert "before" in listed
        assert x == 1
        assert isinstance(who, dict)
        assert found == 2
        assert read == [5]
        assert set(client.list_datasets()) == {"before", "meanwhile"}


def test_closed_while_there_is_no_scheduler(tmp_path: Path) -> None:
    with Cluster(tmp_path, window=0, workers=0) as cluster:
        with returning(cluster.address) as client:
            pending = client.submit(f.inc, 1)
            kill(cluster, client)
            waiting, out = in_thread(lambda: client.list_datasets())
        assert client.status == "closed"
        waiting.join(PATIENCE_SECONDS)
        assert isinstance(out[0], CommClosedError), out
        assert pending.status == "cancelled"


def test_scheduler_file_says_where(tmp_path: Path) -> None:
    file = tmp_path / "scheduler.json"
    with Cluster(tmp_path, window=0, workers=0) as cluster:
        file.write_text(json.dumps({"address": cluster.address}))
        with returning(None, scheduler_file=str(file)) as client:
            pending = client.submit(f.inc, 1)
            kill(cluster, client)
            cluster.port = free_port()
            cluster.address = f"tcp://127.0.0.1:{cluster.port}"
            cluster.start_scheduler()
            cluster.start_worker(wait=False)
            file.write_text(json.dumps({"address": cluster.address}))
            assert pending.result(timeout=PATIENCE_SECONDS) == 2
            assert client.scheduler.address == cluster.address


def test_asynchronous_client(tmp_path: Path) -> None:
    gate = tmp_path / "gate"

    async def play(cluster: Cluster) -> None:
        with dask.config.set(OURS):
            starting = Client(cluster.address, asynchronous=True)
        async with starting as client:
            first = client.submit(f.wait_for_file, str(gate), 1, key="first")
            waiting = asyncio.ensure_future(client.gather([first]))
            await asyncio.to_thread(until, lambda: client.taskdb.epoch == 1 and not len(client.taskdb.outbox), "it is on disk")
            await asyncio.to_thread(kill, cluster, client)
            second = client.submit(f.inc, first, key="second")
            statuses = asyncio.ensure_future(client.scheduler.get_task_status(keys=["first", "second"]))
            await asyncio.to_thread(cluster.start_scheduler)
            assert (await statuses).keys() == {"first", "second"}
            gate.touch()
            assert await waiting == [1]
            assert await second == 2
            (again,) = await futures(["second"], client)
            assert await again == 2
            with pytest.raises(KeyError, match="knows no task 'third'"):
                await future("third", client)

    with Cluster(tmp_path, window=0, workers=1, worker_args=(SURVIVES,)) as cluster:
        asyncio.run(asyncio.wait_for(play(cluster), 4 * PATIENCE_SECONDS))


def test_client_of_a_task(tmp_path: Path, window: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A task that submits others outlives the scheduler together with its worker, and so do its futures."""
    monkeypatch.setenv("DASK_DISTRIBUTED__CLIENT__PRELOAD", "['scheduler_adapter.client']")
    started, gate, runs = tmp_path / "started", tmp_path / "gate", tmp_path / "runs"
    with Cluster(tmp_path, window=window, workers=1, worker_args=(SURVIVES,)) as cluster, returning(cluster.address) as client:
        outer = client.submit(f.submits_others, str(started), str(gate), str(runs), key="outer")
        until(started.exists, "the task has futures of its own")
        acknowledged(client)
        kill(cluster, client)
        cluster.start_scheduler()
        until(lambda: client.nthreads(), "the worker is back")
        gate.touch()
        assert outer.result(timeout=2 * PATIENCE_SECONDS) == 0 + 1 + 2 + 10
        assert sorted(lines(runs)) == ["0", "1", "2", "outer"], "nothing ran twice"
        assert cluster.faults() == []
