"""Functions run inside the scheduler to see how it stands."""

from __future__ import annotations

from collections import Counter
from typing import Any


def progress(dask_scheduler: Any) -> tuple[int, int]:
    """(a number that moves while anything happens, tasks resident)."""
    s = dask_scheduler
    return s.transition_counter, len(s.tasks)


def leftovers(dask_scheduler: Any) -> dict[str, Any]:
    """What must be empty once nobody wants anything. Empty values are left out."""
    s = dask_scheduler
    if not hasattr(s, "taskdb"):
        found = {"tasks": len(s.tasks), "task_groups": len(s.task_groups)}
        return {k: v for k, v in found.items() if v}
    pager = s.taskdb.pager
    window = pager.window
    found = {
        "tasks": len(s.tasks),
        "window.by_key": len(window.by_key),
        "window.by_id": len(window.by_id),
        "window.leased": len(window.leased),
        "task_groups": {n: {k: v for k, v in g.states.items() if v} for n, g in list(s.task_groups.items())[:10]},
        "prefixes off": {
            n: {k: v for k, v in p.states.items() if v and k != "forgotten"}
            for n, p in s.task_prefixes.items()
            if any(v and k != "forgotten" for k, v in p.states.items())
        },
        "pager.submissions": [
            f"{x.name[:8]} followed={x.followed} remaining={x.remaining} sealed={x.sealed} under_way={x.runs_under_way}"
            for x in pager.residency.submissions.values()
        ],
        "pager.fire_and_forget": len(pager.fire_and_forget),
        "holder": len(pager.residency.holder.wants_what),
        "arriving": len(_arriving(s)),
        "inboxes busy": sum(not i.idle for i in s.taskdb.clients.inboxes.values()),
        "ledger debts": dict(getattr(pager.residency.ledger, "_debts", {})),
        "active_graph_updates": s._active_graph_updates,
        "wants": {c: len(cs.wants_what) for c, cs in s.clients.items() if cs.wants_what},
    }
    return {k: v for k, v in found.items() if v}


def _arriving(s: Any) -> Any:
    """Runs that were sent and not answered, wherever the adapter keeps them."""
    submitter = s.taskdb.clients.submitter
    for holder in (submitter, *vars(submitter).values()):
        for name in ("_arriving", "arriving"):
            found = getattr(holder, name, None)
            if isinstance(found, dict):
                return found
    return ()


def state(dask_scheduler: Any) -> dict[str, Any]:
    s = dask_scheduler
    pager = s.taskdb.pager
    window = pager.window
    session = pager.session

    def task(ts: Any) -> str:
        r = window.by_key.get(ts.key)
        parts = [f"{ts.key!r} {ts.state}"]
        if ts.waiting_on:
            parts.append(f"waiting_on={[(d.key, d.state) for d in list(ts.waiting_on)[:3]]}")
        if ts.dependencies:
            parts.append(f"deps={[(d.key, d.state) for d in list(ts.dependencies)[:3]]}")
        parts.append(f"dependents={len(ts.dependents)} waiters={len(ts.waiters or ())}")
        parts.append(f"who_wants={[c.client_key for c in ts.who_wants or ()]} who_has={len(ts.who_has or ())}")
        if ts.has_lost_dependencies:
            parts.append("LOST")
        if r is None:
            parts.append("NO RESIDENT")
        else:
            parts.append(f"id={r.id} paged={r.paged} stub={r.stub} told={r.told!r} leaving={r.leaving} leased={r in window.leased}")
        return " ".join(parts)

    shown = [ts for ts in s.tasks.values() if ts.state not in ("memory",)][:15] + [ts for ts in s.tasks.values() if ts.state == "memory"][
        :15
    ]
    return {
        "tasks": dict(Counter(ts.state for ts in s.tasks.values())),
        "window": {"by_key": len(window.by_key), "changed": len(window.changed), "leased": len(window.leased)},
        "session": {
            "in_flight": session.in_flight,
            "unacked": session.unacked,
            "connected": session.connected,
            "last_seq": session.last_seq,
        },
        "pager": {
            "backlog": pager.backlog,
            "ready_on_disk": pager.ready_on_disk,
            "credit_told": getattr(pager, "_credit_told", None),
            "leases_seen": getattr(pager, "_leases_seen", None),
            "session.leases_seen": session.leases_seen,
            "flush": str(getattr(pager, "_flush", None)),
            "busy": getattr(pager, "_busy", None),
            "pending": len(getattr(pager, "_pending", ())),
            "asked": len(getattr(pager, "_asked", ())),
            "waiters": len(getattr(pager, "_waiters", ())),
        },
        "inboxes": {c: [m.op for m in i.waiting()] for c, i in s.taskdb.clients.inboxes.items() if not i.idle},
        "workers": {w.name: [len(w.processing), len(w.has_what)] for w in s.workers.values()},
        "queued": len(s.queued),
        "unrunnable": len(s.unrunnable),
        "shown": [task(ts) for ts in shown],
    }


def stories(dask_scheduler: Any) -> dict[str, list[str]]:
    """What lately happened to some tasks that are left."""
    s = dask_scheduler
    shown = [ts for ts in s.tasks.values() if ts.state != "memory"][:3] + [ts for ts in s.tasks.values() if ts.state == "memory"][:2]
    out = {}
    for ts in shown:
        own = [t for t in s.story(ts.key) if t.key == ts.key][-14:]
        out[str(ts.key)] = [f"{t.timestamp:.3f} {t.start} -> {t.finish} {t.stimulus_id}" for t in own]
    return out
