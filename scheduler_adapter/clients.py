"""What clients say, apart from submitting: wants, cancel, retry, data, disconnect, restart. Routes it to stock, to the database, or both.

Every message of a client goes through its inbox, so that it takes effect in order though a graph before it is still arriving; cancel
and disconnect overtake.
"""

from __future__ import annotations

import functools
import inspect
import logging
import uuid
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any

from distributed.scheduler import Scheduler

from scheduler_adapter import dask_cold
from scheduler_adapter import dask_internals as internals
from scheduler_adapter.inbox import Inbox, Message
from scheduler_adapter.keys import pack_keys, unpack_key
from scheduler_adapter.outbox import FIRE_AND_FORGET
from scheduler_adapter.pager import Pager
from scheduler_adapter.returning import Returning
from scheduler_adapter.submissions import Submitter
from scheduler_adapter.submitted import Submission
from scheduler_adapter.window import Resident
from taskdb.commands import (
    AddTasks,
    BeginGraph,
    Cancel,
    Cancelled,
    DropClient,
    Retry,
    SealGraph,
    Unwant,
    Want,
)
from taskdb.model import Level, TaskFlag

logger = logging.getLogger("distributed.taskdb")
#: What `Client.get_scheduler_logs` shows.
scheduler_logger = logging.getLogger("distributed.scheduler")
#: Cancelled keys that are named in it at once.
LOGGED_KEYS_MAX = 100

#: Messages that neither change nor read tasks: they do not wait behind a graph.
_PASS = {"heartbeat-client", "subscribe-topic", "unsubscribe-topic"}
#: Messages that take effect though their client is gone: a Variable or Queue waits for them.
_RECEIPTS = {"variable-future-received-confirm", "queue-future-release"}
#: Messages that overtake.
_OVERTAKE = {"cancel-keys", "close-client"}


@dataclass
class Cancelling:
    """Of what is cancelled meanwhile a client is not told these keys: it would take the word for its new futures'."""

    #: Named in its cancels, how often: it knows of these itself.
    named: Counter[Any] = field(default_factory=Counter)
    #: Submitted since.
    again: set[Any] = field(default_factory=set)


