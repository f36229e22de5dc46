"""What people ask of the scheduler through the database: cancel and retry, carried out as if each client had asked for its own."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from distributed.scheduler import Scheduler

from scheduler_adapter.clients import Clients
from scheduler_adapter.keys import unpack_key
from taskdb.client import Session

logger = logging.getLogger("distributed.taskdb")


class Operator:
    def __init__(self, scheduler: Scheduler, clients: Clients, session: Session):
        self._scheduler = scheduler
        self._clients = clients
        self._session = session
        session.on_ask = self.asked

    def asked(self, number: int, action: str, keys: Sequence[bytes]) -> None:
        """Never raises: the Session would take it for a fault."""
        try:
            count = self._do(action, [unpack_key(key) for key in keys])
        except Exception as error:
            logger.exception("the request to %s %d tasks failed", action, len(keys))
            self._session.done(number, 0, f"the scheduler could not {action} them: {repr(error)[:300]}")
        else:
            self._session.done(number, count)

    def _do(self, action: str, keys: list[object]) -> int:
        logger.info("an operator asks to %s %d tasks", action, len(keys))
        self._scheduler.log_event("taskdb", {"action": action, "count": len(keys)})
        if action == "cancel":
            return self._clients.cancel_for_all(keys)
        if action == "retry":
            return self._clients.retry_for_all(keys)
        raise ValueError(f"unknown action {action}")
