"""The one writer. Owns the open write transaction, the group commit and the standing credit of the scheduler.

Rules:
- Everything here is plain calls on the thread of the daemon's loop: no locks, no hand-offs. A round trip is one apply.
- A batch of the Session is applied, and answered, at once; it is on disk at most `commit_interval_ms` later, and only then
  `durable`. If the commit fails, everything since the last one never happened: the Session is closed, the scheduler comes
  back and sends it again.
- An Ingest run has a transaction of its own, committed before it is answered, so a full store refuses that run alone.
- Background work (`Engine.step`) runs in slices between messages.
- An error the engine does not explain (a broken invariant, a bug) stops the daemon: nothing is written on a guess.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from taskdb import commands as c
from taskdb.config import ServerConfig
from taskdb.engine.engine import Engine, Refused
from taskdb.engine.ingest import NoRoom
from taskdb.engine.refs import is_open, is_sealed, tasks_added
from taskdb.engine.spooled_keys import Place
from taskdb.errors import InvalidRequest, LimitExceeded, StaleEpoch, TaskDBError, Unavailable, is_fatal
from taskdb.server.answers import Answer, Answers, merge
from taskdb.server.counters import Counters
from taskdb.server.credit import LEASES_SLICE_MAX, CreditLine
from taskdb.server.peer import Peer
from taskdb.server.recorder import Recorder
from taskdb.server.unsealed import Unsealed
from taskdb.store.base import ReadTxn, Store, WriteTxn
from taskdb.store.codec import explained
from taskdb.store.schema import Table
from taskdb.wire.status import from_kind

logger = logging.getLogger("taskdb.server")

T = TypeVar("T")

#: Items between two looks at the clock, and the length of a slice: it is what a message may have to wait.
STEP_ITEMS_SLICE = 64
SLICE_SECONDS_MAX = 0.003
#: Messages the peer has yet to be sent above which background work pauses, and the pause. So it does between any two slices while a graph
#: is pruned: most of the time is others', and most of what a commit writes.
BACKLOG_MAX = 4
PAUSE_SECONDS = 0.006
#: Pause before background work and aborts are tried again after the store refused them (it is full).
RETRY_SECONDS = 1.0


class Writer:
    def __init__(self, store: Store, engine: Engine, config: ServerConfig, on_fatal: Callable[[BaseException], None]):
        self._store = store
        self._engine = engine
        self._commit_seconds = config.commit_interval_ms / 1000
        self._commands_max = config.commit_commands_max
        self._on_fatal = on_fatal
        self._loop = asyncio.get_running_loop()
        self._txn: WriteTxn | None = None
        #: A transaction was dropped since the last one began; at the start, perhaps by a crash.
        self._dropped = True
        #: Commands and steps in the open transaction.
        self._uncommitted = 0
        #: Last batch of the peer in the open transaction that it waits to hear Durable of; 0 if none.
        self._seq = 0
        self._peer: Peer | None = None
        self._credit = CreditLine()
        #: The peer has said what it holds: nothing is leased before.
        self._synced = False
        #: The peer has begun its epoch and said nothing yet: it reads what there is, and nothing changes before it is ready to hear of it.
        self._restoring = False
        self._answers = Answers()
        #: Keeps the history, if there is to be one.
        self.recorder = Recorder(config.history_bytes_max) if config.history_bytes_max else None
        if self.recorder is not None:
            engine.moves = self.recorder.moves
        #: Tasks forgotten in the open transaction, by submission and group: told once that is on disk, so that nothing is counted twice.
        self._forgotten: Counter[tuple[str, str]] = Counter()
        self._depths = (0, 0)
        #: Result.queued as the scheduler last heard it.
        self._told_queued = 0
        self._commit_timer: asyncio.TimerHandle | None = None
        self._slice_handle: asyncio.Handle | None = None
        #: There was no room for more tasks of a rule, and that has been said.
        self._full = False
        self._unsealed = Unsealed(self._wake)
        self._closed = False
        #: Leases that a transaction which was dropped, perhaps by a crash, told, and that the scheduler has not said it holds.
        self._leases_lost = True
        self.counters = Counters()

    @property
    def peer(self) -> Peer | None:
        return self._peer

    @property
    def attached(self) -> bool:
        return self._peer is not None

    # ------------------------------------------------------------------------------------------------- the Session

    def attach(self, peer: Peer, scheduler_id: str, epoch: int) -> tuple[int, int]:
        """Begin an epoch (0) or go on with one; the peer replaces any other. Returns epoch and last seq.

        All of it is on disk on return. Raises StaleEpoch, Unavailable.
        """
        self.flush()
        self._check_open()
        try:
            txn = self._begin()
            old: TaskDBError
            new = epoch == 0
            if new:
                epoch = self._engine.begin_epoch(txn, scheduler_id)
                self._answers.heard(txn, 2**64 - 1)
                last_seq, old = 0, StaleEpoch(f"scheduler {scheduler_id} began epoch {epoch}")
            else:
                self._engine.check_epoch(txn, epoch)
                last_seq = self._engine.last_seq(txn, epoch)
                old = Unavailable("another Session of this epoch was opened")
            self._commit()
        except Exception as error:
            raise self._explain(error) from error
        self._credit = CreditLine()
        self._synced = new
        self._restoring = last_seq == 0
        self._told_queued = 0
        peer.epoch = epoch
        peer.leases_lost = self._leases_lost
        if new:
            self._leases_lost = False
        former, self._peer = self._peer, peer
        if former is not None:
            former.end(old)
        self._wake()
        return epoch, last_seq

    def resync(self, peer: Peer, held: Sequence[int], leases_seen: int) -> None:
        """The peer, which goes on with its epoch and has sent again what was not known, holds just these. Errors close it."""
        if self._peer is not peer:
            return
        try:
            txn = self._begin()
            result = self._engine.resync(txn, peer.epoch, held)
            self._set_aside(result)
            self._answers.keep(txn, result, 0)
            self._note_depths(txn, result)
        except Exception as error:
            self._abort(error)
            return
        # Only the scheduler knows which leases arrived; those that did not are said again, and are under way again.
        self._credit = CreditLine(leases_seen + len(result.leases))
        self._synced = True
        self._leases_lost = False
        self._push(result)
        self._touch(1)
        self._wake()

    def unheard(self, answered: int, last_seq: int, heard: int) -> Iterator[Answer]:
        """What a peer that goes on with its epoch has not heard, in order; empty where nothing was kept."""
        yield from self._answers.unheard(self._begin(), answered, last_seq, heard)

    def held(self) -> int:
        """Tasks held by schedulers of this epoch and earlier ones."""
        return self._begin().count(Table.HOLDS)

    def detach(self, peer: Peer) -> None:
        """The Session is gone; the epoch stays. Nothing is leased until it comes back."""
        if self._peer is peer:
            self._peer = None
        self._wake()

    def batch(self, peer: Peer, seq: int, commands: Sequence[c.Command], heard: int = 0) -> None:
        """Apply and answer. Errors close the peer."""
        if self._peer is not peer:
            return  # it was replaced, or closed by a failed commit, while this was in its stream
        if seq == 0:
            self._close_peer(InvalidRequest("a batch of a Session is numbered from 1"))
            return
        try:
            txn = self._begin()
            result, refused = self._engine.apply(txn, peer.epoch, seq, commands)
            for command in reversed(commands):
                if type(command) is c.Credit:
                    self._credit.renew(command)
                    break
            result.busy = txn.count(Table.TODO) > 0
            more = self._lease(txn, result) or result.busy or self._engine.may_grow(txn)
            self._set_aside(result)
            self._answers.heard(txn, heard)
            self._answers.keep(txn, result, seq, refused)
        except Exception as error:
            self._abort(error)
            return
        self._seq = seq
        if self._restoring:
            self._restoring, more = False, True
        self._note_depths(txn, result)
        self._told_queued = result.queued
        peer.push(result, seq, refused)
        if more:
            self._wake()
        self._touch(len(commands))

    def _lease(self, txn: WriteTxn, result: c.Result) -> bool:
        ready, total = self._credit.room()
        # Look-ahead is never given in the place of ready tasks that there are not: a chain would come in whole.
        ready = min(ready, txn.count(Table.READY))
        total = max(total, ready)
        if self._peer is None or not self._synced or total <= 0:
            return False
        leases, more = self._engine.lease(txn, ready, total)
        self._credit.spend(len(leases))
        result.leases.extend(leases)
        return more or len(leases) == LEASES_SLICE_MAX

    # --------------------------------------------------------------------------------------------------- the Ingest

    def ingest(self, epoch: int, command: c.BeginGraph | c.AddTasks | c.AddRule | c.SealGraph) -> tuple[list[c.Added], bool]:
        """Apply one command of an Ingest stream; it is on disk on return. What concerns the scheduler is pushed to it.

        Returns what was added, and whether the submission is sealed. Raises what it was refused with, StaleEpoch, StoreFull, Unavailable.
        """

        def apply(txn: WriteTxn) -> tuple[c.Result, tuple[list[c.Added], list[Refused], bool]]:
            result, refused = self._engine.apply(txn, epoch, 0, [command])
            if type(command) is c.BeginGraph:
                self._unsealed.goes_on(command.submission)
            added, result.added = result.added, []
            return result, (added, refused, is_sealed(txn, command.submission))

        added, refused, sealed = self._alone(apply)
        self._restoring = False  # who sends graphs has restored
        self._slice()
        if refused:
            _, _, kind, message = refused[0]
            raise from_kind(kind, message)
        return added, sealed

    def _alone(self, apply: Callable[[WriteTxn], tuple[c.Result, T]]) -> T:
        """In a transaction of its own; what concerns the scheduler is pushed to it. Raises what `apply` does, StoreFull, Unavailable."""
        self.flush()
        self._check_open()
        try:
            result, found = apply(txn := self._begin())
            self._note_depths(txn, result)
            self._set_aside(result)
            self._answers.keep(txn, result, 0)
            self._commit()
        except Exception as error:
            raise self._explain(error) from error
        self._push(result)
        return found

    def spooled(self, commands: Sequence[c.Command]) -> list[Place]:
        """Runs to `carry` out, in this order, before these commands."""
        return [] if self._closed else self._engine.spooled(self._begin(), commands)

    def carry(self, place: Place) -> None:
        """Carry out a spooled run, unless that was done meanwhile. Raises StoreFull, Unavailable."""
        self._alone(lambda txn: (self._engine.carry(txn, place), None))
        self._wake()

    def added(self, submission: str) -> int:
        """Tasks of an open submission that are there."""
        txn = self._begin()
        return tasks_added(txn, submission) if is_open(txn, submission) else 0

    def ended(self, epoch: int, submission: str) -> None:
        """Its stream ended before seal."""
        self._unsealed.ended(epoch, submission)

    # --------------------------------------------------------------------------------------------------- background

    def start(self) -> None:
        """Take up what an earlier life left to do."""
        self._begin()
        self._commit()
        self._wake()

    def prune(self, submissions: Sequence[str], history_before: float) -> None:
        """Forget graphs, and the history of before a time, in slices. What is to be done is on disk on return. Raises Unavailable."""
        self.flush()
        self._check_open()
        try:
            self._engine.prune(self._begin(), submissions)
            self._commit()
        except Exception as error:
            raise self._explain(error) from error
        if self.recorder is not None:
            self.recorder.forget_before = max(self.recorder.forget_before, history_before)
        self._wake()

    def _wake(self, delay_seconds: float = 0.0) -> None:
        if self._slice_handle is None and not self._closed:
            if delay_seconds:
                self._slice_handle = self._loop.call_later(delay_seconds, self._slice)
            else:
                self._slice_handle = self._loop.call_soon(self._slice)

    def _slice(self) -> None:
        if self._slice_handle is not None:
            self._slice_handle.cancel()
            self._slice_handle = None
        if self._closed or (self._restoring and self._peer is not None):
            return
        if self._peer is not None and self._peer.backlog >= BACKLOG_MAX:
            # What it waits for would stand behind all that this tells it.
            self._wake(PAUSE_SECONDS)
            return
        result = c.Result()
        stop = time.perf_counter() + SLICE_SECONDS_MAX
        due = dict(self._unsealed.due)
        try:
            txn = self._begin()
            if due:
                merge(result, self._unsealed.abort(self._engine, txn))
            more = True
            while more and time.perf_counter() < stop:
                done, more = self._engine.step(txn, STEP_ITEMS_SLICE)
                merge(result, done)
            growing = not more and self._peer is not None
            while growing and time.perf_counter() < stop:
                done, growing = self._grow(txn)
                merge(result, done)
            more = more or growing or (self.recorder is not None and self.recorder.step(txn))
            more = self._lease(txn, result) or more
            self._set_aside(result)
            self._answers.keep(txn, result, 0)
            self._note_depths(txn, result)
        except Exception as error:
            self._unsealed.due.update(due)
            self._abort(error)
            self._wake(RETRY_SECONDS)
            return
        pause = PAUSE_SECONDS if self._peer is not None and self._engine.pruning(txn) else 0.0
        self._push(result)
        self._touch(1)
        if more:
            self._wake(pause)

    def _grow(self, txn: WriteTxn) -> tuple[c.Result, bool]:
        """Make more tasks of rules, if they may soon be asked for and there is room."""
        try:
            return self._engine.grow(txn)
        except NoRoom as error:
            if not self._full:
                logger.warning("graphs are held up: %s", error)
            self._full = True
            return c.Result(), False

    def _note_depths(self, txn: ReadTxn, result: c.Result) -> None:
        result.ready = txn.count(Table.READY)
        result.queued = result.ready + txn.count(Table.AHEAD)
        self._depths = result.queued, result.ready
        if self.recorder is not None:
            self.recorder.note(txn)
        self.counters.answered(result)

    def _push(self, result: c.Result) -> None:
        """To the scheduler, if there is anything to tell; that there is work on disk, or no more, is."""
        if self._peer is not None and (result or bool(result.queued) != bool(self._told_queued)):
            self._told_queued = result.queued
            self._peer.push(result, 0, ())

    def _set_aside(self, result: c.Result) -> None:
        """What was forgotten goes with the commit: nobody waits for that."""
        for x in result.forgotten:
            self._forgotten[x.submission, x.group] += x.count
        result.forgotten = []

    def _counts(self, txn: WriteTxn) -> c.Result | None:
        if not self._forgotten:
            return None
        result = c.Result(queued=self._depths[0], ready=self._depths[1])
        result.forgotten = [c.GroupCount(submission, group, count) for (submission, group), count in self._forgotten.items()]
        self._forgotten.clear()
        self._answers.keep(txn, result, 0)
        return result

    # ----------------------------------------------------------------------------------------------------- committing

    def _begin(self) -> WriteTxn:
        if self._txn is None:
            self._txn = self._store.write()
            if self._dropped:
                # Ids it told are the scheduler's: they must not come true for other tasks.
                self._dropped = False
                self._engine.opened(self._txn)
                self._answers.opened(self._txn)
        return self._txn

    def _check_open(self) -> None:
        if self._closed:
            raise Unavailable("daemon is shutting down")

    def _touch(self, count: int) -> None:
        self._uncommitted += count
        if self._uncommitted >= self._commands_max:
            self.flush()
        elif self._commit_timer is None:
            self._commit_timer = self._loop.call_later(self._commit_seconds, self.flush)

    def flush(self) -> None:
        """Commit what is applied and say Durable. If that fails the Session is closed; the state is that of the last commit."""
        if self._txn is None:
            return
        try:
            self._commit()
        except Exception as error:
            self._abort(error)

    def _commit(self) -> None:
        self._stop_timer()
        txn = self._txn
        assert txn is not None
        began = time.perf_counter()
        counts = self._counts(txn)
        if self.recorder is not None:
            self.recorder.write(txn)
        txn.commit()
        self._txn = None
        self._uncommitted = 0
        self.counters.committed(time.perf_counter() - began)
        seq, self._seq = self._seq, 0
        if self._peer is not None:
            if counts is not None:
                self._peer.push(counts, 0, ())
            if seq:
                self._peer.durable(seq)

    def _stop_timer(self) -> None:
        if self._commit_timer is not None:
            self._commit_timer.cancel()
            self._commit_timer = None

    def _explain(self, error: Exception) -> TaskDBError:
        """An error of a transaction that held no batch: drop it and tell the caller; the Session goes on, unless it is fatal."""
        if is_fatal(error):
            self._fatal(error)
            return Unavailable("the daemon stops: see its log")
        self._drop()
        assert isinstance(error, TaskDBError)
        return error

    def _abort(self, error: BaseException) -> None:
        """An error of a transaction that held batches: they never happened, so the Session must come again."""
        if is_fatal(error):
            self._fatal(error)
            return
        self._drop()
        logger.warning("transaction dropped: %s", error)
        if isinstance(error, InvalidRequest | LimitExceeded | StaleEpoch | Unavailable):
            self._close_peer(error)
        else:
            self._close_peer(Unavailable(f"not written, send again: {error}"))

    def _fatal(self, error: BaseException) -> None:
        if isinstance(error, Exception):
            error = explained(error)
        self._drop()
        self._close_peer(Unavailable("the daemon stops: see its log"))
        self._on_fatal(error)

    def _drop(self) -> None:
        self._stop_timer()
        txn, self._txn = self._txn, None
        self._uncommitted = 0
        self._seq = 0
        self._dropped = self._leases_lost = True
        self._forgotten.clear()
        if self.recorder is not None:
            self.recorder.dropped()
        if txn is not None:
            self.counters.dropped += 1
            txn.abort()

    def _close_peer(self, error: TaskDBError) -> None:
        peer, self._peer = self._peer, None
        if peer is not None:
            peer.end(error)

    def close(self) -> None:
        """Commit, close the Session with Unavailable, take no more."""
        if self._closed:
            return
        self.flush()
        self._closed = True
        self._unsealed.close()
        self._drop()
        if self._slice_handle is not None:
            self._slice_handle.cancel()
        self._close_peer(Unavailable("daemon is shutting down"))
