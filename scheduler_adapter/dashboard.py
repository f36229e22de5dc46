"""The page `/taskdb` of Dask's dashboard. Imported only where there is a dashboard, and so Bokeh.

A refresh takes in the rows that are new and at most GRAPHS_SHOWN graphs, however many tasks these have.
"""

from __future__ import annotations

import heapq
import math
import time
from html import escape
from itertools import islice
from typing import TYPE_CHECKING, Any

from bokeh.layouts import column, gridplot
from bokeh.models import (
    ColumnDataSource,
    CustomJS,
    DataTable,
    Div,
    HoverTool,
    HTMLTemplateFormatter,
    LinearAxis,
    LinearScale,
    NumberFormatter,
    NumeralTickFormatter,
    Range1d,
    TableColumn,
)
from bokeh.plotting import figure
from dask.utils import key_split
from distributed.dashboard.components import DashboardComponent, add_periodic_callback
from distributed.dashboard.components.scheduler import BOKEH_THEME, env
from distributed.scheduler import Scheduler

from scheduler_adapter.history import ROWS_MAX, History, Row
from scheduler_adapter.submitted import Submission
from taskdb.wire import taskdb_pb2 as pb

if TYPE_CHECKING:
    from scheduler_adapter.adapter import Adapter

REFRESH_MS = 1000
GRAPHS_SHOWN = 50
#: Names of functions in the name of a graph.
NAMES_SHOWN = 3
#: Below this a count on a logarithmic axis is drawn here; in words it is 0.
_FLOOR = 0.4

_COLUMNS = ("time", "resident", "graph_tasks", "memory", "queued", "ready", "leased", "commit_ms", "durable_ms", "taken_in", "finished")
_GRAPH_COLUMNS = ("graph", "client", "submitted", "tasks", "share", "done", "processing", "queued", "waiting", "erred", "bar")
_LINKS = {
    "live": ("#2ca02c", "connected"),
    "lost": ("#d62728", "the daemon is gone: what is resident runs on, the rest waits until it is back"),
    "closed": ("#7f7f7f", "closed"),
}
#: Segments of a graph's bar.
_SEGMENT = "display:inline-block;height:12px"
_COLOURS = {"done": "#2ca02c", "processing": "#ff7f0e", "queued": "#1f77b4", "erred": "#000000", "waiting": "#d0d0d0"}


def page(scheduler: Scheduler, extra: dict[str, Any], doc: Any) -> None:
    """Fill a document, for one visitor."""
    adapter: Adapter = scheduler.taskdb
    view = View(adapter)
    view.update()
    doc.title = "Dask: TaskDB"
    add_periodic_callback(doc, view, REFRESH_MS)
    doc.add_root(view.root)
    doc.template = env.get_template("simple.html")
    doc.template_variables.update(extra)
    doc.theme = BOKEH_THEME


