"""Figures about the past of a graph: durations by prefix, stragglers, what workers did."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from taskdb.cli.past import Past, Run
from taskdb.engine.failures import exception_name
from taskdb.engine.reader import prefix_text

#: A straggler took so many times the median of its prefix, and at least so long; so many are listed.
STRAGGLER_TIMES = 3.0
STRAGGLER_SECONDS_MIN = 0.1
STRAGGLERS_MAX = 25


@dataclass(frozen=True, slots=True)
class Prefix:
    """Durations of one prefix, ascending, in seconds."""

    name: str
    durations: list[float]

    @property
    def count(self) -> int:
        return len(self.durations)

    @property
    def total(self) -> float:
        return sum(self.durations)

    @property
    def median(self) -> float:
        return self.quantile(0.5)

    @property
    def p95(self) -> float:
        return self.quantile(0.95)

    @property
    def longest(self) -> float:
        return self.durations[-1]

    def quantile(self, share: float) -> float:
        return self.durations[min(self.count - 1, int(share * self.count))]


class Summary:
    def __init__(self, past: Past) -> None:
        self.past = past
        self.tasks = len(past.states)
        #: Runs, by when they began.
        self.runs = sorted(past.runs, key=lambda run: run.began)
        self.ran = len({run.id for run in past.runs})
        self.seconds = sum(run.seconds for run in past.runs)
        #: From the first that is known of it to the last, by all clocks.
        self.begin = min([past.begin, *(run.began for run in past.runs)])
        self.end = max([past.begin, *past.finished, *(run.began + run.seconds for run in past.runs)])
        self.wall_seconds = max(0.0, self.end - self.begin)
        by_prefix: dict[str, list[float]] = defaultdict(list)
        for run in past.runs:
            by_prefix[self.prefix(run.id)].append(run.seconds)
        #: Those that took longest in all first.
        self.prefixes = sorted((Prefix(name, sorted(found)) for name, found in by_prefix.items()), key=lambda x: -x.total)
        medians = {x.name: x.median for x in self.prefixes}
        slow = [(run, run.seconds / max(medians[self.prefix(run.id)], 1e-6)) for run in past.runs]
        #: (run, times the median of its prefix), the longest first.
        self.stragglers = sorted(
            ((run, times) for run, times in slow if times >= STRAGGLER_TIMES and run.seconds >= STRAGGLER_SECONDS_MIN),
            key=lambda x: -x[0].seconds,
        )[:STRAGGLERS_MAX]
        #: Worker -> its runs.
        self.workers: dict[str, list[Run]] = defaultdict(list)
        for run in self.runs:
            self.workers[run.worker].append(run)

    def prefix(self, task_id: int) -> str:
        group = self.past.groups.get(task_id, "")
        return prefix_text(group or self.past.keys.get(task_id, b"\xa7unknown"))

    def failures(self) -> list[tuple[str, str, list[int]]]:
        """(exception, prefix, tasks), the most frequent first."""
        groups: dict[tuple[str, str], list[int]] = defaultdict(list)
        for task_id, text in self.past.failures.items():
            groups[exception_name(text), self.prefix(task_id)].append(task_id)
        return sorted(((*names, ids) for names, ids in groups.items()), key=lambda x: -len(x[2]))
