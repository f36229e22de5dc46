"""The engine against an independent model, on both stores, with crashes, reopenings and new schedulers between any two steps; and with
background work cut into the smallest steps, where only the rules are checked, and that everything comes to an end.

A failure prints the steps; `@reproduce_failure` of Hypothesis repeats it.
"""

from __future__ import annotations

import copy
import os
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from unittest import mock

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from taskdb import commands as c
from taskdb.engine import background, hunger, leasing, spool
from taskdb.engine import engine as engine_module
from taskdb.engine.engine import Engine
from taskdb.engine.invariants import Snapshot, violations
from taskdb.engine.recovery import kept
from taskdb.engine.refs import find_graph, find_key
from taskdb.engine.todo import Todo
from taskdb.engine.work import Work
from taskdb.model import ACTIVE, GraphFlag, Level, TaskFlag, TaskState
from taskdb.store.lmdb_store import LmdbStore
from taskdb.store.memory_store import MemoryStore
from taskdb.store.schema import U64, Meta, Table, meta_key
from tests.support.engine_model import Model

# IMPORTANT: longer than Hypothesis takes to shrink (300 s). Interrupted there, it would complain of "inconsistent data generation" and not
# show the failure.
pytestmark = pytest.mark.timeout(600)

KEYS = [bytes((letter,)) for letter in b"abcdefghij"]
CLIENTS = ["alice", "bob", "carol"]
GRAPHS = ["g1", "g2", "g3"]
#: More than there are.
ALL = 1000
IDS_SKIPPED = 20

keys = st.sampled_from(KEYS)
clients = st.sampled_from(CLIENTS)
graphs = st.sampled_from(GRAPHS)
ids = st.integers(1, 40)
levels = st.sampled_from(list(Level))
#: What comes before a run of tasks in the same batch: kind, client, keys, level, submission.
Before = tuple[str, str, list[bytes], Level, str]
befores = st.tuples(
    st.sampled_from(["nothing"] * 4 + ["unwant"] * 3 + ["drop", "cancel", "force", "retry", "report", "fail", "abort"]),
    clients,
    st.lists(keys, min_size=1, max_size=4),
    levels,
    graphs,
)
NOTHING: Before = ("nothing", "alice", [], Level.HELD, "g1")
held_levels = st.sampled_from([Level.MEMORY, Level.MEMORY, Level.HELD])
Row = tuple[bytes, int, list[int], int, float]


@st.composite
def new_rows(draw: st.DrawFn) -> list[tuple[bytes, int, list[int], float]]:
    """A submission: key, flags, dependencies, order."""
    rows = []
    for index in range(draw(st.integers(2, 8))):
        kind = draw(st.sampled_from(["plain"] * 6 + ["external", "data", "held"]))
        flags = int(TaskFlag.WANTED) if draw(st.booleans()) else 0
        flags |= {"plain": 0, "external": int(TaskFlag.EXTERNAL), "data": int(TaskFlag.DATA | TaskFlag.HELD), "held": int(TaskFlag.HELD)}[
            kind
        ]
        deps = []
        if index and kind in ("plain", "held"):
            deps = draw(st.lists(st.integers(0, index - 1), max_size=3))
        rows.append((draw(keys), flags, deps, float(draw(st.integers(-2, 2)))))
    return rows


@dataclass
class Batch:
    """A batch with runs of tasks, and what the model says of it."""

    commands: list[c.Command]
    added: list[c.Added] = field(default_factory=list)
    #: (submission, first index) -> its tasks, of each run.
    runs: dict[tuple[str, int], list[Row]] = field(default_factory=dict)
    refused: list[int] = field(default_factory=list)


