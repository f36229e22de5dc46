"""`taskdb cancel` and `taskdb retry`: tasks by key or by query, carried out by the scheduler."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import click

from taskdb.access import Daemon
from taskdb.cli import exits
from taskdb.cli.keys import unpack_key
from taskdb.cli.listing import filter_options, filters
from taskdb.cli.online import Key, online_options
from taskdb.cli.output import TASK_COLUMNS, TASK_NUMBERS, print_json, print_table, task_row
from taskdb.client import Client
from taskdb.wire import taskdb_pb2 as pb

#: Keys sent at a time.
_KEYS_SLICE = 5_000
#: Tasks shown before it is asked whether to go on.
_SHOWN = 10

_HELP = f"Through the daemon, by the scheduler that is attached (exit code 3 if there is none).\n\n{exits.HELP}"


def _acting(command: Callable[..., None]) -> Callable[..., None]:
    for option in (
        click.option("--yes", is_flag=True, help="Do not ask. Needed where nobody can be asked."),
        click.option("--dry-run", is_flag=True, help="Only say which tasks."),
        filter_options,
        click.argument("keys", nargs=-1, type=Key()),
    ):
        command = option(command)
    return online_options(command)


@click.command(
    help="Cancel tasks: those of these keys, or all that a query finds. With them goes what depends on them; every client that waits for"
    " one is told that it is cancelled. Of a graph as a whole (--graph alone) it is the wanted results that are cancelled, and what only"
    f" they need goes with them.\n\n{_HELP}"
)
@_acting
def cancel(keys: tuple[bytes, ...], dry_run: bool, yes: bool, url: Daemon, output: str, timeout: float, **which: Any) -> None:
    if which["graph"] and not any(value for name, value in which.items() if name != "graph"):
        which["wanted"] = True
    _act("cancel", "cancelled", keys, dry_run, yes, url, output, timeout, which)


@click.command(
    help="Run failed tasks again: those of these keys, or all that a query finds. What they failed of runs again, too; clients that wait"
    f" for them wait on.\n\n{_HELP}"
)
@_acting
def retry(keys: tuple[bytes, ...], dry_run: bool, yes: bool, url: Daemon, output: str, timeout: float, **which: Any) -> None:
    if which["state"] not in (None, "erred"):
        raise click.UsageError("only tasks that are erred can be retried")
    if any(which.values()):
        which["state"] = "erred"
    _act("retry", "retried", keys, dry_run, yes, url, output, timeout, which)


def _act(
    action: str,
    done: str,
    keys: tuple[bytes, ...],
    dry_run: bool,
    yes: bool,
    url: Daemon,
    output: str,
    timeout: float,
    which: dict[str, Any],
) -> None:
    if bool(keys) == any(which.values()):
        raise click.UsageError("say which tasks: keys, or a query (--graph, --state, …), not both")
    if not (yes or dry_run or sys.stdin.isatty()):
        raise click.UsageError("nobody can be asked here whether to do it: say --yes, or --dry-run")
    with Client(url, timeout) as client:
        if keys:
            stored = client.get_tasks(keys)
            found = [task.info for task in stored if task.found]
        else:
            found = list(client.tasks(**filters(client, **which)))
        count = 0
        if found and not dry_run and (yes or _asked(action, found)):
            for start in range(0, len(found), _KEYS_SLICE):
                count += client.act(action, [task.key for task in found[start : start + _KEYS_SLICE]])
    missing = len(keys) - len(found) if keys else 0
    if output == "json":
        print_json({"found": len(found), done: count, "unknown": missing, "keys": [unpack_key(task.key) for task in found]})
    elif dry_run:
        print_table(TASK_COLUMNS, [task_row(task) for task in found], TASK_NUMBERS)
    else:
        click.echo(f"{count:,} of {len(found):,} tasks {done}")
    if missing:
        click.echo(f"taskdb: {missing:,} of these keys are of no task", err=True)
        sys.exit(exits.PROBLEM)


def _asked(action: str, found: list[pb.TaskInfo]) -> bool:
    print_table(TASK_COLUMNS, [task_row(task) for task in found[:_SHOWN]], TASK_NUMBERS)
    more = f" (these, and {len(found) - _SHOWN:,} more)" if len(found) > _SHOWN else ""
    return click.confirm(f"{action} {len(found):,} tasks{more}?", abort=True)
