"""Tasks of a rule that were made before: what they depend on follows from the rule, and so do they.

So a task that is finished, or that nobody needs, keeps no edges (`transitions.cut`), and what nobody links any more is dropped. `restore`
undoes both for a task that is to run again, one level at a time: what it makes again has no edges until it runs itself.
"""

from __future__ import annotations

from taskdb.engine.refs import KeyPlace, look_up, rule_place
from taskdb.engine.tables import new_task
from taskdb.engine.work import Work
from taskdb.model import TaskState
from taskdb.store.codec import RULED, UNGROWN, GraphRecord, StoredRule, TaskRecord, encode_ids, encode_rank
from taskdb.store.schema import RULE_PLACE, U64, Table

_RELEASED = int(TaskState.RELEASED)


def new_ruled(
    work: Work, graph: GraphRecord, stored: StoredRule, layer: int, element: int, number: int, task_id: int, at: KeyPlace, expected: int
) -> TaskRecord:
    """A task of a rule under a key that is free. It has yet to be linked and placed."""
    this = stored.rule.layers[layer]
    rank = encode_rank(this.user, graph.generation, float(number))
    task = new_task(work, graph, task_id, at, this.flags | RULED, expected, stored.first_group + layer, this.shared, rank)
    work.txn.put(Table.SPECS, U64.pack(task_id), RULE_PLACE.pack(layer, element))
    return task


def restore(work: Work, task: TaskRecord) -> None:
    """It is to run again, or has failed: if it was cut, it is linked again, and what it depends on is there. Touches at most
    RULE_DEPS_MAX tasks."""
    if not task.flags & RULED or task.flags & UNGROWN or work.deps(task):
        return
    graph = work.known_graph(task.graph)
    stored = work.rule(graph)
    rule = stored.rule
    layer, element = rule_place(work.txn, task.id)
    if not rule.layers[layer].deps:
        return
    deps: list[int] = []
    for dep_layer, indices in rule.deps(layer, rule.indices(layer, element)):
        at = look_up(work.txn, rule.key(dep_layer, indices))
        # Under its key there may be another submission's by now.
        dep = work.task(at.id) if at.id else None
        if dep is None:
            dep = _again(work, graph, stored, dep_layer, rule.element(dep_layer, indices), at)
        dep.links += 1
        dep.dirty = True
        work.name_dependent(dep.id, task.id)
        deps.append(dep.id)
    task.deps = tuple(deps)
    work.txn.put(Table.EDGES, U64.pack(task.id), encode_ids(deps))


def _again(work: Work, graph: GraphRecord, stored: StoredRule, layer: int, element: int, at: KeyPlace) -> TaskRecord:
    """A task that was dropped. Even of an output the id is the one that its number says: its own belongs to what is over."""
    number = stored.rule.number(layer, element)
    task = new_ruled(work, graph, stored, layer, element, number, stored.first_id + number, at, 0)
    graph.counts[_RELEASED - 1] += 1
    graph.dirty = True
    work.count_dropped(graph, layer, -1)
    return task