class Clients:
    def __init__(self, scheduler: Scheduler, pager: Pager, submitter: Submitter, returning: Returning, undo: internals.Undo):
        self.scheduler = scheduler
        self.pager = pager
        self.submitter = submitter
        self.returning = returning
        self.inboxes: dict[str, Inbox] = {}
        returning.on_gone = self.remove
        returning.busy = lambda client: (inbox := self.inboxes.get(client)) is not None and not inbox.idle
        self._cancel_words: tuple[str, str] = ("", "")
        #: By client, while cancels of it are carried out.
        self._cancelling: dict[str, Cancelling] = {}
        pager.on_cancelled = self._cancelled
        submitter.arrivals.submits_again = self._submits_again
        self._install(undo)

    def _install(self, undo: internals.Undo) -> None:
        s = self.scheduler
        self._stock = {
            name: getattr(s, name)
            for name in ("client_desires_keys", "client_releases_keys", "remove_client", "update_data", "restart", "stimulus_retry")
        }
        streams = s.stream_handlers
        ours: dict[str, Callable[..., Any]] = {
            "update-graph": self.submitter.take,
            "client-desires-keys": self.desires,
            "client-releases-keys": self.releases,
            "cancel-keys": self.cancel,
            "close-client": self.close,
            "update-data": self.update_data,
            "report-key": self.report_key,
        }
        client_ops = set(ours) | {
            op for op, handler in streams.items() if op not in ours and "client" in inspect.signature(handler).parameters
        }
        for op in client_ops - _PASS:
            handler = ours.get(op, streams.get(op))
            if op in _OVERTAKE:
                undo.set_item(streams, op, handler)
            else:
                undo.set_item(streams, op, functools.partial(self._receive, op, handler))
        for name, method in {
            "client_desires_keys": self.desires,
            "client_releases_keys": self.releases,
            "remove_client": self.remove,
            "update_data": self.update_data,
            "restart": self.restart,
            "stimulus_cancel": self.cancel,
        }.items():
            undo.set_attr(s, name, method)
        undo.set_item(s.handlers, "update_data", self.update_data)
        undo.set_item(s.handlers, "restart", self.restart)
        undo.set_item(s.handlers, "retry", self.retry)

    # ------------------------------------------------------------------------------------------------------ the inbox

    def _receive(
        self,
        op: str,
        handler: Callable[..., Any],
        client: str,
        taskdb_number: int = 0,
        taskdb_sender: str = "",
        **kwargs: Any,
    ) -> None:
        """`taskdb_number`: see `returning.py`. `taskdb_sender`: who says it, if `client` is somebody else."""
        inbox = self.inboxes.get(taskdb_sender or client)
        if client == FIRE_AND_FORGET and not taskdb_sender:
            # The message names no sender: it belongs behind the graph that brings its keys.
            wanted = set(kwargs.get("keys", ()))
            for other in self.inboxes.values():
                if any(m.op == "update-graph" and wanted & set(m.kwargs["keys"]) for m in other.waiting()):
                    inbox = other
        if inbox is None:
            inbox = self.inboxes[taskdb_sender or client] = Inbox(self._failed)
        if op == "update-graph":
            kwargs["taskdb_number"] = taskdb_number
            if client in self._cancelling:
                self._cancelling[client].again.update(kwargs["keys"])
        message = Message(op, handler, {"client": client, **kwargs})
        try:
            inbox.put(message)
        except Exception as e:
            if not taskdb_number:
                raise
            # The client would come back, and say it again.
            self._failed(message, e)
        self._handled(inbox, taskdb_sender or client, taskdb_number)

    def _handled(self, inbox: Inbox | None, client: str, number: int) -> None:
        """All that was put into the inbox so far takes effect; then the client may know."""
        if not number:
            return
        if inbox is None:
            self.returning.handled(client, number)
        else:
            inbox.put(Message("taskdb-handled", self.returning.handled, {"client": client, "number": number}))

    def _failed(self, message: Message, error: Exception) -> None:
        logger.error("message %s of client %s failed", message.op, message.kwargs.get("client"), exc_info=error)

    # ---------------------------------------------------------------------------------------------------------- wants

    def desires(self, keys: Collection[Any], client: str) -> None:
        """`client-desires-keys`, also for keys on disk."""
        keys = list(keys)
        if client == FIRE_AND_FORGET:
            # What is done already would be wanted for ever.
            keys = [k for k in keys if not self._done(k)]
            self.pager.fire_and_forget.update(keys)
            # Nobody else may want these. A result is kept until the database has heard of it, or a crash would make it run again.
            for key in keys:
                if key in self.scheduler.tasks:
                    internals.hold(self.scheduler.tasks[key], self.pager.residency.holder)
        internals.ensure_client_state(self.scheduler, client)
        self.submitter.wants.resident(keys, client)
        self.pager.send(Want(client, pack_keys(keys)))

    def _done(self, key: Any) -> bool:
        ts = self.scheduler.tasks.get(key)
        return key in self.pager.cooling if ts is None else ts.state in ("memory", "erred")

    def releases(self, keys: Collection[Any], client: str, stimulus_id: str | None = None) -> None:
        """`client-releases-keys`, also for keys on disk."""
        keys = list(keys)
        self._stock["client_releases_keys"](keys=keys, client=client, stimulus_id=stimulus_id)
        self.pager.cooling.unwant(client, keys)
        if keys:
            self.returning.released(client, keys)
            self.pager.residency.needed_less(keys)
            self.pager.send(Unwant(client, pack_keys(keys)))

    def report_key(self, key: Any, client: str) -> None:
        """`report-key`: stock says `cancelled` of a key it does not hold; the database may have it."""
        ts = self.scheduler.tasks.get(key)
        if ts is not None:
            self.scheduler.report_on_key(ts=ts, client=client)
        elif key in self.pager.cooling:
            dask_cold.tell_in_memory(self.scheduler, key, client)
        else:
            internals.in_background(self.scheduler, self._report_unknown, key, client)

    async def _report_unknown(self, key: Any, client: str) -> None:
        (want,) = await self.pager.want(client, [key])
        if want.state is None:
            self.scheduler.client_send(client, {"op": "cancelled-keys", "keys": [key]})

    # --------------------------------------------------------------------------------------------------------- cancel

    def cancel(self, keys: Collection[Any], client: str, force: bool, reason: str = "", msg: str = "", taskdb_number: int = 0) -> None:
        """`cancel-keys`. The database knows all that depends on a key, so it says what is cancelled; stock's walk knows residents only."""
        keys = list(keys)
        scheduler_logger.info("Client %s requests to cancel %d keys", client, len(keys))
        self.scheduler.log_event(client, {"action": "cancel", "count": len(keys), "force": force})
        if client not in self.scheduler.clients:
            return
        self._cancel_words = reason, msg
        command = Cancel(client, pack_keys(keys), force)
        self.pager.send(command, urgent=True)
        self._cancelling.setdefault(client, Cancelling()).named.update(keys)
        inbox = self.inboxes.setdefault(client, Inbox(self._failed))
        if not inbox.idle:
            self._cancel_on_its_way(command, keys, inbox)
        inbox.put(Message("taskdb-cancelled", self._until_cancelled, {"client": client, "keys": keys}))
        self._handled(inbox, client, taskdb_number)

    def cancel_for_all(self, keys: list[Any]) -> int:
        """As if every client that wants them cancelled them, by force. Returns their number."""
        self._cancel_words = "cancelled by an operator", ""
        command = Cancel("", pack_keys(keys), True)
        self.pager.send(command, urgent=True)
        for inbox in self.inboxes.values():
            if not inbox.idle:
                self._cancel_on_its_way(command, keys, inbox)
        return len(keys)

    async def _until_cancelled(self, client: str, keys: Collection[Any]) -> None:
        """What the client says next waits: names it submits again are new tasks."""
        await self.pager.carried_out()
        if client in self._cancelling:
            self._cancelling[client].named.subtract(Counter(keys))
            if not any(self._cancelling[client].named.values()):
                del self._cancelling[client]

    def _cancel_on_its_way(self, command: Cancel, keys: Collection[Any], inbox: Inbox) -> None:
        """What is cancelled of a graph before it has come is not submitted at all; and once all is there, the cancel is said again, for
        what depends on the keys."""
        cancelled = set(keys)
        for message in inbox.waiting():
            if message.op == "update-graph" and (hit := cancelled & set(message.kwargs["keys"])) and hit == set(message.kwargs["keys"]):
                inbox.drop(message)
                self._tell_cancelled(list(hit))
        inbox.put(Message("cancel-keys", lambda client: self.pager.send(command, urgent=True), {"client": command.client}))

    def _cancelled(self, cancelled: list[Cancelled]) -> None:
        """The database has ended these wants; do so here, and tell."""
        keys = [unpack_key(c.key) for c in cancelled]
        holder = self.pager.residency.holder
        by_client: dict[Any, list[Any]] = {}
        for key in keys:
            ts = self.scheduler.tasks.get(key)
            if ts is not None:
                for cs in ts.who_wants or ():
                    if cs is not holder:
                        by_client.setdefault(cs, []).append(key)
        for cs, theirs in by_client.items():
            internals.release_wants(self.scheduler, theirs, cs, "taskdb-cancel")
        self.pager.cooling.unwant_all(keys)
        self._tell_cancelled(keys)

    def _tell_cancelled(self, keys: list[Any]) -> None:
        reason, msg = self._cancel_words
        for key in keys[:LOGGED_KEYS_MAX]:
            scheduler_logger.info("Scheduler cancels key %s", key)
        if len(keys) > LOGGED_KEYS_MAX:
            scheduler_logger.info("Scheduler cancels %d keys more", len(keys) - LOGGED_KEYS_MAX)
        for client in internals.clients_listening(self.scheduler):
            cancelling = self._cancelling.get(client)
            theirs = keys
            if cancelling is not None:
                theirs = [key for key in keys if not cancelling.named[key] and key not in cancelling.again]
            if theirs:
                self.scheduler.client_send(client, {"op": "cancelled-keys", "keys": theirs, "reason": reason, "msg": msg})

    def _submits_again(self, client: str) -> Collection[Any]:
        cancelling = self._cancelling.get(client)
        return () if cancelling is None else cancelling.again

    # ---------------------------------------------------------------------------------------------------------- retry

    def retry(self, keys: Collection[Any], client: str | None = None) -> tuple[Any, ...]:
        """`retry`. Followed tasks are stock's; the database starts the others again, from those that failed themselves.

        The client takes what is returned for pending. So only what failed is: a result that is under way already would be overlooked. And
        the answer goes out at once, before any new result can.
        """
        failed = self._failed_of(keys)
        followed, paged = self._retried_by(failed)
        if followed:
            self._stock["stimulus_retry"](keys=followed, client=client)
        if paged:
            if client:
                for key in paged:
                    self.scheduler.client_send(client, {"op": "task-retried", "key": key})
            self.pager.send(Retry(pack_keys(paged)), urgent=True)
        return tuple(failed)

    def retry_for_all(self, keys: list[Any]) -> int:
        """As if every client retried them. Returns the number of those that have failed, as far as is known here."""
        failed = self._failed_of(keys)
        followed, paged = self._retried_by(failed)
        if followed:
            # Stock tells the clients that want them.
            self._stock["stimulus_retry"](keys=followed)
        for key in paged:
            # To all: who does not have it does not mind.
            for client in internals.clients_listening(self.scheduler):
                self.scheduler.client_send(client, {"op": "task-retried", "key": key})
        if paged:
            self.pager.send(Retry(pack_keys(paged)), urgent=True)
        return len(failed)

    def _failed_of(self, keys: Collection[Any]) -> list[Any]:
        """Those that have failed; of what is on disk only the database knows."""
        tasks, cooling = self.scheduler.tasks, self.pager.cooling
        return [key for key in keys if (key not in cooling if (ts := tasks.get(key)) is None else ts.state == "erred")]

    def _retried_by(self, failed: list[Any]) -> tuple[list[Any], list[Any]]:
        """Of failed tasks: those that stock can retry, and those that the database has to."""
        followed, paged = [], []
        for key in failed:
            resident = self.pager.window.by_key.get(key)
            if resident is not None and not resident.paged and not _any_paged_below(self.pager, resident):
                followed.append(key)
            else:
                paged.append(key)
        return followed, paged

    # ----------------------------------------------------------------------------------------------------------- data

    def update_data(self, *, who_has: dict[Any, list[str]], nbytes: dict[Any, int], client: str | None = None) -> None:
        """Scattered data: the database must know of it, for graphs that use it."""
        self.pager.cooling.warm(who_has)
        new = [key for key in who_has if self.pager.window.by_key.get(key) is None]
        self._stock["update_data"](who_has=who_has, nbytes=nbytes, client=None)
        if new:
            self._register_data(new, client)
        if client:
            self.returning.scattered(client, who_has)
            self.desires(list(who_has), client)

    def _register_data(self, keys: list[Any], client: str | None) -> None:
        name = f"data-{uuid.uuid4().hex}"
        submission = Submission(name, client or "", followed=True, sealed=True)
        self.pager.residency.begins(submission)
        residents: list[Resident | None] = []
        for key in keys:
            resident = Resident(key, 0, self.scheduler.tasks[key], paged=False, told=Level.HELD, submission=name)
            self.pager.window.add(resident)
            self.pager.window.changed[resident] = None
            residents.append(resident)
        flags = int(TaskFlag.DATA | TaskFlag.HELD)
        run = AddTasks(name, 0, pack_keys(keys), flags=[flags] * len(keys), new_groups=["data"])
        self.submitter.arrivals.expect(submission, run, residents, set(keys), [])
        # Wanted in the same breath, or the database would forget it at once.
        wants = [Want(client, run.keys)] if client else []
        self.pager.send(BeginGraph(name, client or "", 0.0, 0.0, "scatter"), run, *wants, SealGraph(name))

    # ---------------------------------------------------------------------------------------------- disconnect, restart

    def close(self, client: str) -> None:
        """`close-client`: it will not come back."""
        self.returning.leaves(client)
        self.remove(client)

    def remove(self, client: str, stimulus_id: str | None = None) -> None:
        """A client is gone. Overtakes: its graphs still arriving are stopped, but for those it left to fire-and-forget."""
        if self.returning.may_return(client):
            return
        inbox = self.inboxes.get(client)
        if inbox is None or inbox.idle:
            self._remove_now(client, stimulus_id)
        elif any(m.op == "close-client" for m in inbox.waiting()):
            pass  # it is on its way out; stock says it twice
        elif any(m.op == "client-desires-keys" and m.kwargs["client"] == FIRE_AND_FORGET for m in inbox.waiting()):
            # It leaves work behind that may build on anything it sent: finish in order, then leave.
            inbox.put(Message("close-client", self._remove_now, {"client": client, "stimulus_id": stimulus_id}))
        elif receipts := [m for m in inbox.waiting() if m.op in _RECEIPTS]:
            inbox.stop()
            for message in (*receipts, Message("close-client", self._remove_now, {"client": client, "stimulus_id": stimulus_id})):
                inbox.put(message)
        else:
            inbox.stop()
            self._remove_now(client, stimulus_id)

    def _remove_now(self, client: str, stimulus_id: str | None = None) -> None:
        self.inboxes.pop(client, None)
        self._cancelling.pop(client, None)
        cs = self.scheduler.clients.get(client)
        keys = [ts.key for ts in cs.wants_what] if cs is not None else []
        self._stock["remove_client"](client=client, stimulus_id=stimulus_id)
        self.pager.cooling.table.drop_client(client)
        self.pager.residency.needed_less(keys)
        self.pager.send(DropClient(client))
        self.returning.forget(client)

    async def restart(self, **kwargs: Any) -> None:
        """`restart`: forget all tasks, here and on disk, then restart workers as stock does."""
        for inbox in self.inboxes.values():
            inbox.stop()
        self._cancelling.clear()
        pager = self.pager
        names = [c for c in self.scheduler.clients if c != FIRE_AND_FORGET]
        pager.send(*[DropClient(name) for name in (*names, FIRE_AND_FORGET)])
        internals.forget_held(self.scheduler, pager.residency.holder, [r for r in pager.window.by_key.values() if r.task is not None])
        await self._stock["restart"](**kwargs)
        await pager.answered()


def _any_paged_below(pager: Pager, resident: Resident) -> bool:
    """Whether the failure of a followed task comes from one that stock's walk would not reach."""
    blame = resident.task.exception_blame
    if blame is None or resident.task.has_lost_dependencies:
        return True
    other = pager.window.by_key.get(blame.key)
    return other is None or other.paged
