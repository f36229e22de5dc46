"""Commands on the files of a store: verify, backup, restore, compact, recover. The last three write, with the writer's lock."""

from __future__ import annotations

import sys
from collections.abc import Callable
from inspect import cleandoc
from pathlib import Path
from typing import Any, TypeVar

import click

from taskdb.cli import exits
from taskdb.cli.output import print_json, show_bytes
from taskdb.cli.progress import Progress
from taskdb.cli.serve import store_bytes_max_option

F = TypeVar("F", bound=Callable[..., Any])

_READS = f"Offline: reads the files, and needs no daemon. One may serve the same folder meanwhile.\n\n{exits.HELP}"
_WRITES = f"Offline: writes the files. End the daemon that serves the folder first.\n\n{exits.HELP}"
#: What is wrong with it, the store says better.
_FOLDER = click.Path(path_type=Path, readable=False)

_data = click.option("--data", required=True, type=_FOLDER, help="Folder of the store.")


def _output(command: F) -> F:
    return click.option("--output", type=click.Choice(["table", "json"]), default="table", show_default=True)(command)


def _command(kind: str) -> Callable[[Callable[..., None]], click.Command]:
    """A command whose help is its docstring, and what it has in common with others."""
    return lambda function: click.command(help=f"{cleandoc(function.__doc__ or '')}\n\n{kind}")(function)


# What these do is imported when it is done: LMDB and numpy are not for every command.


@_command(_READS)
@_data
@_output
def verify(data: Path, output: str) -> None:
    """Check a store, also one in use. Changes nothing.

    Looks at its pages, its records, and every rule of the engine over all tasks. Prints counts, and the first of what is wrong. Exit code 1
    if a rule is broken, 5 if something cannot be read. A million tasks take some 40 s and 1.3 GiB of memory; meanwhile a daemon cannot use
    again the space of what it changes."""
    from taskdb.cli.verifying import print_report, verify_store

    with Progress() as progress:
        report = verify_store(data, progress)
    if output == "json":
        print_json(report)
    else:
        print_report(report)
    if report["ok"]:
        return
    unreadable = bool(report["violations"].keys() & {"pages", "records"})
    if unreadable:
        todo = "restore a backup, or move it away to begin anew (cp makes no whole copy of a store in use: taskdb backup does)"
    else:
        todo = "taskdb recover puts indexes right; for all else restore a backup"
    click.echo(f"taskdb: the store in {data} is not as it should be ({report['first']}): {todo}", err=True)
    sys.exit(exits.CORRUPT if unreadable else exits.PROBLEM)


@_command(_READS)
@_data
@click.option("--to", "target", required=True, type=_FOLDER, help="Folder of the copy. Must not exist.")
@_output
def backup(data: Path, target: Path, output: str) -> None:
    """Copy a store, also one in use.

    All of it, as of one moment; the copy is there complete, or not at all. A backup is a store itself. A store in use can be copied in no
    other way. One that is damaged is not copied (exit code 5)."""
    from taskdb.store import copies

    with Progress() as progress:
        progress.begin("pages looked over")
        size = copies.backup(data, target, progress)
    _print_copy(data, target, size, output)


@_command(_WRITES)
@click.option("--from", "source", required=True, type=_FOLDER, help="Folder of the backup.")
@_data
@_output
def restore(source: Path, data: Path, output: str) -> None:
    """Make a store from a backup.

    The folder must be empty, or not be there. The store is as it was when the backup was made: end the schedulers and workers that went on
    since. `taskdb recover` says what will run again."""
    from taskdb.store import copies

    with Progress() as progress:
        progress.begin("pages looked over")
        size = copies.restore(source, data, progress)
    _print_copy(source, data, size, output)


def _print_copy(source: Path, target: Path, size: int, output: str) -> None:
    if output == "json":
        print_json({"from": str(source), "to": str(target), "bytes": size})
    else:
        click.echo(f"{target}: {show_bytes(size)}, a copy of {source}")


@_command(_WRITES)
@_data
@_output
def compact(data: Path, output: str) -> None:
    """Give unused space of a store back to the disk.

    What was pruned or forgotten is used again, but the file stays as large as it ever was. This writes it anew, beside the old one, and
    puts it in its place: complete, or not at all. It needs as much free disk as the store has in use. A store that is damaged is left alone
    (exit code 5)."""
    from taskdb.store import copies

    with Progress() as progress:
        progress.begin("pages looked over")
        before, after = copies.compact(data, progress)
    if output == "json":
        print_json({"data": str(data), "bytes_before": before, "bytes": after})
    else:
        click.echo(f"{data}: {show_bytes(after)} on disk, {show_bytes(before)} before")


@_command(_WRITES)
@_data
@click.option("--dry-run", is_flag=True, help="Only say it, and write nothing. (The daemon must be ended all the same.)")
@store_bytes_max_option
@_output
def recover(data: Path, dry_run: bool, store_bytes_max: int, output: str) -> None:
    """Put right a store whose cluster is gone.

    For when no scheduler and no worker lives any more. Says what is kept, what will run, and how long that takes, as far as durations were
    recorded.

    What workers held is lost: what is needed of it is queued again, with all it is computed from. Submissions that were not complete are
    dropped; their clients send them again. What clients want stays wanted.

    A scheduler that starts on the store recovers by itself, and keeps what living workers hold: while there are any, do not use this."""
    from taskdb.cli.recovering import print_outcome, recover_store

    with Progress() as progress:
        outcome = recover_store(data, store_bytes_max, dry_run, progress)
    if output == "json":
        print_json(outcome)
    else:
        print_outcome(outcome)
