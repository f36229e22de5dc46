"""One call's view of the store: decoded records, each read once and written back once, and the background work it gives rise to.

Rules: nothing here decides anything; `flush` is the only place that writes tasks, queues, holds, graphs, groups and clients. What is
in `todo` is neither lost nor done twice: it is in memory, or in the table, or done.
"""

from __future__ import annotations

from collections.abc import Iterator
from heapq import heapify, heappop, heappush

from taskdb.commands import GroupCount, Result
from taskdb.engine.moves import Moves
from taskdb.engine.refs import find_key, rule_place
from taskdb.engine.spooled_keys import SpooledKeys
from taskdb.engine.todo import Todo
from taskdb.errors import InvariantBroken
from taskdb.limits import CACHE_TASKS_MAX, RULES_CACHE_MAX
from taskdb.model import TaskState
from taskdb.store.base import WriteTxn
from taskdb.store.codec import (
    NO_GROUP,
    PARKED,
    RULED,
    ClientRecord,
    GraphRecord,
    Growth,
    StoredRule,
    TaskRecord,
    decode_client,
    decode_dropped,
    decode_graph,
    decode_group,
    decode_growth,
    decode_ids,
    decode_rule,
    decode_task,
    encode_client,
    encode_dropped,
    encode_graph,
    encode_group,
    encode_growth,
    encode_ids,
    encode_rule,
    encode_task,
)
from taskdb.store.schema import GRAPH_PART, TODO_KEY, U64, U64_PAIR, Meta, Table, meta_key

_QUEUED = int(TaskState.QUEUED)
_PROCESSING = int(TaskState.PROCESSING)
_MEMORY = int(TaskState.MEMORY)
_NO_IDS: tuple[int, ...] = ()
_QUEUES = (None, Table.READY, Table.AHEAD)


