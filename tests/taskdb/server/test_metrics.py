"""`taskdb serve --metrics`: what Prometheus reads, from a real daemon."""

from __future__ import annotations

import asyncio
import re
import socket
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from taskdb import commands as c
from tests.taskdb.server.procs import Daemon, Recorder, graph, key, run, until


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    with Daemon(tmp_path_factory.mktemp("metrics"), "--metrics", "0") as daemon:
        yield daemon


def url(daemon: Daemon) -> str:
    found = re.search(r"metrics on (http://127\.0\.0\.1:\d+/metrics)$", daemon.words(), re.M)
    assert found, daemon.words()
    return found[1]


def samples(daemon: Daemon) -> dict[str, float]:
    """name{label="value"} -> value."""
    with urllib.request.urlopen(url(daemon), timeout=10) as answer:
        families = text_string_to_metric_families(answer.read().decode())
        found = {}
        for family in families:
            for sample in family.samples:
                labels = ",".join(f"{name}={value}" for name, value in sample.labels.items())
                found[f"{sample.name}[{labels}]" if labels else sample.name] = sample.value
    return found


def test_what_happens_is_counted(daemon: Daemon) -> None:
    before = samples(daemon)
    assert before["taskdb_scheduler_attached"] == 0

    async def play() -> dict[str, float]:
        async with Recorder(daemon.address) as scheduler:
            keys = [key("x", i) for i in range(10)]
            await scheduler.ask(*graph("s", keys))
            leases = (await scheduler.ask(scheduler.credit(4))).leases
            await scheduler.ask(scheduler.finish(lease.id for lease in leases[:3]))
            await scheduler.durable()
            now = await asyncio.to_thread(samples, daemon)
            await scheduler.ask(c.DropClient("client-1"))
            return now

    now = asyncio.run(play())
    assert now["taskdb_scheduler_attached"] == 1
    assert now["taskdb_epoch"] == before["taskdb_epoch"] + 1
    assert now["taskdb_tasks_added_total"] - before["taskdb_tasks_added_total"] == 10
    assert now["taskdb_leases_total"] - before["taskdb_leases_total"] == 4
    assert now["taskdb_batches_total"] - before["taskdb_batches_total"] == 3
    assert [now[f"taskdb_tasks[state={state}]"] for state in ("queued", "processing", "memory")] == [6, 1, 3]
    assert (now["taskdb_tasks_queued"], now["taskdb_tasks_ready"], now["taskdb_graphs"]) == (6, 6, 1)
    commits = now["taskdb_commit_seconds_count"]
    assert commits > before["taskdb_commit_seconds_count"]
    assert now["taskdb_commit_seconds_bucket[le=+Inf]"] == commits
    classes = [value for name, value in now.items() if name.startswith("taskdb_commit_seconds_bucket")]
    assert classes == sorted(classes)
    assert 0 < now["taskdb_store_bytes"] < now["taskdb_store_bytes_max"]
    assert now["process_resident_memory_bytes"] > 2**20
    until(lambda: samples(daemon)["taskdb_graphs"] == 0, "the graph to be gone")


def test_metrics_name_no_keys_and_no_clients(daemon: Daemon) -> None:
    async def play() -> bytes:
        async with Recorder(daemon.address) as scheduler:
            await scheduler.ask(*graph("secret-graph", [key("secret-key")], "secret-client"))
            await scheduler.durable()

            def read() -> bytes:
                with urllib.request.urlopen(url(daemon), timeout=10) as answer:
                    return bytes(answer.read())

            text = await asyncio.to_thread(read)
            await scheduler.ask(c.DropClient("secret-client"))
            return text

    assert b"secret" not in asyncio.run(play())


def test_an_address_in_use_is_refused(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        done = run("serve", "--data", str(tmp_path / "data"), "--listen", "127.0.0.1:0", "--metrics", address)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith(f"Error: cannot serve metrics on {address}: ")


def test_an_address_that_others_can_reach_has_to_be_said_aloud(tmp_path: Path) -> None:
    options = ("--data", str(tmp_path / "data"), "--listen", "127.0.0.1:0", "--metrics", "0.0.0.0:0")
    done = run("serve", *options)
    assert done.returncode == 2
    assert "Error: cannot serve metrics on 0.0.0.0:0: others can reach it" in done.stderr
    assert "--insecure" in done.stderr
    assert not (tmp_path / "data").exists()
    with Daemon(tmp_path, "--metrics", "0.0.0.0:0", "--insecure") as daemon:
        assert "who can reach it can read them (--insecure)" in daemon.words()
        found = re.search(r"metrics on http://0\.0\.0\.0:(\d+)/metrics$", daemon.words(), re.M)
        assert found, daemon.words()
        with urllib.request.urlopen(f"http://127.0.0.1:{found[1]}/metrics", timeout=10) as answer:
            assert b"taskdb_epoch" in answer.read()


@pytest.mark.parametrize("address", ["unix:there", "host", "127.0.0.1:99999", "tls://127.0.0.1:0"])
def test_other_addresses_are_refused(tmp_path: Path, address: str) -> None:
    done = run("serve", "--data", str(tmp_path / "data"), "--metrics", address)
    assert done.returncode == 2
    assert "Invalid value for '--metrics'" in done.stderr