class EngineMachine(RuleBasedStateMachine):
    """Subclasses say which store, and how much background work a step does."""

    step_items = 500
    compare = True

    def open_store(self) -> MemoryStore | LmdbStore:
        return MemoryStore(sync=False)

    def __init__(self) -> None:
        super().__init__()
        self._patches = [
            mock.patch.object(engine_module, "STEP_ITEMS", self.step_items),
            mock.patch.object(engine_module, "STEP_ITEMS_BATCH", self.step_items),
            mock.patch.object(engine_module, "STEP_ITEMS_PER_COMMAND_ITEM", 4 if self.compare else 0),
            mock.patch.object(engine_module, "STEP_ITEMS_BEFORE_ADD", self.step_items),
            mock.patch.object(engine_module, "IDS_SKIPPED_AT_START", IDS_SKIPPED),
            mock.patch.object(leasing, "LEASE_PARKED_MAX", 2),
            mock.patch.object(leasing, "LEASE_PASSED_MAX", 2),
        ]
        #: Held tasks the engine may look at when it gives back. The model has the same number of its own.
        self.give_back_max = 0
        if self.compare:
            give_back = background._give_back

            def gate(work: Work, cursor: int, items_max: int) -> int:
                if not self.give_back_max:
                    work.push(Todo.GIVE_BACK, work.epoch, 0, cursor)
                    return items_max
                items, self.give_back_max = min(self.give_back_max, items_max), 0
                return give_back(work, cursor, items)

            self._patches.append(mock.patch.object(background, "_give_back", gate))
        for patch in self._patches:
            patch.start()
        self.engine = Engine()
        self.store: MemoryStore | LmdbStore = self.open_store()
        self.model = Model()
        self.seq = 0
        self.epoch = 0
        #: Rest of each open submission, still to be sent.
        self.rest: dict[str, list[Row]] = {}
        self.sent: dict[str, int] = {}
        self.open: set[str] = set()
        #: What a crash would undo: submissions begun (name, client, generation, marks, tasks), and runs answered (name, first index, tasks,
        #: ids).
        self.begun: list[tuple[str, str, int, int, list[Row]]] = []
        self.answered: list[tuple[str, int, list[Row], list[int]]] = []

    def opened(self) -> None:
        """The daemon has started again."""
        self.engine = Engine()
        txn = self.store.write()
        self.engine.opened(txn)
        txn.commit()
        self.model.start(IDS_SKIPPED)

    def teardown(self) -> None:
        self.store.close()
        for patch in self._patches:
            patch.stop()

    # ----------------------------------------------------------------------------------------------------------- doing

    def do(self, *commands: c.Command, refused: Sequence[int] = (), give_back: int = 0) -> c.Result:
        """`refused`: positions of the commands that cannot be, their submission being no more. `give_back`: held tasks to look at."""
        self.give_back_max = give_back
        txn = self.store.write()
        self.seq += 1
        result, not_done = self.engine.apply(txn, self.epoch, self.seq, commands)
        if not self.compare:
            gone = {added.submission for added in result.added if added.missing}
            self.open -= gone
            refused = [position for position, submission, _, _ in not_done if submission in gone]
        assert [position for position, _, _, _ in not_done] == list(refused), not_done
        self.give_back_max = 0
        if self.compare:
            more_result, more = self.engine.step(txn, 1)
            assert not more_result
        again, _ = self.engine.apply(txn, self.epoch, self.seq, commands)
        assert not again, "a repeated seq changes nothing"
        txn.commit()
        self.judge(result, give_back)
        if self.compare:
            assert more == (self.model.giving_back is not None)
        return result

    def judge(self, result: c.Result, give_back: int = 0) -> None:
        self.model.give_back_max = give_back
        said = self.model.settle()
        self.model.give_back_max = 0
        if not self.compare:
            return
        assert sorted(result.release) == sorted(said.release)
        assert sorted((erred.client, erred.key) for erred in result.erred) == sorted(said.erred)
        assert sorted(cancelled.key for cancelled in result.cancelled) == sorted(said.cancelled)
        assert sum(group.count for group in result.forgotten) == said.forgotten

    @initialize(rows=new_rows(), seal=st.booleans())
    def first_epoch(self, rows: list[tuple[bytes, int, list[int], float]], seal: bool) -> None:
        self.new_epoch()
        self.submit("g1", "alice", rows, 0, [8], seal, True, NOTHING)

    # ---------------------------------------------------------------------------------------------------------- epochs

    @rule()
    def new_epoch(self) -> None:
        """Another scheduler."""
        txn = self.store.write()
        self.epoch = self.engine.begin_epoch(txn, "scheduler")
        result, more = self.engine.step(txn, 500) if self.compare else (c.Result(), False)
        txn.commit()
        assert not more
        self.seq = 0
        self.rest, self.sent, self.open = {}, {}, set()
        self.model.begin_epoch()
        self.judge(result)

    @rule(count=st.integers(1, 4), rounds=st.integers(0, 2))
    def take_over(self, count: int, rounds: int) -> None:
        """Some tasks finish, some run, and the scheduler is replaced."""
        for _ in range(rounds):
            self.run(count, Level.MEMORY)
        self.lease(count, count)
        self.new_epoch()

    @rule(data=st.data(), levels=st.lists(held_levels, min_size=1, max_size=4), sizes=st.booleans(), before=befores)
    def adopt(self, data: st.DataObject, levels: list[Level], sizes: bool, before: Before) -> None:
        """A worker brings anything."""
        known = self.known_keys()
        some = [(data.draw(st.sampled_from(known) | keys), level) for level in levels]
        epoch = data.draw(st.sampled_from([self.epoch - 1] * 5 + [max(0, self.epoch - 2), 0, self.epoch, self.epoch + 1, 2**64 - 1]))
        self.bring(epoch, some, sizes, before)

    @rule(data=st.data(), before=befores)
    def return_orphans(self, data: st.DataObject, before: Before) -> None:
        """A worker brings what the last scheduler held, or has finished it."""
        orphans = self.orphans()
        some = data.draw(st.lists(st.sampled_from(orphans), min_size=1, max_size=4, unique=True)) if orphans else []
        self.bring(self.epoch - 1, [(key, data.draw(st.sampled_from([level, Level.MEMORY]))) for key, level in some], True, before)

    def known_keys(self) -> list[bytes]:
        with self.store.read() as txn:
            return sorted(name for _, name in txn.scan(Table.NAMES)) or KEYS

    def orphans(self) -> list[tuple[bytes, Level]]:
        """What earlier schedulers held, as they held it."""
        with self.store.read() as txn:
            ids_held = [key for key, owner in txn.scan(Table.HOLDS) if owner != U64.pack(self.epoch)]
            tasks = Snapshot(txn).tasks
            states = [tasks[int.from_bytes(key)].state for key in ids_held]
            names = [txn.get(Table.NAMES, key) or b"" for key in ids_held]
        return [(name, Level.HELD if state == TaskState.PROCESSING else Level.MEMORY) for name, state in zip(names, states)]

    def bring(self, epoch: int, some: list[tuple[bytes, Level]], sizes: bool, before: Before) -> None:
        commands = self.before(before)
        answers = self.model.adopt(epoch, some)
        needs = {task_id: self.model.need(key) for key, _, task_id in answers if task_id}
        result = self.do(*commands, c.Adopt(epoch, [x[0] for x in some], [x[1] for x in some], [8] * len(some) if sizes else []))
        if self.compare:
            assert [(x.key, x.level, x.lease.id if x.lease else 0) for x in result.adopted] == answers
            for answer in result.adopted:
                if answer.lease is not None:
                    assert answer.lease.key == answer.key
                    assert answer.lease.dependents in (needs[answer.lease.id], c.DEPENDENTS_UNKNOWN)
                    assert not answer.lease.flags & ~(TaskFlag.DATA | TaskFlag.DATA_PRODUCER)

    @rule(graph=graphs, before=befores)
    def take_whole(self, graph: str, before: Before) -> None:
        commands = self.before(before)
        leased = self.model.take_whole(graph)
        result = self.do(*commands, c.TakeWhole(graph))
        if self.compare:
            assert [(whole.submission, [lease.id for lease in whole.leases]) for whole in result.whole] == [(graph, leased)]

    @rule(data=st.data(), level=st.none() | levels, give_back=st.sampled_from([0, ALL]))
    def say_and_end_recovery(self, data: st.DataObject, level: Level | None, give_back: int) -> None:
        """In one batch: what was held, and is said of it now, is on its way to the store when it is given back."""
        orphans = self.orphans()
        key = data.draw(st.sampled_from(orphans))[0] if orphans and level is not None else b""
        self.end_recovery(("report", "", [key], level or Level.HELD, ""), give_back)

    def end_recovery(self, before: Before, give_back: int) -> None:
        """What nobody brought is given back: at once, or in steps to come."""
        commands = self.before(before)
        self.model.end_recovery()
        self.do(*commands, c.EndRecovery(), give_back=give_back)

    @precondition(lambda self: self.model.giving_back is not None)
    @rule(items=st.integers(1, 3))
    def give_back(self, items: int) -> None:
        self.give_back_max = items
        txn = self.store.write()
        result, more = self.engine.step(txn, 500)
        txn.commit()
        self.give_back_max = 0
        self.judge(result, items)
        if self.compare:
            assert more == (self.model.giving_back is not None)

    @rule(items=st.lists(st.integers(1, 3), min_size=1, max_size=3), ready=st.integers(0, 2), total=st.integers(0, 3))
    def recover_in_steps(self, items: list[int], ready: int, total: int) -> None:
        """Leases in between."""
        self.end_recovery(NOTHING, 0)
        for count in items:
            if self.model.giving_back is not None:
                self.give_back(count)
                self.lease(ready, total)

    @rule(often=st.integers(0, 3))
    def to_the_end(self, often: int) -> None:
        """Recovery ends, everything runs, and nothing that is needed is left undone."""
        if often < 3:
            return
        self.end_recovery(NOTHING, ALL)
        for _ in range(100):
            self.settle()
            self.lease(ALL, ALL)
            running = self.processing()
            if not running:
                break
            self.say(running, Level.MEMORY)
        with self.store.read() as txn:
            snap = Snapshot(txn)
        assert [task.id for task in snap.tasks.values() if task.state in ACTIVE] == []

    def settle(self) -> None:
        """Do all background work."""

    def processing(self) -> list[int]:
        with self.store.read() as txn:
            return [task.id for task in Snapshot(txn).tasks.values() if task.state == TaskState.PROCESSING]

    @rule(items=st.lists(st.tuples(st.sampled_from([b"a", b"b\0a", b"b\0b"]), st.sampled_from([b"", b"x", b"yz"])), max_size=3))
    def keep(self, items: list[tuple[bytes, bytes]]) -> None:
        self.model.keep(items)
        self.do(c.Keep([name for name, _ in items], [value for _, value in items]))

    # ----------------------------------------------------------------------------------------------------- submissions

    @rule(
        graph=graphs,
        client=clients,
        rows=new_rows(),
        generation=st.integers(0, 2),
        counts=st.lists(st.integers(0, 7), min_size=1, max_size=2),
        seal=st.booleans(),
        found=st.booleans(),
        before=befores,
        marks=st.sampled_from([0, 0, int(GraphFlag.RESENT), int(GraphFlag.WHOLE)]),
    )
    def submit(
        self,
        graph: str,
        client: str,
        rows: list[tuple[bytes, int, list[int], float]],
        generation: int,
        counts: list[int],
        seal: bool,
        found: bool,
        before: Before,
        marks: int = 0,
    ) -> None:
        """The first runs of a submission. `found`: only inputs that are there are named as such."""
        batch = Batch(self.before(before))
        if not self.graph_exists(graph):
            flags = [row[1] if not found or self.task_id(row[0]) else row[1] & ~TaskFlag.EXTERNAL for row in rows]
            declared = [len({i for i, row in enumerate(rows) if index in row[2]}) for index in range(len(rows))]
            rest = [(key, flags[i], deps, declared[i], order) for i, (key, _, deps, order) in enumerate(rows)]
            self.begin(batch, graph, client, generation, marks, rest)
            for count in counts:
                self.take(batch, graph, count)
            if seal and not self.rest[graph]:
                self.open.discard(graph)
                if self.compare and graph not in self.model.graphs:
                    batch.refused.append(len(batch.commands))
                self.model.seal(graph)
                batch.commands.append(c.SealGraph(graph))
        self.send(batch)

    def begin(self, batch: Batch, graph: str, client: str, generation: int, marks: int, rows: list[Row]) -> None:
        self.begun.append((graph, client, generation, marks, rows))
        self.rest[graph] = rows
        self.sent[graph] = 0
        self.open.add(graph)
        self.model.begin(graph, client, float(generation), marks)
        batch.commands += [c.BeginGraph(graph, client, float(generation), 0.0, flags=marks)] * 2

    @rule(
        graph=graphs,
        client=clients,
        owner=clients,
        key=keys,
        flags=st.sampled_from([TaskFlag.EXTERNAL, TaskFlag(0), TaskFlag.WANTED]),
        kind=st.sampled_from(["unwant", "drop", "force", "force"]),
    )
    def build_on(self, graph: str, client: str, owner: str, key: bytes, flags: TaskFlag, kind: str) -> None:
        """A task, new if that is possible, whose input is perhaps let go of just before, in the same batch."""
        new = next((other for other in KEYS if other != key and not self.task_id(other)), KEYS[0])
        rows: list[tuple[bytes, int, list[int], float]] = [(key, int(flags), [], 0.0), (new, int(TaskFlag.WANTED), [0], 0.0)]
        self.submit(graph, client, rows, 0, [2], True, True, (kind, owner, [key], Level.HELD, graph))

    def graph_exists(self, graph: str) -> bool:
        """Whether its name is taken."""
        return graph in self.model.graphs

    def task_id(self, key: bytes) -> int:
        return self.model.tasks[key].id if key in self.model.tasks else 0

    def before(self, before: Before) -> list[c.Command]:
        kind, client, some, level, graph = before
        if kind == "unwant":
            for key in some:
                self.model.unwant(client, key)
            return [c.Unwant(client, some)]
        if kind == "drop":
            self.model.drop(client)
            return [c.DropClient(client)]
        if kind in ("cancel", "force"):
            for key in some:
                self.model.cancel(client, key, kind == "force")
            return [c.Cancel(client, some, kind == "force")]
        if kind == "retry":
            for key in some:
                self.model.retry(key)
            return [c.Retry(some)]
        if kind == "report":
            reported = [self.task_id(key) for key in some]
            for task_id in reported:
                self.model.report(task_id, level)
            return [c.Report(reported, [level] * len(some))]
        if kind == "fail":
            failed = self.task_id(some[0])
            self.model.fail(failed)
            return [c.Fail(failed, b"payload", "text")]
        if kind == "abort":
            self.model.abort(graph)
            self.open.discard(graph)
            return [c.AbortGraph(graph)]
        return []

    def take(self, batch: Batch, graph: str, count: int, told: Sequence[int] = ()) -> None:
        """Add the next tasks of an open submission. Once an input was missing, they are refused."""
        rows, self.rest[graph] = self.rest[graph][:count], self.rest[graph][count:]
        at = self.sent[graph]
        self.sent[graph] += len(rows)
        batch.runs[graph, at] = rows
        if self.compare:
            if graph in self.model.graphs:
                arrived = self.model.add(graph, rows, list(told))
                batch.added.append(c.Added(graph, at, arrived.ids, arrived.missing, arrived.known))
                if arrived.missing:
                    self.open.discard(graph)
            else:
                batch.refused.append(len(batch.commands))
        batch.commands.append(
            c.AddTasks(
                graph,
                at,
                [row[0] for row in rows],
                [b"spec"] * len(rows),
                [row[1] for row in rows],
                [len(row[2]) for row in rows],
                [dep for row in rows for dep in row[2]],
                [row[3] for row in rows],
                [row[4] for row in rows],
                new_groups=["group"] if at == 0 else [],
                told_ids=told,
            )
        )

    def send(self, batch: Batch) -> None:
        result = self.do(*batch.commands, refused=batch.refused)
        if self.compare:
            assert result.added == batch.added, (result.added, batch.added, batch.commands)
        for x in result.added:
            if not x.missing:
                self.answered.append((x.submission, x.first_index, batch.runs[x.submission, x.first_index], x.ids))

    @precondition(lambda self: any(self.rest[graph] for graph in self.open))
    @rule(counts=st.lists(st.integers(1, 4), min_size=1, max_size=2), before=befores, data=st.data())
    def add_more(self, counts: list[int], before: Before, data: st.DataObject) -> None:
        graph = data.draw(st.sampled_from(sorted(graph for graph in self.open if self.rest[graph])))
        batch = Batch(self.before(before))
        if graph in self.open:
            for count in counts:
                self.take(batch, graph, count)
        self.send(batch)

    @precondition(lambda self: self.open)
    @rule(data=st.data(), abort=st.booleans())
    def end(self, data: st.DataObject, abort: bool) -> None:
        """Seal an open submission, also an incomplete one, or abort it."""
        graph = data.draw(st.sampled_from(sorted(self.open)))
        self.open.discard(graph)
        if abort:
            self.model.abort(graph)
            self.do(c.AbortGraph(graph))
        else:
            self.model.seal(graph)
            self.do(c.SealGraph(graph))

    @rule(graph=graphs)
    def abort_sealed(self, graph: str) -> None:
        if graph not in self.open:
            self.model.abort(graph)
            self.do(c.AbortGraph(graph))

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def refused(self, data: st.DataObject) -> None:
        """A run that cannot be: nothing of it stands, and the submission is aborted."""
        graph = data.draw(st.sampled_from(sorted(self.open)))
        self.open.discard(graph)
        at = self.sent[graph]
        wrong = data.draw(
            st.sampled_from(
                [
                    c.AddTasks(graph, at + 1, [b"new"]),
                    c.AddTasks(graph, at, [b"new", b""]),
                    c.AddTasks(graph, at, [b"new"], dep_counts=[1], deps=[at]),
                    c.AddTasks(graph, at, [b"new", b"newer"], dep_counts=[1, 0], deps=[at + 1]),
                    c.AddTasks(graph, at, [b"new", b"newer"], flags=[0]),
                    c.AddTasks(graph, at, [b"new"], flags=[int(TaskFlag.DATA)]),
                ]
            )
        )
        self.model.abort(graph)
        self.seq += 1
        txn = self.store.write()
        result, refused = self.engine.apply(txn, self.epoch, self.seq, [wrong, c.SealGraph(graph)])
        txn.commit()
        assert [(position, name, kind) for position, name, kind, _ in refused] == [
            (0, graph, "invalid_request"),
            (1, graph, "invalid_request"),
        ]
        self.judge(result)

    # ------------------------------------------------------------------------------------------------- clients, reports

    @rule(client=clients, some=st.lists(keys, max_size=3))
    def want(self, client: str, some: list[bytes]) -> None:
        states = []
        for key in some:
            task = self.model.tasks.get(key)
            states.append((key, task.id if task else 0))
            self.model.want(client, key)
        result = self.do(c.Want(client, some))
        if self.compare:
            assert [(state.key, state.id) for state in result.wants] == states

    @rule(client=clients, some=st.lists(keys, max_size=3))
    def unwant(self, client: str, some: list[bytes]) -> None:
        for key in some:
            self.model.unwant(client, key)
        self.do(c.Unwant(client, some))

    @rule(client=clients)
    def drop(self, client: str) -> None:
        self.model.drop(client)
        self.do(c.DropClient(client))

    @rule(client=clients, some=st.lists(keys, min_size=1, max_size=2), force=st.booleans())
    def cancel(self, client: str, some: list[bytes], force: bool) -> None:
        for key in some:
            self.model.cancel(client, key, force)
        self.do(c.Cancel(client, some, force))

    @rule(some=st.lists(keys, min_size=1, max_size=2))
    def retry(self, some: list[bytes]) -> None:
        for key in some:
            self.model.retry(key)
        self.do(c.Retry(some))

    def known_ids(self) -> list[int]:
        return sorted(task.id for task in self.model.tasks.values()) or [1]

    @rule(data=st.data(), some=st.lists(levels, min_size=1, max_size=4))
    def report(self, data: st.DataObject, some: list[Level]) -> None:
        reported = [data.draw(st.sampled_from(self.known_ids()) | ids) for _ in some]
        for task_id, level in zip(reported, some):
            self.model.report(task_id, level)
        self.do(c.Report(reported, some, [8] * len(some)))

    @rule(count=st.integers(1, 3), level=st.sampled_from([Level.MEMORY, Level.MEMORY, Level.MEMORY, Level.ERRED, Level.OUT]))
    def run(self, count: int, level: Level) -> None:
        """Lease some, and say what became of them."""
        self.lease(count, count)
        self.say(self.processing(), level)

    @rule(data=st.data(), level=st.sampled_from([Level.MEMORY, Level.MEMORY, Level.ERRED, Level.OUT]))
    def report_leased(self, data: st.DataObject, level: Level) -> None:
        """What schedulers mostly do."""
        leased = sorted(task.id for task in self.model.tasks.values() if task.state == "leased")
        reported = data.draw(st.lists(st.sampled_from(leased), max_size=4, unique=True)) if leased else []
        self.say(reported, level)

    @rule(data=st.data(), cause=ids)
    def fail(self, data: st.DataObject, cause: int) -> None:
        failed = data.draw(st.sampled_from(self.known_ids()))
        self.model.fail(failed)
        blamed = data.draw(st.sampled_from(self.known_ids()))
        self.model.fail(blamed)
        self.do(c.Fail(failed, b"payload", "text"), c.Blame(blamed, cause))

    def dependents_of(self) -> dict[int, list[int]]:
        """Of each task that has any."""
        above = {task.id: [other.id for other in self.model.dependents(task.key)] for task in self.model.tasks.values()}
        return {task_id: dependents for task_id, dependents in sorted(above.items()) if dependents} or {1: []}

    @rule(
        data=st.data(),
        levels=st.sampled_from([[Level.RELEASED], [Level.RELEASED, Level.HELD, Level.OUT], [Level.HELD], [Level.MEMORY]]),
        above=st.none() | st.just(Level.MEMORY) | levels,
    )
    def revive(self, data: st.DataObject, levels: list[Level], above: Level | None) -> None:
        """One fails, and what depends on it; and it lives again, and they do. Then perhaps they need it no more."""
        task_id, dependents = data.draw(st.sampled_from(list(self.dependents_of().items())))
        for level in [Level.ERRED, *levels]:
            self.say([task_id], level)
        if above is not None:
            self.say(dependents, above)

    def say(self, reported: list[int], level: Level) -> None:
        for task_id in reported:
            self.model.report(task_id, level)
        self.do(c.Report(reported, [level] * len(reported)))

    @rule(ready=st.integers(0, 4), total=st.integers(0, 6))
    def lease(self, ready: int, total: int) -> None:
        leases: list[c.Lease] = []
        more = True
        while more:
            txn = self.store.write()
            before = txn.count(Table.READY), txn.count(Table.AHEAD)
            some, more = self.engine.lease(txn, ready - len(leases), total - len(leases))
            # What is being taken back stays where it is.
            more = more and before != (txn.count(Table.READY), txn.count(Table.AHEAD))
            leases += some
            for lease in some:
                assert {txn.get(Table.HOLDS, U64.pack(dep)) for dep in lease.deps} <= {U64.pack(self.epoch)}, "it has all its inputs"
            txn.commit()
        if self.compare:
            assert [lease.id for lease in leases] == self.model.lease(ready, total)
            for lease in leases:
                assert [self.model.by_id(dep).key for dep in lease.deps] == self.model.tasks[lease.key].deps  # type: ignore[union-attr]

    @rule(data=st.data())
    def resync(self, data: st.DataObject) -> None:
        held = data.draw(st.lists(st.sampled_from(self.known_ids()) | ids, max_size=5, unique=True))
        release, leases = self.model.resync(held)
        txn = self.store.write()
        result = self.engine.resync(txn, self.epoch, held)
        txn.commit()
        if self.compare:
            assert result.release[: len(release)] == release
            assert sorted(lease.id for lease in result.leases) == sorted(leases)
        result.release = result.release[len(release) :]
        self.judge(result)

    # ----------------------------------------------------------------------------------------------------------- judging

    @invariant()
    def rules_hold(self) -> None:
        with self.store.read() as txn:
            assert list(violations(txn)) == []

    @invariant()
    def equals_model(self) -> None:
        if not self.compare:
            return
        with self.store.read() as txn:
            snap = Snapshot(txn)
            names = {int.from_bytes(key): name for key, name in txn.scan(Table.NAMES)}
            holds = {int.from_bytes(key): int.from_bytes(owner) for key, owner in txn.scan(Table.HOLDS)}
            recovering = txn.get(Table.META, meta_key(Meta.RECOVERING)) is not None
            assert dict(kept(txn)) == self.model.kept
        assert holds == {task.id: task.holder for task in self.model.held()}
        assert recovering == self.model.recovering
        assert {names[task.id]: (task.id, TaskState(task.state).name) for task in snap.tasks.values()} == {
            key: (task.id, self.model.state_name(task)) for key, task in self.model.tasks.items()
        }
        assert {names[task.id]: (task.wants, task.expected) for task in snap.tasks.values()} == {
            key: (len(task.wants), task.expected) for key, task in self.model.tasks.items()
        }


