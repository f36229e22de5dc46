"""How things stand with the adapter, in numbers: for the dashboard, for Prometheus and for people. Asks nobody, changes nothing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from scheduler_adapter.adapter import Adapter

Link = Literal["live", "lost", "closed"]


@dataclass(frozen=True, slots=True)
class Figures:
    #: Epoch of this scheduler; 0 before it has one.
    epoch: int
    #: Whether the daemon is there.
    link: Link
    #: Tasks in the scheduler, and how many there may be.
    resident: int
    window: int
    #: Tasks of paged graphs that were handed out by the database and have not finished.
    leased: int
    #: Results the scheduler keeps a short record of.
    cold: int
    #: Graphs of which something is left, and all of their tasks that the database has not forgotten: on disk, resident, or yet to be made.
    graphs: int
    graph_tasks: int
    #: Tasks on disk that could be handed out, and those of them that could run at once.
    queued: int
    ready: int
    #: Since the start: new tasks of graphs that were taken in, and tasks that finished.
    taken_in: int
    finished: int
    #: Batches of reports without an answer, and those that are not on disk.
    unanswered: int
    undurable: int
    #: How long it took, last, until a batch was on disk; or has taken so far, if that is longer. Seconds.
    durable_seconds: float


def figures(adapter: Adapter) -> Figures:
    """O(graphs + prefixes). To be called on the scheduler's loop."""
    scheduler, pager, session = adapter.scheduler, adapter.pager, adapter.session
    residency = pager.residency
    link: Link = "closed"
    if session is not None and pager.session is not None:
        link = "live" if session.connected else "lost"
    return Figures(
        epoch=session.epoch if session is not None else 0,
        link=link,
        resident=len(scheduler.tasks),
        window=adapter.config.window,
        leased=len(pager.window.leased),
        cold=len(pager.cooling),
        graphs=len(residency.submissions),
        graph_tasks=sum(max(submission.remaining, 0) for submission in residency.submissions.values()),
        queued=pager.backlog,
        ready=pager.ready_on_disk,
        taken_in=residency.taken_in,
        finished=sum(prefix.state_counts["memory"] for prefix in scheduler.task_prefixes.values()),
        unanswered=session.in_flight if session is not None else 0,
        undurable=session.unacked if session is not None else 0,
        durable_seconds=session.durable_seconds if session is not None else 0.0,
    )
