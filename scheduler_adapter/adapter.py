"""Puts the parts together on one scheduler, and takes them apart again."""

from __future__ import annotations

import logging
import uuid

from distributed.scheduler import Scheduler

from scheduler_adapter import dask_extensions, dask_pages
from scheduler_adapter import dask_internals as internals
from scheduler_adapter.access import daemon_at
from scheduler_adapter.clients import Clients
from scheduler_adapter.config import AdapterConfig
from scheduler_adapter.embedded import EmbeddedDaemon
from scheduler_adapter.history import History
from scheduler_adapter.ingest.client import IngestProcess
from scheduler_adapter.kept import Kept
from scheduler_adapter.lookups import Lookups
from scheduler_adapter.metrics import COLLECTOR
from scheduler_adapter.operator import Operator
from scheduler_adapter.pager import Pager
from scheduler_adapter.recovery import Recovery, Restored
from scheduler_adapter.returning import Returning
from scheduler_adapter.submissions import Submitter
from taskdb.client import Session

logger = logging.getLogger("distributed.taskdb")


class Adapter:
    """One scheduler's connection to the database. `scheduler.taskdb` for whoever looks from outside."""

    def __init__(self, scheduler: Scheduler, config: AdapterConfig):
        self.scheduler = scheduler
        self.config = config
        self.undo = internals.Undo()
        self.daemon: EmbeddedDaemon | None = None
        self.session: Session | None = None
        self.restored = Restored()
        self.recovery: Recovery | None = None
        self.returning: Returning | None = None
        self.submitter: Submitter | None = None
        self.kept: Kept | None = None
        #: There if the scheduler has a dashboard.
        self.history: History | None = None
        self.ingest = IngestProcess()
        self.pager = Pager(scheduler, config)
        self.pager.on_fault = lambda detail: self._state("failed", f"the adapter failed: {detail}")

    async def start(self) -> None:
        """Reach the database, then take over. Raises TaskDBError; the scheduler is untouched then."""
        config = self.config
        address = config.url
        if address is None:
            self.daemon = EmbeddedDaemon(config.data)
            await self.daemon.start(max(config.connect_timeout_seconds, 30))
            address = self.daemon.address
        self.session = Session(
            daemon_at(address, config, self.scheduler.security),
            f"{self.scheduler.address}-{uuid.uuid4().hex[:8]}",
            on_result=self.pager.on_result,
            on_state=self._state,
            held=self.pager.window.held_ids,
        )
        try:
            info = await self.session.attach(config.connect_timeout_seconds)
        except BaseException:
            if self.daemon is not None:
                await self.daemon.close()
            raise
        self.pager.session = self.session
        self.pager.store = info.store_uuid
        self.restored = await Restored.read(self.session, info.orphans, config.connect_timeout_seconds)
        self.restored.leases_lost = info.leases_lost
        self.ingest.start()
        self._take_over()
        logger.info("taskdb: epoch %d on %s (store %s)", info.epoch, address, info.store_uuid)

    def _take_over(self) -> None:
        scheduler = self.scheduler
        assert self.session is not None
        self.returning = Returning(
            scheduler, self.pager, self.undo, self.restored.kept, self.restored.graphs, self.config.clients_return_seconds
        )
        self.submitter = submitter = Submitter(scheduler, self.config, self.pager, self.ingest, self.returning)
        self.clients = Clients(scheduler, self.pager, submitter, self.returning, self.undo)
        self.operator = Operator(scheduler, self.clients, self.session)
        self.lookups = Lookups(scheduler, self.pager, self.undo)
        self.pager.cooling.install(self.undo)
        internals.before_results_are_lost(scheduler, self.undo, self.pager.residency.keep_followed)
        internals.suppress_cancelled(scheduler, self.undo, self.pager.residency.runs_again)
        internals.send_stored_specs(scheduler, self.undo)
        scheduler.add_plugin(self.pager, name=self.pager.name)
        generation = max((graph.generation for graph in self.restored.graphs), default=0.0)
        dask_extensions.continue_numbers(scheduler, self.session.epoch, generation)
        self.kept = Kept(scheduler, self.pager, self.undo, self.restored.kept, self.restored.clients)
        self.recovery = Recovery(scheduler, self.config, self.pager, self.undo, self.restored)
        self.returning.on_returned = self.recovery.client_returned
        scheduler.add_plugin(self.recovery, name=self.recovery.name)
        self.recovery.start_waiting()
        self.restored = Restored()  # it holds every kept item
        # IMPORTANT: not before. The database tells and changes nothing until it hears from us, so that all of it is heard.
        self.pager.schedule(urgent=True)
        scheduler.taskdb = self
        COLLECTOR.show(self)
        self.undo.step(lambda: COLLECTOR.hide(self))
        if dask_pages.has_dashboard(scheduler):
            self._show()

    def _show(self) -> None:
        """The page of the dashboard."""
        from scheduler_adapter.dashboard import page  # imports Bokeh

        self.history = History(self)
        self.history.start()
        dask_pages.add_pages(self.scheduler, self.undo, {"/taskdb": page})

    def _state(self, state: str, detail: str) -> None:
        if state == "lost":
            logger.warning("taskdb: the daemon is gone (%s); what is resident runs on, the rest waits until it is back", detail)
        elif state == "live":
            logger.warning("taskdb: the daemon is back")
            self.pager.link_restored()
        else:
            # Fenced, or refused for good: a scheduler without its database must not run on.
            logger.critical("taskdb: %s; this scheduler stops", detail)
            internals.in_background(self.scheduler, self.scheduler.close, reason=f"taskdb: {detail}")

    async def close(self) -> None:
        scheduler = self.scheduler
        if self.kept is not None:
            self.kept.close()
        self.pager.close()
        if self.history is not None:
            self.history.close()
        if self.recovery is not None:
            self.recovery.close()
        if self.returning is not None:
            self.returning.close()
        self.pager.cooling.stop()
        for name in (Recovery.name, self.pager.name, self.pager.cooling.name):
            if name in scheduler.plugins:
                scheduler.remove_plugin(name)
        self.undo.run()
        await self.ingest.close()
        if self.session is not None:
            await self.session.close()
        if self.daemon is not None:
            await self.daemon.close()
