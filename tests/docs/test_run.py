"""What the pages say can be typed is typed: on one cluster, started by the commands of the quick start."""

from __future__ import annotations

import contextlib
import io
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import dask
import pytest
from distributed import Client

from scheduler_adapter.local.processes import Processes, await_port, free_port
from tests.docs.pages import PAGES, ROOT, blocks, commands

pytestmark = pytest.mark.e2e

QUICK_START = ROOT / "docs/quickstart.md"
#: How a command that is run has to end, if not with 0: the pages' made-up task is not there.
ENDS_WITH = {"explain": 1, "story": 1}


@dataclass
class Running:
    """A cluster on ports of its own, in a folder in which the pages' relative paths are right."""

    processes: Processes
    folder: Path
    ports: dict[str, int]

    def here(self, text: str) -> str:
        return re.sub(r"\b127\.0\.0\.1:(7070|8786)\b", lambda found: f"127.0.0.1:{self.ports[found[1]]}", text)

    def run(self, words: list[str], limit_seconds: float = 30) -> subprocess.CompletedProcess[str]:
        there = {**os.environ, "TASKDB_URL": f"127.0.0.1:{self.ports['7070']}"}
        # All it runs are programs of this environment.
        program = [sys.executable, str(Path(sys.executable).with_name(words[0]))]
        return subprocess.run(
            [*program, *words[1:]], cwd=self.folder, env=there, capture_output=True, text=True, timeout=limit_seconds, check=False
        )


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("docs")
    with Processes(folder) as processes:
        running = Running(processes, folder, {"7070": free_port(), "8786": free_port()})
        for words in commands(QUICK_START, "start"):
            program, *said = (running.here(word) for word in words)
            name = words[1]
            if name == "scheduler":
                # What the worker's line says; the default port may be taken here.
                said += ["--host", "127.0.0.1", "--port", str(running.ports["8786"])]
            if program == "dask":
                said.append("--no-dashboard")
            started = processes.start(name, [str(Path(sys.executable).with_name(program)), *said])
            if name != "worker":
                await_port(started, running.ports["7070" if name == "serve" else "8786"], 60)
        yield running
        processes.check()


def test_the_client_of_the_quick_start(cluster: Running) -> None:
    ((_, program),) = (block for block in blocks(QUICK_START, "python") if block[0] == "client")
    said = io.StringIO()
    names: dict[str, object] = {}
    with dask.config.set({"distributed.client.preload": []}), contextlib.redirect_stdout(said):
        try:
            exec(compile(cluster.here(program), str(QUICK_START), "exec"), names)
            client = names["client"]
            assert isinstance(client, Client)
            assert hasattr(client, "taskdb"), "its preload is on"
        finally:
            names.pop("total", None)
            if isinstance(client := names.get("client"), Client):
                client.close()
    assert said.getvalue().split() == ["20000.0"]


def test_commands_that_ask_the_daemon(cluster: Running) -> None:
    with Client(cluster.here("tcp://127.0.0.1:8786"), set_as_default=False) as client:
        assert client.submit(int, "1").result(timeout=60) == 1  # there is something to report
    asked = {tuple(words) for page in PAGES for words in commands(page, "online")}
    assert {words[1] for words in asked} >= {"status", "tasks", "explain"}
    for words in sorted(asked):
        done = cluster.run(list(words))
        assert done.returncode == ENDS_WITH.get(words[1], 0), (words, done.stderr)


def test_commands_that_look_after_a_store(cluster: Running) -> None:
    """Those that work while the store is in use, in their order, which makes the copy that others need; then `recover`, on that."""
    said = [words for page in PAGES for words in commands(page, "store")]
    beside = [words for words in said if words[1] != "recover"]
    assert {words[1] for words in beside} == {"verify", "backup", "restore"}
    for words in beside:
        done = cluster.run(words)
        assert done.returncode == 0, (words, done.stderr)
    for words in (words for words in said if words[1] == "recover"):
        assert cluster.run(words).returncode == 4, "the daemon has the store, as the page says"
        done = cluster.run([word.replace("taskdb-data", "taskdb-restored") for word in words])
        assert done.returncode == 0, done.stderr


def test_the_program_of_the_quick_start(tmp_path: Path) -> None:
    ((_, program),) = (block for block in blocks(QUICK_START, "python") if block[0] == "python")
    # Guarded, because a cluster's processes import the program again.
    body = "".join(f"    {line}\n" for line in program.splitlines())
    (tmp_path / "program.py").write_text(f"if __name__ == '__main__':\n{body}")
    done = subprocess.run([sys.executable, "program.py"], cwd=tmp_path, capture_output=True, text=True, timeout=100, check=False)
    assert done.stdout.strip() == "6", done.stderr
