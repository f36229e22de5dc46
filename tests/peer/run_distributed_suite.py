"""Runs tests of a source checkout of `distributed` on the installed one with the adapter in every scheduler, and stock what fails then.

    python -m tests.peer.run_distributed_suite CHECKOUT [FILES…] --results FOLDER

FILES are relative to the package (`tests/test_client.py`); none: those of `FILES`. Goes on where an earlier run with the same folder
ended. Regimes may be run at the same time, with one folder. `--again` afterwards: what fails only on a busy machine passes then.
Prints a table, and exits with 1 if a test that passes stock fails here without a reason in EXCEPTIONS.toml.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import click
import distributed

from tests.peer import results
from tests.peer.plugin import DEFAULT, PAGED, REGIMES, STOCK

ROOT = Path(__file__).resolve().parents[2]
EXCEPTIONS = Path(__file__).with_name("EXCEPTIONS.toml")

FIRST = (
    "client scheduler steal failed_workers cancelled_state publish variable queues as_completed worker_client actor priorities "
    "resources spans computations nanny collections active_memory_manager "
)
LAST = (
    "utils_comm semaphore locks events multi_locks reschedule stress preload stories cluster_dump client_executor client_loop "
    "dask_collections event_logging worker worker_memory spill tls_functional "
)
FILES = (
    *(f"tests/test_{name}.py" for name in FIRST.split()),
    "shuffle/tests",
    "diagnostics/tests",
    "dashboard/tests",
    "http",
    *(f"tests/test_{name}.py" for name in LAST.split()),
    "deploy/tests/test_local.py",
    "deploy/tests/test_adaptive.py",
    "cli/tests/test_dask_scheduler.py",
)
#: A process whose test takes this many times its bound is killed: it cannot be interrupted.
PATIENCE = 3


def merge(checkout: Path, into: Path) -> None:
    """The installed package, with the checkout's tests: a wheel has none."""
    shutil.copytree(Path(distributed.__file__).parent, into / "distributed", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("conftest.py", "pyproject.toml"):
        shutil.copy(checkout / name, into / name)
    source = checkout / "distributed"
    for folder in source.rglob("tests"):
        if folder.is_dir():
            shutil.copytree(folder, into / "distributed" / folder.relative_to(source), dirs_exist_ok=True)


def run(merged: Path, targets: list[str], regime: str, folder: Path, seconds: float) -> None:
    """All tests of a file or folder, or some tests. Results are appended; a process that a test ends is followed by another."""
    found, log, running = (folder / f"{regime}.{suffix}" for suffix in ("jsonl", "log", "running"))
    words = [sys.executable, "-m", "pytest", "-p", "tests.peer.plugin", "-v", "--tb=short", "--color=no"]
    words += [f"distributed/{target.removeprefix('distributed/')}" for target in targets]
    words += ["-o", "addopts=-p no:asyncio -p no:legacypath", "-W", "ignore::pytest.PytestUnraisableExceptionWarning"]
    words += ["--timeout", str(seconds), "-o", "timeout_method=signal"]
    env = dict(os.environ, TASKDB_PEER_REGIME=regime, TASKDB_PEER_RESULTS=str(found), TASKDB_PEER_RUNNING=str(running))
    env["PYTHONPATH"] = os.pathsep.join([str(merged), str(ROOT)])
    while True:
        running.unlink(missing_ok=True)
        with log.open("a") as file_of_log:
            process = subprocess.Popen(words, cwd=merged, env=env, stdout=file_of_log, stderr=subprocess.STDOUT, start_new_session=True)
            code = wait(process, running, PATIENCE * seconds)
        if code in (0, 1, 5):  # passed, failed, nothing left to run
            return
        if not running.exists():
            raise click.ClickException(f"pytest ended with {code}: see {log}")
        outcome = results.HUNG if code == -signal.SIGKILL else results.FAILED
        line = {"test": running.read_text(), "outcome": outcome, "text": f"pytest ended with {code}: see {log.name}"}
        with found.open("a") as file_of_results:
            file_of_results.write(json.dumps(line) + "\n")


def wait(process: subprocess.Popen[bytes], running: Path, seconds: float) -> int:
    """The process's exit code. It and its children are killed if one test takes longer."""
    try:
        while True:
            try:
                return process.wait(5)
            except subprocess.TimeoutExpired:
                if running.exists() and time.time() - running.stat().st_mtime > seconds:
                    os.killpg(process.pid, signal.SIGKILL)
    finally:
        if process.returncode is None:
            os.killpg(process.pid, signal.SIGTERM)


def forget(folder: Path, regime: str, tests: set[str]) -> None:
    """Take results out, so that the tests are run again. They are kept beside, to tell how many were not alone."""
    found = folder / f"{regime}.jsonl"
    lines = found.read_text().splitlines(keepends=True)
    gone = [line for line in lines if json.loads(line)["test"] in tests]
    with (folder / f"{regime}.before").open("a") as before:
        before.writelines(gone)
    found.write_text("".join(line for line in lines if line not in gone))


def run_again(merged: Path, files: tuple[str, ...], regimes: tuple[str, ...], folder: Path, seconds: float) -> None:
    for row in table_of(folder):
        tests = [*row.differ, *row.hung]
        if row.regime not in regimes or not tests or (files and not row.file.removeprefix("distributed/").startswith(files)):
            continue
        forget(folder, row.regime, set(tests))
        for test in tests:
            click.echo(f"{test}, {row.regime}", err=True)
            run(merged, [test], row.regime, folder, seconds)


def table_of(folder: Path) -> list[results.Row]:
    return results.rows(results.read(folder), results.read_exceptions(EXCEPTIONS))


@click.command()
@click.argument("checkout", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.argument("files", nargs=-1)
@click.option("--results", "folder", type=click.Path(file_okay=False, path_type=Path), required=True, help="Where results are kept.")
@click.option(
    "--regime", "regimes", type=click.Choice(REGIMES), multiple=True, default=(DEFAULT, PAGED), show_default=True, help="stock: all tests."
)
@click.option("--seconds", type=click.FloatRange(1), default=90.0, show_default=True, help="Bound on one test.")
@click.option("--again", is_flag=True, help="Run only what passed stock and failed here, each test in a process of its own.")
def main(checkout: Path, files: tuple[str, ...], folder: Path, regimes: tuple[str, ...], seconds: float, again: bool) -> None:
    """Compare stock with ours on the tests of a checkout of distributed. Of stock, what fails with ours is run."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    folder.mkdir(parents=True, exist_ok=True)
    folder = folder.resolve()
    with tempfile.TemporaryDirectory(prefix="taskdb-peer-") as name:
        merged = Path(name)
        merge(checkout, merged)
        if again:
            run_again(merged, files, regimes, folder, seconds)
        else:
            for file in files or FILES:
                if not (merged / "distributed" / file).exists():
                    click.echo(f"{file}: not in this checkout", err=True)
                    continue
                for regime in regimes:
                    click.echo(f"{file}, {regime}", err=True)
                    run(merged, [file], regime, folder, seconds)
                    if tests := results.unknown(results.read(folder), regime):
                        run(merged, tests, STOCK, folder, seconds)
    table = table_of(folder)
    click.echo(results.markdown(table))
    (folder / "table.json").write_text(json.dumps([vars(row) for row in table], indent=1) + "\n")
    differ = [(row.regime, test) for row in table for test in (*row.differ, *row.hung)]
    for regime, test in differ:
        click.echo(f"{regime}: {test}", err=True)
    sys.exit(bool(differ))


if __name__ == "__main__":
    main()
