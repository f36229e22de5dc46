"""Commands that ask a running daemon: status, explain. They change nothing. What all online commands share."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, TypeVar

import click

from taskdb.access import Daemon
from taskdb.cli import exits
from taskdb.cli.keys import parse_key, show_key, unpack_key
from taskdb.cli.output import (
    STATES,
    TASK_COLUMNS,
    TASK_NUMBERS,
    print_json,
    print_table,
    show_bytes,
    show_seconds,
    show_time,
    task_dict,
    task_row,
)
from taskdb.cli.reaching import reaching
from taskdb.client import Client
from taskdb.wire import taskdb_pb2 as pb

F = TypeVar("F", bound=Callable[..., Any])

ONLINE_HELP = f"Online: asks the daemon.\n\n{exits.HELP}"


def online_options(command: F) -> F:
    """The options every online command has."""
    output = click.option("--output", type=click.Choice(["table", "json"]), default="table", show_default=True)
    timeout = click.option("--timeout", type=click.FloatRange(0.1), default=10.0, show_default=True, help="Seconds to wait for an answer.")
    return reaching(output(timeout(command)))  # type: ignore[return-value]


class Key(click.ParamType[bytes]):
    """Plain text, or a Python or JSON literal for a tuple: "('x', 0)"."""

    name = "key"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> bytes:
        if isinstance(value, bytes):
            return value
        try:
            return parse_key(str(value))
        except ValueError as error:
            self.fail(str(error), param, ctx)


# ---------------------------------------------------------------------------------------------------------- status


@click.command(help=f"What the database holds: tasks by state, submissions, size.\n\n{ONLINE_HELP}")
@online_options
def status(url: Daemon, output: str, timeout: float) -> None:
    with Client(url, timeout) as client:
        reply = client.status()
    if output == "json":
        print_json(_status_dict(reply))
        return
    durable = f"{reply.commits:,} commits, last {reply.commit_seconds_last * 1000:.1f} ms"
    print_table(
        ("", ""),
        [
            ("daemon", f"taskdb {reply.version}, up {reply.uptime_seconds:.0f} s, {durable}"),
            ("store", f"{reply.store_uuid}, format {reply.format_version}"),
            ("size", f"{show_bytes(reply.store_bytes)} of {show_bytes(reply.store_bytes_max)}"),
            ("scheduler", f"epoch {reply.epoch}, {'attached' if reply.scheduler_attached else 'not attached'}"),
            ("tasks", f"{reply.tasks:,}" + "".join(f", {reply.states[x]:,} {x}" for x in STATES if reply.states.get(x))),
            ("background", f"{reply.todo:,} to do"),
        ],
    )
    if reply.graphs:
        click.echo()
        columns = ("SUBMISSION", "CLIENT", "SUBMITTED", "SEALED", "TASKS", "UNMADE", "WANTED", *(x.upper() for x in STATES))
        rows = [
            (
                graph.submission,
                graph.client,
                show_time(graph.submitted),
                "yes" if graph.sealed else "no",
                graph.tasks,
                graph.unmade,
                graph.wanted,
                *(graph.states.get(x, 0) for x in STATES),
            )
            for graph in reply.graphs
        ]
        print_table(columns, rows, numbers=columns[4:])


def graph_fields(graph: pb.GraphStatus) -> dict[str, Any]:
    return {
        "submission": graph.submission,
        "client": graph.client,
        "label": graph.label,
        "submitted": graph.submitted,
        "sealed": graph.sealed,
        "tasks": graph.tasks,
        "states": {x: graph.states.get(x, 0) for x in STATES},
        "wanted": graph.wanted,
        "unmade": graph.unmade,
        "total": graph.total,
    }


def _status_dict(reply: pb.StatusReply) -> dict[str, Any]:
    return {
        "version": reply.version,
        "store_uuid": reply.store_uuid,
        "format_version": reply.format_version,
        "epoch": reply.epoch,
        "scheduler_attached": reply.scheduler_attached,
        "tasks": reply.tasks,
        "states": {x: reply.states.get(x, 0) for x in STATES},
        "store_bytes": reply.store_bytes,
        "store_bytes_max": reply.store_bytes_max,
        "todo": reply.todo,
        "uptime_seconds": reply.uptime_seconds,
        "commits": reply.commits,
        "commit_seconds_last": reply.commit_seconds_last,
        "graphs": [graph_fields(graph) for graph in reply.graphs],
    }


# --------------------------------------------------------------------------------------------------------- explain


@click.command(
    help="Say why a task does not run. KEY is plain text, or a Python or JSON literal for a tuple: \"('x', 0)\"."
    f" Exit code 1 if there is no such task.\n\n{ONLINE_HELP}"
)
@click.argument("key", type=Key())
@click.option("--limit", type=click.IntRange(1, 100), default=10, show_default=True, help="Tasks listed of each kind.")
@online_options
def explain(key: bytes, limit: int, url: Daemon, output: str, timeout: float) -> None:
    with Client(url, timeout) as client:
        reply = client.explain(key, limit)
    if output == "json":
        print_json(_explain_dict(key, reply))
    elif reply.found:
        _explain_table(reply)
    if not reply.found:
        click.echo(f"taskdb: there is no task {show_key(key)}: it was forgotten, or never came", err=True)
        sys.exit(exits.PROBLEM)


def _explain_dict(key: bytes, reply: pb.ExplainReply) -> dict[str, Any]:
    if not reply.found:
        return {"key": unpack_key(key), "found": False}
    return {
        "key": unpack_key(key),
        "found": True,
        "reason": reply.reason,
        "task": task_dict(reply.task),
        "waits_for": [task_dict(x) for x in reply.waits_for],
        "chain": [task_dict(x) for x in reply.chain],
        "ahead_in_queue": reply.ahead_in_queue,
        "wanted_by": list(reply.wanted_by),
        "cause": task_dict(reply.cause) if reply.HasField("cause") else None,
        "critical_path": {
            "steps": [{"task": task_dict(step.task), "seconds": _seconds(step)} for step in reply.path],
            "tasks": reply.path_tasks,
            "whole": reply.path_whole,
        },
    }


def _seconds(step: pb.PathStep) -> float | None:
    return step.seconds if step.seconds >= 0 else None


def _explain_table(reply: pb.ExplainReply) -> None:
    click.echo(f"{show_key(reply.task.key)}: {reply.task.state}. {reply.reason}")
    if reply.wanted_by:
        click.echo(f"wanted by: {', '.join(reply.wanted_by)}")
    causes = [reply.cause] if reply.HasField("cause") else []
    for title, found in (("failed because of", causes), ("waits for", reply.waits_for), ("held up by", reply.chain)):
        if found:
            click.echo(f"\n{title}:")
            print_table(TASK_COLUMNS, [task_row(x) for x in found], TASK_NUMBERS)
    if reply.path:
        known = [seconds for step in reply.path if (seconds := _seconds(step)) is not None]
        takes = f", some {show_seconds(sum(known))} of what is known" if known else ""
        part = "" if reply.path_whole else f", of the {reply.path_tasks:,} nearest"
        click.echo(f"\ncritical path{takes} ({reply.path_tasks:,} tasks are to be done before it is{part}):")
        rows = [(show_key(x.task.key), x.task.state, "?" if x.seconds < 0 else show_seconds(x.seconds)) for x in reply.path]
        print_table(("KEY", "STATE", "USUALLY TAKES"), rows, ("USUALLY TAKES",))
