"""`taskdb report`: what happened in a graph, as one page that needs nothing else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from taskdb.access import Daemon
from taskdb.cli.keys import show_key
from taskdb.cli.online import ONLINE_HELP, online_options
from taskdb.cli.output import print_json, show_seconds
from taskdb.cli.past import find_past, read_past
from taskdb.cli.statistics import Summary
from taskdb.client import Client


@click.command(
    help="Write a page about a graph, also of one that is over, as far as the history reaches: timeline of the workers, durations by"
    " prefix, stragglers, failures. It is one HTML file without scripts that loads nothing. GRAPH is its name or the beginning of it,"
    f" or the newest if none is said.\n\n{ONLINE_HELP}"
)
@click.argument("graph", default="")
@click.option("-o", "--to", "target", required=True, type=click.Path(dir_okay=False, path_type=Path), help="The file to write.")
@online_options
def report(graph: str, target: Path, url: Daemon, output: str, timeout: float) -> None:
    from taskdb.cli.report_page import page

    with Client(url, timeout) as client:
        past = read_past(client, find_past(client, graph))
    summary = Summary(past)
    try:
        target.write_text(page(past, summary))
    except OSError as error:
        raise click.ClickException(f"{target} cannot be written: {error.strerror}") from None
    if output == "json":
        print_json(_dict(summary, target))
        return
    click.echo(
        f"{target}: graph {past.graph.submission}, {summary.ran:,} tasks ran for {show_seconds(summary.seconds)} in all, within "
        f"{show_seconds(summary.wall_seconds)} on {len(summary.workers)} workers; {len(past.failures):,} failed"
    )


def _dict(summary: Summary, target: Path) -> dict[str, Any]:
    past = summary.past
    return {
        "to": str(target),
        "submission": past.graph.submission,
        "tasks": summary.tasks,
        "ran": summary.ran,
        "failed": len(past.failures),
        "seconds": summary.seconds,
        "wall_seconds": summary.wall_seconds,
        "workers": len(summary.workers),
        "prefixes": [
            {
                "prefix": x.name,
                "ran": x.count,
                "seconds": x.total,
                "median": x.median,
                "p95": x.p95,
                "max": x.longest,
            }
            for x in summary.prefixes
        ],
        "stragglers": [
            {"key": show_key(past.keys.get(run.id, b"")), "worker": run.worker, "seconds": run.seconds, "times_median": times}
            for run, times in summary.stragglers
        ],
    }
