"""The work of `taskdb recover`, and its words."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from taskdb.cli.output import print_table, show_seconds
from taskdb.cli.progress import Progress
from taskdb.cli.verifying import counts, kept_text, tasks_text, uuid_text
from taskdb.engine.engine import Engine
from taskdb.engine.repair import Outcome, recover
from taskdb.errors import InvariantBroken, StoreCorrupt, StoreFull
from taskdb.store.base import WriteTxn
from taskdb.store.lmdb_store import LmdbStore

#: Groups in the table of what runs.
_GROUPS_SHOWN = 10


def recover_store(data: Path, bytes_max: int, dry_run: bool, progress: Progress) -> dict[str, Any]:
    """What was done, or would be. Raises what LmdbStore does."""
    progress.begin("items of work")
    store = LmdbStore(data, bytes_max=bytes_max, create=False, rehearsal=dry_run, thorough=True)
    try:

        def turn(txn: WriteTxn) -> WriteTxn:
            if dry_run:
                return txn
            txn.commit()
            return store.write()

        txn, outcome = recover(Engine(), store.write(), turn, progress)
        identity = uuid_text(txn)
    except InvariantBroken as exc:
        raise StoreCorrupt(f"the store in {data} breaks a rule ({exc}): `taskdb verify` says which; restore a backup") from exc
    except StoreFull as exc:
        todo = "make room, or say a larger --store-bytes-max, and run this again: it goes on where it stopped"
        raise StoreFull(f"{exc}; {todo}") from exc
    finally:
        store.close()
    return {"data": str(data), "uuid": identity, "dry_run": dry_run, **_dict(outcome)}


def _dict(outcome: Outcome) -> dict[str, Any]:
    before, after, cost = outcome.before, outcome.after, outcome.cost
    return {
        "changed": outcome.changed,
        "epoch": outcome.epoch,
        "repaired": {"holds": before.held, "open_submissions": len(before.open_graphs), "index_entries": outcome.entries},
        "before": counts(before),
        "kept": counts(after),
        "to_run": {
            "tasks": outcome.to_run,
            "unfinished": outcome.unfinished,
            "begun": outcome.begun,
            "lost_results": outcome.lost_results,
            "released_inputs": outcome.released_inputs,
            "unmade": outcome.unmade,
        },
        "lost": {
            "data": outcome.lost_data,
            "cancelled": outcome.cancelled,
            "unneeded_results": outcome.unneeded,
            "dropped": outcome.dropped,
            "forgotten": outcome.forgotten,
        },
        "cost": {
            "seconds": cost.seconds,
            "tasks_known": cost.known,
            "tasks_unknown": cost.unknown,
            "groups": [{"group": group, "tasks": tasks, "seconds": seconds} for group, tasks, seconds in cost.groups],
        },
    }


def print_outcome(found: dict[str, Any]) -> None:
    repaired, runs, lost, cost = found["repaired"], found["to_run"], found["lost"], found["cost"]
    done = (
        f"holds given back {repaired['holds']:,}, submissions dropped {repaired['open_submissions']:,}, "
        f"index entries put right {repaired['index_entries']:,}"
    )
    coming = _some(
        (runs["unfinished"], f"unfinished ({runs['begun']:,} of them begun)"),
        (runs["lost_results"], "whose results are lost and needed"),
        (runs["released_inputs"], "that these are computed from"),
        (runs["unmade"], "of rules, yet to be made"),
    )
    gone = _some(
        (lost["data"], "scattered data, which nothing can compute again"),
        (lost["cancelled"], "wanted results that need it"),
        (lost["dropped"], "tasks of submissions that were not complete"),
        (lost["unneeded_results"], "results that nobody needs"),
        (lost["forgotten"], "tasks that nobody needs"),
    )
    takes = f"{show_seconds(cost['seconds'])} of one thread for {cost['tasks_known']:,} tasks" if cost["tasks_known"] else ""
    unknown = f"not known for {cost['tasks_unknown']:,} tasks" if cost["tasks_unknown"] else ""
    print_table(
        ("", ""),
        [
            ("repaired", done if found["changed"] else "nothing: no scheduler had left anything"),
            ("kept", kept_text(found["kept"])),
            ("tasks", tasks_text(found["kept"])),
            ("to run", f"{runs['tasks']:,}" + (f": {coming}" if coming else "")),
            ("lost", gone or "nothing that is needed"),
            ("cost", "; ".join(filter(None, (takes, unknown))) or "none"),
        ],
    )
    groups = [
        (group["group"] or "-", group["tasks"], "?" if group["seconds"] is None else show_seconds(group["seconds"]))
        for group in cost["groups"]
    ]
    if groups:
        click.echo()
        print_table(("GROUP", "TO RUN", "TAKES"), groups[:_GROUPS_SHOWN], numbers=("TO RUN", "TAKES"))
    if len(groups) > _GROUPS_SHOWN:
        click.echo(f"more: {len(groups) - _GROUPS_SHOWN:,} groups, with --output json", err=True)
    if found["dry_run"]:
        click.echo("a dry run: nothing was written", err=True)


def _some(*parts: tuple[int, str]) -> str:
    return ", ".join(f"{count:,} {what}" for count, what in parts if count)
