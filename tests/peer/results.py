"""What the runs of the suite found: by file and regime, and what differs without a reason."""

from __future__ import annotations

import json
import tomllib
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

STOCK = "stock"
PASSED, FAILED, HUNG, SKIPPED = "passed", "failed", "hung", "skipped"


@dataclass
class Row:
    """One file, one regime of ours against stock."""

    file: str
    regime: str
    passed_stock: int = 0
    #: Of those that pass stock.
    passed: int = 0
    excepted: list[str] = field(default_factory=list)
    #: Pass stock, fail here, and no reason is given.
    differ: list[str] = field(default_factory=list)
    hung: list[str] = field(default_factory=list)
    #: Pass stock and were not run here.
    missing: int = 0


def read(folder: Path) -> dict[str, dict[str, dict[str, Any]]]:
    """By regime and test, all that is known of it. Of a test that was run more than once, the last."""
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for file in sorted(folder.glob("*.jsonl")):
        found[file.stem] = {(line := json.loads(text))["test"]: line for text in file.read_text().splitlines()}
    return found


def read_exceptions(file: Path) -> dict[str, dict[str, str]]:
    """Reasons, by test and regime ("" for each). Raises ValueError for an entry without one, or with one that is no reason."""
    found: dict[str, dict[str, str]] = defaultdict(dict)
    for entry in tomllib.loads(file.read_text()).get("exception", []):
        reason = entry.get("reason", "").strip()
        if not reason or any(word in reason.lower().split() for word in ("hang", "hangs", "lost")):
            raise ValueError(f"{entry.get('test')}: {reason or 'no reason'!r} is not a reason")
        for test in entry["tests"]:
            found[test][entry.get("regime", "")] = reason
    return found


def unknown(found: dict[str, dict[str, dict[str, Any]]], regime: str) -> list[str]:
    """Tests that do not pass here, and that stock has not run."""
    stock = found.get(STOCK, {})
    return [test for test, line in found.get(regime, {}).items() if line["outcome"] in (FAILED, HUNG) and test not in stock]


def rows(found: dict[str, dict[str, dict[str, Any]]], exceptions: dict[str, dict[str, str]]) -> list[Row]:
    """A row for each file and regime but stock. A test that passes here and was not run stock counts as one that passes stock."""
    stock = found.get(STOCK, {})
    table: dict[tuple[str, str], Row] = {}
    for regime in found.keys() - {STOCK}:
        ours = found[regime]
        for test in sorted(stock.keys() | ours.keys()):
            outcome = ours.get(test, {}).get("outcome")
            if stock.get(test, {"outcome": PASSED})["outcome"] != PASSED or (test not in stock and outcome == SKIPPED):
                continue
            file = test.split("::")[0]
            row = table.setdefault((file, regime), Row(file, regime))
            row.passed_stock += 1
            if outcome is None:
                row.missing += 1
            elif outcome == PASSED:
                row.passed += 1
            elif outcome == HUNG:
                row.hung.append(test)
            elif regime in (reasons := exceptions.get(test, {})) or "" in reasons:
                row.excepted.append(test)
            else:
                row.differ.append(test)
    return [table[at] for at in sorted(table)]


def markdown(table: list[Row]) -> str:
    lines = [
        "| file | regime | pass stock | of them pass ours | excepted | differ | hung | not run |",
        "|---|---|---:|---:|---:|---:|---:|---:|",
    ]
    for regime in sorted({row.regime for row in table}):
        mine = [row for row in table if row.regime == regime]
        total = Row("all", regime, sum(r.passed_stock for r in mine), sum(r.passed for r in mine), missing=sum(r.missing for r in mine))
        total.excepted, total.differ, total.hung = ([x for r in mine for x in getattr(r, name)] for name in ("excepted", "differ", "hung"))
        for row in (*mine, total):
            counts = (row.passed_stock, row.passed, len(row.excepted), len(row.differ), len(row.hung), row.missing)
            lines.append(f"| {row.file} | {row.regime} | " + " | ".join(map(str, counts)) + " |")
    return "\n".join(lines)
