"""The page of `taskdb report`: HTML and SVG, with what is drawn bounded whatever the graph's size."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from html import escape

from taskdb.cli.keys import show_key
from taskdb.cli.output import show_seconds, show_time
from taskdb.cli.past import Past, Run
from taskdb.cli.statistics import Prefix, Summary

#: Bars drawn one by one; above, a worker's time is cut into slots.
_BARS_MAX = 4_000
_SLOTS = 400
_WIDTH, _LEFT, _LANE = 1_000, 190, 14
_WORKERS_MAX = 64
_LANES_MAX = 32
_BINS = 40
_FAILURES_MAX = 50
#: Of prefixes, by total time; the rest is grey.
_COLOURS = ("#4c78a8", "#f58518", "#54a24b", "#e45756", "#72b7b2", "#b279a2", "#eeca3b", "#9d755d", "#ff9da6", "#59779b")
_REST = "#9a9a9a"

_STYLE = """
:root { color-scheme: light dark; --ink: #1c1e21; --soft: #6b7280; --line: #d9dce1; --paper: #ffffff; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e8eb; --soft: #9aa3af; --line: #3a3f47; --paper: #16181c; } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper); max-width: 1060px; margin: 2em auto;
  padding: 0 1em; }
h1 { font-size: 1.4em; margin-bottom: 0; } h2 { font-size: 1.1em; margin-top: 2em; } p.soft { color: var(--soft); margin-top: .2em; }
table { border-collapse: collapse; width: 100%; } th { text-align: left; color: var(--soft); font-weight: 500; }
td, th { padding: .25em .8em .25em 0; border-bottom: 1px solid var(--line); vertical-align: top; } .n { text-align: right; }
code { font-size: .92em; overflow-wrap: anywhere; } svg { width: 100%; height: auto; } svg text { fill: var(--soft); font-size: 11px; }
.axis { stroke: var(--line); } .cards { display: flex; flex-wrap: wrap; gap: .8em 2.5em; margin: 1.2em 0; }
.cards b { display: block; font-size: 1.25em; } .cards span { color: var(--soft); }
.key i { display: inline-block; width: .8em; height: .8em; border-radius: 2px; margin-right: .3em; } .key span { margin-right: 1.2em; }
"""


def page(past: Past, summary: Summary) -> str:
    graph = past.graph
    colours = {prefix.name: _COLOURS[place] if place < len(_COLOURS) else _REST for place, prefix in enumerate(summary.prefixes)}
    parts = [
        f"<h1>{escape(graph.label or graph.submission)}</h1>",
        f'<p class="soft">graph <code>{escape(graph.submission)}</code> of client <code>{escape(graph.client)}</code>, '
        f"submitted {show_time(graph.submitted)}</p>",
        _cards(past, summary),
        "<h2>Timeline</h2>",
        _legend(summary.prefixes, colours),
        _timeline(summary, colours),
        "<h2>Finished tasks</h2>",
        _progress(past, summary),
        "<h2>Durations by prefix</h2>",
        _durations(summary, colours),
        "<h2>Stragglers</h2>",
        _stragglers(past, summary),
        "<h2>Workers</h2>",
        _workers(summary),
        "<h2>Failures</h2>",
        _failures(past, summary),
    ]
    title = escape(f"taskdb report: {graph.label or graph.submission}")
    head = f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{title}</title><style>{_STYLE}</style></head>'
    return f"{head}<body>\n" + "\n".join(parts) + "\n</body></html>\n"


def _cards(past: Past, summary: Summary) -> str:
    wall, busy = summary.wall_seconds, summary.seconds
    cards = (
        (f"{summary.tasks:,}", "tasks"),
        (f"{summary.ran:,}", "ran"),
        (f"{len(past.failures):,}", "failed"),
        (show_seconds(wall), "from begin to end"),
        (show_seconds(busy), "of computing"),
        (f"{busy / wall:.1f}" if wall else "-", "tasks at a time, on average"),
        (f"{len(summary.workers):,}", "workers"),
    )
    return '<div class="cards">' + "".join(f"<div><b>{value}</b><span>{name}</span></div>" for value, name in cards) + "</div>"


def _legend(prefixes: Sequence[Prefix], colours: dict[str, str]) -> str:
    named = "".join(f'<span><i style="background:{colours[x.name]}"></i>{escape(x.name)}</span>' for x in prefixes[: len(_COLOURS)])
    rest = f'<span><i style="background:{_REST}"></i>others</span>' if len(prefixes) > len(_COLOURS) else ""
    return f'<p class="key">{named}{rest}</p>'


def _table(columns: Sequence[str], rows: Iterable[Sequence[str]], numbers: int) -> str:
    """The last `numbers` columns hold numbers. Cells are HTML."""
    first = len(columns) - numbers
    head = "".join(f"<th{' class=n' if place >= first else ''}>{name}</th>" for place, name in enumerate(columns))
    body = "".join(
        "<tr>" + "".join(f"<td{' class=n' if place >= first else ''}>{cell}</td>" for place, cell in enumerate(row)) + "</tr>"
        for row in rows
    )
    return f"<table><tr>{head}</tr>{body}</table>"


# ------------------------------------------------------------------------------------------------------------ drawings


class _Axis:
    def __init__(self, summary: Summary) -> None:
        self._begin = summary.begin
        self._seconds = summary.wall_seconds or 1.0

    def x(self, moment: float) -> float:
        share = min(1.0, max(0.0, (moment - self._begin) / self._seconds))
        return _LEFT + share * (_WIDTH - _LEFT)

    def marks(self, height: float) -> str:
        out = []
        for place in range(5):
            x = self.x(self._begin + self._seconds * place / 4)
            anchor = "end" if place == 4 else "middle" if place else "start"
            label = show_seconds(self._seconds * place / 4)
            out.append(f'<line class="axis" x1="{x:.1f}" x2="{x:.1f}" y1="0" y2="{height}"/>')
            out.append(f'<text x="{x:.1f}" y="{height + 13}" text-anchor="{anchor}">{label}</text>')
        return "".join(out)


def _timeline(summary: Summary, colours: dict[str, str]) -> str:
    if not summary.runs:
        return "<p>Nothing of what ran is in the history.</p>"
    axis = _Axis(summary)
    single = len(summary.runs) <= _BARS_MAX
    y = 0.0
    out = []
    for worker, runs in sorted(summary.workers.items())[:_WORKERS_MAX]:
        lanes = _lanes(runs) if single else []
        label = escape(worker.removeprefix("tcp://"))
        out.append(f'<text x="{_LEFT - 8}" y="{y + 11}" text-anchor="end">{label}</text>')
        if single:
            for row, lane in enumerate(lanes):
                out += [_bar(axis, summary, run, y + row * _LANE, colours) for run in lane]
            y += max(1, len(lanes)) * _LANE + 4
        else:
            out += _slots(axis, summary, runs, y, colours)
            y += 2 * _LANE + 4
    more = len(summary.workers) - _WORKERS_MAX
    words = f"<p class=soft>{more:,} more workers are not drawn.</p>" if more > 0 else ""
    note = (
        "" if single else '<p class="soft">Too many tasks for a bar each: the colour says what a worker did most, the height how much.</p>'
    )
    return f'{note}<svg viewBox="0 0 {_WIDTH} {y + 18}" role="img">{axis.marks(y)}{"".join(out)}</svg>{words}'


def _lanes(runs: Sequence[Run]) -> list[list[Run]]:
    """So that no two of a lane overlap: about a lane a thread."""
    lanes: list[list[Run]] = []
    for run in runs:
        for lane in lanes:
            if lane[-1].began + lane[-1].seconds <= run.began:
                lane.append(run)
                break
        else:
            if len(lanes) < _LANES_MAX:
                lanes.append([run])
    return lanes


def _bar(axis: _Axis, summary: Summary, run: Run, y: float, colours: dict[str, str]) -> str:
    x, end = axis.x(run.began), axis.x(run.began + run.seconds)
    key = summary.past.keys.get(run.id)
    name = show_key(key) if key else f"task {run.id}"
    return (
        f'<rect x="{x:.1f}" y="{y}" width="{max(0.5, end - x):.1f}" height="{_LANE - 2}" fill="{colours[summary.prefix(run.id)]}">'
        f"<title>{escape(name)}: {show_seconds(run.seconds)}</title></rect>"
    )


def _slots(axis: _Axis, summary: Summary, runs: Sequence[Run], y: float, colours: dict[str, str]) -> list[str]:
    width = (summary.wall_seconds or 1.0) / _SLOTS
    busy: list[dict[str, float]] = [defaultdict(float) for _ in range(_SLOTS)]
    for run in runs:
        first = min(_SLOTS - 1, max(0, int((run.began - summary.begin) / width)))
        last = min(_SLOTS - 1, max(first, int((run.began + run.seconds - summary.begin) / width)))
        for at in range(first, last + 1):
            begin = summary.begin + at * width
            busy[at][summary.prefix(run.id)] += max(0.0, min(run.began + run.seconds, begin + width) - max(run.began, begin))
    most = max((sum(slot.values()) for slot in busy), default=0.0) or 1.0
    out = []
    for place, slot in enumerate(busy):
        if slot:
            height = 2 * _LANE * sum(slot.values()) / most
            x, end = axis.x(summary.begin + place * width), axis.x(summary.begin + (place + 1) * width)
            colour = colours[max(slot, key=lambda prefix: slot[prefix])]
            rect = f'x="{x:.1f}" y="{y + 2 * _LANE - height:.1f}" width="{end - x + 0.2:.1f}" height="{height:.1f}"'
            out.append(f'<rect {rect} fill="{colour}"/>')
    return out


def _progress(past: Past, summary: Summary) -> str:
    finished = sorted(past.finished)
    if not finished:
        return "<p>No task has finished.</p>"
    axis = _Axis(summary)
    height = 140
    step = max(1, len(finished) // _SLOTS)
    points = [(summary.begin, 0)] + [(finished[at], at + 1) for at in range(0, len(finished), step)] + [(finished[-1], len(finished))]
    line = " ".join(f"{axis.x(moment):.1f},{height - (height - 8) * count / len(finished):.1f}" for moment, count in points)
    label = f'<text x="{_LEFT - 8}" y="16" text-anchor="end">{len(finished):,} tasks</text>'
    curve = f'<polyline points="{line}" fill="none" stroke="{_COLOURS[0]}" stroke-width="2"/>'
    return f'<svg viewBox="0 0 {_WIDTH} {height + 18}" role="img">{axis.marks(height)}{label}{curve}</svg>'


def _histogram(prefix: Prefix, longest: float, colour: str) -> str:
    bins = [0] * _BINS
    for seconds in prefix.durations:
        bins[min(_BINS - 1, int(_BINS * seconds / longest)) if longest else 0] += 1
    most = max(bins)
    bars = "".join(
        f'<rect x="{place * 5}" y="{24 - 24 * count / most:.1f}" width="4" height="{24 * count / most:.1f}" fill="{colour}"/>'
        for place, count in enumerate(bins)
        if count
    )
    return f'<svg viewBox="0 0 {_BINS * 5} 24" style="width:200px" role="img">{bars}</svg>'


# -------------------------------------------------------------------------------------------------------------- tables


def _durations(summary: Summary, colours: dict[str, str]) -> str:
    rows = [
        (
            escape(x.name),
            _histogram(x, x.longest, colours[x.name]),
            f"{x.count:,}",
            show_seconds(x.total),
            show_seconds(x.total / x.count),
            show_seconds(x.median),
            show_seconds(x.p95),
            show_seconds(x.longest),
        )
        for x in summary.prefixes
    ]
    return _table(("prefix", "from 0 to the longest", "ran", "in all", "mean", "median", "p95", "longest"), rows, 6)


def _stragglers(past: Past, summary: Summary) -> str:
    if not summary.stragglers:
        return "<p>None: no task took much longer than others of its prefix.</p>"
    rows = [
        (
            f"<code>{escape(show_key(past.keys[run.id])) if run.id in past.keys else f'task {run.id}'}</code>",
            f"<code>{escape(run.worker)}</code>",
            show_seconds(run.began - summary.begin),
            show_seconds(run.seconds),
            f"{times:.1f}",
        )
        for run, times in summary.stragglers
    ]
    return _table(("task", "worker", "began after", "took", "times the median"), rows, 3)


def _workers(summary: Summary) -> str:
    rows = [
        (
            f"<code>{escape(worker)}</code>",
            f"{len(runs):,}",
            show_seconds(sum(run.seconds for run in runs)),
            f"{sum(run.seconds for run in runs) / summary.wall_seconds:.2f}" if summary.wall_seconds else "-",
        )
        for worker, runs in sorted(summary.workers.items())[:_WORKERS_MAX]
    ]
    return _table(("worker", "ran", "computing", "tasks at a time, on average"), rows, 3)


def _failures(past: Past, summary: Summary) -> str:
    groups = summary.failures()
    if not groups:
        return "<p>None.</p>"
    rows = [
        (
            escape(exception),
            escape(prefix),
            f"<code>{escape(show_key(past.keys.get(ids[0], b'')) if ids[0] in past.keys else f'task {ids[0]}')}</code>",
            f"<code>{escape(past.failures[ids[0]])}</code>",
            f"{len(ids):,}",
        )
        for exception, prefix, ids in groups[:_FAILURES_MAX]
    ]
    return _table(("exception", "prefix", "for example", "message", "tasks"), rows, 1)
