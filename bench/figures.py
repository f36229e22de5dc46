"""The figures of a run: their names, units and meaning; medians, ratios, and how they are written down.

Nothing else formats a figure. A figure that does not apply is None, in JSON null, and is shown as a dash.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from rich.table import Table

#: Version of the JSON files; a change of meaning raises it.
FORMAT = 1
#: Shown where a figure does not apply.
DASH = "–"
#: The two sides, in the order in which they are shown.
SIDES = ("stock", "ours")

Figures: TypeAlias = dict[str, float | None]


def _plain(value: float) -> str:
    return f"{value:,.0f}"


def _seconds(value: float) -> str:
    return f"{value:,.2f} s"


def _millis(value: float) -> str:
    return f"{value * 1e3:,.0f} ms"


def _micros(value: float) -> str:
    return f"{value * 1e6:,.0f} µs"


def _bytes(value: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if abs(value) < 1024:
            return f"{value:,.0f} {unit}" if unit == "B" else f"{value:,.1f} {unit}"
        value /= 1024
    return f"{value:,.1f} GiB"


@dataclass(frozen=True)
class Figure:
    """One thing that is measured."""

    #: Its name in JSON, unit last.
    name: str
    #: What a reader is told.
    title: str
    show: Callable[[float], str]
    #: Whether a ratio of the two sides means something.
    comparable: bool = True
    #: Whether it has a column in the table of many files.
    in_table: bool = True


FIGURES = (
    Figure("tasks", "tasks run", _plain),
    Figure("submission_s", "submission", _seconds, in_table=False),
    Figure("makespan_s", "makespan", _seconds),
    Figure("makespan_per_task_s", "makespan per task", _micros, in_table=False),
    Figure("scheduler_cpu_per_task_s", "scheduler CPU per task", _micros),
    Figure("daemon_cpu_per_task_s", "daemon CPU per task", _micros, comparable=False, in_table=False),
    Figure("ingest_cpu_per_task_s", "ingest CPU per task", _micros, comparable=False, in_table=False),
    Figure("all_cpu_per_task_s", "all three CPU per task", _micros),
    Figure("scheduler_rss_growth_bytes", "scheduler peak RSS over idle", _bytes),
    Figure("daemon_rss_max_bytes", "daemon peak RSS", _bytes, comparable=False, in_table=False),
    Figure("ingest_rss_max_bytes", "ingest peak RSS", _bytes, comparable=False, in_table=False),
    Figure("tasks_resident_max", "most resident tasks", _plain),
    Figure("stall_max_s", "longest loop stall", _millis),
    Figure("first_task_s", "submission to first task", _millis),
    Figure("disk_bytes_per_task", "disk per task", _bytes, comparable=False),
    Figure("worker_bytes_max", "peak bytes held by workers", _bytes),
)


def shown(figure: Figure, value: float | None) -> str:
    """The figure as text."""
    return DASH if value is None else figure.show(value)


def median(runs: Sequence[Figures]) -> Figures:
    """The median of each figure over the runs in which it applies."""
    result: Figures = {}
    for figure in FIGURES:
        values = [value for run in runs if (value := run.get(figure.name)) is not None]
        result[figure.name] = statistics.median(values) if values else None
    return result


def ratio(figure: Figure, medians: dict[str, Figures]) -> float | None:
    """Ours over stock; None if one is missing or stock is 0."""
    stock, ours = (medians.get(side, {}).get(figure.name) for side in SIDES)
    return ours / stock if figure.comparable and stock and ours is not None else None


def _ratio_shown(value: float | None) -> str:
    return DASH if value is None else f"{value:.2f}"


def document(head: dict[str, Any], runs: list[dict[str, Any]]) -> dict[str, Any]:
    """What is written as JSON: the head as given, every run, medians and ratios."""
    medians = {side: median(found) for side in SIDES if (found := [r["figures"] for r in runs if r["side"] == side])}
    ratios = {figure.name: ratio(figure, medians) for figure in FIGURES}
    return {"format": FORMAT, **head, "runs": runs, "medians": medians, "ratios": ratios}


def load(path: Path) -> dict[str, Any]:
    """Read a file that `compare --json` wrote. Raises ValueError if it is something else."""
    content = json.loads(path.read_text())
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise ValueError(f"{path}: not a file of `bench compare --json`, format {FORMAT}")
    return content


def side_by_side(content: dict[str, Any]) -> Table:
    """One document as a table for the terminal."""
    medians = content["medians"]
    options = content["options"]
    table = Table(title=f"{content['workload']}, {options['workers']} {options['worker_kind']} workers")
    table.add_column("figure")
    for title in (*medians, "ours / stock"):
        table.add_column(title, justify="right")
    for figure in FIGURES:
        values = [shown(figure, medians[side].get(figure.name)) for side in medians]
        table.add_row(figure.title, *values, _ratio_shown(content["ratios"].get(figure.name)))
    if options["repeat"] > 1:
        table.caption = f"medians of {options['repeat']} runs in turn"
    return table


def _cell(figure: Figure, medians: dict[str, Figures]) -> str:
    """`stock → ours`, or the one value there is."""
    values = [shown(figure, medians[side].get(figure.name)) for side in SIDES if side in medians]
    if not figure.comparable:
        values = [value for value in values if value != DASH] or [DASH]
    return values[0] if len(set(values)) == 1 else " → ".join(values)


def markdown(contents: Iterable[dict[str, Any]]) -> str:
    """Many documents as one Markdown table, a row each; cells read stock → ours."""
    columns = [figure for figure in FIGURES if figure.in_table]
    lines = [
        "| " + " | ".join(["workload", "workers", *(figure.title for figure in columns)]) + " |",
        "|" + "|".join(["---", "---", *("---:" for _ in columns)]) + "|",
    ]
    for content in contents:
        options = content["options"]
        head = [content["workload"], f"{options['workers']} {options['worker_kind']}"]
        lines.append("| " + " | ".join([*head, *(_cell(figure, content["medians"]) for figure in columns)]) + " |")
    return "\n".join(lines)
