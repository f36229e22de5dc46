"""`taskdb errors`: what failed, and why."""

from __future__ import annotations

import click

from taskdb.access import Daemon
from taskdb.cli.keys import show_key, unpack_key
from taskdb.cli.listing import find_graph
from taskdb.cli.online import ONLINE_HELP, online_options
from taskdb.cli.output import print_json, print_table
from taskdb.client import Client


@click.command(
    help="Group failed tasks by exception and prefix, the most frequent first, with the message of one of each."
    f"\n\nExit code 0 also if there are failed tasks.\n\n{ONLINE_HELP}"
)
@click.option("--graph", default="", help="Only of this graph: its name, or the beginning of it.")
@click.option("--traceback/--no-traceback", default=True, show_default=True, help="Show where the exception was raised.")
@online_options
def errors(graph: str, traceback: bool, url: Daemon, output: str, timeout: float) -> None:
    with Client(url, timeout) as client:
        found = client.errors(find_graph(client, graph) if graph else "")
    if output == "json":
        groups = [
            {
                "exception": group.exception,
                "prefix": group.prefix,
                "failed": group.failed,
                "blamed": group.blamed,
                "key": unpack_key(group.key),
                "submission": group.submission,
                "text": group.text,
                "traceback": group.traceback,
            }
            for group in found
        ]
        print_json({"errors": groups})
        return
    columns = ("EXCEPTION", "PREFIX", "FAILED", "BLAMED ON THEM", "FOR EXAMPLE", "MESSAGE")
    rows = [(x.exception, x.prefix, x.failed, x.blamed, show_key(x.key), " ".join(x.text.split())[:200]) for x in found]
    print_table(columns, rows, ("FAILED", "BLAMED ON THEM"))
    for group in found if traceback else ():
        if group.traceback:
            click.echo(f"\n{group.exception} in {show_key(group.key)}:\n{group.traceback.rstrip()}")