class View(DashboardComponent):
    """What one visitor sees."""

    def __init__(self, adapter: Adapter):
        assert adapter.history is not None
        self._adapter = adapter
        self._history: History = adapter.history
        self._count = 0
        self.source = ColumnDataSource({name: [] for name in _COLUMNS}, name="taskdb-rows")
        self.graphs = ColumnDataSource({name: [] for name in _GRAPH_COLUMNS}, name="taskdb-graphs")
        self.words = Div(name="taskdb-words", sizing_mode="stretch_width")
        self.root = column(
            self.words,
            gridplot(
                [[self._frontier(), self._queue()], [self._latency(), self._rates()]],
                sizing_mode="stretch_width",
                toolbar_location=None,
                merge_tools=False,
            ),
            self._table(),
            name="taskdb",
            sizing_mode="stretch_width",
        )

    # --------------------------------------------------------------------------------------------------------- update

    def update(self) -> None:
        history = self._history
        history.look()
        rows, self._count = history.since(self._count)
        if rows:
            self.source.stream({name: [row[name] for row in map(_numbers, rows)] for name in _COLUMNS}, rollover=ROWS_MAX)
            self._scale_memory()
            self.words.text = self._state(rows[-1])
        self.graphs.data = self._graph_rows()

    def _scale_memory(self) -> None:
        memory = self.source.data["memory"]
        self._memory_range.end = 1.2 * max(memory)

    def _state(self, row: Row) -> str:
        now, status = row.now, self._history.status
        colour, words = _LINKS[now.link]
        session = self._adapter.session
        held = f"{now.resident:,} tasks resident (window {now.window:,})"
        parts = [f"epoch {now.epoch}", held, f"{now.graph_tasks:,} tasks in {now.graphs:,} graphs"]
        if now.unanswered or now.undurable:
            parts.append(f"{now.unanswered:,} batches unanswered, {now.undurable:,} not on disk")
        if now.cold:
            parts.append(f"{now.cold:,} cold results")
        if status is not None:
            parts.append(f"store {_size(status.store_bytes)} of {_size(status.store_bytes_max)}")
            if status.todo:
                parts.append(f"{status.todo:,} background items")
        if self._history.problem:
            parts.append(f"not answered: {self._history.problem}")
        address = escape(session.address if session is not None else "")
        head = f'<span style="color:{colour}">&#9679;</span> <b id="taskdb-link">{now.link}</b> <code>{address}</code>: {escape(words)}'
        return f'<div style="font-size:14px">{head}<br>{escape(" · ".join(parts))}</div>'

    def _graph_rows(self) -> dict[str, list[Any]]:
        status = self._history.status
        graphs = [] if status is None else heapq.nlargest(GRAPHS_SHOWN, status.graphs, key=_interest)
        submissions = self._adapter.pager.residency.submissions
        rows = [graph_row(graph, submissions.get(graph.submission)) for graph in graphs]
        return {name: [row[name] for row in rows] for name in _GRAPH_COLUMNS}

    # --------------------------------------------------------------------------------------------------------- figures

    def _frontier(self) -> Any:
        plot = self._plot("Frontier: what the scheduler holds of what there is", y_axis_type="log", y_axis_label="tasks")
        self._lines(plot, {"graph_tasks": ("tasks of graphs", "#1f77b4"), "resident": ("resident", "#ff7f0e")})
        plot.y_range.renderers = list(plot.renderers)
        self._memory_range = Range1d(0, 1)
        plot.extra_y_ranges, plot.extra_y_scales = {"memory": self._memory_range}, {"memory": LinearScale()}
        formatter = NumeralTickFormatter(format="0.0 ib")
        plot.add_layout(LinearAxis(y_range_name="memory", formatter=formatter, axis_label="scheduler memory"), "right")
        style = {"color": "#7f7f7f", "line_dash": "4 2", "legend_label": "memory (right)"}
        plot.line("time", "memory", source=self.source, y_range_name="memory", **style)
        return plot

    def _queue(self) -> Any:
        plot = self._plot("Queue depth", y_axis_type="log", y_axis_label="tasks")
        lines = {"queued": ("could be handed out", "#1f77b4"), "ready": ("could run", "#2ca02c"), "leased": ("leased", "#ff7f0e")}
        self._lines(plot, lines)
        return plot

    def _latency(self) -> Any:
        plot = self._plot("Commit latency", y_axis_label="ms")
        self._lines(plot, {"durable_ms": ("from report to disk", "#1f77b4"), "commit_ms": ("commit", "#ff7f0e")})
        return plot

    def _rates(self) -> Any:
        plot = self._plot("Tasks a second", y_axis_type="log", y_axis_label="tasks / s")
        self._lines(plot, {"taken_in": ("taken in", "#1f77b4"), "finished": ("finished", "#2ca02c")})
        return plot

    def _plot(self, title: str, **options: Any) -> Any:
        tools = {"tools": "xpan,xwheel_zoom,reset", "toolbar_location": None}
        plot = figure(title=title, x_axis_type="datetime", height=260, min_width=400, **tools, **options)
        if options.get("y_axis_type") == "log":
            plot.yaxis.formatter = NumeralTickFormatter(format="0.[0]a")
        return plot

    def _lines(self, plot: Any, lines: dict[str, tuple[str, str]]) -> None:
        for name, (label, colour) in lines.items():
            plot.line("time", name, source=self.source, color=colour, line_width=2, legend_label=label)
        plot.add_tools(HoverTool(mode="vline", tooltips=[(label, f"@{name}{{0,0}}") for name, (label, _) in lines.items()]))
        plot.legend.location = "top_left"
        plot.legend.background_fill_alpha = 0.6

    def _table(self) -> Any:
        text = HTMLTemplateFormatter(template='<span title="<%- value %>"><%- value %></span>')
        bar = HTMLTemplateFormatter(template="<%= value %>")
        count = NumberFormatter(format="0,0")

        def number(name: str) -> Any:
            return TableColumn(field=name, title=name, formatter=count, width=70)

        table = DataTable(
            source=self.graphs,
            columns=[
                TableColumn(field="graph", title="graph", formatter=text, width=160),
                TableColumn(field="client", title="client", formatter=text, width=120),
                TableColumn(field="submitted", title="submitted", formatter=text, width=70),
                TableColumn(field="bar", title="progress", formatter=bar, width=260),
                TableColumn(field="share", title="%", formatter=NumberFormatter(format="0.0"), width=50),
                *(number(name) for name in ("tasks", "done", "processing", "queued", "waiting", "erred")),
            ],
            index_position=None,
            sortable=False,
            reorderable=False,
            height=300,
            sizing_mode="stretch_width",
        )
        # Bokeh draws a table again only if the number of its rows has changed.
        self.graphs.js_on_change("data", CustomJS(args={"view": table.view}, code="view.change.emit()"))
        return table