class Work:
    def __init__(
        self, txn: WriteTxn, epoch: int, rules: dict[tuple[int, str], StoredRule], spooled: SpooledKeys, former: Work | None = None
    ) -> None:
        """`rules`: those read so far, by graph and submission. `former`: the Work of the last call in the same transaction, flushed, whose
        records are taken over."""
        self.txn = txn
        self._rules = rules
        self.epoch = epoch
        self.result = Result()
        #: Tasks met in this call, and in earlier ones. None: there is none.
        self._tasks: dict[int, TaskRecord | None] = {}
        self._before: dict[int, TaskRecord | None] = {}
        self._graphs: dict[int, GraphRecord | None] = {}
        self._clients: dict[int, ClientRecord | None] = {}
        self._growths: dict[int, Growth | None] = {}
        #: Graph -> dropped tasks of each layer of its rule; and the graphs whose counts changed.
        self._dropped: dict[int, list[int]] = {}
        self._dropped_changed: set[int] = set()
        #: (graph, index) -> [live tasks, name, changed]
        self._groups: dict[tuple[int, int], list[int | str | bool]] = {}
        self._blobs: dict[tuple[int, int], bytes] = {}
        #: Names of clients met -> their numbers.
        self.client_ids: dict[tuple[str, bool], int] = {}
        if former is not None:
            self._before = former._before
            self._before.update(former._tasks)
            if len(self._before) > CACHE_TASKS_MAX:
                self._before.clear()
            self._graphs = former._graphs
            self._clients = former._clients
            self._growths = former._growths
            self._dropped = former._dropped
            self._groups = former._groups
            self._blobs = former._blobs
            self.client_ids = former.client_ids
        self._forgotten: dict[tuple[int, int], int] = {}
        self._todo: dict[tuple[int, int, int], int] = {}
        self._todo_heap: list[tuple[int, int, int]] = []
        self._stored_todo: set[tuple[int, int, int]] = set()
        #: Nothing was waiting when this began, so nothing new needs to be looked up.
        self._todo_was_empty = txn.count(Table.TODO) == 0
        #: Dependents that came in this call: dependency -> their ids.
        self.new_dependents: dict[int, list[int]] = {}
        #: Holds of earlier epochs may exist.
        self.recovering = txn.get(Table.META, meta_key(Meta.RECOVERING)) is not None
        #: Set while leasing: told of each task that becomes QUEUED.
        self.newly_queued: list[tuple[bytes, int]] | None = None
        #: Told of what becomes of tasks, if a history is kept.
        self.moves: Moves | None = None
        #: Where the keys of runs are that have yet to be carried out.
        self.spooled = spooled
        self.spooled.attend(txn)

    # ------------------------------------------------------------------------------------------------------------ tasks

    def task(self, task_id: int) -> TaskRecord | None:
        tasks = self._tasks
        if task_id in tasks:
            return tasks[task_id]
        if task_id in self._before:
            task = tasks[task_id] = self._before[task_id]
            return task
        data = self.txn.get(Table.TASKS, U64.pack(task_id))
        task = tasks[task_id] = decode_task(task_id, data) if data is not None else None
        return task

    def known_task(self, task_id: int) -> TaskRecord:
        """A task that must be there. Raises InvariantBroken."""
        task = self._tasks.get(task_id) or self.task(task_id)
        if task is None:
            raise InvariantBroken(f"task {task_id} is gone")
        return task

    def add_task(self, task: TaskRecord) -> None:
        self._tasks[task.id] = task

    def remove_task(self, task: TaskRecord) -> None:
        """Take it out of the tables that `flush` keeps."""
        if self.moves is not None:
            self.moves.states.append((task.id, 0, task.graph, task.group))
        key = U64.pack(task.id)
        self.txn.delete(Table.TASKS, key)
        if task.stored_queue:
            self.txn.delete(_queue_table(task.stored_queue), task.rank + key)
        if task.stored_held:
            self.txn.delete(Table.HOLDS, key)
        self._tasks[task.id] = None

    def deps(self, task: TaskRecord) -> tuple[int, ...]:
        deps = task.deps
        if deps is None:
            data = self.txn.get(Table.EDGES, U64.pack(task.id))
            deps = task.deps = _NO_IDS if data is None else decode_ids(data)
        return deps

    def segments(self, task_id: int, start: int = 0) -> Iterator[tuple[int, tuple[int, ...]]]:
        """Dependents in ascending order, as (first id, ids) of each record from `start` on. Some may be forgotten, or cut
        (`transitions.cut`), and some be named twice."""
        if self.new_dependents:
            self.flush_dependents()
        # Most tasks have one record: one look-up, and a scan only for those that have more.
        pair = self.txn.first(Table.REDGES, U64_PAIR.pack(task_id, start))
        if pair is None or int.from_bytes(pair[0][:8]) != task_id:
            return
        first = int.from_bytes(pair[0][8:])
        yield first, decode_ids(pair[1])
        for key, data in self.txn.scan(Table.REDGES, U64_PAIR.pack(task_id, first + 1), U64_PAIR.pack(task_id + 1, 0)):
            yield int.from_bytes(key[8:]), decode_ids(data)

    def flush_dependents(self) -> None:
        """Write the dependents gathered, one record a dependency."""
        if self.new_dependents:
            put = self.txn.put
            for task_id, dependents in self.new_dependents.items():
                dependents.sort()  # outputs of a rule have lower ids than what was made before them
                put(Table.REDGES, U64_PAIR.pack(task_id, dependents[0]), encode_ids(dependents))
            self.new_dependents.clear()

    def name_dependent(self, task_id: int, dependent_id: int) -> None:
        """A dependent is linked again. It may then be named twice: what must not be done to it twice has to look for that."""
        key = U64_PAIR.pack(task_id, dependent_id)
        if self.txn.get(Table.REDGES, key) is None:
            self.txn.put(Table.REDGES, key, U64.pack(dependent_id))

    def drop_dependents(self, task_id: int) -> None:
        """Nobody depends on it any more: remove what names them."""
        self.flush_dependents()
        for key, _ in list(self.txn.scan(Table.REDGES, U64_PAIR.pack(task_id, 0), U64_PAIR.pack(task_id + 1, 0))):
            self.txn.delete(Table.REDGES, key)

    def key(self, task_id: int) -> bytes:
        return self.txn.get(Table.NAMES, U64.pack(task_id)) or b""

    def find(self, key: bytes) -> TaskRecord | None:
        task_id = find_key(self.txn, key)
        return self.task(task_id) if task_id else None

    def is_orphan(self, task: TaskRecord) -> bool:
        """Held by a scheduler that is gone, and not by this one."""
        if not self.recovering or task.reclaim or not task.stored_held or not _PROCESSING <= task.state <= _MEMORY:
            return False
        return self.txn.get(Table.HOLDS, U64.pack(task.id)) != U64.pack(self.epoch)

    def end_recovery(self) -> None:
        """Nothing is held by earlier epochs any more."""
        # IMPORTANT: the table is right before anybody relies on it; what is held again later in this call is not written anew.
        self.flush_records()
        self.txn.delete(Table.META, meta_key(Meta.RECOVERING))
        self.recovering = False

    # ---------------------------------------------------------------------------------------------------- graphs, clients

    def graph(self, graph_id: int) -> GraphRecord | None:
        if graph_id not in self._graphs:
            data = self.txn.get(Table.GRAPHS, U64.pack(graph_id))
            self._graphs[graph_id] = decode_graph(graph_id, data) if data is not None else None
        return self._graphs[graph_id]

    def known_graph(self, graph_id: int) -> GraphRecord:
        graph = self._graphs.get(graph_id) or self.graph(graph_id)
        if graph is None:
            raise InvariantBroken(f"graph {graph_id} is gone")
        return graph

    def add_graph(self, graph: GraphRecord) -> None:
        # At once, because names are looked up in the table.
        self.txn.put(Table.GRAPHS, U64.pack(graph.id), encode_graph(graph))
        self._graphs[graph.id] = graph

    def remove_graph(self, graph: GraphRecord) -> None:
        self.txn.delete(Table.GRAPHS, U64.pack(graph.id))
        self._graphs[graph.id] = None

    def rule(self, graph: GraphRecord) -> StoredRule:
        """Of a submission that has one. Raises InvariantBroken."""
        # Until it is on disk a number may be given again; a submission's name is its own.
        stored = self._rules.get((graph.id, graph.submission))
        if stored is None:
            data = self.txn.get(Table.RULES, U64.pack(graph.id))
            if data is None:
                raise InvariantBroken(f"graph {graph.id} has no rule")
            stored = decode_rule(data)
            self._keep_rule(graph, stored)
        return stored

    def add_rule(self, graph: GraphRecord, stored: StoredRule) -> None:
        self.txn.put(Table.RULES, U64.pack(graph.id), encode_rule(stored))
        self._keep_rule(graph, stored)

    def _keep_rule(self, graph: GraphRecord, stored: StoredRule) -> None:
        if len(self._rules) >= RULES_CACHE_MAX:
            self._rules.clear()
        self._rules[graph.id, graph.submission] = stored

    def growth(self, graph_id: int) -> Growth | None:
        """How far the rule of a graph has been carried out; None if it has none, or that is done."""
        if graph_id not in self._growths:
            data = self.txn.get(Table.GROWTH, U64.pack(graph_id))
            self._growths[graph_id] = decode_growth(data) if data is not None else None
        return self._growths[graph_id]

    def add_growth(self, graph_id: int, growth: Growth) -> None:
        # At once, because growing graphs are looked up in the table.
        self.txn.put(Table.GROWTH, U64.pack(graph_id), encode_growth(growth))
        self._growths[graph_id] = growth

    def remove_growth(self, graph_id: int) -> None:
        self.txn.delete(Table.GROWTH, U64.pack(graph_id))
        self._growths[graph_id] = None

    def count_dropped(self, graph: GraphRecord, layer: int, change: int) -> None:
        """A task of its rule was dropped (1) or made again (-1). Less than none are dropped if one is made that was told as forgotten."""
        counts = self._dropped.get(graph.id)
        if counts is None:
            data = self.txn.get(Table.DROPPED, U64.pack(graph.id))
            counts = self._dropped[graph.id] = [0] * len(self.rule(graph).counts) if data is None else decode_dropped(data)
        counts[layer] += change
        self._dropped_changed.add(graph.id)

    def forget_dropped(self, graph: GraphRecord) -> None:
        """Nothing of a graph is left but what was dropped: that is forgotten."""
        data = self.txn.get(Table.DROPPED, U64.pack(graph.id))
        counts = self._dropped.pop(graph.id, None) or (decode_dropped(data) if data is not None else [])
        self._dropped_changed.discard(graph.id)
        if data is not None:
            self.txn.delete(Table.DROPPED, U64.pack(graph.id))
        for layer, count in enumerate(counts):
            if count > 0:
                self.count_forgotten(graph.id, self.rule(graph).first_group + layer, count)

    def spec(self, task: TaskRecord) -> bytes:
        if task.flags & RULED:
            return self.rule(self.known_graph(task.graph)).rule.spec(*rule_place(self.txn, task.id))
        return self.txn.get(Table.SPECS, U64.pack(task.id)) or b""

    def client(self, client_id: int) -> ClientRecord | None:
        if client_id not in self._clients:
            data = self.txn.get(Table.CLIENTS, U64.pack(client_id))
            self._clients[client_id] = decode_client(client_id, data) if data is not None else None
        return self._clients[client_id]

    def add_client(self, client: ClientRecord) -> None:
        self.txn.put(Table.CLIENTS, U64.pack(client.id), encode_client(client))
        self._clients[client.id] = client

    def remove_client(self, client: ClientRecord) -> None:
        self.txn.delete(Table.CLIENTS, U64.pack(client.id))
        self._clients[client.id] = None

    def _group(self, graph_id: int, index: int) -> list[int | str | bool]:
        group = self._groups.get((graph_id, index))
        if group is None:
            data = self.txn.get(Table.GROUPS, GRAPH_PART.pack(graph_id, index))
            live, name = decode_group(data) if data is not None else (0, "")
            group = self._groups[graph_id, index] = [live, name, False]
        return group

    def add_group(self, graph_id: int, index: int, name: str) -> None:
        self._groups[graph_id, index] = [0, name, True]

    def group_name(self, graph_id: int, index: int) -> str:
        return "" if index == NO_GROUP else str(self._group(graph_id, index)[1])

    def count_group(self, graph_id: int, index: int, change: int) -> None:
        """A task came (1), or is gone (-1)."""
        if index != NO_GROUP:
            group = self._group(graph_id, index)
            group[0] = int(group[0]) + change
            group[2] = True

    def count_forgotten(self, graph_id: int, index: int, count: int) -> None:
        """To be told the scheduler: tasks that are forgotten, or that are of a rule and will not be made."""
        self._forgotten[graph_id, index] = self._forgotten.get((graph_id, index), 0) + count

    def drop_groups(self, graph_id: int) -> None:
        """Its group records were deleted."""
        for part in [part for part in self._groups if part[0] == graph_id]:
            del self._groups[part]

    def blob(self, graph_id: int, number: int) -> bytes:
        if not number:
            return b""
        blob = self._blobs.get((graph_id, number))
        if blob is None:
            blob = self._blobs[graph_id, number] = self.txn.get(Table.BLOBS, GRAPH_PART.pack(graph_id, number)) or b""
        return blob

    def next(self, meta: Meta, count: int = 1) -> int:
        """The first of `count` new numbers, never used before. Begins at 1."""
        data = self.txn.get(Table.META, meta_key(meta))
        first = 1 if data is None else int(U64.unpack(data)[0])
        self.txn.put(Table.META, meta_key(meta), U64.pack(first + count))
        return first

    # ----------------------------------------------------------------------------------------------------------- todo

    def push(self, kind: Todo, a: int, b: int = 0, cursor: int = 0) -> None:
        """Put work off. If the same is waiting already, it begins at the earlier of the two cursors."""
        item = (kind, a, b)
        old = self._todo.get(item)
        if old is None:
            if not self._todo_was_empty and item not in self._stored_todo:
                data = self.txn.get(Table.TODO, TODO_KEY.pack(*item))
                if data is not None:
                    self._stored_todo.add(item)
                    cursor = min(cursor, int(U64.unpack(data)[0]))
            heappush(self._todo_heap, item)
            self._todo[item] = cursor
        elif cursor < old:
            self._todo[item] = cursor

    @property
    def has_todo(self) -> bool:
        return bool(self._todo_heap) or not self._todo_was_empty

    def load_todo(self, items_max: int) -> None:
        """Take the first items of the table into memory."""
        if self._todo_was_empty:
            return
        for key, data in self.txn.scan(Table.TODO):
            if items_max <= 0:
                break
            items_max -= 1
            item = TODO_KEY.unpack(key)
            cursor = int(U64.unpack(data)[0])
            self._stored_todo.add(item)
            if item in self._todo:
                self._todo[item] = min(self._todo[item], cursor)
            else:
                self._todo[item] = cursor
                self._todo_heap.append(item)
        heapify(self._todo_heap)

    def pop_todo(self) -> tuple[Todo, int, int, int] | None:
        """Take out the first item."""
        if not self._todo_heap:
            return None
        item = heappop(self._todo_heap)
        cursor = self._todo.pop(item)
        if item in self._stored_todo:
            self._stored_todo.discard(item)
            self.txn.delete(Table.TODO, TODO_KEY.pack(*item))
        return Todo(item[0]), item[1], item[2], cursor

    # ---------------------------------------------------------------------------------------------------------- flushing

    def trim(self) -> None:
        """Keep memory bounded: write back and drop what was decoded, if it is much. No record may be held by the caller."""
        if len(self._tasks) > CACHE_TASKS_MAX:
            self.flush_records()
            self._tasks.clear()
            self._before.clear()

    def flush_records(self) -> None:
        self.flush_dependents()
        put = self.txn.put
        pack = U64.pack
        tasks_table, holds_table = Table.TASKS, Table.HOLDS
        for task in self._tasks.values():
            if task is None or not task.dirty:
                continue
            task.dirty = False
            key = pack(task.id)
            put(tasks_table, key, encode_task(task))
            state = task.state
            if state != task.stored_state:
                task.stored_state = state
                if self.moves is not None:
                    self.moves.states.append((task.id, state, task.graph, task.group))
            queue = 0 if state != _QUEUED or task.flags & PARKED else (2 if task.waiting_on else 1)
            if queue != task.stored_queue:
                if task.stored_queue:
                    self.txn.delete(_queue_table(task.stored_queue), task.rank + key)
                if queue:
                    put(_queue_table(queue), task.rank + key, b"")
                task.stored_queue = queue
            held = _PROCESSING <= state <= _MEMORY
            reclaim, task.reclaim = task.reclaim, False
            if held != task.stored_held or (held and reclaim):
                task.stored_held = held
                if held:
                    put(holds_table, key, pack(self.epoch))
                else:
                    self.txn.delete(holds_table, key)

    def flush(self) -> Result:
        """Write everything back and hand over the result. The Work is then used up, but for the records a next one takes over."""
        self.flush_records()
        for graph in self._graphs.values():
            if graph is not None and graph.dirty:
                graph.dirty = False
                self.txn.put(Table.GRAPHS, U64.pack(graph.id), encode_graph(graph))
        for graph_id, growth in self._growths.items():
            if growth is not None and growth.dirty:
                growth.dirty = False
                self.txn.put(Table.GROWTH, U64.pack(graph_id), encode_growth(growth))
        for graph_id in self._dropped_changed:
            self.txn.put(Table.DROPPED, U64.pack(graph_id), encode_dropped(self._dropped[graph_id]))
        self._dropped_changed.clear()
        for client in self._clients.values():
            if client is not None and client.dirty:
                client.dirty = False
                self.txn.put(Table.CLIENTS, U64.pack(client.id), encode_client(client))
        for part, group in self._groups.items():
            if group[2]:
                group[2] = False
                self.txn.put(Table.GROUPS, GRAPH_PART.pack(*part), encode_group(int(group[0]), str(group[1])))
        for item, cursor in self._todo.items():
            self.txn.put(Table.TODO, TODO_KEY.pack(*item), U64.pack(cursor))
        return self.result

    def report_forgotten(self) -> None:
        """Turn the tasks forgotten so far into GroupCounts. Call it while their graphs are still there."""
        for (graph_id, index), count in self._forgotten.items():
            submission = self.known_graph(graph_id).submission
            self.result.forgotten.append(GroupCount(submission, self.group_name(graph_id, index), count))
        self._forgotten.clear()


def _queue_table(queue: int) -> Table:
    table = _QUEUES[queue]
    assert table is not None
    return table
