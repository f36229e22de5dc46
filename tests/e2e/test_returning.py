"""A scheduler killed with -9 and started again by the same command, seen by its clients. Each test has a cluster of its own."""

from __future__ import annotations

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

from scheduler_adapter.client import SchedulerLost, future, futures
from taskdb.wire.reader import Client as Reader
from tests.e2e import functions as f
from tests.e2e.conftest import nothing_is_left
from tests.support.cluster import PATIENCE_SECONDS, Cluster, free_port, until

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
            until(lambda: client.nthreads(), "the worker is back, and knows what is not wanted any more")
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
    env = {"DASK_TASKDB__WORKERS_RETURN": "2s"}
    with Cluster(tmp_path, window=window, workers=1, worker_args=(SURVIVES,), env=env) as cluster:
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
                assert client.gather(second) == [1, 2, 3], said
                ran = lines(runs)
                for value, key in enumerate((first.key, *[x.key for x in second])):
                    times = ran.count(str(max(value, 1))) if value > 1 else None
                    assert times is None or times == 1 or (times == 2 and key not in finished), f"{said}; ran: {ran}"
                assert cluster.faults() == [], said
                cluster._read = 0  # the next scheduler's log begins anew
                del first, second
        nothing_is_left(cluster)


def test_large_graph_in_the_middle_of_its_ingest(tmp_path: Path, window: int | None) -> None:
    n = 12_000
    graph: dict[str, tuple[object, ...]] = {f"a-{i}": (f.inc, i) for i in range(n)}
    graph.update({f"b-{i}": (f.total, [f"a-{j}" for j in range(100 * i, 100 * i + 100)]) for i in range(n // 100)})
    graph["sum"] = (f.total, [f"b-{i}" for i in range(n // 100)])
    env = {"DASK_TASKDB__LOCAL_BYTES": "1kiB"}
    with Cluster(tmp_path, window=window, workers=1, worker_args=(SURVIVES,), env=env) as cluster:
        with returning(cluster.address) as client:
            result = client.get(graph, "sum", sync=False)
            with Reader(cluster.url) as reader:
                open_graph = until(
                    lambda: [g for g in reader.status().graphs if not g.sealed and g.tasks > 2_000], "some of the graph is there"
                )
                assert len(client.taskdb.outbox) == 1
                kill(cluster, client)
                cluster.start_scheduler()
                assert result.result(timeout=120) == sum(range(1, n + 1))
                (stored,) = reader.status().graphs
                assert stored.sealed
                assert stored.submission == open_graph[0].submission, "sent again under its name"
            del result
        nothing_is_left(cluster)


HOLDER = """
import sys, time
from distributed import Client
import dask
dask.config.set({"distributed.client.preload": ["scheduler_adapter.client"]})
from tests.e2e import functions as f
client = Client(sys.argv[1])
kept = client.submit(f.count_run, sys.argv[2], 7, key="kept-by-other")
waits = client.submit(f.wait_for_file, sys.argv[3], 1, key="waits-for-other")
print(kept.result(), flush=True)
while True:
    time.sleep(0.05)
    if waits.done():
        print("again", client.gather([kept, waits]), flush=True)
        break
"""


def test_client_that_comes_back_late_and_one_that_does_not(tmp_path: Path, window: int | None) -> None:
    runs, gate = tmp_path / "runs", tmp_path / "gate"
    env = {"DASK_TASKDB__CLIENTS_RETURN": "8s"}
    with Cluster(tmp_path, window=window, workers=1, worker_args=(SURVIVES,), env=env) as cluster:
        others = [
            cluster.processes.start(
                f"other-{i}",
                ["-c", HOLDER.replace("by-other", f"by-{i}").replace("for-other", f"for-{i}")] + [cluster.address, str(runs), str(gate)],
            )
            for i in (0, 1)
        ]
        for other in others:
            until(lambda other=other: b"7" in other.log.read_bytes().split(), "the other client has its result")  # type: ignore[misc]
        with returning(cluster.address) as client:
            (kept,) = futures(["kept-by-0"], client)
            above = client.submit(f.inc, kept, key="above")
            assert above.result(timeout=PATIENCE_SECONDS) == 8
            below = client.submit(f.wait_for_file, str(tmp_path / "go"), 1, kept, key="below")
            del kept
            acknowledged(client)
            os.kill(others[0].pid, signal.SIGSTOP)
            cluster.kill(others[1])
            kill(cluster, client)
            cluster.start_scheduler()
            (tmp_path / "go").touch()
            # The last that needs the result here is done; the client that wants it is not back.
            assert below.result(timeout=PATIENCE_SECONDS) == 1
            os.kill(others[0].pid, signal.SIGCONT)
            until(lambda: known_to_the_database(cluster) & {"kept-by-1", "waits-for-1"} == set(), "what the dead client wanted is let go")
            assert "1 clients did not come back" in cluster.scheduler_log()
            gate.touch()
            until(lambda: b"again [7, 1]" in others[0].log.read_bytes(), "the late client has its results")
            assert lines(runs) == ["7", "7"], "each ran once"
            assert above.result(timeout=PATIENCE_SECONDS) == 8
            del above, below
        until(lambda: not others[0].alive, "the late client ends")


def test_stock_client_beside_ours(tmp_path: Path, window: int | None, caplog: pytest.LogCaptureFixture) -> None:
    with Cluster(tmp_path, window=window, workers=1, worker_args=(SURVIVES,)) as cluster:
        with Client(cluster.address) as stock, returning(cluster.address, set_as_default=False) as client:
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
            cluster.kill(worker)
            cluster.kill(cluster.scheduler)
            cluster.stock = False
        caplog.clear()
        cluster.start_scheduler()
        with returning(cluster.address) as client, dask.config.set({"taskdb.scheduler-return": "1s"}):
            pending = client.submit(f.inc, 1)
            cluster.kill(cluster.scheduler)
            with pytest.raises(CancelledError):
                pending.result(timeout=PATIENCE_SECONDS)
            until(lambda: client.status == "closed", "the client closes, as stock does")
            (said,) = [r.getMessage() for r in caplog.records if r.levelno == logging.ERROR]
            assert "no scheduler came back within 1 s" in said
            assert "\n" not in said


def test_calls_wait_or_say_why_not(tmp_path: Path) -> None:
    with Cluster(tmp_path, window=0, workers=1, worker_args=(SURVIVES,)) as cluster:
        with returning(cluster.address) as client:
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
        assert isinstance(out[0], SchedulerLost | CancelledError), out
        assert pending.status == "cancelled"


def test_scheduler_file_says_where(tmp_path: Path) -> None:
    file = tmp_path / "scheduler.json"
    with Cluster(tmp_path, window=0, workers=0) as cluster:
        file.write_text(json.dumps({"address": cluster.address}))
        with returning(None, scheduler_file=str(file)) as client:
            pending = client.submit(f.inc, 1)
            kill(cluster, client)
            cluster.port = free_port()
            cluster.start_scheduler()
            cluster.start_worker(wait=False)
            file.write_text(json.dumps({"address": cluster.address}))
            assert pending.result(timeout=PATIENCE_SECONDS) == 2
            assert client.scheduler.address == cluster.address
