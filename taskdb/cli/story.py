"""`taskdb story`: what became of a task, and when."""

from __future__ import annotations

import sys
from datetime import datetime

import click

from taskdb.access import Daemon
from taskdb.cli import exits
from taskdb.cli.keys import show_key, unpack_key
from taskdb.cli.online import ONLINE_HELP, Key, online_options
from taskdb.cli.output import print_json, print_table, show_seconds, show_time
from taskdb.client import Client


@click.command(
    help="Tell what became of a task, and when, as far as the history reaches: also of one that is forgotten, and of all that had"
    f" its key. Exit code 1 if there is nothing to tell.\n\n{ONLINE_HELP}"
)
@click.argument("key", type=Key())
@click.option("--limit", type=click.IntRange(1, 1_000), default=100, show_default=True, help="The last so many events.")
@online_options
def story(key: bytes, limit: int, url: Daemon, output: str, timeout: float) -> None:
    with Client(url, timeout) as client:
        reply = client.story(key, limit)
    if output == "json":
        events = [
            {
                "time": event.time,
                "id": event.id,
                "what": event.what,
                "submission": event.submission,
                "worker": event.worker,
                "seconds": event.seconds if event.what == "ran" else None,
                "text": event.text,
            }
            for event in reply.events
        ]
        print_json({"key": unpack_key(key), "id": reply.id or None, "events": events, "since": reply.since or None, "more": reply.more})
    elif reply.events:
        rows = []
        for event in reply.events:
            details = event.text or (f"on {event.worker} for {show_seconds(event.seconds)}" if event.what == "ran" else event.submission)
            rows.append((datetime.fromtimestamp(event.time).isoformat(sep=" ", timespec="milliseconds"), event.id, event.what, details))
        print_table(("TIME", "ID", "WHAT", ""), rows, ("ID",))
        if reply.more:
            click.echo("more: earlier events, with a larger --limit", err=True)
    if not reply.events:
        reach = f"it begins {show_time(reply.since)}" if reply.since else "there is none: see `taskdb serve --history-bytes-max`"
        click.echo(f"taskdb: the history says nothing of {show_key(key)}; {reach}", err=True)
        sys.exit(exits.PROBLEM)
