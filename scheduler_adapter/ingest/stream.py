"""One graph on its way from the ingest process to the database, and what the scheduler is told meanwhile."""

from __future__ import annotations

from collections import Counter
from contextlib import suppress
from typing import Any

from scheduler_adapter.graph import Ahead, Graph, runs
from scheduler_adapter.keys import unpack_key
from scheduler_adapter.symbolic import Symbolic
from taskdb.commands import AddRule, AddTasks, BeginGraph
from taskdb.errors import TaskDBError
from taskdb.ingest import Ingest, MissingKeys
from taskdb.model import GraphFlag, TaskFlag

#: Fewest tasks of a graph whose runs are stored as they come: smaller ones are there at once.
SPOOL_TASKS = 20_000


class Stream:
    def __init__(self, job: dict[str, Any], graph: Graph, tell: Any, rule: Symbolic | None = None):
        """`graph`: the tasks that are sent one by one. `tell(op=…)` reports to the scheduler."""
        self.job = job
        self.graph = graph
        self.tell = tell
        self.rule = rule
        self.submission: str = job["submission"]
        #: Groups introduced so far.
        self.names: list[str] = []

    def run(self) -> None:
        """Raises what the database refused it with."""
        self._announce()
        job = self.job
        flags = job["flags"] | (GraphFlag.SPOOLED if self.rule is None and len(self.graph.dsk) >= SPOOL_TASKS else 0)
        with Ingest(job["daemon"], job["epoch"], self._added) as stream:
            try:
                there = stream.begin(
                    BeginGraph(self.submission, job["client"], job["generation"], job["submitted"], job["label"], flags=flags)
                )
                self.tell(op="begun", there=there)
                ahead = Ahead()
                if self.rule is not None:
                    ahead = self._add_rule(stream, self.rule)
                for run in runs(self.graph, self.submission, held=False, consume=True, ahead=ahead):
                    self.names.extend(run.new_groups)
                    stream.add(run)
                tasks = stream.seal()
            except Exception as e:
                # What is in the database by now has to be counted, to be taken back.
                with suppress(TaskDBError):
                    stream.settle()
                if not isinstance(e, MissingKeys):
                    raise
                self.tell(op="missing", keys=[unpack_key(k) for k in e.keys])
                return
        self.tell(op="done", tasks=tasks)

    def _announce(self) -> None:
        graph, rule = self.graph, self.rule
        sizes, links = graph.groups()
        tasks, external = len(graph.dsk), graph.external
        if rule is not None:
            tasks += rule.rule.tasks
            sizes.update(self._rule_sizes(rule))
            links |= {(rule.groups[number], rule.groups[dep]) for number, layer in enumerate(rule.rule.layers) for dep in layer.deps}
            outputs = set(rule.output_keys)
            external = [key for key in external if key not in outputs]
        self.tell(op="graph", tasks=tasks, external=external, groups=dict(sizes), group_deps=links)

    def _rule_sizes(self, rule: Symbolic) -> Counter[str]:
        sizes: Counter[str] = Counter()
        for name, count in zip(rule.groups, rule.rule.counts, strict=True):
            sizes[name] += count
        return sizes

    def _add_rule(self, stream: Ingest, rule: Symbolic) -> Ahead:
        outputs = Counter(dep for spec in self.graph.dsk.values() for dep in spec.dependencies)
        known = stream.add_rule(
            AddRule(
                self.submission,
                0,
                rule.rule.write(),
                rule.groups,
                rule.shared,
                [layer for layer, _ in rule.outputs],
                [element for _, element in rule.outputs],
                [int(TaskFlag.WANTED) if key in self.graph.wanted else 0 for key in rule.output_keys],
                [outputs[key] for key in rule.output_keys],
            )
        )
        old = Counter(rule.groups[rule.outputs[i][0]] for i in known)
        self.tell(
            op="run", first=0, new=dict(self._rule_sizes(rule) - old), old=dict(old), known=[rule.output_keys[i] for i in known], keys=()
        )
        self.names.extend(rule.groups)
        return Ahead(rule.output_keys, rule.groups, len(rule.shared))

    def _added(self, run: AddTasks, known: list[int]) -> None:
        """A run is in the database. Some of its tasks may have been there."""
        names = self.names
        old = [i for i in known if not run.flags[i] & TaskFlag.EXTERNAL]
        new = Counter(names[g] for g, flag in zip(run.groups, run.flags, strict=True) if not flag & TaskFlag.EXTERNAL)
        before = Counter(names[run.groups[i]] for i in old)
        keys = run.keys if self.job["flags"] & GraphFlag.RESENT else ()
        self.tell(
            op="run",
            first=run.first_index,
            new=dict(new - before),
            old=dict(before),
            known=[unpack_key(run.keys[i]) for i in old],
            keys=keys,
        )