def graph_row(graph: pb.GraphStatus, submission: Submission | None) -> dict[str, Any]:
    """A graph in numbers. What the scheduler was told of it knows its size; finished tasks leave the database, or were never written."""
    states = graph.states
    there = graph.tasks + graph.unmade
    tasks = max(there, submission.total if submission is not None else 0)
    counts = {
        "processing": states.get("processing", 0),
        "queued": states.get("queued", 0),
        "waiting": states.get("waiting", 0) + graph.unmade,
        "erred": states.get("erred", 0),
    }
    counts["done"] = tasks - sum(counts.values())
    return {
        "graph": _name(graph, submission),
        "client": graph.client,
        "submitted": time.strftime("%H:%M:%S", time.localtime(graph.submitted)),
        "tasks": tasks,
        "share": 100 * counts["done"] / tasks if tasks else 0.0,
        "bar": _bar(counts, tasks),
        **counts,
    }


def _name(graph: pb.GraphStatus, submission: Submission | None) -> str:
    """Of what functions it is made, as Dask's other pages name tasks; else what it was called when it came."""
    groups = islice(submission.groups, 100 * NAMES_SHOWN) if submission is not None else ()
    names = sorted({name for group in groups if not (name := key_split(group)).startswith("finalize")})
    if not names:
        return graph.label or graph.submission
    return ", ".join(names[:NAMES_SHOWN]) + (", …" if len(names) > NAMES_SHOWN else "")


def _bar(counts: dict[str, int], tasks: int) -> str:
    """Only numbers and names of ours: it is shown as it is."""
    segments = "".join(
        f'<span title="{name}: {counts[name]:,}" style="{_SEGMENT};width:{100 * counts[name] / tasks:.3f}%;background:{colour}"></span>'
        for name, colour in _COLOURS.items()
        if counts[name]
    )
    return f'<div style="white-space:nowrap;font-size:0;padding-top:4px">{segments}</div>'


def _interest(graph: pb.GraphStatus) -> tuple[bool, float]:
    """Unfinished graphs first, then new ones."""
    unfinished = graph.unmade + sum(graph.states.get(name, 0) for name in ("waiting", "queued", "processing"))
    return unfinished > 0, graph.submitted


def _numbers(row: Row) -> dict[str, float]:
    """One row of the source."""
    now = row.now
    return {
        "time": 1000 * row.time,
        "resident": max(now.resident, _FLOOR),
        "graph_tasks": max(now.graph_tasks, _FLOOR),
        "memory": row.memory_bytes,
        "queued": max(now.queued, _FLOOR),
        "ready": max(now.ready, _FLOOR),
        "leased": max(now.leased, _FLOOR),
        "commit_ms": math.nan if row.commit_seconds is None else 1000 * row.commit_seconds,
        "durable_ms": 1000 * now.durable_seconds,
        "taken_in": max(row.taken_in_rate, _FLOOR),
        "finished": max(row.finished_rate, _FLOOR),
    }


def _size(count: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} {unit}"
        count /= 1024
    return f"{count:.1f} GiB"
