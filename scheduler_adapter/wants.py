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
        """The client wants those of these that are here; stock reports to it what is finished."""
        self.pager.residency.wanted_again(client, keys)
        self._desire(keys, client)

    def begin(self, keys: Collection[Any], client: str) -> None:
        """The same for a graph of the client that is about to come, of what is sure to be the same task."""
        self.pager.residency.wanted_again(client, keys)
        may_be_over = self.pager.residency.may_be_over
        self._desire([key for key in keys if not may_be_over(key)], client)

    def rest(self, keys: Collection[Any], client: str) -> None:
        """The same for a graph that has come. Many of its tasks may be finished by now: what names the client already was reported."""
        self.pager.residency.wanted_again(client, keys)
        self._desire(keys, client, new=True)

    def _desire(self, keys: Collection[Any], client: str, *, new: bool = False) -> None:
        """`new`: only what the client did not want before."""
        cs = internals.client_state(self.scheduler, client)
        if cs is None:
            return
        tasks = self.scheduler.tasks
        here = [key for key in keys if (ts := tasks.get(key)) is not None and not (new and cs in (ts.who_wants or ()))]
        if here:
            type(self.scheduler).client_desires_keys(self.scheduler, keys=here, client=client)
        self.pager.cooling.want(client, keys, new=new)
