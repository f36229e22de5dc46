"""A client's wants of what is resident already. What is on disk is the database's to say: leases name the clients that want a task."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from distributed.scheduler import Scheduler

from scheduler_adapter import dask_internals as internals
from scheduler_adapter.pager import Pager


class Wants:
    def __init__(self, scheduler: Scheduler, pager: Pager):
        self.scheduler = scheduler
        self.pager = pager

    def resident(self, keys: Collection[Any], client: str) -> None:
        """The client wants those of these that are resident; stock reports to it what is finished."""
        self.pager.residency.wanted_again(client, keys)
        tasks = self.scheduler.tasks
        self._desire([key for key in keys if key in tasks], client)

    def begin(self, keys: Collection[Any], client: str) -> None:
        """The same for a graph of the client that is about to come, of what is sure to be the same task."""
        self.pager.residency.wanted_again(client, keys)
        tasks = self.scheduler.tasks
        self._desire([key for key in keys if key in tasks and not self._may_be_over(key)], client)

    def rest(self, keys: Collection[Any], client: str) -> None:
        """The same for a graph that has come. Many of its tasks may be finished by now: what names the client already was reported."""
        self.pager.residency.wanted_again(client, keys)
        cs = internals.client_state(self.scheduler, client)
        tasks = self.scheduler.tasks
        self._desire([key for key in keys if (ts := tasks.get(key)) is not None and cs not in (ts.who_wants or ())], client)

    def _desire(self, keys: list[Any], client: str) -> None:
        if keys and client in self.scheduler.clients:
            type(self.scheduler).client_desires_keys(self.scheduler, keys=keys, client=client)

    def _may_be_over(self, key: Any) -> bool:
        """A resident no client wants may be forgotten by the database, and its key mean another task: `Added.known` will say."""
        resident = self.pager.window.by_key.get(key)
        if resident is None or not resident.paged or resident.task is None:
            return False
        return all(cs is self.pager.residency.holder for cs in resident.task.who_wants or ())
