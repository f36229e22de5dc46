"""`taskdb prune`: forget graphs that are done, while others run."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Iterable

import click

from taskdb.access import Daemon
from taskdb.cli import exits
from taskdb.cli.listing import find_graph, graph_dict
from taskdb.cli.online import ONLINE_HELP, online_options
from taskdb.cli.output import print_json, print_table, show_bytes, show_time
from taskdb.cli.progress import Progress
from taskdb.cli.serve import Size
from taskdb.client import Client
from taskdb.wire import taskdb_pb2 as pb

_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 604_800}
#: Pause between two looks at how far it is.
_LOOK_SECONDS = 0.1
#: Looks without a change after which what is left is what others depend on.
_LOOKS_SAME = 30


class Age(click.ParamType[float]):
    """Seconds: 90s, 30m, 12h, 7d, 2w."""

    name = "age"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> float:
        match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([smhdw])", str(value).strip().lower())
        if match is None:
            self.fail(f"{value!r} is not an age, such as 12h or 7d", param, ctx)
        return float(match[1]) * _UNITS[match[2]]


@click.command(
    help="Forget finished graphs: those named, those that are old, and the oldest until the store is small enough."
    "\n\nResults that clients still want are let go of, and the clients are told that they are cancelled. Tasks that other graphs depend on"
    " stay. Graphs that run are not held up: it is done in small steps, meanwhile. The space is used again; `taskdb compact` gives it back"
    f" to the disk.\n\n{ONLINE_HELP}"
)
@click.argument("graphs", nargs=-1)
@click.option("--older-than", type=Age(), help="Finished graphs submitted so long ago, and the history of before: 12h, 7d.")
@click.option("--budget", type=Size(), help="The oldest finished graphs, until no more bytes than this are in use.")
@click.option("--dry-run", is_flag=True, help="Only say which graphs.")
@click.option("--wait/--no-wait", default=True, show_default=True, help="Return when it is done. (--budget always waits.)")
@online_options
def prune(
    graphs: tuple[str, ...],
    older_than: float | None,
    budget: int | None,
    dry_run: bool,
    wait: bool,
    url: Daemon,
    output: str,
    timeout: float,
) -> None:
    if not graphs and older_than is None and budget is None:
        raise click.UsageError("say which: graphs, --older-than, or --budget")
    before = 0.0 if older_than is None else time.time() - older_than
    with Client(url, timeout) as client, Progress() as progress:
        used = client.status().used_bytes
        names = [find_graph(client, name) for name in graphs]
        gone: list[pb.GraphStatus] = []
        if names or before:
            gone = client.prune(names, submitted_before=before, history_before=before, dry_run=dry_run)
            if not dry_run and (wait or budget is not None):
                _await(client, gone, progress)
        if budget is not None:
            gone += _to_budget(client, budget, dry_run, progress, {graph.submission for graph in gone})
        left = client.status().used_bytes
    if output == "json":
        print_json({"graphs": [graph_dict(graph) for graph in gone], "used_bytes_before": used, "used_bytes": left, "dry_run": dry_run})
    else:
        columns = ("SUBMISSION", "CLIENT", "SUBMITTED", "TASKS")
        print_table(columns, [(x.submission, x.client, show_time(x.submitted), x.tasks) for x in gone], ("TASKS",))
        done = "would be forgotten" if dry_run else "forgotten" if wait or budget is not None else "being forgotten"
        click.echo(f"{len(gone):,} graphs {done}; {show_bytes(left)} in use, {show_bytes(used)} before", err=True)
    if budget is not None and left > budget and not dry_run:
        click.echo(f"taskdb: {show_bytes(left)} are in use, more than {show_bytes(budget)}, and no graph more is finished", err=True)
        sys.exit(exits.PROBLEM)


def _to_budget(client: Client, budget: int, dry_run: bool, progress: Progress, known: set[str]) -> list[pb.GraphStatus]:
    """Graphs one by one, the oldest first. A dry run cannot know how many it takes: it names all."""
    gone: list[pb.GraphStatus] = []
    while client.status().used_bytes > budget:
        finished = [x for x in client.prune(submitted_before=time.time() + 1, dry_run=True) if x.submission not in known]
        if dry_run:
            return sorted(finished, key=lambda graph: graph.submitted)
        if not finished:
            break
        oldest = min(finished, key=lambda graph: graph.submitted)
        known.add(oldest.submission)
        gone += client.prune([oldest.submission])
        _await(client, [oldest], progress)
    return gone


def _await(client: Client, graphs: Iterable[pb.GraphStatus], progress: Progress) -> None:
    """Until nothing is left of them but what others depend on."""
    names = {graph.submission for graph in graphs}
    total = sum(graph.tasks for graph in graphs)
    progress.begin("tasks forgotten", total)
    before, same = -1, 0
    while True:
        status = client.status()
        left = [graph for graph in status.graphs if graph.submission in names]
        tasks = sum(graph.tasks for graph in left)
        progress(total - tasks)
        # What goes on elsewhere may always give the daemon something to do.
        same = same + 1 if tasks == before else 0
        before = tasks
        if not left or (not any(graph.wanted for graph in left) and (not status.todo or same > _LOOKS_SAME)):
            return
        time.sleep(_LOOK_SECONDS)
