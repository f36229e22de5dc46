"""`make demo` shows the right result, says when it is wrong, and leaves nothing behind."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from unittest import mock

import psutil
import pytest
from rich.console import Console

from demo.__main__ import Watch, job, report
from demo.crash import Crashes
from scheduler_adapter.local.cluster import FAILURES, Cluster

ROOT = Path(__file__).resolve().parents[1]


def demo(*options: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "demo", *options],
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        # Shutdown by Ctrl-C is tested below: the signal must reach the demo alone.
        start_new_session=True,
    )


def wait_until_empty(processes: list[psutil.Process]) -> list[psutil.Process]:
    """Those of the processes that still run after a few seconds."""
    return psutil.wait_procs(processes, timeout=10)[1]


@pytest.mark.e2e
@pytest.mark.parametrize("options", [["--stock"], ["--window", "40"]], ids=["stock", "database"])
def test_demo_is_right(options: list[str]) -> None:
    chunks = 300
    process = demo("--chunks", str(chunks), *options)
    output, _ = process.communicate(timeout=110)
    assert process.returncode == 0, output
    _, expected = job(chunks)
    assert re.search(rf"sum = {expected:,} +right", output), output
    assert "makespan" in output
    if "--stock" not in options:
        most = re.search(r"most tasks in the scheduler\D+([\d,]+)", output)
        assert most is not None
        assert int(most[1].replace(",", "")) < chunks, output


@pytest.mark.e2e
@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_demo_stops_all_it_started(signum: signal.Signals) -> None:
    # Large enough to be still at it, small enough that a busy scheduler soon hears of the end.
    process = demo("--chunks", "20000", "--stock")
    deadline = time.monotonic() + 60
    while len(children := psutil.Process(process.pid).children(recursive=True)) < 3:
        assert time.monotonic() < deadline
        time.sleep(0.1)
    os.kill(process.pid, signum)
    process.communicate(timeout=60)
    assert process.returncode == 130
    assert wait_until_empty(children) == []


def test_a_wrong_result_is_said() -> None:
    console = Console(record=True, width=100)
    watch = mock.Mock(
        spec=Watch, crashes=None, makespan=1.0, total=3, resident_max=3, rss_max=2, rss_idle=1, answer_seconds_max=0.1, store_bytes=0
    )
    assert report(console, watch, result=54, expected=55) is False
    assert "wrong, expected 55" in console.export_text()


def test_the_closed_form() -> None:
    array, expected = job(7)
    assert int(array.compute(scheduler="sync")) == expected


class Unlucky(Cluster):
    def scheduler_command(self, port: int, *more: str) -> list[str]:
        return ["-c", "print('out of luck'); raise SystemExit(3)"]


def test_a_process_that_does_not_start_is_named_with_its_last_words(tmp_path: Path) -> None:
    with pytest.raises(FAILURES, match=r"(?s)scheduler .* ended with code 3.*out of luck"), Unlucky(tmp_path, stock=True):
        pass


@pytest.mark.e2e
@pytest.mark.timeout(300)
def test_demo_is_right_though_scheduler_and_daemon_are_killed() -> None:
    chunks = 1500
    process = demo("--chunks", str(chunks), "--crash", "--window", "200")
    output, _ = process.communicate(timeout=280)
    assert process.returncode == 0, output
    _, expected = job(chunks)
    assert re.search(rf"sum = {expected:,} +right", output), output
    # Without a terminal the table is 80 columns wide, and long rows go on in the next line.
    table = re.sub(r"[\s│]+", " ", output[output.index("sum = ") :])
    total = re.search(r" tasks ([\d,]+) ", table)
    assert total is not None, output
    for name, part in (("scheduler", 1 / 3), ("daemon", 2 / 3)):
        killed = re.search(rf"{name} killed with -9 at ([\d,]+) tasks, back after [\d.]+ s", table)
        assert killed is not None, output
        assert int(killed[1].replace(",", "")) >= part * int(total[1].replace(",", "")), output


def test_what_is_killed_comes_back_and_is_killed_once(tmp_path: Path) -> None:
    with Cluster(tmp_path, workers=0) as cluster:
        crashes = Crashes(cluster)
        first = cluster.scheduler
        assert crashes.kill(0, 0) is None
        assert crashes.kill(33, 100) is None
        assert crashes.kill(34, 100) is cluster.scheduler
        assert not first.alive
        assert crashes.kill(90, 100) is None, "one after the other"
        cluster.await_scheduler()
        crashes.back()
        daemon = cluster.daemon
        assert crashes.kill(90, 100) is cluster.daemon
        assert daemon is not None
        assert not daemon.alive
        cluster.await_daemon()
        crashes.back()
        assert crashes.over
        assert crashes.kill(100, 100) is None
        cluster.processes.check()


REPLACED = """
import os, signal, sys, time
from distributed import Client
with Client(sys.argv[1]) as client:
    client.wait_for_workers(2, timeout=60)
    before = set(client.run(os.getpid).values())
    os.kill(min(before), signal.SIGKILL)
    deadline = time.monotonic() + 60
    while len(set(client.run(os.getpid, on_error="ignore").values()) - before) < 1:
        assert time.monotonic() < deadline
        time.sleep(0.1)
print("replaced")
"""


@pytest.mark.e2e
def test_cluster_for_a_command_replaces_a_worker_that_dies() -> None:
    words = ["-m", "demo.cluster", "--nanny", "--", sys.executable, "-c", REPLACED, "{address}"]
    done = subprocess.run(
        [sys.executable, *words], cwd=ROOT, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=110, check=False
    )
    assert (done.returncode, done.stdout.strip()) == (0, "replaced"), done.stdout + done.stderr
