"""Tasks of a rule are made when they are about to be needed: in the order of the rule, ahead of what is handed out.

To the rest of the engine a growing submission is one whose sender is slow: a task expects the dependents that are yet to be made, so it is
needed, and kept, until the last of them is there. Only outputs exist from the start; until their turn comes they wait (UNGROWN). If none of
them is left, nothing more needs to be made.

A task's id follows from its number in the rule's order. So ids that were told before a crash undid their making come true again.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence

from taskdb.commands import Added, AddRule, AddTasks
from taskdb.engine.again import answer_again
from taskdb.engine.hunger import is_hungry
from taskdb.engine.ingest import add_names, add_runs, check_room, complete, named_graph
from taskdb.engine.newcomers import expect_less, link, meet, place, tell_one
from taskdb.engine.refs import find_key, look_up, rule_place, unmade
from taskdb.engine.ruled import new_ruled
from taskdb.engine.spool import reach_id
from taskdb.engine.todo import Todo
from taskdb.engine.transitions import ERRED, RELEASED, recheck
from taskdb.engine.wants import add_want, intern_client
from taskdb.engine.work import Work
from taskdb.errors import InvalidRequest, InvariantBroken, LimitExceeded
from taskdb.limits import COUNT_MAX, GROW_TASKS, RULE_OUTPUTS_MAX, TASK_BYTES_ESTIMATE
from taskdb.model import TaskFlag
from taskdb.rules import Rule
from taskdb.store.base import ReadTxn
from taskdb.store.codec import (
    UNGROWN,
    GraphRecord,
    GraphStatus,
    Growth,
    StoredRule,
    TaskRecord,
    decode_graph,
    decode_growth,
)
from taskdb.store.schema import U64_PAIR, Meta, Table

_WANTED = int(TaskFlag.WANTED)
#: Indices of tasks that were made, in RUNS: behind those that came.
MADE_INDEX = 2**40


def add_rule(work: Work, command: AddRule, free_bytes: Callable[[], int] | None) -> None:
    """Raises InvalidRequest, LimitExceeded, StoreFull; then nothing of it was written."""
    graph = named_graph(work, command.submission)
    rule = Rule.read(command.rule)
    _check(graph, command, rule)
    keys = [rule.key(layer, rule.indices(layer, element)) for layer, element in zip(command.layers, command.elements, strict=True)]
    if graph.status != GraphStatus.OPEN or command.first_index < graph.added:
        answer_again(work, graph, AddTasks(command.submission, command.first_index, keys))
        return
    count = len(keys)
    if free_bytes is not None:
        size = len(command.rule) + 2 * sum(map(len, keys)) + sum(map(len, command.new_shared)) + count * TASK_BYTES_ESTIMATE
        check_room(free_bytes(), size, f"a rule and {count} tasks")
    # Outputs come first: so ids of what is made grow beyond all others, and records are appended.
    first_output = work.next(Meta.NEXT_TASK, count + rule.tasks)
    outputs: list[list[int]] = [[] for _ in rule.layers]
    for layer, element in zip(command.layers, command.elements, strict=True):
        outputs[layer].append(element)
    stored = StoredRule(first_output + count, graph.groups, rule.counts, tuple(tuple(sorted(elements)) for elements in outputs), rule)
    work.add_rule(graph, stored)
    add_names(work, graph, command.new_groups, command.new_shared)
    growth = Growth(0, 0, [0] * len(rule.layers))
    ids: list[int] = []
    known_at: list[int] = []
    for i, (layer, element, key) in enumerate(zip(command.layers, command.elements, keys, strict=True)):
        flag = command.flags[i]
        place_of = look_up(work.txn, key)
        known = work.task(place_of.id) if place_of.id else None
        if known is not None:
            known_at.append(i)
            meet(work, graph, known, flag, (), 0)
            task = known
        else:
            expected = rule.dependents[layer] + command.dependent_counts[i]
            task = new_ruled(work, graph, stored, layer, element, rule.number(layer, element), first_output + i, place_of, expected)
            task.flags |= UNGROWN
            growth.ungrown += 1
        ids.append(task.id)
        if flag & _WANTED:
            add_want(work, intern_client(work, graph.client), task, graph.id)
        if known is None:
            place(work, graph, task)
        else:
            recheck(work, task)
            if task.state == ERRED and flag & _WANTED:
                tell_one(work, task, graph.client)
    work.add_growth(graph.id, growth)
    if not growth.ungrown:
        work.push(Todo.GROWN, graph.id)
    graph.added += count
    graph.dirty = True
    add_runs(work, graph, command.first_index, ids)
    work.result.added.append(Added(command.submission, command.first_index, ids, [], known_at))


def _check(graph: GraphRecord, command: AddRule, rule: Rule) -> None:
    count = len(command.layers)
    if not 0 < count <= RULE_OUTPUTS_MAX:
        raise LimitExceeded(f"a rule with {count} outputs, not 1 to {RULE_OUTPUTS_MAX}")
    if not len(command.elements) == len(command.flags) == len(command.dependent_counts) == count:
        raise InvalidRequest("columns of outputs differ in length")
    if len(command.new_groups) != len(rule.layers):
        raise InvalidRequest(f"{len(command.new_groups)} groups for {len(rule.layers)} layers")
    if command.first_index > graph.added:
        raise InvalidRequest(f"first_index is {command.first_index}, but {graph.added} tasks were added so far")
    if graph.added + count > COUNT_MAX:
        raise LimitExceeded(f"more than {COUNT_MAX} tasks in one submission")
    if len(set(zip(command.layers, command.elements, strict=True))) != count:
        raise InvalidRequest("an output is named twice")
    for layer, element in zip(command.layers, command.elements, strict=True):
        if not 0 <= layer < len(rule.layers) or not 0 <= element < rule.counts[layer]:
            raise InvalidRequest(f"element {element} of layer {layer} is not of the rule")
    if any(not 0 <= declared <= COUNT_MAX - max(rule.dependents) for declared in command.dependent_counts):
        raise InvalidRequest("dependent_counts are out of range")
    shared_max = graph.annotations + len(command.new_shared)
    if any(not 0 <= layer.shared <= shared_max for layer in rule.layers):
        raise InvalidRequest(f"shared blobs are 0 to {shared_max}")
    if any(layer.flags & ~int(TaskFlag.DATA_PRODUCER) for layer in rule.layers):
        raise InvalidRequest("layers have no flags but DATA_PRODUCER")


# ------------------------------------------------------------------------------------------------------------- growing


def grow_some(work: Work, free_bytes: Callable[[], int] | None) -> bool:
    """Up to GROW_TASKS tasks of the first graph that has few queued. True if there is more to make now. Raises NoRoom."""
    graphs = []
    for key, _ in work.txn.scan(Table.GROWTH):
        growth, graph = work.growth(int.from_bytes(key)), work.known_graph(int.from_bytes(key))
        if growth is not None and _wants_more(graph, growth):
            graphs.append(graph)
    if not graphs:
        return False
    graph = min(graphs, key=lambda graph: graph.generation)
    if free_bytes is not None:
        check_room(free_bytes(), GROW_TASKS * TASK_BYTES_ESTIMATE, "more tasks of a rule")
    grow(work, graph, GROW_TASKS)
    return True


def hungry(txn: ReadTxn) -> bool:
    """Whether some graph with a rule has few tasks queued. Reads one record for each of them."""
    return any(_wants_more(decode_graph(0, txn.get(Table.GRAPHS, key) or b""), decode_growth(data)) for key, data in txn.scan(Table.GROWTH))


def _wants_more(graph: GraphRecord, growth: Growth) -> bool:
    return graph.status == GraphStatus.GROWING and growth.ungrown > 0 and is_hungry(graph)


def grow(work: Work, graph: GraphRecord, count: int) -> None:
    """Make the next tasks of a graph's rule. It must have a growth."""
    growth = work.growth(graph.id)
    assert growth is not None
    stored = work.rule(graph)
    rule = stored.rule
    first = growth.emitted
    #: Ids of those made here, by key.
    made: dict[bytes, int] = {}
    for layer, element in rule.emit(growth.cursors, count):
        number = growth.emitted
        growth.emitted += 1
        growth.cursors[layer] += 1
        indices = rule.indices(layer, element)
        key = rule.key(layer, indices)
        deps = _dep_ids(work, rule, layer, indices, made)
        place_of = look_up(work.txn, key)
        task = work.task(place_of.id) if place_of.id else None
        if task is not None and task.flags & UNGROWN and task.graph == graph.id:
            _complete(work, graph, task, deps)
            growth.ungrown -= 1
        elif _is_output(stored, layer, element):
            # It was known when the rule came, or is forgotten.
            expect_less(work, graph, deps)
        elif task is not None:
            meet(work, graph, task, 0, deps, 0)
            recheck(work, task)
            work.count_forgotten(graph.id, stored.first_group + layer, 1)
        else:
            task = new_ruled(work, graph, stored, layer, element, number, stored.first_id + number, place_of, rule.dependents[layer])
            link(work, graph, task, deps)
            place(work, graph, task)
        if task is not None:
            made[key] = task.id
    growth.dirty = graph.dirty = True
    work.flush_dependents()
    _note_made(work, graph, stored, first, growth.emitted)
    if not growth.ungrown:
        work.push(Todo.GROWN, graph.id)


