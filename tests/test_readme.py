"""What the README says can be typed, can be typed."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import dask.array as da
import dask.config
import pytest
import yaml
from distributed import Client

from scheduler_adapter.local.processes import Processes, Spawned, await_port, free_port
from tests.support.commands import problems

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text()
MAKEFILE = (ROOT / "Makefile").read_text()


def command(name: str) -> str:
    """The command of that name in the environment this runs in."""
    return str(Path(sys.executable).with_name(name))


def blocks(language: str, tag: str = "") -> list[str]:
    """Fenced blocks of a language; with a tag, those below the comment `<!-- tested: tag -->`."""
    comment = rf"<!-- tested: {tag} -->\n" if tag else ""
    return re.findall(rf"^{comment}```{language}\n(.*?)^```", README, re.DOTALL | re.MULTILINE)


def commands(*texts: str) -> Iterator[list[str]]:
    for text in texts:
        yield from filter(None, (shlex.split(line, comments=True) for line in text.splitlines()))


@pytest.mark.parametrize("words", list(commands(*blocks("bash"))), ids=" ".join)
def test_commands_and_options_exist(words: list[str]) -> None:
    if words[0] == "make":
        assert re.search(rf"^{words[1]}:", MAKEFILE, re.MULTILINE), f"no target {words[1]}"
    elif words[0] == "export":
        name = words[1].partition("=")[0]
        section, _, setting = name.removeprefix("DASK_").lower().partition("__")
        assert setting in settings()[section]
    else:
        assert words[0] in ("taskdb", "dask", "pip")
        assert problems(words) == []


@pytest.mark.parametrize("target", sorted(set(re.findall(r"`make (\w+)", README))))
def test_make_targets_named_in_the_text_exist(target: str) -> None:
    assert re.search(rf"^{target}:", MAKEFILE, re.MULTILINE)


def settings() -> dict[str, dict[str, object]]:
    return yaml.safe_load((ROOT / "scheduler_adapter/taskdb.yaml").read_text())


def test_configuration_is_known() -> None:
    (text,) = blocks("yaml")
    shown = yaml.safe_load(text)
    assert set(shown["taskdb"]) <= set(settings()["taskdb"])
    assert "preload" in dask.config.get("distributed.scheduler")


def test_linked_files_exist() -> None:
    for target in re.findall(r"\]\(([^)]+)\)", README):
        assert (ROOT / target).exists(), target


@pytest.mark.e2e
def test_the_program_runs(tmp_path: Path) -> None:
    (program,) = blocks("python", "python")
    # Guarded, because LocalCluster's processes import the program again.
    body = "".join(f"    {line}\n" for line in program.splitlines())
    (tmp_path / "program.py").write_text(f"if __name__ == '__main__':\n{body}")
    done = subprocess.run(
        [sys.executable, "program.py"], cwd=tmp_path, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "6", done.stderr


class Shown:
    """The three processes of a block of the README, on free ports."""

    def __init__(self, processes: Processes, tag: str) -> None:
        self.processes = processes
        self.ports = {"7070": free_port(), "8786": free_port()}
        self.serve, self.scheduler, self.worker = (self._here(words) for words in commands(*blocks("bash", tag)))
        # Said by the README's worker line; the scheduler's own default port may be taken here.
        self.scheduler += ["--host", "127.0.0.1", "--port", str(self.ports["8786"]), "--no-dashboard"]
        self.address = f"tcp://127.0.0.1:{self.ports['8786']}"
        await_port(self._start("taskdb", self.serve), self.ports["7070"], 60)
        self.running = self.start_scheduler()
        self._start("worker", [*self.worker, "--no-dashboard"])

    def _here(self, words: list[str]) -> list[str]:
        return [re.sub(r":(7070|8786)\b", lambda hit: f":{self.ports[hit[1]]}", word) for word in words]

    def _start(self, name: str, words: list[str]) -> Spawned:
        return self.processes.start(name, [command(words[0]), *words[1:]])

    def start_scheduler(self) -> Spawned:
        scheduler = self._start("scheduler", self.scheduler)
        await_port(scheduler, self.ports["8786"], 60)
        return scheduler


@pytest.mark.e2e
def test_the_cluster_runs_and_can_be_looked_into(tmp_path: Path) -> None:
    with Processes(tmp_path) as processes:
        shown = Shown(processes, "cluster")
        with Client(shown.address, set_as_default=False) as client:
            future = client.compute((da.arange(100, chunks=5) + 1).sum())
            assert future.result(timeout=60) == 5050
            # The README's commands ask the default port.
            there = {**os.environ, "TASKDB_URL": f"127.0.0.1:{shown.ports['7070']}"}
            for words in commands(*blocks("bash", "lookups")):
                done = subprocess.run(
                    [sys.executable, command(words[0]), *words[1:]], env=there, capture_output=True, text=True, timeout=30, check=False
                )
                # 1: no task has the README's made-up key.
                assert done.returncode == (1 if words[1] == "explain" else 0), done.stderr
                if words[1] == "status":
                    assert re.search(r"\battached", done.stdout), "the scheduler runs without the database"
            # Beside the daemon that serves it, in the folder it was started in.
            for words in commands(*blocks("bash", "store")):
                done = subprocess.run(
                    [sys.executable, command(words[0]), *words[1:]], cwd=tmp_path, capture_output=True, text=True, timeout=30, check=False
                )
                assert done.returncode == 0, done.stderr
        processes.check()


@pytest.mark.e2e
def test_the_cluster_outlives_its_scheduler(tmp_path: Path) -> None:
    with Processes(tmp_path) as processes:
        shown = Shown(processes, "survivors")
        with (
            dask.config.set({"distributed.client.preload": ["scheduler_adapter.client"]}),
            Client(shown.address, set_as_default=False) as client,
        ):
            ran_by = client.submit(os.getpid, pure=False)
            pid = ran_by.result(timeout=60)
            client.run(os.getpid, nanny=True)  # answered once the nanny has started: before, it fails without a scheduler
            shown.running.popen.kill()
            shown.running.popen.wait()
            processes.ended(shown.running)
            shown.start_scheduler()
            assert client.submit(str, ran_by).result(timeout=60) == str(pid)
        processes.check()
