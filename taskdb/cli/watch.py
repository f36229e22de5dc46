"""`taskdb watch`: how far graphs have got, again and again."""

from __future__ import annotations

import json
import sys
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import click
from rich.console import Console
from rich.live import Live
from rich.table import Table

from taskdb.access import Daemon
from taskdb.cli import exits
from taskdb.cli.listing import done, find_graph, graph_dict, unfinished
from taskdb.cli.online import ONLINE_HELP, online_options
from taskdb.cli.output import show_seconds
from taskdb.client import Client
from taskdb.wire import taskdb_pb2 as pb

#: Looks over which the rate is taken, and graphs shown at a time.
_LOOKS = 20
_SHOWN = 20
_BAR = 24


@dataclass(slots=True)
class Row:
    graph: pb.GraphStatus
    #: Tasks a second, of late; 0: not known.
    rate: float

    @property
    def left_seconds(self) -> float | None:
        return unfinished(self.graph) / self.rate if self.rate else None


class Rates:
    """Tasks done by graph, look by look."""

    def __init__(self) -> None:
        self._seen: dict[str, deque[tuple[float, int]]] = {}

    def row(self, graph: pb.GraphStatus, now: float) -> Row:
        seen = self._seen.setdefault(graph.submission, deque(maxlen=_LOOKS))
        seen.append((now, done(graph)))
        (then, before), (_, count) = seen[0], seen[-1]
        return Row(graph, (count - before) / (now - then) if now > then else 0.0)


@click.command(
    help="Show how far graphs have got, until they are done, or (if none is named) until it is stopped, or has looked --count times."
    " Exit code 1 if a named graph ended with failed tasks. With --output json a line each time."
    f"\n\n{ONLINE_HELP}"
)
@click.argument("graphs", nargs=-1)
@click.option("--interval", type=click.FloatRange(0.05), default=1.0, show_default=True, help="Seconds between two looks.")
@click.option("--count", type=click.IntRange(1), help="Look so many times, and end.")
@online_options
def watch(graphs: tuple[str, ...], interval: float, count: int | None, url: Daemon, output: str, timeout: float) -> None:
    with Client(url, timeout) as client:
        names = {find_graph(client, name) for name in graphs}
        console = Console(markup=False, highlight=False)
        failed = False
        live = Live(console=console, auto_refresh=False) if output == "table" and console.is_terminal else None
        if live is not None:
            live.start()
        try:
            for status, rows in _looks(client, names, interval, count):
                failed = any(row.graph.states.get("erred") for row in rows) and bool(names)
                if live is not None:
                    live.update(_table(status, rows), refresh=True)
                elif output == "json":
                    click.echo(json.dumps(_dict(status, rows)))
                else:
                    for row in rows[:_SHOWN]:
                        click.echo(_line(row))
        except KeyboardInterrupt:
            pass
        finally:
            if live is not None:
                live.stop()
    if failed:
        sys.exit(exits.PROBLEM)


def _looks(client: Client, names: set[str], interval: float, count: int | None) -> Iterator[tuple[pb.StatusReply, list[Row]]]:
    rates = Rates()
    looked = 0
    while True:
        status = client.status()
        now = time.monotonic()
        chosen = [graph for graph in status.graphs if not names or graph.submission in names]
        rows = [rates.row(graph, now) for graph in chosen]
        rows.sort(key=lambda row: (not unfinished(row.graph), -row.graph.submitted))
        yield status, rows
        looked += 1
        # A graph that is gone is done, and all of it was let go of.
        if looked == count or (names and not any(unfinished(graph) or not graph.sealed for graph in chosen)):
            return
        time.sleep(interval)


def _dict(status: pb.StatusReply, rows: list[Row]) -> dict[str, Any]:
    return {
        "time": time.time(),
        "scheduler_attached": status.scheduler_attached,
        "tasks": status.tasks,
        "graphs": [{**graph_dict(row.graph), "per_second": row.rate, "seconds_left": row.left_seconds} for row in rows],
    }


def _words(row: Row) -> tuple[str, ...]:
    graph = row.graph
    left = row.left_seconds
    return (
        f"{done(graph):,}/{graph.total:,}" + ("" if graph.sealed else "+"),
        f"{graph.states.get('processing', 0):,}",
        f"{graph.states.get('queued', 0):,}",
        f"{graph.states.get('erred', 0):,}",
        f"{row.rate:,.0f}",
        "" if left is None else show_seconds(left) if unfinished(graph) else "done",
    )


def _share(graph: pb.GraphStatus) -> float:
    return done(graph) / graph.total if graph.total else 1.0


def _line(row: Row) -> str:
    tasks, running, queued, failed, rate, left = _words(row)
    return (
        f"{row.graph.submission}: {_share(row.graph):.0%}, {tasks} tasks, {running} with the scheduler, {queued} queued, {failed} failed, "
        f"{rate}/s{f', {left} left' if left and left != 'done' else ''}"
    )


def _table(status: pb.StatusReply, rows: list[Row]) -> Table:
    attached = "attached" if status.scheduler_attached else "not attached"
    table = Table(box=None, pad_edge=False, header_style="bold", caption=f"{status.tasks:,} tasks stored; scheduler {attached}")
    for column in ("GRAPH", "", "DONE", "RUNNING", "QUEUED", "FAILED", "A SECOND", "LEFT"):
        table.add_column(column, justify="left" if column in ("GRAPH", "") else "right")
    for row in rows[:_SHOWN]:
        full = round(_BAR * _share(row.graph))
        table.add_row(row.graph.label or row.graph.submission, "█" * full + "░" * (_BAR - full), *_words(row))
    if len(rows) > _SHOWN:
        table.add_row(f"and {len(rows) - _SHOWN:,} more", *[""] * 7)
    return table