def _dep_ids(work: Work, rule: Rule, layer: int, indices: dict[int, int], made: dict[bytes, int]) -> list[int]:
    ids = []
    for dep, at in rule.deps(layer, indices):
        key = rule.key(dep, at)
        dep_id = made.get(key) or find_key(work.txn, key)
        if not dep_id or work.task(dep_id) is None:
            raise InvariantBroken(f"a task of layer {layer} of a rule depends on one of layer {dep} that is not there")
        ids.append(dep_id)
    return ids


def _complete(work: Work, graph: GraphRecord, task: TaskRecord, deps: Sequence[int]) -> None:
    """An output's dependencies are there."""
    graph.counts[task.state - 1] -= 1
    # For those that depend on it nothing changes: an output that waits, and one that is not needed, block them alike.
    task.state = RELEASED
    task.waiting_on = task.blocked_on = 0
    task.flags &= ~UNGROWN
    task.deps = ()
    task.dirty = True
    link(work, graph, task, deps)
    place(work, graph, task)


def _is_output(stored: StoredRule, layer: int, element: int) -> bool:
    elements = stored.outputs[layer]
    at = bisect_left(elements, element)
    return at < len(elements) and elements[at] == element


def _note_made(work: Work, graph: GraphRecord, stored: StoredRule, before: int, after: int) -> None:
    if before:
        work.txn.delete(Table.RUNS, U64_PAIR.pack(graph.id, MADE_INDEX + before - 1))
    if after:
        work.txn.put(Table.RUNS, U64_PAIR.pack(graph.id, MADE_INDEX + after - 1), U64_PAIR.pack(MADE_INDEX, stored.first_id))


