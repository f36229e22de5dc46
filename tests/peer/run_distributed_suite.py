"""Runs tests of a source checkout of `distributed` on the installed one: stock, and with the adapter in every scheduler.

    python -m tests.peer.run_distributed_suite CHECKOUT [FILES…] --results FOLDER

FILES are relative to the package (`tests/test_client.py`); none: those of `FILES`. Goes on where an earlier run with the same folder ended.
Prints a table, and exits with 1 if a test that passes stock fails here without a reason in EXCEPTIONS.toml.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import click
import distributed

from tests.peer import results
from tests.peer.plugin import REGIMES

ROOT = Path(__file__).resolve().parents[2]
EXCEPTIONS = Path(__file__).with_name("EXCEPTIONS.toml")

FILES = (
    *(
        f"tests/test_{name}.py"
        for name in ("client", "scheduler", "steal", "failed_workers", "cancelled_state", "actor", "variable", "queues")
    ),
    *(f"tests/test_{name}.py" for name in ("publish", "as_completed", "worker_client", "priorities", "resources", "spans", "computations")),
    *(f"tests/test_{name}.py" for name in ("active_memory_manager", "nanny", "collections", "utils_comm", "semaphore", "locks", "events")),
    *(f"tests/test_{name}.py" for name in ("multi_locks", "reschedule", "scheduler_bokeh", "stress", "preload")),
    "diagnostics/tests",
    "dashboard/tests",
    "http",
    "shuffle/tests",
)


def merge(checkout: Path, into: Path) -> None:
    """The installed package, with the checkout's tests: a wheel has none."""
    shutil.copytree(Path(distributed.__file__).parent, into / "distributed", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("conftest.py", "pyproject.toml"):
        shutil.copy(checkout / name, into / name)
    source = checkout / "distributed"
    for folder in source.rglob("tests"):
        if folder.is_dir():
            shutil.copytree(folder, into / "distributed" / folder.relative_to(source), dirs_exist_ok=True)


def run(merged: Path, file: str, regime: str, folder: Path, seconds: float) -> None:
    """All tests of one file, or folder. Results are appended."""
    found = folder / f"{regime}.jsonl"
    words = [sys.executable, "-m", "pytest", "-p", "tests.peer.plugin", "-v", "--tb=short", "--color=no", f"distributed/{file}"]
    words += ["-o", "addopts=-p no:asyncio -p no:legacypath", "-W", "ignore::pytest.PytestUnraisableExceptionWarning"]
    words += ["--timeout", str(seconds), "-o", "timeout_method=signal"]
    env = dict(os.environ, TASKDB_PEER_REGIME=regime, TASKDB_PEER_RESULTS=str(found))
    env["PYTHONPATH"] = os.pathsep.join([str(merged), str(ROOT)])
    log = folder / f"{regime}.log"
    with log.open("a") as file_of_log:
        code = subprocess.run(words, cwd=merged, env=env, stdout=file_of_log, stderr=subprocess.STDOUT, check=False).returncode
    if code not in (0, 1, 5):  # passed, failed, nothing left to run
        raise click.ClickException(f"pytest ended with {code}: see {log}")


@click.command()
@click.argument("checkout", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.argument("files", nargs=-1)
@click.option("--results", "folder", type=click.Path(file_okay=False, path_type=Path), required=True, help="Where results are kept.")
@click.option("--regime", "regimes", type=click.Choice(REGIMES), multiple=True, default=REGIMES, show_default=True)
@click.option("--seconds", type=click.FloatRange(1), default=90.0, show_default=True, help="Bound on one test.")
def main(checkout: Path, files: tuple[str, ...], folder: Path, regimes: tuple[str, ...], seconds: float) -> None:
    """Compare stock with ours on the tests of a checkout of distributed."""
    exceptions = results.read_exceptions(EXCEPTIONS)
    folder.mkdir(parents=True, exist_ok=True)
    folder = folder.resolve()
    with tempfile.TemporaryDirectory(prefix="taskdb-peer-") as name:
        merged = Path(name)
        merge(checkout, merged)
        for file in files or FILES:
            if not (merged / "distributed" / file).exists():
                click.echo(f"{file}: not in this checkout", err=True)
                continue
            for regime in regimes:
                click.echo(f"{file}, {regime}", err=True)
                run(merged, file, regime, folder, seconds)
    table = results.rows(results.read(folder), exceptions)
    click.echo(results.markdown(table))
    (folder / "table.json").write_text(json.dumps([vars(row) for row in table], indent=1) + "\n")
    differ = [(row.regime, test) for row in table for test in (*row.differ, *row.hung)]
    for regime, test in differ:
        click.echo(f"{regime}: {test}", err=True)
    sys.exit(bool(differ))


if __name__ == "__main__":
    main()
