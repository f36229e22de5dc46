"""What the engine should do, written a second time from the rules (docs/engine.md), as plainly as possible: no counters, no queues, no
bytes, everything recounted whenever it is asked. Used to judge the engine; shares no code with it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import NamedTuple

from taskdb.model import GraphFlag, Level, TaskFlag

#: A state of the model: ACTIVE is WAITING or QUEUED, which follows from the dependencies.
ACTIVE, LEASED, MEMORY, RELEASED, ERRED = "active", "leased", "memory", "released", "erred"


@dataclass
class Task:
    key: bytes
    id: int
    #: Number of its submission.
    graph: int
    deps: list[bytes]
    rank: tuple[float, float, float]
    data: bool
    expected: int
    state: str = RELEASED
    #: Epoch of the scheduler that has it, if it is LEASED or MEMORY; what it was when it last was, if not.
    holder: int = 0
    #: It was ERRED, and was neither leased nor named for release since: the scheduler may hold it as failed.
    revived: bool = False
    #: Who wants it -> number of the submission that brought the want (0 if none or several). "!…" is a submission that is open and met it,
    #: "~…" a client (or a submission) whose wants are about to end.
    wants: dict[str, int] = field(default_factory=dict)


@dataclass
class Graph:
    number: int
    client: str
    generation: float
    sealed: bool = False
    #: Keys by index.
    keys: list[bytes] = field(default_factory=list)

    @property
    def protector(self) -> str:
        return f"!{self.number}"


class Arrived(NamedTuple):
    """Answer to a run of tasks."""

    ids: list[int]
    missing: list[bytes]
    #: Positions of the tasks that were there already.
    known: list[int]


@dataclass
class Said:
    """What one batch should answer."""

    release: list[int] = field(default_factory=list)
    erred: list[tuple[str, bytes]] = field(default_factory=list)
    cancelled: list[bytes] = field(default_factory=list)
    forgotten: int = 0


class Model:
    def __init__(self) -> None:
        self.tasks: dict[bytes, Task] = {}
        self.graphs: dict[str, Graph] = {}
        self.last_id = 0
        self.numbers = 0
        self.said = Said()
        #: Numbers of submissions that were sealed, and that were aborted: what they brought is about to be taken back.
        self._sealed: set[int] = set()
        self._aborted: set[int] = set()
        #: Numbers of submissions that were sent a second time, and of those that are one unit.
        self._resent: set[int] = set()
        self._whole: set[int] = set()
        self.epoch = 0
        #: Epoch -> the first id that was free when it began.
        self.first_ids: dict[int, int] = {}
        #: Earlier schedulers may have something.
        self.recovering = False
        #: While what they have is given back: the id to go on with.
        self.giving_back: int | None = None
        #: Tasks to look at, of those that are held, when there is nothing else to do.
        self.give_back_max = 0
        self.kept: dict[bytes, bytes] = {}
        self._revive: set[bytes] = set()
        self._retry: set[bytes] = set()
        #: (client, "*force" or "*lost"; key)
        self._cancel: set[tuple[str, bytes]] = set()

    # ------------------------------------------------------------------------------------------------------- recounts

    def dependents(self, key: bytes) -> list[Task]:
        return [task for task in self.tasks.values() if key in task.deps]

    def is_active(self, task: Task) -> bool:
        return task.state in (ACTIVE, LEASED)

    def needed(self, task: Task) -> bool:
        return bool(task.wants or task.expected or any(self.is_active(other) for other in self.dependents(task.key)))

    def linked(self, task: Task) -> bool:
        return bool(task.wants or task.expected or self.dependents(task.key))

    def waiting_on(self, task: Task) -> int:
        return sum(self.tasks[dep].state != MEMORY for dep in task.deps)

    def blocked_on(self, task: Task) -> int:
        return sum(self.tasks[dep].state not in (MEMORY, LEASED) for dep in task.deps)

    def state_name(self, task: Task) -> str:
        if task.state == ACTIVE:
            return "WAITING" if self.blocked_on(task) else "QUEUED"
        return {LEASED: "PROCESSING", MEMORY: "MEMORY", RELEASED: "RELEASED", ERRED: "ERRED"}[task.state]

    def by_id(self, task_id: int) -> Task | None:
        return next((task for task in self.tasks.values() if task.id == task_id), None)

    # ---------------------------------------------------------------------------------------------------------- epochs

    def begin_epoch(self) -> None:
        self.epoch += 1
        self.first_ids[self.epoch] = self.last_id + 1
        self.recovering = bool(self.held())
        self.giving_back = None
        for name in [name for name, graph in self.graphs.items() if not graph.sealed]:
            self.abort(name)

    def held(self) -> list[Task]:
        """All that some scheduler has, by id."""
        return sorted((task for task in self.tasks.values() if task.state in (LEASED, MEMORY)), key=lambda task: task.id)

    def is_orphan(self, task: Task) -> bool:
        return task.state in (LEASED, MEMORY) and task.holder != self.epoch

    def adopt(self, epoch: int, rows: list[tuple[bytes, Level]]) -> list[tuple[bytes, Level, int]]:
        """Rows: key, level. Answers: key, level, id (0: let go of it)."""
        answers = []
        for level in (Level.MEMORY, Level.HELD):
            for key in [key for key, other in rows if other == level]:
                task = self.tasks.get(key)
                adopted = task is not None and self._adopt(task, level, epoch)
                answers.append((key, Level.OUT if task is None else level, task.id if task is not None and adopted else 0))
        return answers

    def need(self, key: bytes) -> int:
        """Dependents that need its result, or may come and need it."""
        return self.tasks[key].expected + sum(self.is_active(other) for other in self.dependents(key))

    def _adopt(self, task: Task, level: Level, epoch: int) -> bool:
        # The epoch of the worker is over, and the task was there before it was.
        is_the_same = epoch < self.epoch and task.id < self.first_ids.get(epoch + 1, 0)
        if not is_the_same and task.graph not in self._resent:
            return False
        if not self.needed(task):
            return False
        if task.graph in self._whole and any(self.is_active(other) for other in self.own(task.graph)):
            return False
        runs_here = task.state == LEASED and not self.is_orphan(task)
        can_run = task.state == LEASED or (task.state == ACTIVE and not self.blocked_on(task))
        if level == Level.MEMORY and task.state != ERRED and not runs_here:
            self._take(task, MEMORY)
            return True
        if level == Level.HELD and can_run:
            self._take(task, LEASED)
            return True
        return False

    def own(self, graph: int) -> list[Task]:
        return sorted((task for task in self.tasks.values() if task.graph == graph), key=lambda task: task.id)

    def take_whole(self, name: str) -> list[int]:
        """The tasks it leases."""
        graph = self.graphs.get(name)
        if graph is None:
            return []
        for task in self.own(graph.number):
            if task.state in (LEASED, MEMORY):
                task.state = RELEASED
        self._settle_all()
        for task in self.own(graph.number):
            if task.state == ACTIVE:
                self._take(task, LEASED)
        return [task.id for task in self.own(graph.number) if task.state == LEASED]

    def end_recovery(self) -> None:
        if self.recovering:
            self.giving_back = 0

    def _give_back(self) -> None:
        """Look at the next tasks that are held."""
        assert self.giving_back is not None
        rest = [task for task in self.held() if task.id >= self.giving_back]
        for task in rest[: self.give_back_max]:
            if self.is_orphan(task):
                task.state = RELEASED
        if len(rest) > self.give_back_max:
            self.giving_back = rest[self.give_back_max].id
        else:
            self.giving_back = None
            self.recovering = False
        self.give_back_max = 0

    def keep(self, items: list[tuple[bytes, bytes]]) -> None:
        self.kept.update(items)
        self.kept = {name: value for name, value in self.kept.items() if value}

    # -------------------------------------------------------------------------------------------------------- commands

    def begin(self, name: str, client: str, generation: float, marks: int) -> None:
        if name not in self.graphs:
            self.numbers += 1
            self.graphs[name] = Graph(self.numbers, client, generation)
            if marks & GraphFlag.RESENT:
                self._resent.add(self.numbers)
            if marks & GraphFlag.WHOLE:
                self._whole.add(self.numbers)

    def start(self, ids_skipped: int) -> None:
        """The daemon starts, perhaps after a crash."""
        self.last_id += ids_skipped

    def add(self, name: str, rows: list[tuple[bytes, int, list[int], int, float]], told: list[int] | None = None) -> Arrived:
        """Rows: key, flags, dependencies (indices), dependents declared, order. `told`: the ids they had before a crash. If an input is
        missing, nothing is added, and the submission is no more."""
        # What was let go of before is gone: its key is then a new task, or missing.
        if any(key in self.tasks for key, *_ in rows):
            self._settle_all()
        missing = [key for key, flags, *_ in rows if flags & TaskFlag.EXTERNAL and key not in self.tasks]
        if missing:
            self.abort(name)
            return Arrived([0] * len(rows), missing, list(range(len(rows))))
        graph = self.graphs[name]
        # All at once: what is there already is as it was before.
        fresh = iter(list(islice(self._fresh_ids(graph, rows, told or []), len({row[0] for row in rows} - self.tasks.keys()))))
        ids: list[int] = []
        known: list[int] = []
        for position, (key, flags, deps, declared, order) in enumerate(rows):
            dep_keys = list(dict.fromkeys(graph.keys[dep] for dep in deps))
            for dep_key in dep_keys:
                dep = self.tasks[dep_key]
                if dep.graph == graph.number and dep.expected:
                    dep.expected -= 1
            graph.keys.append(key)
            task = self.tasks.get(key)
            if task is not None:
                known.append(position)
                ids.append(task.id)
                if task.graph != graph.number:
                    task.wants.setdefault(graph.protector, 0)
                else:
                    task.expected += declared
                if flags & TaskFlag.HELD and (task.state != MEMORY or self.is_orphan(task)):
                    self.hold(task)
                if flags & TaskFlag.WANTED:
                    self._want(task, graph.client, graph.number)
                    if task.state == ERRED:
                        self.said.erred.append((graph.client, key))
                continue
            ids.append(next(fresh))
            task = Task(key, ids[-1], graph.number, dep_keys, (0.0, graph.generation, order), bool(flags & TaskFlag.DATA), declared)
            self.tasks[key] = task
            if flags & TaskFlag.WANTED:
                self._want(task, graph.client, graph.number)
            if flags & TaskFlag.HELD:
                self._take(task, LEASED)
            elif self.needed(task):
                self._activate(task)
        return Arrived(ids, [], known)

    def _fresh_ids(self, graph: Graph, rows: list[tuple[bytes, int, list[int], int, float]], told: list[int]) -> Iterator[int]:
        """Those they had, if these still grow from a task to what depends on it."""
        again: dict[bytes, int] = {}
        for row, task_id in zip(rows, told):
            if row[0] not in self.tasks:
                again.setdefault(row[0], task_id)
        new = list(again.values())
        keys = [*graph.keys, *(row[0] for row in rows)]
        older = [self.tasks[keys[dep]].id for row in rows for dep in row[2] if keys[dep] in self.tasks]
        older += [self.tasks[row[0]].id for row in rows if row[0] in self.tasks]
        free = not any(task.id in new for task in self.tasks.values())
        if new and free and new[0] > max(older, default=0) and new == list(range(new[0], new[0] + len(new))):
            yield from new
        while True:
            self.last_id += 1
            yield self.last_id

    def _want(self, task: Task, client: str, number: int) -> None:
        if client in task.wants:
            if task.wants[client] != number:
                task.wants[client] = 0
        else:
            task.wants[client] = number

    def seal(self, name: str) -> None:
        graph = self.graphs.get(name)
        if graph is not None and not graph.sealed:
            graph.sealed = True
            self._sealed.add(graph.number)
            self.drop(graph.protector)

    def abort(self, name: str) -> None:
        graph = self.graphs.pop(name, None)
        if graph is not None:
            self._aborted.add(graph.number)
            self.drop(graph.protector)

    def want(self, client: str, key: bytes) -> None:
        if key in self.tasks:
            self._want(self.tasks[key], client, 0)

    def unwant(self, client: str, key: bytes) -> None:
        if key in self.tasks:
            self.tasks[key].wants.pop(client, None)

    def drop(self, client: str) -> None:
        """Its wants are about to end, and from now on its name is another's."""
        self.numbers += 1
        dropped = f"~{client} {self.numbers}"
        for task in self.tasks.values():
            if client in task.wants:
                task.wants[dropped] = task.wants.pop(client)
        self._cancel = {(dropped if who == client else who, key) for who, key in self._cancel}

    def cancel(self, client: str, key: bytes, force: bool) -> None:
        if key in self.tasks and (force or any(client in task.wants for task in self.tasks.values())):
            self._cancel.add(("*force" if force else client, key))

    def retry(self, key: bytes) -> None:
        if key in self.tasks:
            self._retry.add(key)

    def report(self, task_id: int, level: Level) -> None:
        task = self.by_id(task_id)
        if task is None:
            if level != Level.OUT:
                self.said.release.append(task_id)
            return
        if level == Level.HELD:
            self.hold(task)
        elif level == Level.MEMORY:
            if task.state == ERRED:
                self._revive.add(task.key)
            self._take(task, MEMORY)
        elif level == Level.ERRED:
            task.state = ERRED
        elif level == Level.OUT:
            if task.state in (LEASED, MEMORY):
                task.state = RELEASED
        else:
            self._put_back(task)

    def fail(self, task_id: int) -> None:
        task = self.by_id(task_id)
        if task is None:
            self.said.release.append(task_id)
        else:
            task.state = ERRED

    def hold(self, task: Task) -> None:
        if task.state == ERRED:
            self._revive.add(task.key)
        self._take(task, LEASED)

    def _take(self, task: Task, state: str) -> None:
        """The scheduler has it."""
        task.state = state
        task.holder = self.epoch
        if state == LEASED:
            task.revived = False

    def _put_back(self, task: Task) -> None:
        if task.state == ERRED:
            self._revive.add(task.key)
            task.revived = True
        task.state = RELEASED

    def lease(self, ready: int, total: int) -> list[int]:
        taken: list[int] = []
        while len(taken) < total:
            queued = [
                task
                for task in self.tasks.values()
                if task.state == ACTIVE
                and task.graph not in self._aborted
                and not self.blocked_on(task)
                and not any(self.is_orphan(self.tasks[dep]) for dep in task.deps)
            ]
            if len(taken) < ready:
                queued_ready = [task for task in queued if not self.waiting_on(task)]
                if not queued_ready:
                    ready = 0
                    continue
                queued = queued_ready
            if not queued:
                break
            task = min(queued, key=lambda other: (other.rank, other.id))
            self._take(task, LEASED)
            taken.append(task.id)
        return taken

    def resync(self, held: list[int]) -> tuple[list[int], list[int]]:
        """(release, leases said again)"""
        release = []
        for task_id in held:
            task = self.by_id(task_id)
            if task is None:
                release.append(task_id)
            elif task.state == ERRED:
                continue
            elif task.state == LEASED or (task.state == MEMORY and self.needed(task)):
                self._take(task, task.state)
            elif not self.needed(task):
                release.append(task_id)
            else:
                self.hold(task)
        mine = [task for task in self.held() if task.state == LEASED and not self.is_orphan(task)]
        return release, [task.id for task in mine if task.id not in held]

    # ---------------------------------------------------------------------------------------------------------- settling

    def settle(self) -> Said:
        """Apply the rules until none applies; what brings back comes before what lets go. Returns what was said since the last time."""
        self._settle_all()
        said, self.said = self.said, Said()
        return said

    def _settle_all(self) -> None:
        while True:
            while self._settle_one():
                pass
            if self.giving_back is None or not self.give_back_max:
                break
            self._give_back()
        # A submission without tasks has ended.
        self.graphs = {
            name: graph
            for name, graph in self.graphs.items()
            if not graph.sealed or any(task.graph == graph.number for task in self.tasks.values())
        }

    def _age(self, key: bytes) -> int:
        return self.tasks[key].id

    def _settle_one(self) -> bool:
        tasks = sorted(self.tasks.values(), key=lambda task: task.id)
        for task in tasks:
            if task.state == RELEASED and self.needed(task):
                self._activate(task)
                return True
        self._cancel = {(who, key) for who, key in self._cancel if key in self.tasks}
        if self._cancel:
            # Forced ones first, and those of lost data last.
            item = min(self._cancel, key=lambda item: (item[0] == "*lost", item[0], self._age(item[1])))
            self._cancel.discard(item)
            self._cancel_one(*item)
            return True
        for task in tasks:
            if task.state == ACTIVE and any(self.tasks[dep].state == ERRED for dep in task.deps):
                self._fail(task)
                return True
        # Older ones first: what they depend on is then as it will be.
        for key in sorted(self._revive, key=self._age):
            self._revive.discard(key)
            for other in self.dependents(key):
                self._revive_one(other)
            return True
        for key in sorted(self._retry, key=self._age):
            self._retry.discard(key)
            task = self.tasks[key]
            if task.state == ERRED:
                above = [dep for dep in task.deps if self.tasks[dep].state == ERRED]
                self._retry.update(above)
                if not above:
                    self._revive_one(task)
            return True
        if self._end_wants():
            return True
        for task in tasks:
            if not self.linked(task):
                if task.state in (LEASED, MEMORY, ERRED) or task.revived:
                    self.said.release.append(task.id)
                del self.tasks[task.key]
                self._revive.discard(task.key)
                self.said.forgotten += 1
                return True
            if not self.needed(task) and task.state in (ACTIVE, LEASED, MEMORY):
                if task.state in (LEASED, MEMORY) or task.revived:
                    self.said.release.append(task.id)
                task.state = RELEASED
                task.revived = False
                return True
        return False

    def _end_wants(self) -> bool:
        """Those of dropped clients, and what submissions brought that were sealed or aborted. False if there was nothing to do."""
        changed = bool(self._sealed or self._aborted)
        for task in self.tasks.values():
            left = {who: brought for who, brought in task.wants.items() if who[0] != "~" and brought not in self._aborted}
            changed = changed or left != task.wants
            task.wants = left
            if task.graph in self._sealed | self._aborted:
                task.expected = 0
        self._sealed.clear()
        self._aborted.clear()
        return changed

    def _activate(self, task: Task) -> None:
        if task.data:
            task.state = ERRED
            self._cancel.add(("*lost", task.key))
        elif any(self.tasks[dep].state == ERRED for dep in task.deps):
            self._fail(task)
        else:
            task.state = ACTIVE

    def _fail(self, task: Task) -> None:
        task.state = ERRED
        self.said.erred += [(client, task.key) for client in task.wants if client[0] not in "!~"]

    def _revive_one(self, task: Task) -> None:
        if task.state == ERRED and not task.data:
            self._put_back(task)

    def _cancel_one(self, who: str, key: bytes) -> None:
        task = self.tasks[key]
        if who == "*lost" and task.state == MEMORY:
            return
        if who.startswith("*"):
            ended = [client for client in task.wants if not client.startswith(("!", "~!"))]
        else:
            if any(client != who and client[0] not in "!~" for client in task.wants):
                return
            ended = [client for client in task.wants if client == who]
        for client in ended:
            del task.wants[client]
        if any(client[0] != "~" for client in ended):
            self.said.cancelled.append(key)
        for other in self.dependents(key):
            self._cancel.add((who, other.key))
