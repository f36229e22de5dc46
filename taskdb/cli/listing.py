"""`taskdb graphs` and `taskdb tasks`: lists, with filters and pages."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Callable
from typing import Any, TypeVar

import click

from taskdb.access import Daemon
from taskdb.cli.online import ONLINE_HELP, graph_fields, online_options
from taskdb.cli.output import STATES, TASK_COLUMNS, TASK_NUMBERS, print_json, print_table, show_time, task_dict, task_row
from taskdb.cli.past import past_graphs
from taskdb.client import Client
from taskdb.errors import InvalidRequest
from taskdb.wire import taskdb_pb2 as pb

F = TypeVar("F", bound=Callable[..., Any])

#: As taskdb/engine/listing.py has them, which imports numpy: not for every command.
SORTS = ("bytes", "priority", "waits-for", "needed-by", "wanted-by", "suspicious")
#: States of tasks that are to be done.
UNFINISHED = ("waiting", "queued", "processing")


class Cursor(click.ParamType[bytes]):
    """What the last page said to go on with."""

    name = "cursor"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> bytes:
        if isinstance(value, bytes):
            return value
        try:
            return base64.b64decode(str(value).encode("ascii"), altchars=b"-_", validate=True)
        except (binascii.Error, UnicodeEncodeError):
            self.fail("is not a cursor of an earlier page", param, ctx)


def filter_options(command: F) -> F:
    """Which tasks: as `filters` takes them."""
    for option in (
        click.option("--worker", default="", help="Only what this worker computed, by address, as far as the history reaches."),
        click.option("--wanted", is_flag=True, help="Only tasks whose results somebody wants."),
        click.option("--pattern", default="", help="Only keys that match, as a shell matches names of files: '*sum*'."),
        click.option("--group", default="", help="Only of this task group, or of all that begin with it and a '-'."),
        click.option("--prefix", default="", help="Only keys (or names in tuple keys) that begin with this."),
        click.option("--state", type=click.Choice(STATES), help="Only in this state."),
        click.option("--graph", default="", help="Only of this graph: its name, or the beginning of it."),
    ):
        command = option(command)
    return command


def find_graph(client: Client, name: str) -> str:
    """The graph of that name, or the only one whose name begins so. Raises InvalidRequest."""
    names = [graph.submission for graph in client.status().graphs]
    if name in names:
        return name
    found = [other for other in names if other.startswith(name)]
    if len(found) == 1:
        return found[0]
    if not found:
        raise InvalidRequest(f"there is no graph {name}: `taskdb graphs` names them")
    raise InvalidRequest(f"{len(found)} graphs have names that begin with {name}: say more of it")


def filters(client: Client, graph: str, state: str | None, **rest: Any) -> dict[str, Any]:
    """Fields of ListTasksRequest, of the options above."""
    return {"submission": find_graph(client, graph) if graph else "", "state": state or "", **rest}


# ---------------------------------------------------------------------------------------------------------- graphs


def graph_dict(graph: pb.GraphStatus) -> dict[str, Any]:
    return {**graph_fields(graph), "done": done(graph)}


def unfinished(graph: pb.GraphStatus) -> int:
    """Tasks that are to be done, unmade ones counted."""
    return graph.unmade + sum(graph.states.get(state, 0) for state in UNFINISHED)


def done(graph: pb.GraphStatus) -> int:
    return max(0, graph.total - unfinished(graph))


GRAPH_COLUMNS = ("SUBMISSION", "CLIENT", "LABEL", "SUBMITTED", "SEALED", "DONE", "TOTAL", "WANTED", *(x.upper() for x in STATES))
GRAPH_NUMBERS = GRAPH_COLUMNS[5:]


def graph_row(graph: pb.GraphStatus) -> tuple[object, ...]:
    return (
        graph.submission,
        graph.client,
        graph.label or "-",
        show_time(graph.submitted),
        "yes" if graph.sealed else "no",
        done(graph),
        graph.total,
        graph.wanted,
        *(graph.states.get(x, 0) for x in STATES),
    )


@click.command(help=f"List graphs with their progress, the newest first.\n\n{ONLINE_HELP}")
@click.option("--client", "client_name", default="", help="Only of clients whose names begin with this.")
@click.option("--unfinished/--finished", "is_unfinished", default=None, help="Only those with tasks to be done, or without.")
@click.option("--failed", is_flag=True, help="Only those with failed tasks.")
@click.option("--past", is_flag=True, help="Instead those that the history remembers, also if they are gone.")
@click.option("--limit", type=click.IntRange(1), default=100, show_default=True, help="Graphs listed.")
@online_options
def graphs(
    client_name: str, is_unfinished: bool | None, failed: bool, past: bool, limit: int, url: Daemon, output: str, timeout: float
) -> None:
    if past and (is_unfinished is not None or failed):
        raise click.UsageError("the history does not say which graphs are --unfinished, --finished or --failed")
    with Client(url, timeout) as client:
        if past:
            _print_past([x for x in past_graphs(client) if x.client.startswith(client_name)], limit, output)
            return
        reply = client.status()
    found = [
        graph
        for graph in sorted(reply.graphs, key=lambda graph: graph.submitted, reverse=True)
        if graph.client.startswith(client_name)
        and (is_unfinished is None or is_unfinished == bool(unfinished(graph)))
        and (not failed or graph.states.get("erred"))
    ]
    if output == "json":
        print_json({"graphs": [graph_dict(graph) for graph in found[:limit]], "more": len(found) > limit})
        return
    print_table(GRAPH_COLUMNS, [graph_row(graph) for graph in found[:limit]], GRAPH_NUMBERS)
    if len(found) > limit:
        click.echo(f"more: {len(found) - limit:,} graphs, with a larger --limit", err=True)


def _print_past(found: list[pb.HistoryGraph], limit: int, output: str) -> None:
    if output == "json":
        shown = [{"submission": x.submission, "client": x.client, "label": x.label, "submitted": x.submitted} for x in found[:limit]]
        print_json({"graphs": shown, "more": len(found) > limit})
        return
    rows = [(x.submission, x.client, x.label or "-", show_time(x.submitted)) for x in found[:limit]]
    print_table(GRAPH_COLUMNS[:4], rows)
    if len(found) > limit:
        click.echo(f"more: {len(found) - limit:,} graphs, with a larger --limit", err=True)


# ----------------------------------------------------------------------------------------------------------- tasks


@click.command(help=f"List tasks, one page at a time.\n\n{ONLINE_HELP}")
@filter_options
@click.option("--sort", type=click.Choice(SORTS), help="By this, of the whole store, instead of by id.")
@click.option("--descending", is_flag=True, help="The largest first.")
@click.option("--limit", type=click.IntRange(1, 1_000), default=100, show_default=True, help="Tasks on the page.")
@click.option("--cursor", type=Cursor(), default=b"", help="Where the last page ended, as it said.")
@online_options
def tasks(sort: str | None, descending: bool, limit: int, cursor: bytes, url: Daemon, output: str, timeout: float, **which: Any) -> None:
    if descending and not sort:
        raise click.UsageError("--descending goes with --sort")
    with Client(url, timeout) as client:
        asked = filters(client, **which)
        if sort:
            found = client.sorted_tasks(limit, sort=sort, descending=descending, after=cursor, **asked)
            cursor = found[-1].token if len(found) == limit else b""
        else:
            found, cursor = _page(client, limit, cursor, asked)
    following = base64.urlsafe_b64encode(cursor).decode()
    if output == "json":
        print_json({"tasks": [task_dict(x) for x in found], "cursor": following or None})
        return
    print_table(TASK_COLUMNS, [task_row(x) for x in found], TASK_NUMBERS)
    if following:
        click.echo(f"more: --cursor {following}", err=True)


def _page(client: Client, limit: int, cursor: bytes, asked: dict[str, Any]) -> tuple[list[pb.TaskInfo], bytes]:
    """A filter that lets little through gives short pages: go on until this one is full."""
    found: list[pb.TaskInfo] = []
    while True:
        reply = client.list_tasks(cursor=cursor, limit=limit - len(found), **asked)
        found += reply.tasks
        cursor = reply.cursor
        if not cursor or len(found) >= limit:
            return found, cursor
