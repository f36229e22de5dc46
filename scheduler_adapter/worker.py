"""The worker preload: a worker outlives its scheduler, keeps its results and what it runs, and hands them to the next one.

`dask worker ADDRESS --preload scheduler_adapter.worker`. With a scheduler that does not keep its tasks in taskdb it stays out of the way.
"""

from __future__ import annotations

import asyncio
import logging
import time
from contextlib import suppress
from typing import Any

import dask
from distributed.comm import Comm
from distributed.worker import Worker

from scheduler_adapter import dask_worker as internals
from scheduler_adapter.config import address_in, scheduler_return_seconds
from scheduler_adapter.inventory import EPOCH, NAME, Inventory
from scheduler_adapter.keys import pack_key
from taskdb.errors import LimitExceeded

logger = logging.getLogger("distributed.taskdb")

#: Pauses between attempts to find the scheduler.
PAUSE_SECONDS_MIN = 0.1
PAUSE_SECONDS_MAX = 1.0
#: How long is waited for the answer who is there. Short: inside it Dask tries to connect at ever longer intervals.
QUESTION_SECONDS = 3.0
#: How long registering may take.
ATTEMPT_SECONDS = 10.0
#: How long after a registration an answer to an earlier heartbeat may come.
HEARTBEAT_SECONDS = 5.0
#: How long a scheduler without taskdb must have been there until it is taken for the one that came back.
WITHOUT_SECONDS = 10.0


def dask_setup(worker: Worker) -> None:
    Survivor(worker)


