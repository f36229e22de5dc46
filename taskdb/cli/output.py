"""Two printers of the same data: a table for people, JSON for programs. Nothing else writes to stdout."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from taskdb.cli.keys import show_key, unpack_key
from taskdb.wire import taskdb_pb2 as pb

#: Order of the states in tables.
STATES = ("waiting", "queued", "processing", "memory", "released", "erred")


def print_json(value: Any) -> None:
    click.echo(json.dumps(value, indent=2, default=str))


def print_table(columns: Sequence[str], rows: Iterable[Sequence[object]], numbers: Sequence[str] = ()) -> None:
    """Not cut when stdout is no terminal: a pipe has no width."""
    table = Table(box=None, pad_edge=False, header_style="bold", show_header=any(columns))
    for column in columns:
        table.add_column(column, justify="right" if column in numbers else "left", overflow="fold")
    for row in rows:
        table.add_row(*(_text(x) for x in row))
    console = Console(markup=False, highlight=False)
    if not console.is_terminal:
        console = Console(markup=False, highlight=False, width=10_000)
    console.print(table)


def _text(value: object) -> str:
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


def show_bytes(count: int) -> str:
    size, unit = float(count), "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if size < 1024 or unit == "TiB":
            break
        size /= 1024
    return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"


def show_seconds(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.3g} s"
    minutes, hours = seconds / 60, seconds / 3600
    return f"{minutes:.1f} min" if minutes < 60 else f"{hours:,.1f} h"


def show_time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds).isoformat(sep=" ", timespec="seconds") if seconds else "-"


def task_dict(task: pb.TaskInfo) -> dict[str, Any]:
    return {
        "key": unpack_key(task.key),
        "id": task.id,
        "state": task.state,
        "submission": task.submission,
        "group": task.group,
        "waiting_on": task.waiting_on,
        "blocked_on": task.blocked_on,
        "need": task.need,
        "wants": task.wants,
        "nbytes": task.nbytes,
        "rank": [task.user, task.generation, task.order],
        "suspicious": task.suspicious,
        "error": task.error,
    }


TASK_COLUMNS = ("KEY", "STATE", "WAITS FOR", "NEEDED BY", "WANTED BY", "BYTES", "SUBMISSION", "ERROR")
TASK_NUMBERS = ("WAITS FOR", "NEEDED BY", "WANTED BY", "BYTES")


def task_row(task: pb.TaskInfo) -> tuple[object, ...]:
    return (
        show_key(task.key),
        task.state,
        task.waiting_on,
        task.need,
        task.wants,
        task.nbytes if task.nbytes >= 0 else "-",
        task.submission or "-",
        task.error.strip().splitlines()[-1] if task.error.strip() else "",
    )
