"""The commands, as processes: one small comparison, and what is left when one is ended."""

import json
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from bench.workloads import WORKLOADS

ROOT = Path(__file__).resolve().parents[2]
COMMAND = [sys.executable, "-m", "bench"]


def _bench(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*COMMAND, *args], cwd=ROOT, capture_output=True, text=True, timeout=100, check=False)


@pytest.mark.e2e
def test_compare_stock_with_zero_workers(tmp_path: Path) -> None:
    file = tmp_path / "run.json"
    done = _bench("compare", "--workload", "tree-sum", "--tasks", "200", "--side", "stock", "--json", str(file), "--timeout", "60")
    assert done.returncode == 0, done.stderr
    assert "makespan" in done.stdout
    content = json.loads(file.read_text())
    found = content["medians"]["stock"]
    assert found["tasks"] == found["tasks_resident_max"] == pytest.approx(200, abs=10)
    assert found["worker_bytes_max"] >= 1024
    assert found["first_task_s"] > 0
    assert found["disk_bytes_per_task"] is None
    shown = _bench("table", str(file))
    assert shown.returncode == 0, shown.stderr
    assert "| tree-sum | 2 zero |" in shown.stdout


@pytest.mark.e2e
def test_ending_it_ends_all_it_started(tmp_path: Path) -> None:
    command = [*COMMAND, "compare", "--workload", "submit-result", "--tasks", "100000", "--side", "stock", "--folder", str(tmp_path)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as popen:
        try:
            bench, deadline = psutil.Process(popen.pid), time.monotonic() + 60
            while len(children := bench.children()) < 3:
                assert popen.poll() is None
                assert time.monotonic() < deadline
                time.sleep(0.1)
        finally:
            popen.terminate()
            _, words = popen.communicate(timeout=60)
    assert popen.returncode == 1
    assert "ended by SIGTERM" in words
    assert not [child for child in children if child.is_running()]


def test_list_names_every_workload() -> None:
    done = _bench("list")
    assert done.returncode == 0, done.stderr
    assert [name for name in WORKLOADS if name not in done.stdout] == []