@st.composite
def new_dag(draw: st.DrawFn) -> list[tuple[bytes, int, list[int], float]]:
    """A submission with many links, whose last tasks are wanted."""
    some = draw(st.permutations(KEYS))[: draw(st.integers(3, len(KEYS)))]
    deps = [draw(st.lists(st.integers(0, index - 1), max_size=3)) if index else [] for index in range(len(some))]
    inner = {dep for row in deps for dep in row}
    rows = []
    for index, key in enumerate(some):
        flags = draw(st.sampled_from([0, 0, 0, 0, int(TaskFlag.WANTED), int(TaskFlag.DATA | TaskFlag.HELD)]))
        if deps[index]:
            flags &= ~int(TaskFlag.DATA)
        if index not in inner:
            flags |= TaskFlag.WANTED
        rows.append((key, flags, deps[index], float(draw(st.integers(-2, 2)))))
    return rows


class MemoryMachine(EngineMachine):
    """A crash takes everything back to the last sync. Then what it undid is perhaps said again."""

    def __init__(self) -> None:
        super().__init__()
        self._synced = self.saved()

    def saved(self) -> tuple[object, ...]:
        return copy.deepcopy((self.model, self.seq, self.epoch, self.rest, self.sent, self.open))

    @rule()
    def sync(self) -> None:
        assert isinstance(self.store, MemoryStore)
        self.store.sync()
        self._synced = self.saved()
        self.begun, self.answered = [], []

    @precondition(lambda self: self._synced[2])
    @rule(often=st.integers(0, 3), again=st.booleans())
    def crash(self, often: int, again: bool) -> None:
        if often < 3:
            return
        assert isinstance(self.store, MemoryStore)
        self.store.crash()
        self.model, self.seq, self.epoch, self.rest, self.sent, self.open = copy.deepcopy(self._synced)  # type: ignore[assignment]
        begun, answered = self.begun, self.answered
        self.opened()
        self.sync()
        if not again:
            return
        batch = Batch([])
        for graph, client, generation, marks, rows in begun:
            if not self.graph_exists(graph):
                self.begin(batch, graph, client, generation, marks, rows)
        for graph, first, rows, told in answered:
            if graph in self.open and self.sent[graph] == first and self.rest[graph][: len(rows)] == rows:
                self.take(batch, graph, len(rows), told)
        self.send(batch)


