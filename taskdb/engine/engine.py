"""The engine's door: epochs, batches, leases, background steps. Everything that writes comes in here.

A caller opens a write transaction, makes any number of calls, and commits or aborts. After an exception it must abort. What the engine
keeps between calls belongs to one transaction and is dropped with it, so an aborted one leaves no trace.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from taskdb import commands as c
from taskdb.commands import Lease, Result
from taskdb.engine import growth, ingest, recovery, reports, spool, wants
from taskdb.engine.background import drain
from taskdb.engine.leasing import lease, lease_of
from taskdb.engine.moves import Moves
from taskdb.engine.refs import find_graph, stored_graph
from taskdb.engine.spooled_keys import Place, SpooledKeys
from taskdb.engine.todo import Todo
from taskdb.engine.transitions import ERRED, MEMORY, PROCESSING, claim, hold, needed
from taskdb.engine.work import Work
from taskdb.errors import InvalidRequest, LimitExceeded, StaleEpoch
from taskdb.limits import (
    BATCH_COMMANDS_MAX,
    COMMAND_ITEMS_MAX,
    IDS_SKIPPED_AT_START,
    STEP_ITEMS,
    STEP_ITEMS_BATCH,
    STEP_ITEMS_BEFORE_ADD,
    STEP_ITEMS_PER_COMMAND_ITEM,
)
from taskdb.store.base import ReadTxn, WriteTxn
from taskdb.store.codec import GraphStatus, StoredRule, decode_graph
from taskdb.store.schema import TODO_KEY, U64, Meta, Table, meta_key

#: (position of the command, its submission or "", kind, message)
Refused = tuple[int, str, str, str]


class Engine:
    """`free_bytes` says how much the store may still grow; without it AddTasks is never refused for lack of room."""

    def __init__(self, free_bytes: Callable[[], int] | None = None) -> None:
        self._free_bytes = free_bytes
        #: The last call's records, of use to the next one if it is in the same transaction; None after an error.
        self._former: Work | None = None
        self._rules: dict[tuple[int, str], StoredRule] = {}
        self._spooled = SpooledKeys()
        #: Gathers what becomes of tasks, for whoever keeps a history.
        self.moves: Moves | None = None

    def _work(self, txn: WriteTxn, epoch: int) -> Work:
        former, self._former = self._former, None
        work = Work(txn, epoch, self._rules, self._spooled, former if former is not None and former.txn is txn else None)
        work.moves = self.moves
        return work

    def _done(self, work: Work) -> Result:
        result = work.flush()
        self._former = work
        return result

    def opened(self, txn: WriteTxn) -> None:
        """The store was opened, perhaps after a crash: what was told of uncommitted ids must not come true for other tasks."""
        key = meta_key(Meta.NEXT_TASK)
        data = txn.get(Table.META, key)
        if data is not None or current_epoch(txn):
            first = 1 if data is None else U64.unpack(data)[0]
            txn.put(Table.META, key, U64.pack(first + IDS_SKIPPED_AT_START))

    # ------------------------------------------------------------------------------------------------------------ epochs

    def begin_epoch(self, txn: WriteTxn, scheduler_id: str) -> int:
        """Fence every earlier scheduler, and return the new epoch.

        Wants stay. Submissions that are open are aborted: whoever sent them sends them again. What earlier schedulers held stays as it is,
        but nothing that depends on it is leased, until it is claimed (Adopt) or given back (EndRecovery).
        """
        epoch = current_epoch(txn) + 1
        txn.put(Table.META, meta_key(Meta.EPOCH), U64.pack(epoch))
        txn.put(Table.META, meta_key(Meta.SCHEDULER), scheduler_id.encode())
        for key, _ in list(txn.scan(Table.SESSIONS)):
            txn.delete(Table.SESSIONS, key)
        txn.put(Table.EPOCHS, U64.pack(epoch), txn.get(Table.META, meta_key(Meta.NEXT_TASK)) or U64.pack(1))
        # What the last one had yet to give back, workers may bring to this one.
        for key, _ in list(txn.scan(Table.TODO, TODO_KEY.pack(Todo.GIVE_BACK, 0, 0), TODO_KEY.pack(Todo.GIVE_BACK + 1, 0, 0))):
            txn.delete(Table.TODO, key)
        if txn.count(Table.HOLDS):
            txn.put(Table.META, meta_key(Meta.RECOVERING), U64.pack(epoch))
        else:
            txn.delete(Table.META, meta_key(Meta.RECOVERING))
        work = self._work(txn, epoch)
        for key, data in list(txn.scan(Table.GRAPHS)):
            if decode_graph(0, data).status == GraphStatus.OPEN:
                ingest.abort_graph(work, work.known_graph(int.from_bytes(key)))
        self._done(work)
        return epoch

    def check_epoch(self, txn: ReadTxn, epoch: int) -> None:
        """Raises StaleEpoch unless this is the current epoch."""
        current = current_epoch(txn)
        if epoch != current:
            raise StaleEpoch(f"epoch {epoch} is over: the store belongs to epoch {current}")

    def last_seq(self, txn: ReadTxn, epoch: int) -> int:
        """Number of the last batch applied in this epoch, 0 if none."""
        data = txn.get(Table.SESSIONS, U64.pack(epoch))
        return 0 if data is None else int(U64.unpack(data)[0])

    # ----------------------------------------------------------------------------------------------------------- batches

    def apply(self, txn: WriteTxn, epoch: int, seq: int, commands: Sequence[c.Command]) -> tuple[Result, list[Refused]]:
        """Apply a batch, in order, and some of the work it gives rise to.

        `seq` 0: not numbered (Ingest). A number applied before is answered with an empty Result. A refused command leaves nothing of
        itself; its submission is aborted; the others stand. Raises StaleEpoch, InvalidRequest (a gap), LimitExceeded (too many commands),
        StoreFull, StoreError.
        """
        self.check_epoch(txn, epoch)
        if len(commands) > BATCH_COMMANDS_MAX:
            raise LimitExceeded(f"{len(commands)} commands in one batch, at most {BATCH_COMMANDS_MAX}")
        if seq:
            last = self.last_seq(txn, epoch)
            if 0 < seq <= last:
                return Result(), []
            if seq != last + 1:
                raise InvalidRequest(f"batch {seq} came after batch {last}")
            txn.put(Table.SESSIONS, U64.pack(epoch), U64.pack(seq))
        work = self._work(txn, epoch)
        refused: list[Refused] = []
        items = 0
        for position, command in enumerate(commands):
            submission = getattr(command, "submission", "")
            try:
                count = _items(command)
                if count > COMMAND_ITEMS_MAX:
                    raise LimitExceeded(f"{count} items in one command, at most {COMMAND_ITEMS_MAX}")
                if type(command) is not c.Cancel:  # however many it names, others are served in between
                    items += count
                self._apply_one(work, command)
            except (InvalidRequest, LimitExceeded, ingest.NoRoom) as exc:
                refused.append((position, submission, exc.kind, exc.message))
                if submission and type(command) is not c.BeginGraph:
                    graph = work.graph(find_graph(txn, submission))
                    if graph is not None and graph.status == GraphStatus.OPEN:
                        ingest.abort_graph(work, graph)
            work.trim()
        # Nobody waits for what is pruned.
        drain(work, STEP_ITEMS_BATCH + STEP_ITEMS_PER_COMMAND_ITEM * items, last=Todo.GIVE_BACK)
        return self._done(work), refused

    def _apply_one(self, work: Work, command: c.Command) -> None:
        spool.reach(work, command)
        match command:
            case c.Report():
                reports.report(work, command)
            case c.AddTasks():
                if spool.spool_tasks(work, command, self._free_bytes):
                    return
                if work.has_todo and ingest.names_known(work, command):
                    # IMPORTANT: a key that was let go of and comes again is a new task, with a spec of its own.
                    drain(work, STEP_ITEMS_BEFORE_ADD)
                ingest.add_tasks(work, command, self._free_bytes)
            case c.AddRule():
                if work.has_todo:
                    drain(work, STEP_ITEMS_BEFORE_ADD)  # as for AddTasks
                growth.add_rule(work, command, self._free_bytes)
            case c.BeginGraph():
                ingest.begin(work, command)
            case c.SealGraph():
                ingest.seal(work, command.submission)
            case c.AbortGraph():
                ingest.abort(work, command.submission)
            case c.Want():
                wants.want(work, command.client, command.keys)
            case c.Unwant():
                wants.unwant(work, command.client, command.keys)
            case c.DropClient():
                spool.end_wants_of(work, command.client)
                client = wants.client_of(work, command.client)
                if client is not None:
                    wants.drop_client(work, client)
            case c.Fail():
                reports.fail_task(work, command)
            case c.Blame():
                reports.blame(work, command)
            case c.Cancel():
                wants.cancel(work, command.client, command.keys, command.force)
            case c.Retry():
                reports.retry(work, command)
            case c.Adopt():
                recovery.adopt(work, command)
            case c.TakeWhole():
                recovery.take_whole(work, command.submission)
            case c.EndRecovery():
                if work.recovering:
                    work.push(Todo.GIVE_BACK, work.epoch)
            case c.Keep():
                recovery.keep(work, command, self._free_bytes)
            case c.Credit():
                # Credit is what the caller knows when it calls `lease`; there is nothing to store.
                pass

    # ----------------------------------------------------------------------------------------------- leases, background

    def lease(self, txn: WriteTxn, ready: int, total: int) -> tuple[list[Lease], bool]:
        """Lease up to `ready` tasks whose dependencies are in memory, then any up to `total` in all, in rank order. True: ask again, there
        may be more."""
        if total <= 0:
            return [], False
        work = self._work(txn, current_epoch(txn))
        leases, more = lease(work, ready, total)
        self._done(work)
        return leases, more

    def step(self, txn: WriteTxn, items_max: int = STEP_ITEMS) -> tuple[Result, bool]:
        """Do up to `items_max` items of background work. True if there is more."""
        if not txn.count(Table.TODO):
            return Result(), False
        work = self._work(txn, current_epoch(txn))
        drain(work, items_max)
        result = self._done(work)
        return result, txn.count(Table.TODO) > 0

    def prune(self, txn: WriteTxn, submissions: Sequence[str]) -> None:
        """Have these graphs forgotten, in the background: the wants of their tasks end, and clients are told that they are cancelled. What
        tasks of other graphs depend on stays. Unknown ones are left out."""
        work = self._work(txn, current_epoch(txn))
        for submission in submissions:
            if graph_id := find_graph(txn, submission):
                work.push(Todo.PRUNE, graph_id)
        self._done(work)

    def pruning(self, txn: ReadTxn) -> bool:
        """Whether a graph is being pruned: that has time."""
        return txn.first(Table.TODO, TODO_KEY.pack(Todo.PRUNE, 0, 0)) is not None

    def may_grow(self, txn: ReadTxn) -> bool:
        """Whether there is a rule of which more is to be made now, or a run to be carried out."""
        return (txn.count(Table.GROWTH) > 0 and growth.hungry(txn)) or (txn.count(Table.SPOOL) > 0 and bool(spool.hungry_graphs(txn)))

    def grow(self, txn: WriteTxn) -> tuple[Result, bool]:
        """Make some tasks of a rule, or carry out a run, if one of its submission's tasks may soon be asked for. True if there is more to
        make now.

        Raises NoRoom (nothing was made, and the transaction goes on), StoreFull, StoreError.
        """
        if not txn.count(Table.GROWTH) and not txn.count(Table.SPOOL):
            return Result(), False
        work = self._work(txn, current_epoch(txn))
        more = growth.grow_some(work, self._free_bytes) or spool.carry_some(work, self._free_bytes)
        work.report_forgotten()
        return self._done(work), more

    def spooled(self, txn: ReadTxn, commands: Sequence[c.Command]) -> list[Place]:
        """Runs that these commands name tasks of, with those before them: to be carried out first, in this order. So each takes some
        milliseconds; `apply` does by itself what was left out, in one go."""
        self._spooled.attend(txn)
        if not self._spooled.tasks:
            return []
        return spool.needed_by(txn, self._spooled, commands, lambda name: stored_graph(txn, name))

    def carry(self, txn: WriteTxn, place: Place) -> Result:
        """Carry out a spooled run, if it is there: those before it have been."""
        work = self._work(txn, current_epoch(txn))
        spool.carry_if_there(work, place)
        work.report_forgotten()
        return self._done(work)

    def resync(self, txn: WriteTxn, epoch: int, held_ids: Sequence[int]) -> Result:
        """After a broken link: the scheduler holds just these. Say again what it may have missed. Raises StaleEpoch.

        What it holds and is not leased becomes leased, if it is needed, else it is named for release; what is leased and not held is leased
        again, as it stands.
        """
        self.check_epoch(txn, epoch)
        work = self._work(txn, epoch)
        held = set(held_ids)
        for task_id in held_ids:
            task = growth.made(work, task_id)
            if task is None:
                work.result.release.append(task_id)
            elif task.state in (PROCESSING, ERRED):
                claim(work, task)
            elif not needed(task):
                work.result.release.append(task_id)
            elif task.state == MEMORY:
                claim(work, task)
            else:
                hold(work, task)
        for key, data in txn.scan(Table.HOLDS):
            task_id = int.from_bytes(key)
            if task_id in held or int.from_bytes(data) != epoch:
                continue
            task = work.known_task(task_id)
            if task.state == PROCESSING:
                work.result.leases.append(lease_of(work, task))
        drain(work, STEP_ITEMS + STEP_ITEMS_PER_COMMAND_ITEM * len(held))
        return self._done(work)


def current_epoch(txn: ReadTxn) -> int:
    """0 before the first."""
    data = txn.get(Table.META, meta_key(Meta.EPOCH))
    return 0 if data is None else int(U64.unpack(data)[0])


def _items(command: c.Command) -> int:
    """Tasks, ids or keys it names."""
    match command:
        case c.Report():
            return len(command.ids)
        case c.Want() | c.Unwant() | c.Cancel() | c.Retry() | c.Adopt():
            return len(command.keys)
        case c.Keep():
            return len(command.names)
        case c.AddTasks():
            return 0
        case _:
            return 1
