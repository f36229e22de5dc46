"""The critical path of a task: of all that it still needs, the chain that takes longest. Bounded work, so of a part if there is much."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from statistics import fmean

from taskdb.engine.reader import Reader, TaskInfo
from taskdb.engine.repair import duration, durations
from taskdb.limits import EXPLAIN_PATH_LINKS_MAX
from taskdb.model import TaskState
from taskdb.store.codec import TaskRecord

#: Of a task of which nothing is known, if nothing is known of any: then the longest chain is that of most tasks.
_SECONDS_UNKNOWN = 1.0


@dataclass(slots=True)
class CriticalPath:
    """What runs first comes first; the task itself is last. `seconds` is None where no duration was recorded."""

    steps: list[tuple[TaskInfo, float | None]] = field(default_factory=list)
    #: Tasks looked at, and whether those were all it needs.
    tasks: int = 0
    whole: bool = True


def critical_path(reader: Reader, task: TaskRecord, limit: int) -> CriticalPath:
    """The last `limit` steps of it. Looks at EXPLAIN_PATH_LINKS_MAX links at most."""
    records, deps, whole = _below(reader, task)
    known = durations(reader.txn)
    groups: dict[tuple[int, int], float | None] = {}
    for record in records.values():
        part = record.graph, record.group
        if part not in groups:
            groups[part] = duration(known, reader.group(*part))
    found = [seconds for seconds in groups.values() if seconds is not None]
    usual = fmean(found) if found else _SECONDS_UNKNOWN
    ends: dict[int, tuple[float, int]] = {}
    for task_id in _deps_first(task.id, deps):
        longest, through = max(((ends[dep][0], dep) for dep in deps.get(task_id, ())), default=(0.0, 0))
        seconds = groups[records[task_id].graph, records[task_id].group]
        ends[task_id] = longest + (usual if seconds is None else seconds), through
    path = CriticalPath(tasks=len(records), whole=whole)
    task_id = task.id
    while task_id and len(path.steps) < limit:
        record = records[task_id]
        path.steps.append((reader.info(record), groups[record.graph, record.group]))
        task_id = ends[task_id][1]
    path.steps.reverse()
    return path


def _below(reader: Reader, task: TaskRecord) -> tuple[dict[int, TaskRecord], dict[int, list[int]], bool]:
    """What a task needs and is not there, by id; and the dependencies among these."""
    records = {task.id: task}
    deps: dict[int, list[int]] = {}
    waiting = deque([task.id])
    links = 0
    while waiting:
        if links > EXPLAIN_PATH_LINKS_MAX:
            return records, deps, False
        task_id = waiting.popleft()
        found = deps[task_id] = []
        for dep_id in reader.deps(task_id):
            links += 1
            if links > EXPLAIN_PATH_LINKS_MAX:
                break
            dep = records.get(dep_id) or reader.task(dep_id)
            if dep is None or dep.state in (TaskState.MEMORY, TaskState.ERRED):
                continue
            found.append(dep_id)
            if dep_id not in records:
                records[dep_id] = dep
                waiting.append(dep_id)
    return records, deps, links <= EXPLAIN_PATH_LINKS_MAX


def _deps_first(task_id: int, deps: dict[int, list[int]]) -> list[int]:
    """All tasks below one, and it, each after its dependencies."""
    order: list[int] = []
    seen = {task_id}
    stack = [(task_id, iter(deps.get(task_id, ())))]
    while stack:
        current, rest = stack[-1]
        for dep in rest:
            if dep not in seen:
                seen.add(dep)
                stack.append((dep, iter(deps.get(dep, ()))))
                break
        else:
            stack.pop()
            order.append(current)
    return order