class RecoveryMachine(MemoryMachine):
    """Graphs that are worth recovering, and less that makes an end of them."""

    @initialize(rows=new_dag(), count=st.integers(1, 3), rounds=st.integers(0, 3))
    def first_epoch(self, rows: list[tuple[bytes, int, list[int], float]], count: int, rounds: int) -> None:  # type: ignore[override]
        self.new_epoch()
        self.submit("g1", "alice", rows, 0, [8, 8], True, True, NOTHING)
        self.take_over(count, rounds)

    @rule(graph=graphs, rows=new_dag(), marks=st.sampled_from([0, 0, int(GraphFlag.RESENT), int(GraphFlag.WHOLE)]))
    def submit_dag(self, graph: str, rows: list[tuple[bytes, int, list[int], float]], marks: int) -> None:
        self.submit(graph, "bob", rows, 1, [8, 8], True, True, NOTHING, marks)

    #: No rules here.
    build_on = abort_sealed = refused = drop = cancel = end = keep = to_the_end = None  # type: ignore[assignment]


class LmdbMachine(EngineMachine):
    def open_store(self) -> LmdbStore:
        if not hasattr(self, "folder"):
            self.folder = tempfile.mkdtemp(prefix="taskdb-test-")
        return LmdbStore(self.folder, sync=False)

    @rule()
    def reopen(self) -> None:
        self.store.close()
        self.store = self.open_store()
        self.opened()

    @rule(key=keys)
    def aborted_transaction(self, key: bytes) -> None:
        txn = self.store.write()
        self.engine.apply(txn, self.epoch, self.seq + 1, [c.Cancel("alice", [key], True), c.DropClient("bob")])
        txn.abort()

    def teardown(self) -> None:
        super().teardown()
        shutil.rmtree(self.folder, ignore_errors=True)


