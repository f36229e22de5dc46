"""What the engine should do, written a second time from the rules (docs/engine.md), as plainly as possible: no counters, no queues, no
bytes, everything recounted whenever it is asked. Used to judge the engine; shares no code with it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from taskdb.model import Level, TaskFlag

#: A state of the model: ACTIVE is WAITING or QUEUED, which follows from the dependencies.
ACTIVE, LEASED, MEMORY, RELEASED, ERRED = "active", "leased", "memory", "released", "erred"


@dataclass
class Task:
    key: bytes
    id: int
    graph: str
    deps: list[bytes]
    rank: tuple[float, float, float]
    data: bool
    expected: int
    state: str = RELEASED
    #: client -> the submission that brought the want ("" if none or several)
    wants: dict[str, str] = field(default_factory=dict)


@dataclass
class Graph:
    name: str
    client: str
    generation: float
    sealed: bool = False
    #: Keys by index (None: missing).
    keys: list[bytes | None] = field(default_factory=list)


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
        self.said = Said()
        self._revive: set[bytes] = set()
        self._retry: set[bytes] = set()
        #: (client, None: force, or "lost" in a tuple; key)
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

    # -------------------------------------------------------------------------------------------------------- commands

    def begin(self, name: str, client: str, generation: float) -> None:
        if name not in self.graphs:
            self.graphs[name] = Graph(name, client, generation)

    def add(self, name: str, rows: list[tuple[bytes, int, list[int], int, float]]) -> bool:
        """Rows: key, flags, dependencies (indices), dependents declared, order. False: an input is missing, and the graph is no more."""
        if any(flags & TaskFlag.EXTERNAL and key not in self.tasks for key, flags, *_ in rows):
            self.abort(name)
            return False
        graph = self.graphs[name]
        for key, flags, deps, declared, order in rows:
            dep_keys = [dep_key for dep in dict.fromkeys(deps) if (dep_key := graph.keys[dep]) is not None]
            dep_keys = list(dict.fromkeys(dep_keys))
            for dep_key in dep_keys:
                dep = self.tasks[dep_key]
                if dep.graph == name and dep.expected:
                    dep.expected -= 1
            task = self.tasks.get(key)
            if task is not None:
                graph.keys.append(key)
                if task.graph != name:
                    task.wants.setdefault(f"!{name}", "")
                else:
                    task.expected += declared
                if flags & TaskFlag.HELD and task.state != MEMORY:
                    self.hold(task)
                if flags & TaskFlag.WANTED:
                    self._want(task, graph.client, name)
                    if task.state == ERRED:
                        self.said.erred.append((graph.client, key))
                continue
            self.last_id += 1
            task = Task(key, self.last_id, name, dep_keys, (0.0, graph.generation, order), bool(flags & TaskFlag.DATA), declared)
            self.tasks[key] = task
            graph.keys.append(key)
            if flags & TaskFlag.WANTED:
                self._want(task, graph.client, name)
            if flags & TaskFlag.HELD:
                task.state = LEASED
            elif self.needed(task):
                self._activate(task)
        return True

    def _want(self, task: Task, client: str, graph: str) -> None:
        if client in task.wants:
            if task.wants[client] != graph:
                task.wants[client] = ""
        else:
            task.wants[client] = graph

    def seal(self, name: str) -> None:
        graph = self.graphs.get(name)
        if graph is None or graph.sealed:
            return
        graph.sealed = True
        for task in self.tasks.values():
            task.wants.pop(f"!{name}", None)
            if task.graph == name:
                task.expected = 0

    def abort(self, name: str) -> None:
        graph = self.graphs.pop(name, None)
        if graph is None:
            return
        for task in self.tasks.values():
            task.wants.pop(f"!{name}", None)
            if task.wants.get(graph.client) == name:
                del task.wants[graph.client]
            if task.graph == name:
                task.expected = 0
                # The name may be used again; this submission is no more.
                task.graph = f"aborted {name}"

    def want(self, client: str, key: bytes) -> None:
        if key in self.tasks:
            self._want(self.tasks[key], client, "")

    def unwant(self, client: str, key: bytes) -> None:
        if key in self.tasks:
            self.tasks[key].wants.pop(client, None)

    def drop(self, client: str) -> None:
        for task in self.tasks.values():
            task.wants.pop(client, None)

    def cancel(self, client: str, key: bytes, force: bool) -> None:
        if key in self.tasks and (force or any(client in task.wants for task in self.tasks.values())):
            self._cancel.add(("*force" if force else client, key))

    def retry(self, key: bytes) -> None:
        if key in self.tasks and self.tasks[key].state == ERRED:
            self._retry.add(key)

    def report(self, task_id: int, level: Level) -> None:
        task = self.by_id(task_id)
        if task is None:
            return
        if level == Level.HELD:
            self.hold(task)
        elif level == Level.MEMORY:
            if task.state == ERRED:
                self._revive.add(task.key)
            task.state = MEMORY
        elif level == Level.ERRED:
            task.state = ERRED
        elif level == Level.OUT:
            if task.state in (LEASED, MEMORY):
                task.state = RELEASED
        else:
            if task.state == ERRED:
                self._revive.add(task.key)
            task.state = RELEASED

    def hold(self, task: Task) -> None:
        if task.state == ERRED:
            self._revive.add(task.key)
        task.state = LEASED

    def lease(self, ready: int, total: int) -> list[int]:
        taken: list[int] = []
        while len(taken) < total:
            queued = [task for task in self.tasks.values() if task.state == ACTIVE and not self.blocked_on(task)]
            if len(taken) < ready:
                queued_ready = [task for task in queued if not self.waiting_on(task)]
                if not queued_ready:
                    ready = 0
                    continue
                queued = queued_ready
            if not queued:
                break
            task = min(queued, key=lambda other: (other.rank, other.id))
            task.state = LEASED
            taken.append(task.id)
        return taken

    def resync(self, held: list[int]) -> tuple[list[int], list[int]]:
        """(release, leases said again)"""
        release = []
        for task_id in held:
            task = self.by_id(task_id)
            if task is None:
                release.append(task_id)
            elif task.state in (LEASED, ERRED):
                continue
            elif not self.needed(task):
                release.append(task_id)
            elif task.state != MEMORY:
                self.hold(task)
        return release, [task.id for task in self.tasks.values() if task.state == LEASED and task.id not in held]

    # ---------------------------------------------------------------------------------------------------------- settling

    def settle(self) -> Said:
        """Apply the rules until none applies; what brings back comes before what lets go. Returns what was said since the last time."""
        while self._settle_one():
            pass
        said, self.said = self.said, Said()
        return said

    def _settle_one(self) -> bool:
        tasks = sorted(self.tasks.values(), key=lambda task: task.id)
        for task in tasks:
            if task.state == RELEASED and self.needed(task):
                self._activate(task)
                return True
        self._cancel = {(who, key) for who, key in self._cancel if key in self.tasks}
        if self._cancel:
            item = min(self._cancel, key=lambda item: self.tasks[item[1]].id)
            self._cancel.discard(item)
            self._cancel_one(*item)
            return True
        for task in tasks:
            if task.state == ACTIVE and any(self.tasks[dep].state == ERRED for dep in task.deps):
                self._fail(task)
                return True
        for key in sorted(self._revive):
            self._revive.discard(key)
            for other in self.dependents(key):
                self._revive_one(other)
            return True
        for key in sorted(self._retry):
            self._retry.discard(key)
            task = self.tasks[key]
            if task.state == ERRED:
                above = [dep for dep in task.deps if self.tasks[dep].state == ERRED]
                self._retry.update(above)
                if not above:
                    self._revive_one(task)
            return True
        for task in tasks:
            if not self.linked(task):
                if task.state in (LEASED, MEMORY, ERRED):
                    self.said.release.append(task.id)
                del self.tasks[task.key]
                self._revive.discard(task.key)
                self.said.forgotten += 1
                return True
            if not self.needed(task) and task.state in (ACTIVE, LEASED, MEMORY):
                if task.state in (LEASED, MEMORY):
                    self.said.release.append(task.id)
                task.state = RELEASED
                return True
        return False

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
        self.said.erred += [(client, task.key) for client in task.wants if not client.startswith("!")]

    def _revive_one(self, task: Task) -> None:
        if task.state == ERRED and not task.data:
            task.state = RELEASED
            self._revive.add(task.key)

    def _cancel_one(self, who: str, key: bytes) -> None:
        task = self.tasks[key]
        if who == "*lost" and task.state == MEMORY:
            return
        if who.startswith("*"):
            ended = [client for client in task.wants if not client.startswith("!")]
        else:
            if set(task.wants) - {who}:
                return
            ended = list(task.wants)
        for client in ended:
            del task.wants[client]
        if ended:
            self.said.cancelled.append(key)
        for other in self.dependents(key):
            self._cancel.add((who, other.key))
