"""Takes in the graphs clients submit: small ones here, large ones through the ingest process; resident whole, or paged.

A graph is *followed* (resident whole, stock does everything and the database is told) if it fits into what is left of the window and
touches nothing that is on disk. Else it is *paged*. P2P shuffles and actors are followed whatever their size: the scheduler looks at
them as a unit.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from time import time
from typing import Any

import dask
from distributed.scheduler import Scheduler
from distributed.utils import offload

from scheduler_adapter import dask_internals as internals
from scheduler_adapter.arrivals import Arrivals
from scheduler_adapter.config import AdapterConfig
from scheduler_adapter.details import Details
from scheduler_adapter.graph import Graph, estimate_tasks, materialise, prepare, runs, unpack_graph
from scheduler_adapter.ingest.client import IngestProcess
from scheduler_adapter.inputs import inputs_ready
from scheduler_adapter.pager import Pager
from scheduler_adapter.returning import Returning
from scheduler_adapter.specs import StoredSpec, keeps_object
from scheduler_adapter.submitted import Submission
from scheduler_adapter.wants import Wants
from scheduler_adapter.window import Resident
from taskdb.commands import AddTasks, Adopt, BeginGraph, SealGraph
from taskdb.errors import SaidOtherwise, StaleEpoch, Unavailable
from taskdb.model import Level

logger = logging.getLogger("distributed.taskdb")

#: Graphs of at most so many tasks are unpacked on the loop: a thread's hand-over would cost more.
INLINE_TASKS = 16
#: How long, at most, a graph that is said again keeps the scheduler from asking for work.
HOLD_SECONDS_MAX = 10.0
#: How often it is looked whether a daemon that died is back.
AGAIN_SECONDS = 0.1


class Submitter:
    def __init__(self, scheduler: Scheduler, config: AdapterConfig, pager: Pager, ingest: IngestProcess, returning: Returning):
        self.scheduler = scheduler
        self.config = config
        self.pager = pager
        self.ingest = ingest
        self.returning = returning
        self.arrivals = Arrivals(scheduler, pager)
        self.wants = Wants(scheduler, pager)

    async def take(
        self,
        client: str,
        expr_ser: Any,
        keys: Any,
        span_metadata: Any = None,
        internal_priority: dict[Any, float] | None = None,
        submitting_task: Any = None,
        user_priority: Any = 0,
        actors: Any = None,
        fifo_timeout: Any = 0.0,
        code: Any = (),
        annotations: dict[str, Any] | None = None,
        stimulus_id: str | None = None,
        taskdb_submission: str | None = None,
        taskdb_resent: bool = False,
        taskdb_released: Collection[Any] = (),
        taskdb_number: int = 0,
    ) -> None:
        """Stock's `update_graph`. Errors go to the client as stock sends them; nothing is raised.

        `taskdb_submission`: the client's name for it, at most SUBMISSION_BYTES_MAX; `taskdb_resent`: it has been sent before, to another
        scheduler; `taskdb_released`: what it had let go of by then, as this one may not know; `taskdb_number`: see `returning.py`.
        """
        if taskdb_resent and self.returning.was_taken(taskdb_submission):
            return
        if taskdb_released:
            self.scheduler.client_releases_keys(keys=taskdb_released, client=client)
        scheduler = self.scheduler
        start = time()
        stimulus_id = stimulus_id or f"update-graph-{start}"
        keys = set(keys)
        # What workers have under a key that was used again may be the old task's.
        reused = keys.intersection(taskdb_released)
        if reused:
            self.returning.uses_anew(client, reused)
        resent = taskdb_resent and not reused
        details = Details(
            client,
            keys,
            span_metadata,
            internal_priority,
            submitting_task,
            user_priority,
            actors,
            fifo_timeout,
            code,
            annotations,
            stimulus_id,
            start,
            number=taskdb_number,
            resent=resent,
        )
        internals.graph_update_begins(scheduler)
        event: dict[str, Any] = {"action": "update-graph", "stimulus_id": stimulus_id, "status": "error"}
        try:
            if taskdb_resent:
                self.returning.says_again(client)
                await self.pager.workers_are_back()
                await self.returning.earlier_try_is_over(taskdb_submission)
            details.name = self.returning.name(taskdb_submission)
            graph = await self._read_here(expr_ser, details)
            if graph is None:
                tasks = await self._take_large(expr_ser, details)
            else:
                tasks = await self._take_small(graph, details)
            event["status"] = "cancelled" if tasks is None else "OK"
            event["metrics"] = {"tasks": tasks or 0, "start_timestamp_seconds": start, "duration_seconds": time() - start}
        except asyncio.CancelledError:
            event["status"] = "cancelled"
            raise
        except StaleEpoch as e:
            # A later scheduler has begun: the client goes to it, and says this again.
            logger.warning("graph of client %s is not taken in: %s", client, e)
        except Exception as e:
            logger.error("graph of client %s refused: %s", client, e)
            internals.failed_submission(scheduler, e, keys, client)
        finally:
            internals.graph_update_ends(scheduler)
            scheduler.log_event(["scheduler", client], event)
            scheduler.digest_metric("update-graph-duration", time() - start)

    # -------------------------------------------------------------------------------------------------------- reading

    async def _read_here(self, expr_ser: Any, details: Details) -> Graph | None:
        """The graph, if it is small enough to be unpacked in this process, or has actors."""
        if sum(memoryview(f).nbytes for f in expr_ser.frames[:1]) > self.config.local_bytes and not details.actors:
            return None
        most = max(self.config.local_tasks, self.room())
        expr = internals.load_expr(expr_ser)
        estimate = estimate_tasks(expr)
        if estimate is not None and estimate > most and not details.actors:
            return None
        if estimate is not None and estimate <= INLINE_TASKS:
            graph = self._unpack(expr, details)
        else:
            graph = await offload(self._unpack, expr, details)
        if len(graph.dsk) > most and not graph.has_p2p and not details.actors:
            return None
        return graph

    def _unpack(self, expr: Any, details: Details) -> Graph:
        dsk, by_type = materialise(expr)
        graph = prepare(dsk, by_type, details.keys, details.internal_priority, details.annotations)
        for key, spec in graph.dsk.items():
            if not keeps_object(spec):
                graph.dsk[key] = StoredSpec.of(spec)
        return graph

    def room(self) -> int:
        """What is left of the window's budget."""
        if self.pager.recovering or self.pager.holding:
            return 0  # a task may be running, or be done, on a worker that has yet to say so
        return self.config.window - len(self.scheduler.tasks)

    # ---------------------------------------------------------------------------------------------------------- small

    async def _take_small(self, graph: Graph, details: Details) -> int | None:
        details.whole = graph.has_p2p
        must_follow = graph.has_p2p or bool(details.actors)
        unclaimed = self.pager.residency.unclaimed
        if unclaimed and (must_follow or not details.resent):
            unclaimed.drop(graph.dsk)
        if not details.resent:
            self.pager.residency.reused.comes(graph.dsk, self.pager.residency.may_be_over)
        if must_follow and not await inputs_ready(self.pager, graph, details.name):
            # The database fails what depends on it, and tells the client.
            details.whole = False
            return await self._page(graph, details)
        if must_follow or (len(graph.dsk) <= self.room() and not self._touches_disk(graph)):
            return await self._follow(graph, details)
        return await self._page(graph, details)

    def _touches_disk(self, graph: Graph) -> bool:
        by_key = self.pager.window.by_key
        for key in graph.external:
            resident = by_key.get(key)
            if resident is None or resident.stub:
                return True
        unclaimed = self.pager.residency.unclaimed
        return any(
            key in unclaimed
            or key in self.pager.cooling
            or ((r := by_key.get(key)) is not None and (r.paged or r.task.has_lost_dependencies))
            or self.pager.residency.may_be_over(key)
            for key in graph.dsk
        )

    async def _follow(self, graph: Graph, details: Details) -> int | None:
        scheduler = self.scheduler
        if internals.lost_dependencies(scheduler, graph.dsk, details.keys):
            self._lost(details)
            return None
        self.pager.residency.wanted_again(details.client, details.keys)
        internals.create_tasks(
            scheduler,
            dsk=graph.dsk,
            client=details.client,
            keys=details.keys,
            ordered=graph.order,
            submitting_task=details.submitting_task,
            user_priority=details.user_priority,
            actors=details.actors,
            fifo_timeout=details.fifo_timeout,
            code=details.code,
            span_metadata=details.span_metadata,
            annotations_by_type=graph.annotations_by_type,
            global_annotations=graph.global_annotations,
            start=details.start,
            stimulus_id=details.stimulus_id,
        )
        window = self.pager.window
        submission = Submission(details.name, details.client, followed=True, resent=details.resent)
        generation = 0.0
        residents: dict[Any, Resident] = {}
        for key in graph.dsk:
            ts = scheduler.tasks.get(key)
            resident = window.by_key.get(key)
            if resident is None:
                resident = Resident(key, 0, ts, paged=False, told=Level.HELD, submission=details.name)
                if ts is not None:
                    window.add(resident)
                    if ts.priority:
                        generation = float(ts.priority[1])
            else:
                # AddTasks says that it is held: what it is has to be said after that.
                window.tell_again([resident])
            residents[key] = resident
            window.changed[resident] = None
        self.pager.residency.most_resident = max(self.pager.residency.most_resident, len(scheduler.tasks))
        await self._send(graph, details, submission, generation, residents)
        return len(graph.dsk)

    async def _page(self, graph: Graph, details: Details) -> int:
        scheduler = self.scheduler
        generation = internals.next_generation(scheduler, details.submitting_task, details.fifo_timeout, details.start)
        submission = self._submission(details)
        self.pager.residency.shared((*graph.external, *graph.dsk))
        self.wants.begin(details.keys, details.client)
        annotations: dict[str, dict[Any, Any]] = {}
        for kind, value in graph.global_annotations.items():
            annotations[kind] = {key: value(key) if callable(value) else value for key in graph.dsk}
        for kind, by_key in graph.annotations_by_type.items():
            annotations.setdefault(kind, {}).update({k: v for k, v in by_key.items() if k in graph.dsk and v is not None})
        self._tell_plugins(details, list(graph.dsk), annotations, graph.order)
        _, group_deps = graph.groups()
        self._announce(submission, {}, group_deps)
        await self._send(graph, details, submission, generation, {})
        return len(graph.dsk)

    async def _send(
        self, graph: Graph, details: Details, submission: Submission, generation: float, residents: dict[Any, Resident]
    ) -> None:
        """Begin, runs and seal. Others have the loop between runs."""
        pager = self.pager
        keys = [*graph.external, *graph.dsk]
        names: list[str] = []
        pager.residency.begins(submission)
        commands: list[Any] = [BeginGraph(details.name, details.client, generation, details.start, details.stimulus_id, details.flags)]
        try:
            for run in runs(graph, details.name, held=submission.followed):
                names.extend(run.new_groups)
                submission.groups.update(run.new_groups)
                these = keys[run.first_index : run.first_index + len(run.keys)]
                groups = [] if submission.followed else [names[g] for g in run.groups]
                self.arrivals.expect(submission, run, [residents.get(k) for k in these], details.keys, groups)
                commands.append(run)
                if details.resent:
                    commands.extend(self._claims(run.keys))
                if run.first_index + len(run.keys) < len(keys):
                    pager.send(*commands)
                    commands = []
                    await asyncio.sleep(0)
        except BaseException:  # a cancellation is none of Exception
            self.arrivals.unsent(submission, (c for c in commands if isinstance(c, AddTasks)), residents.values())
            self.arrivals.abort(details.name)
            raise
        submission.sealed = True
        pager.send(*commands, SealGraph(details.name), *self.returning.mark(details.client, details.number), urgent=not submission.followed)

    def _claims(self, keys: Iterable[bytes]) -> Iterator[Adopt]:
        """Of what workers have of a graph that is said again. To be sent together with its tasks, before any of them can be leased."""
        unclaimed = self.pager.residency.unclaimed
        for command in unclaimed.claims(keys):
            # What has failed is told once that is answered: what it was computed from is not needed then.
            self.pager.holding += 1
            asked = self.pager.expect_adopted(command, unclaimed.answered)
            asked.done.add_done_callback(lambda done: self.pager.hold_less())
            yield command

    def _hold_no_more(self, details: Details) -> None:
        if details.holds:
            details.holds = False
            self.pager.hold_less()

    # ---------------------------------------------------------------------------------------------------------- large

    async def _take_large(self, expr_ser: Any, details: Details) -> int | None:
        """Through the ingest process, straight to the database."""
        scheduler = self.scheduler
        pager = self.pager
        assert pager.session is not None
        generation = internals.next_generation(scheduler, details.submitting_task, details.fifo_timeout, details.start)
        submission = self._submission(details)
        pager.residency.begins(submission)
        details.holds = details.resent and bool(pager.residency.unclaimed)
        pager.holding += details.holds
        job = {
            "submission": details.name,
            "client": details.client,
            "generation": generation,
            "submitted": details.start,
            "label": details.stimulus_id,
            "flags": details.flags,
            "daemon": pager.session.daemon,
            "epoch": pager.session.epoch,
            "config": dask.config.config,
            "rule_tasks": self.config.rule_tasks,
            "header": expr_ser.header,
            "details": await details.packed(),
        }
        outcome: int | Graph | None = None
        announced: Counter[str] = Counter()
        heard: set[int] = set()
        try:
            while True:
                # IMPORTANT: what was said before is on disk, or it would be said again after this if the daemon died.
                await pager.answered()
                await pager.on_disk(pager.session.last_seq)
                try:
                    outcome = await self._stream(job, expr_ser.frames, details, submission, announced, heard)
                    break
                except (Unavailable, SaidOtherwise) as e:
                    # The daemon died under it; the graph is whole here, so it can come again, under its name. What had arrived is there,
                    # and goes on; or it is forgotten, and told so.
                    self._retract(announced)
                    logger.warning("graph %s waits for the daemon (%s)", details.name, e)
                    await asyncio.sleep(AGAIN_SECONDS)
                    while not pager.session.connected:
                        await asyncio.sleep(AGAIN_SECONDS)
        finally:
            self._hold_no_more(details)
            self._retract(announced)
            submission.sealed = True
            if outcome is None:
                self.arrivals.abort(details.name)
        if outcome is None:
            self._lost(details)
            return None
        if isinstance(outcome, Graph):
            pager.residency.maybe_end(submission)
            return await self._take_small(outcome, details)
        pager.residency.maybe_end(submission)
        # A lease from before the graph came may be under way: it does not name this client.
        await pager.answered()
        self.wants.rest(details.keys, details.client)
        pager.schedule(urgent=True)
        return outcome

    async def _stream(
        self, job: dict[str, Any], frames: Any, details: Details, submission: Submission, announced: Counter[str], heard: set[int]
    ) -> int | Graph | None:
        """One attempt. Number of tasks, or None if inputs are missing; or the graph, if it has to be held whole. Raises what the ingest
        process raised.

        `announced`: what has been shown in task groups and has not arrived. `heard`: first indices of runs that have arrived.
        """
        residency = self.pager.residency
        tasks = 0
        async with contextlib.aclosing(self.ingest.run(job, frames)) as messages:
            async for message in messages:
                op = message["op"]
                if op == "graph":
                    tasks = message["tasks"]
                    residency.shared(message["external"])
                    self.wants.begin(details.keys, details.client)
                    self._tell_plugins(details, list(details.keys), {}, {})
                    # Before the first lease: how tasks are placed depends on how large their groups are.
                    self._announce(submission, message["groups"], message["group_deps"])
                    announced.update(message["groups"])
                elif op == "begun":
                    if not message["there"]:
                        heard.clear()
                elif op == "run":
                    new, old = Counter(message["new"]), Counter(message["old"])
                    if message["first"] in heard:
                        # It had arrived, and was counted, when the daemon died.
                        new, old = Counter(), new + old
                    heard.add(message["first"])
                    for name, count in old.items():
                        residency.ledger.retract(name, count)
                    announced.subtract(old)
                    announced.subtract(new)
                    residency.arrived(submission, new.total())
                    residency.shared(message["known"])
                    if details.holds:
                        self.pager.send(*self._claims(message["keys"]), urgent=True)
                        if not residency.unclaimed or time() > details.start + HOLD_SECONDS_MAX:
                            self._hold_no_more(details)
                elif op == "missing":
                    return None
                elif op == "whole":
                    return await offload(unpack_graph, message["graph"])
                elif op == "error":
                    raise message["exception"]
        return tasks

    # ---------------------------------------------------------------------------------------------------------- common

    def _submission(self, details: Details) -> Submission:
        busy = self.pager.backlog > 0 or (self.pager.session is not None and self.pager.session.in_flight > 0)
        computation = internals.computation_for(self.scheduler, details.code, details.annotations, busy)
        return Submission(details.name, details.client, details.span_metadata, details.code, computation, resent=details.resent)

    def _announce(self, submission: Submission, sizes: dict[str, int], deps: Iterable[tuple[str, str]]) -> None:
        """Show a graph in its task groups before any of its tasks is leased."""
        ledger = self.pager.residency.ledger
        deps = list(deps)
        for name in {*sizes, *(name for pair in deps for name in pair)}:
            submission.groups.add(name)
            ledger.announce(name, sizes.get(name, 0), submission.computation)
        ledger.link(deps)

    def _retract(self, announced: Counter[str]) -> None:
        """What was announced and did not arrive never will."""
        for name, count in announced.items():
            self.pager.residency.ledger.retract(name, count)
        announced.clear()

    def _tell_plugins(self, details: Details, tasks: list[Any], annotations: dict[str, Any], priority: dict[Any, Any]) -> None:
        """`SchedulerPlugin.update_graph`, as stock calls it; of a large graph plugins see the wanted keys, and nothing about them."""
        for plugin in list(self.scheduler.plugins.values()):
            try:
                plugin.update_graph(
                    self.scheduler,
                    client=details.client,
                    tasks=tasks,
                    keys=details.keys,
                    annotations=annotations,
                    priority=priority,
                    stimulus_id=details.stimulus_id,
                )
            except Exception as e:
                logger.exception(e)

    def _lost(self, details: Details) -> None:
        self.arrivals.lost(details.client, details.keys)
