"""The client preload: a client outlives its scheduler. Its futures stay as they are, and what it says meanwhile is kept for the next one.

`distributed.client.preload: [scheduler_adapter.client]` in Dask's config. With a scheduler that does not keep its tasks in taskdb it stays
out of the way. `future` and `futures` find results again by key; they need no preload.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterable
from typing import Any

import dask
from distributed import Client, Future
from distributed.core import CommClosedError

from scheduler_adapter import dask_client as internals
from scheduler_adapter.config import scheduler_return_seconds
from scheduler_adapter.dask_client import Call, NotAnswered, NotConnected
from scheduler_adapter.outbox import Outbox, Words
from scheduler_adapter.supported import check_supported

logger = logging.getLogger("distributed.taskdb")

#: What this client and the scheduler say to each other beyond stock.
PROTOCOL = 1
#: Pauses between attempts to find the scheduler.
PAUSE_SECONDS_MIN = 0.1
PAUSE_SECONDS_MAX = 2.0
#: How long is waited for the answer who is there. Short: inside it Dask tries to connect at ever longer intervals.
QUESTION_SECONDS = 3.0
#: How long registering may take, and a scheduler to take in what was said to it before the stream broke.
ATTEMPT_SECONDS = 10.0
#: How long a scheduler without taskdb must have been there until it is taken for the one that came back; one that closes is without, too.
WITHOUT_SECONDS = 10.0
#: A call may fail before the stream is seen to be broken; so long it is waited for that.
NOTICED_SECONDS = 1.0
#: How long, at most, a client that closes waits until the scheduler has the work it leaves behind.
LEAVES_SECONDS_MAX = 20.0
#: Calls that change nothing, so they can be made again.
READS = {
    "adaptive_target",
    "call_stack",
    "event_is_set",
    "event_wait",
    "events",
    "gather",
    "get_cluster_state",
    "get_error_cause",
    "get_logs",
    "get_metadata",
    "get_runspec",
    "get_story",
    "get_task_prefix_states",
    "get_task_status",
    "get_task_stream",
    "has_what",
    "identity",
    "logs",
    "nbytes",
    "ncores",
    "ncores_running",
    "performance_report",
    "processing",
    "profile",
    "publish_get",
    "publish_list",
    "queue_qsize",
    "taskdb",
    "variable_get",
    "versions",
    "who_has",
    "worker_logs",
}


class SchedulerLost(CommClosedError):
    """A call to the scheduler failed because the scheduler went away."""


async def dask_setup(client: Client) -> None:
    check_supported()
    await Survivor(client).start()


async def dask_teardown(client: Client) -> None:
    survivor: Survivor | None = getattr(client, "taskdb", None)
    if survivor is not None:
        await survivor.leaves()
        survivor.end("the client is being closed")


class Survivor:
    """One client's side of it: `client.taskdb`. Everything runs on the client's loop."""

    def __init__(self, client: Client):
        self.client = client
        self._limit_seconds = scheduler_return_seconds()
        self.outbox = Outbox(client.id)
        #: Epoch of the scheduler it is, or was last, connected to; 0: one without taskdb, and stock behaviour.
        self.epoch = 0
        #: The store that epoch is of.
        self.store = ""
        #: There is a stream, and the scheduler has been told everything.
        self._live = True
        #: Schedulers it has been connected to.
        self._lives = 1
        self._changed = asyncio.Event()
        #: Set when something is acknowledged, or the stream breaks.
        self._told = asyncio.Event()
        #: Why no scheduler is waited for any more.
        self._ended = ""

    async def start(self) -> None:
        """Called when the client is connected for the first time, before it reads its stream."""
        client = self.client
        answer = await self._question()
        if answer is None:
            return
        self.epoch, self.store = int(answer["epoch"]), str(answer["store"])
        self._stock_send = internals.replace_send(client, self._send)
        self._stock_reconnect = internals.replace_reconnect(client, self._reconnect)
        internals.on_message(client, "taskdb-acknowledged", self._acknowledged)
        internals.make_patient(client, self._patience)
        client.taskdb = self

    async def _question(self) -> dict[str, Any] | None:
        """What the scheduler says of itself; None if it does not keep its tasks in taskdb. Raises OSError, TimeoutError."""
        async with asyncio.timeout(QUESTION_SECONDS):
            there = await internals.has_taskdb(self.client)
        if not there:
            return None
        async with asyncio.timeout(ATTEMPT_SECONDS):
            answer = await internals.ask_taskdb(self.client)
        return answer if isinstance(answer, dict) and answer.get("protocol") == PROTOCOL else None

    def end(self, reason: str) -> None:
        """Stock behaviour from now on; whoever waits for the scheduler hears why it waits no longer."""
        self.epoch = 0
        self._ended = reason
        self.outbox.clear()
        self._changed.set()

    # --------------------------------------------------------------------------------------------------------- talking

    async def leaves(self) -> None:
        """Before the stream ends: with it all that is still on its way would be lost, and nobody else can say it again."""
        self._told.clear()
        try:
            async with asyncio.timeout(LEAVES_SECONDS_MAX):
                while self._live and self.outbox.leaves_work:
                    await self._told.wait()
                    self._told.clear()
        except TimeoutError:
            logger.warning("taskdb: the scheduler did not say that it has all fire-and-forget work; this client closes all the same")

    def _acknowledged(self, number: int) -> None:
        self.outbox.acknowledged(number)
        self._told.set()

    def _send(self, message: Words) -> None:
        """In the place of `Client._send_to_scheduler_safe`."""
        if not self.epoch or not internals.is_open(self.client):
            self._stock_send(message)
        elif not self._live:
            self.outbox.take(message, live=False)
        else:
            message = self.outbox.take(message, live=True)
            try:
                internals.say(self.client, message)
            except CommClosedError:  # the reader notices presently
                self.outbox.unsaid(message)

    # ------------------------------------------------------------------------------------------------------- returning

    async def _reconnect(self) -> None:
        """In the place of `Client._reconnect`: wait for a scheduler, and go on with it."""
        client = self.client
        if not self.epoch:
            await self._stock_reconnect()
            return
        self._live = False
        self._told.set()
        self._changed.clear()
        limit = self._limit_seconds
        logger.warning(
            "taskdb: lost the scheduler at %s; %d futures stay as they are, for %.0f s, until one is back",
            client.scheduler.address,
            len(client.futures),
            limit,
        )
        problem: object = "its cluster was closed"
        without_since = 0.0
        deadline = time.monotonic() + limit
        pause = PAUSE_SECONDS_MIN
        while internals.is_open(client) and not internals.has_closed_cluster(client):
            internals.lost(client)
            try:
                internals.move_to(client, internals.address_now(client, dask.config.get("taskdb.scheduler-file")))
                answer = await self._question()
                if answer is not None:
                    await self._go_on(answer)
                    return
                without_since = without_since or time.monotonic()
                if time.monotonic() - without_since >= WITHOUT_SECONDS:
                    await self._go_on_as_stock()
                    return
                problem = "the one there does not keep its tasks in taskdb"
            except ImportError as e:
                problem = e
                break
            except Exception as e:  # mostly OSError: nobody is there
                logger.debug("the scheduler is not back", exc_info=True)
                problem, without_since = repr(e), 0.0
            if time.monotonic() + pause > deadline:
                break
            await asyncio.sleep(pause)
            pause = min(2 * pause, PAUSE_SECONDS_MAX)
        await self._give_up(f"no scheduler came back within {limit:.0f} s ({problem})")

    async def _go_on(self, answer: dict[str, Any]) -> None:
        """Register with the scheduler, and tell it what it cannot know. Raises OSError, TimeoutError, ImportError."""
        client = self.client
        epoch, store = int(answer["epoch"]), str(answer["store"])
        if store != self.store:
            logger.error("taskdb: the scheduler that is back has another store: futures of tasks that are not in it are cancelled")
        elif epoch < self.epoch:
            raise OSError(f"the scheduler there is an older one (epoch {epoch}, not {self.epoch} or later)")
        await internals.connect(client, ATTEMPT_SECONDS)
        self.outbox.acknowledged(int(answer["received"]))
        keys = await internals.wanted_keys(client)
        # IMPORTANT: from here on nothing is awaited, so nothing is said between.
        keys |= self.outbox.submitted_keys()
        wanted = internals.still_wanted(client, keys)
        first, rest = self.outbox.again(wanted)
        internals.say(client, *first, {"op": "taskdb-restate", "keys": wanted}, *rest)
        internals.say(client, *({"op": "subscribe-topic", "topic": topic, "client": client.id} for topic in internals.topics(client)))
        self.epoch, self.store = epoch, store
        self._live = True
        self._lives += 1
        self._changed.set()
        logger.warning(
            "taskdb: the scheduler is back at %s (epoch %d); it was told of %d futures, and %d messages again",
            client.scheduler.address,
            self.epoch,
            len(wanted),
            len(first) + len(rest),
        )

    async def _go_on_as_stock(self) -> None:
        client = self.client
        await internals.connect(client, ATTEMPT_SECONDS)
        self.end("the scheduler there does not keep its tasks in taskdb")
        self._live = True
        logger.error(
            "taskdb: the scheduler now at %s does not keep its tasks in taskdb; the %d futures of this client are cancelled",
            client.scheduler.address,
            internals.cancel_futures(client),
        )

    async def _give_up(self, reason: str) -> None:
        client = self.client
        if not internals.is_open(client):
            return
        self.end(reason)
        logger.error("taskdb: %s; %d futures are cancelled, and this client closes", reason, internals.cancel_futures(client))
        await internals.close(client)

    # --------------------------------------------------------------------------------------------------------- calling

    async def _patience(self, call: Call) -> Any:
        """A call to the scheduler. One that finds no scheduler waits until there is one; so does one that was interrupted, if it only
        reads. Raises SchedulerLost for one that may have changed something, and when no scheduler comes back."""
        began = self._lives
        while True:
            await self._back(call)
            lives = self._lives
            if lives != began and "uid" in call.words:
                # It waits in the scheduler for this message, which may have been lost.
                self._send({"op": "publish_flush_batched_send", "uid": call.words["uid"]})
            try:
                return await call.make()
            except (NotConnected, NotAnswered) as e:
                if not await self._noticed(lives):
                    raise e.__cause__ or e from None
                if type(e) is NotAnswered and call.op not in READS:
                    raise SchedulerLost(
                        f"the scheduler went away while it was asked to do {call.op!r}; whether that was done is not known"
                    ) from e

    async def _back(self, call: Call) -> None:
        """Wait until there is a scheduler."""
        while self.epoch and not self._live and internals.is_open(self.client):
            await self._changed.wait()
        if self._ended and not self._live:
            raise SchedulerLost(f"{call.op!r} was not asked for: {self._ended}")

    async def _noticed(self, lives: int) -> bool:
        """Whether the scheduler is gone, or was since `lives`."""
        deadline = time.monotonic() + NOTICED_SECONDS
        while self.epoch and self._live and self._lives == lives and time.monotonic() < deadline:
            await asyncio.sleep(PAUSE_SECONDS_MIN / 10)
        return bool(self.epoch) and (not self._live or self._lives != lives)


# --------------------------------------------------------------------------------------------------- results, by key


def futures(keys: Iterable[Any], client: Client | None = None) -> Any:
    """Futures of tasks that somebody else submitted, in the order of their keys; a coroutine for an asynchronous client.

    Raises KeyError, naming them, if neither the scheduler nor its database knows some of the keys: a bare `Future(key)` would wait for
    ever.
    """
    client = client or Client.current()
    return client.sync(_futures, client, list(keys))


def future(key: Any, client: Client | None = None) -> Any:
    """The future of one key. See `futures`."""
    client = client or Client.current()
    return client.sync(_future, client, key)


async def _futures(client: Client, keys: list[Any]) -> list[Future]:
    known = await client.scheduler.get_task_status(keys=keys)
    unknown = [key for key in dict.fromkeys(keys) if known.get(key) is None]
    if unknown:
        more = f" and {len(unknown) - 10} more" if len(unknown) > 10 else ""
        raise KeyError(f"the scheduler at {client.scheduler.address} knows no task {', '.join(map(repr, unknown[:10]))}{more}")
    return internals.new_futures(client, keys)


async def _future(client: Client, key: Any) -> Future:
    return (await _futures(client, [key]))[0]
