"""`taskdb export`: tasks, or the history, a JSON object a line."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from taskdb.access import Daemon
from taskdb.cli.keys import unpack_key
from taskdb.cli.listing import filter_options, filters
from taskdb.cli.online import ONLINE_HELP, online_options
from taskdb.cli.output import print_json, task_dict
from taskdb.cli.past import find_past
from taskdb.client import Client
from taskdb.model import TaskState
from taskdb.wire import taskdb_pb2 as pb

_STATES = {int(state): state.name.lower() for state in TaskState} | {0: "forgotten"}


@click.command(
    help="Write tasks as JSON, one a line, with the fields of `taskdb tasks --output json`; or the history, with --history: what tasks"
    f" became, and what ran where. Read page by page, so that it may be long.\n\n{ONLINE_HELP}"
)
@filter_options
@click.option("--history", is_flag=True, help="The history instead, also of tasks that are forgotten. Only --graph chooses of it.")
@click.option("-o", "--to", "target", type=click.Path(dir_okay=False, path_type=Path), help="Write this file.  [default: stdout]")
@online_options
def export(history: bool, target: Path | None, url: Daemon, output: str, timeout: float, **which: Any) -> None:
    if history and any(value for name, value in which.items() if name != "graph"):
        raise click.UsageError("of the history only a --graph can be chosen")
    with Client(url, timeout) as client:
        if history:
            lines = _moves(client, find_past(client, which["graph"]) if which["graph"] else "")
        else:
            lines = (task_dict(task) for task in client.tasks(**filters(client, **which)))
        if target is None:
            for line in lines:
                click.echo(_text(line))
            return
        count = _write(target, lines)
    if output == "json":
        print_json({"to": str(target), "lines": count})
    else:
        click.echo(f"{target}: {count:,} lines", err=True)


def _write(target: Path, lines: Iterator[dict[str, Any]]) -> int:
    """It is there complete, or not at all."""
    part = target.with_name(target.name + ".part")
    count = 0
    try:
        with part.open("w") as file:
            for line in lines:
                file.write(_text(line) + "\n")
                count += 1
        part.replace(target)
    except OSError as error:
        raise click.ClickException(f"{target} cannot be written: {error.strerror}") from None
    finally:
        part.unlink(missing_ok=True)
    return count


def _text(line: dict[str, Any]) -> str:
    return json.dumps(line, default=str)


def _moves(client: Client, submission: str) -> Iterator[dict[str, Any]]:
    """A key is said when its task comes; later lines name its id."""
    for reply in client.history(submission):
        yield from _lines(reply, submission)


def _lines(reply: pb.HistoryReply, submission: str) -> Iterator[dict[str, Any]]:
    keys = dict(zip(reply.key_ids, reply.keys))
    mine = set()
    for when, task_id, state, graph, group in zip(reply.times, reply.ids, reply.states, reply.of_graph, reply.of_group):
        name = reply.graphs[graph].submission
        if submission and name != submission:
            continue
        mine.add(task_id)
        line = {"time": when, "id": task_id, "what": _STATES[state], "submission": name, "group": reply.groups[group]}
        if task_id in keys:
            line["key"] = unpack_key(keys.pop(task_id))
        yield line
    for task_id, place, began, seconds in zip(reply.ran_ids, reply.ran_on, reply.began, reply.seconds):
        if task_id in mine:
            yield {"time": began, "id": task_id, "what": "ran", "worker": reply.workers[place], "seconds": seconds}
    for task_id, text in zip(reply.failed_ids, reply.failed_texts):
        if task_id in mine:
            yield {"id": task_id, "what": "failed", "text": text}