class SmallStepsMachine(MemoryMachine):
    """Background work one item at a time: the model cannot say what happens in between, but the rules must hold throughout."""

    step_items = 1
    compare = False

    @rule(items=st.integers(1, 3))
    def step(self, items: int) -> None:
        txn = self.store.write()
        self.engine.step(txn, items)
        txn.commit()

    # The model is not kept up: it would have to know which tasks are still there.

    def graph_exists(self, graph: str) -> bool:
        with self.store.read() as txn:
            return find_graph(txn, graph) != 0

    def task_id(self, key: bytes) -> int:
        with self.store.read() as txn:
            return find_key(txn, key)

    def known_ids(self) -> list[int]:
        with self.store.read() as txn:
            return [int.from_bytes(key) for key, _ in txn.scan(Table.TASKS)] or [1]

    def dependents_of(self) -> dict[int, list[int]]:
        with self.store.read() as txn:
            above = Snapshot(txn).dependents
        return {task_id: dependents for task_id, dependents in sorted(above.items()) if dependents} or {1: []}

    @rule()
    def drain(self) -> None:
        self.settle()

    def settle(self) -> None:
        txn = self.store.write()
        for _ in range(10_000):
            if not self.engine.step(txn, 1)[1]:
                break
        else:
            raise AssertionError("background work does not come to an end")
        txn.commit()


