"""The work of `taskdb verify`, and its words."""

from __future__ import annotations

import uuid
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from taskdb.cli.output import print_table, show_bytes
from taskdb.cli.progress import Progress
from taskdb.engine import invariants, records
from taskdb.engine.repair import Survey
from taskdb.errors import StoreCorrupt
from taskdb.store.base import ReadTxn
from taskdb.store.lmdb_store import LmdbSnapshot
from taskdb.store.schema import FORMAT_VERSION, Meta, Table, meta_key

#: Characters of what is wrong: some words name all that differs.
_WORDS_MAX = 300


def verify_store(data: Path, progress: Progress) -> dict[str, Any]:
    """Everything about the store, `ok`, the number of `violations` by check, and the `first`. Raises what LmdbSnapshot does."""
    found: Counter[str] = Counter()
    first = None
    report: dict[str, Any] = {"data": str(data)}
    with LmdbSnapshot(data) as snapshot:
        for check, words in _wrong(snapshot, progress, report):
            found[check] += 1
            first = first or f"{check}: {words if len(words) <= _WORDS_MAX else words[:_WORDS_MAX] + ' …'}"
        snapshot.check_alone()
    return {**report, "ok": not found, "violations": dict(found), "first": first}


def _wrong(snapshot: LmdbSnapshot, progress: Progress, report: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """(check, words) of all that is wrong.

    IMPORTANT: a check is made only if the one before found nothing. LMDB trusts its pages, and the rules trust the records.
    """
    wrong = False
    progress.begin("pages", snapshot.pages.total)
    for words in snapshot.pages.problems(progress):
        wrong = True
        yield "pages", words
    report["pages"] = snapshot.pages.walked
    if wrong:
        return
    txn = snapshot.read()
    report |= {"uuid": uuid_text(txn), "format": FORMAT_VERSION, "bytes": snapshot.pages.size_bytes, "records": records.total(txn)}
    progress.begin("records", report["records"])
    for words in records.unreadable(txn, progress):
        wrong = True
        yield "records", words
    if wrong:
        return
    report |= counts(Survey(txn))
    report["rules"] = len(invariants.RULES)
    progress.begin("rules", len(invariants.RULES))
    progress(0)
    try:
        rules = invariants.Snapshot(txn)
        for number, rule in enumerate(invariants.RULES, 1):
            for words in rule(rules):
                yield rule.__name__, words
            progress(number)
    except (ArithmeticError, LookupError, TypeError, ValueError, StoreCorrupt) as exc:
        yield "rules", f"not all of them can be checked: {exc!r}"


def counts(survey: Survey) -> dict[str, Any]:
    return {
        "tasks": len(survey.ids),
        "states": survey.by_state,
        "graphs": survey.graphs,
        "clients": survey.clients,
        "wanted": len(survey.wanted),
        "kept": survey.kept,
    }


def print_report(report: dict[str, Any]) -> None:
    rows: list[tuple[str, str]] = []
    if "uuid" in report:
        rows.append(("store", f"{report['uuid']}, format {report['format']}, {show_bytes(report['bytes'])}"))
    if "tasks" in report:
        rows += [("tasks", tasks_text(report)), ("kept", kept_text(report))]
    rows.append(("checked", ", ".join(f"{report[name]:,} {name}" for name in ("pages", "records", "rules") if name in report)))
    if report["ok"]:
        rows.append(("violations", "none"))
    else:
        rows.append(("violations", ", ".join(f"{count:,} of {check}" for check, count in report["violations"].items())))
        rows.append(("first", report["first"]))
    print_table(("", ""), rows)


def tasks_text(found: dict[str, Any]) -> str:
    states = ", ".join(f"{count:,} {state}" for state, count in found["states"].items() if count)
    return f"{found['tasks']:,}" + (f": {states}" if states else "")


def kept_text(found: dict[str, Any]) -> str:
    return (
        f"graphs {found['graphs']:,}, wanted results {found['wanted']:,}, clients {found['clients']:,}, "
        f"items of the scheduler {found['kept']:,}"
    )


def uuid_text(txn: ReadTxn) -> str | None:
    data = txn.get(Table.META, meta_key(Meta.STORE_UUID))
    return str(uuid.UUID(bytes=data)) if data is not None and len(data) == 16 else None
