"""Commands that other packages add, through metadata as an installer writes it."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.taskdb.server.procs import ROOT, run

COMMAND = """
import click


@click.command(help="Says hello.")
@click.argument("name")
def hello(name):
    click.echo(f"hello {name}")


nothing = 3
"""


@pytest.fixture
def path(tmp_path: Path) -> str:
    """Holds a package that adds four commands; three of them cannot be loaded."""
    (tmp_path / "greetings.py").write_text(COMMAND)
    info = tmp_path / "greetings-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: greetings\nVersion: 1.0\n")
    entries = {"hello": "greetings:hello", "gone": "no_such_module:x", "number": "greetings:nothing", "status": "no_such_module:x"}
    (info / "entry_points.txt").write_text("[taskdb.commands]\n" + "".join(f"{name} = {value}\n" for name, value in entries.items()))
    return os.pathsep.join((str(ROOT), str(tmp_path)))


def test_an_added_command_runs(path: str) -> None:
    done = run("hello", "you", PYTHONPATH=path)
    assert (done.returncode, done.stdout) == (0, "hello you\n"), done.stderr


def test_help_names_all(path: str) -> None:
    done = run("--help", PYTHONPATH=path)
    assert done.returncode == 0
    assert "Says hello." in done.stdout
    assert all(f"  {name} " in done.stdout for name in ("hello", "gone", "number", "serve")), done.stdout


BROKEN = {"gone": "No module named 'no_such_module'", "number": "greetings:nothing is no click command"}


@pytest.mark.parametrize(("name", "words"), BROKEN.items())
def test_one_that_cannot_be_loaded_says_so_in_one_line(path: str, name: str, words: str) -> None:
    done = run(name, "--with", "options", PYTHONPATH=path)
    assert done.returncode == 1
    assert done.stderr == f"Error: the command {name}, which greetings adds, cannot be loaded: {words}\n"


def test_a_command_of_taskdb_is_not_replaced(path: str) -> None:
    assert "What the database holds" in run("status", "--help", PYTHONPATH=path).stdout


def test_dask_has_all_of_it_as_a_command(tmp_path: Path) -> None:
    """As an installer writes pyproject.toml's entry point. Errors and exit codes are those of `taskdb`."""
    entries = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]["dask_cli"]
    info = tmp_path / "ours-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: ours\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[dask_cli]\n" + "".join(f"{name} = {value}\n" for name, value in entries.items()))
    env = {**os.environ, "PYTHONPATH": os.pathsep.join((str(ROOT), str(tmp_path)))}
    args = [sys.executable, "-m", "dask", "taskdb", "status", "--url", f"unix:{tmp_path / 'nobody'}", "--timeout", "1"]
    done = subprocess.run(args, env=env, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (3, "")
    assert "taskdb: no taskdb daemon at unix:" in done.stderr