class SpooledMachine(SmallStepsMachine):
    """Submissions whose runs are carried out when they are about to be needed."""

    def __init__(self) -> None:
        super().__init__()
        more = [mock.patch.object(hunger, "GROW_QUEUED", 2), mock.patch.object(spool, "SPOOL_TASKS_MAX", 9)]
        for patch in more:
            patch.start()
        self._patches += more

    def begin(self, batch: Batch, graph: str, client: str, generation: int, marks: int, rows: list[Row]) -> None:
        super().begin(batch, graph, client, generation, marks | GraphFlag.SPOOLED, rows)

    @rule()
    def grow(self) -> None:
        txn = self.store.write()
        self.engine.grow(txn)
        txn.commit()

    def settle(self) -> None:
        more = True
        while more:
            super().settle()
            txn = self.store.write()
            _, more = self.engine.grow(txn)
            txn.commit()
        super().settle()


def _settings(examples: int, steps: int) -> settings:
    """TASKDB_EXAMPLES multiplies the number of examples, for a search that is longer than a test run."""
    return settings(
        max_examples=examples * int(os.environ.get("TASKDB_EXAMPLES", "1")),
        stateful_step_count=steps,
        deadline=None,
        print_blob=True,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
    )


pytestmark = pytest.mark.timeout(600)

TestMemory = MemoryMachine.TestCase
TestMemory.settings = _settings(60, 40)
TestRecovery = RecoveryMachine.TestCase
TestRecovery.settings = _settings(40, 40)
TestLmdb = LmdbMachine.TestCase
TestLmdb.settings = _settings(15, 30)
TestSmallSteps = SmallStepsMachine.TestCase
TestSmallSteps.settings = _settings(30, 40)
TestSpooled = SpooledMachine.TestCase
TestSpooled.settings = _settings(30, 40)