def end_growth(work: Work, graph_id: int) -> None:
    """Nothing more of its rule needs to be made: all is there, or no output is left to be made, or it is aborted."""
    growth = work.growth(graph_id)
    graph = work.graph(graph_id)
    if growth is None or graph is None or (growth.ungrown and graph.status != GraphStatus.ABORTED):
        return
    if graph.status == GraphStatus.OPEN:
        return  # when it is sealed
    stored = work.rule(graph)
    for layer, count in enumerate(unmade(stored, growth)):
        if count:
            work.count_forgotten(graph.id, stored.first_group + layer, count)
    work.remove_growth(graph_id)
    if graph.status == GraphStatus.GROWING:
        complete(work, graph)


def made(work: Work, task_id: int) -> TaskRecord | None:
    """A task that the scheduler says it has. If it had been made when the daemon died, or an output's turn had come, so it comes now."""
    task = work.task(task_id)
    if task is None and reach_id(work, task_id):
        task = work.task(task_id)
    if task is not None and not task.flags & UNGROWN:
        return task
    for key, _ in list(work.txn.scan(Table.GROWTH)):
        graph = work.known_graph(int.from_bytes(key))
        growth = work.growth(graph.id)
        if growth is None or graph.status != GraphStatus.GROWING:
            continue
        stored = work.rule(graph)
        number = task_id - stored.first_id
        if task is not None:
            if task.graph != graph.id:
                continue
            number = stored.rule.number(*rule_place(work.txn, task_id))
        if growth.emitted <= number < stored.rule.tasks:
            grow(work, graph, number + 1 - growth.emitted)
            return work.task(task_id)
    return task
