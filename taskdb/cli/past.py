"""What the history has of one graph, put together from its stretches."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from taskdb.client import Client
from taskdb.errors import InvalidRequest
from taskdb.model import TaskState
from taskdb.wire import taskdb_pb2 as pb


@dataclass(frozen=True, slots=True)
class Run:
    """One computation of a task. Seconds; `began` since the epoch."""

    id: int
    worker: str
    began: float
    seconds: float


@dataclass(slots=True)
class Past:
    graph: pb.HistoryGraph
    #: Task -> packed key, as far as its coming is remembered; and name of its group.
    keys: dict[int, bytes] = field(default_factory=dict)
    groups: dict[int, str] = field(default_factory=dict)
    runs: list[Run] = field(default_factory=list)
    #: Task -> text.
    failures: dict[int, str] = field(default_factory=dict)
    #: When a task came into memory.
    finished: list[float] = field(default_factory=list)
    #: Task -> its last state; 0: forgotten.
    states: dict[int, int] = field(default_factory=dict)
    #: The first and the last move.
    begin: float = 0.0
    end: float = 0.0


def past_graphs(client: Client) -> list[pb.HistoryGraph]:
    """All graphs the history remembers, the newest first."""
    found = {graph.id: graph for reply in client.history(names=True) for graph in reply.graphs}
    return sorted(found.values(), key=lambda graph: (graph.submitted, graph.id), reverse=True)


def find_past(client: Client, name: str) -> str:
    """The graph of that name, or the only one whose name begins so; "": the newest. Raises InvalidRequest."""
    graphs = past_graphs(client)
    names = list(dict.fromkeys(graph.submission for graph in graphs))
    if not names:
        raise InvalidRequest("the history is empty: nothing has run, or none is kept (taskdb serve --history-bytes-max)")
    if not name:
        return names[0]
    found = [other for other in names if other.startswith(name)]
    if name in found or len(found) == 1:
        return name if name in found else found[0]
    if not found:
        raise InvalidRequest(f"the history knows no graph {name}: `taskdb graphs --past` names those it does")
    raise InvalidRequest(f"{len(found)} graphs have names that begin with {name}: say more of it")


def read_past(client: Client, submission: str) -> Past:
    """All that is remembered of a graph. Some 500 bytes of memory a task."""
    past: Past | None = None
    for reply in client.history(submission):
        past = _add(past, reply, submission)
    if past is None:
        raise InvalidRequest(f"the history knows no graph {submission}")
    return past


def _add(past: Past | None, reply: pb.HistoryReply, submission: str) -> Past | None:
    places = {place for place, graph in enumerate(reply.graphs) if graph.submission == submission}
    if not places:
        return past
    past = past or Past(reply.graphs[min(places)])
    mine = set()
    for place, when, task_id, state, group in zip(reply.of_graph, reply.times, reply.ids, reply.states, reply.of_group):
        if place not in places:
            continue
        mine.add(task_id)
        past.begin = past.begin or when
        past.end = when
        past.groups[task_id] = reply.groups[group]
        past.states[task_id] = state
        if state == TaskState.MEMORY:
            past.finished.append(when)
    past.keys.update((task_id, key) for task_id, key in zip(reply.key_ids, reply.keys) if task_id in mine)
    past.runs += [run for run in _runs(reply) if run.id in mine]
    past.failures.update((task_id, text) for task_id, text in zip(reply.failed_ids, reply.failed_texts) if task_id in mine)
    return past


def _runs(reply: pb.HistoryReply) -> Iterator[Run]:
    columns: Iterable[tuple[int, int, float, float]] = zip(reply.ran_ids, reply.ran_on, reply.began, reply.seconds)
    for task_id, place, began, seconds in columns:
        yield Run(task_id, reply.workers[place], began, seconds)