class Survivor:
    def __init__(self, worker: Worker):
        self.worker = worker
        self._limit_seconds = scheduler_return_seconds()
        #: Epoch of the scheduler it is, or was last, registered with; 0 while that is not known, or it has none.
        self.epoch = 0
        #: The store that epoch is of.
        self.store = ""
        #: Epoch of the scheduler it returned to last, whose stream may not have said so yet.
        self._returned_to = 0
        #: Messages said since the inventory was taken, for the new stream; None: there is a stream, or none is about to be.
        self._held_back: list[dict[str, Any]] | None = None
        #: Since when there is a scheduler without taskdb; 0 if there is none.
        self._without_since = 0.0
        self._stock_send = internals.replace_batched_send(worker, self._send)
        self._stock_close = internals.replace_close(worker, self._close)
        #: When it was registered last.
        self._since = 0.0
        internals.replace_stream_handler(worker, self.serve)
        internals.at_registration(worker, NAME, lambda worker: Inventory().write())
        internals.on_message(worker, EPOCH, self._registered)

    async def _close(self, *args: Any, reason: str = "worker-close", **kwargs: Any) -> Any:
        """A heartbeat may come to a new scheduler before this worker has noticed that the old one is gone: that is no reason to close."""
        if reason == internals.UNKNOWN_TO_SCHEDULER and self.epoch:
            if time.monotonic() - self._since > HEARTBEAT_SECONDS:
                internals.drop_stream(self.worker)
            return None
        return await self._stock_close(*args, reason=reason, **kwargs)

    def _registered(self, epoch: int, store: str) -> None:
        """The scheduler keeps its tasks in taskdb. It says so on the stream of which it is true: an answer to a call may be another's."""
        self.epoch, self.store = epoch, store
        self._since = time.monotonic()

    def _send(self, message: dict[str, Any]) -> None:
        if self._held_back is not None:
            self._held_back.append(message)
        else:
            self._stock_send(message)

    async def serve(self, comm: Comm) -> None:
        """In the place of `Worker.handle_scheduler`: serve scheduler after scheduler, until told to close, or none comes back."""
        worker = self.worker
        reason = "worker-handle-scheduler-connection-broken"
        try:
            while True:
                await internals.stock_stream(worker, comm)
                if not internals.wants_to_live(worker):
                    break
                if not self.epoch:
                    break  # as stock
                again = await self._find_scheduler()
                if again is None:
                    reason = "taskdb-no-scheduler"
                    break
                comm = again
        except Exception:
            logger.exception("the worker's stream failed")
            raise
        finally:
            await worker.close(reason=reason)

    async def _find_scheduler(self) -> Comm | None:
        """A stream to the next scheduler; None: the worker is to close."""
        worker = self.worker
        internals.stop_heartbeat(worker)
        internals.end_shuffles(worker, "the scheduler has gone")
        limit = self._limit_seconds
        logger.warning("taskdb: the scheduler is gone; keeping what this worker holds for %.0f s, until one is back", limit)
        deadline = time.monotonic() + limit
        pause = PAUSE_SECONDS_MIN
        while internals.wants_to_live(worker):
            try:
                return await self._return()
            except (OSError, TimeoutError) as e:
                if time.monotonic() + pause > deadline:
                    logger.error("taskdb: no scheduler came back within %.0f s (%s); this worker closes", limit, e)
                    return None
            except internals.Refused as e:
                logger.error("taskdb: the scheduler does not take this worker back: %s; it closes", e)
                return None
            await asyncio.sleep(pause)
            pause = min(2 * pause, PAUSE_SECONDS_MAX)
        return None

    async def _return(self) -> Comm:
        """Register with the scheduler that is there now. Raises OSError, TimeoutError, Refused."""
        worker = self.worker
        if address := address_in(dask.config.get("taskdb.scheduler-file")):
            internals.move_to(worker, address)
        before = self.epoch
        async with asyncio.timeout(QUESTION_SECONDS):
            answer, store = await self._question()
        if store != self.store:
            logger.warning("taskdb: the scheduler has another store than the one before; what this worker holds is let go of")
            before = 0
            internals.free(worker, [ts.key for ts in internals.tasks(worker)], "taskdb-another-store")
        elif answer in (before, self._returned_to):
            raise internals.Refused("it is the one that lost this worker, and has given its tasks to others")
        elif answer < before:
            raise OSError(f"the scheduler there is an older one (epoch {answer}, not after {before})")
        stimulus_id = f"taskdb-return-{time.time()}"
        self._held_back = None
        try:
            comm = await internals.register(worker, lambda: {NAME: self._inventory(before, stimulus_id)}, stimulus_id, ATTEMPT_SECONDS)
        except BaseException:
            self._held_back = None
            raise
        held_back: list[dict[str, Any]] = self._held_back or []
        self._held_back = None
        # IMPORTANT: not `epoch`: that is what its stream says, behind what it is to let go of (`Recovery._refuse`).
        self._returned_to = answer
        for message in held_back:
            self._stock_send(message)
        internals.start_heartbeat(worker)
        logger.warning("taskdb: registered with the scheduler of epoch %d", answer)
        return comm

    async def _question(self) -> tuple[int, str]:
        """Epoch and store of the scheduler there. Raises OSError if it does not answer, Refused if it is one without taskdb."""
        answer = await self.worker.scheduler.taskdb()
        if answer is None:
            # Stock's answer to what it does not know; and that of one that is closing.
            self._without_since = self._without_since or time.monotonic()
            if time.monotonic() - self._without_since < WITHOUT_SECONDS:
                raise OSError("it does not keep its tasks in taskdb")
            raise internals.Refused("it does not keep its tasks in taskdb (start it with --preload scheduler_adapter)")
        self._without_since = 0.0
        return int(answer["epoch"]), str(answer["store"])

    def _inventory(self, epoch: int, stimulus_id: str) -> dict[str, Any]:
        """What this worker has now; what it has not begun is let go of. From here on messages are held back for the new stream."""
        worker = self.worker
        actors = internals.actors(worker)
        memory: list[bytes] = []
        nbytes: list[int] = []
        types: list[str] = []
        running: list[bytes] = []
        run_ids: list[int] = []
        seceded: list[int] = []
        failed: list[int] = []
        errors: list[list[Any]] = []
        runs: list[int] = []
        rest: list[Any] = []
        for ts in internals.tasks(worker):
            packed = None
            if ts.key not in actors:
                with suppress(LimitExceeded, TypeError):
                    packed = pack_key(ts.key)
            if packed is None or ts.state not in ("memory", "error", *internals.RUNNING):
                rest.append(ts.key)
            elif ts.state == "memory":
                memory.append(packed)
                nbytes.append(internals.nbytes_of(ts))
                types.append(internals.type_name(ts))
                runs.append(ts.run_id)
            else:
                if ts.state == "long-running":
                    seceded.append(len(running))
                elif ts.state == "error":
                    failed.append(len(running))
                    errors.append(internals.error_of(ts))
                running.append(packed)
                run_ids.append(ts.run_id)
        self._held_back = []
        internals.free(worker, rest, stimulus_id)
        return Inventory(epoch, memory, nbytes, types, running, run_ids, seceded, failed, errors, runs).write()
