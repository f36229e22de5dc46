"""One round: jobs on a cluster that is up, kills in their middle, and everything that is checked afterwards."""

from __future__ import annotations

import gc
import json
import subprocess
import sys
import threading
import time
from typing import Any

from distributed import Client

from scheduler_adapter.local.cluster import Cluster, faults
from scheduler_adapter.local.processes import ProcessDied, Spawned
from scheduler_adapter.selftest import acknowledged
from scheduler_adapter.selftest.jobs import NEED_WORKERS, SHAPES, Job, Promises
from scheduler_adapter.selftest.plan import DAEMON, SCHEDULER, WORKER, Kill, Plan
from scheduler_adapter.selftest.tally import Tally
from scheduler_adapter.selftest.work import Runs, ended
from taskdb.client import Client as Reader
from taskdb.errors import TaskDBError

#: How long nothing may happen before a round counts as stuck.
STUCK_SECONDS_MAX = 60.0
#: How long what nobody needs may take to go, in the scheduler and in the store.
LEFT_SECONDS_MAX = 30.0
LOOK_SECONDS = 0.02


class Round:
    """`logs`: how many faults were seen in each log before. `words`: what went wrong, for people. `kills_done`: those that came in time."""

    def __init__(self, cluster: Cluster, client: Client, plan: Plan, number: int, logs: dict[Spawned, int]) -> None:
        self.cluster = cluster
        self.client = client
        self.plan = plan
        self.tally = Tally(rounds=1)
        self.words: list[str] = []
        self.kills_done: list[Kill] = []
        self.path = cluster.folder / f"runs-{number}"
        self.promises = Promises()
        self.jobs = [
            Job(shape, SHAPES[shape], client, f"r{number}-{shape.__name__}", self.path, *plan.jobs[shape.__name__], self.promises)
            for shape in SHAPES
            if shape.__name__ in plan.jobs and not (plan.workers_die and shape in NEED_WORKERS)
        ]
        self._restarts: list[threading.Timer] = []
        self._logs = logs
        logs.setdefault(cluster.scheduler, 0)

    @property
    def tasks(self) -> int:
        return sum(job.tasks for job in self.jobs)

    def run(self) -> None:
        try:
            for job in self.jobs:
                job.start()
            for kill in self.plan.kills:
                if self._reach(kill.at):
                    self._kill(kill)
            self._finish()
        except ProcessDied as e:
            self._wrong(str(e))
        finally:
            for restart in self._restarts:
                restart.join()
        self._count()
        if not self.words:
            self._nothing_left()
            self._verify()
        self._faults()

    def _wrong(self, words: str) -> None:
        self.tally.wrong += 1
        self.words.append(words)

    # ----------------------------------------------------------------------------------------------------------- kills

    def _reach(self, part: float) -> bool:
        """Wait until so much has been done. False: all is over."""
        while ended(self.path) < part * self.tasks:
            if all(job.done for job in self.jobs):
                return False
            self.cluster.processes.check()
            time.sleep(LOOK_SECONDS)
        return not all(job.done for job in self.jobs)

    def _process(self, kill: Kill) -> Spawned | None:
        cluster = self.cluster
        spawned = {SCHEDULER: cluster.scheduler, DAEMON: cluster.daemon, WORKER: cluster.workers[kill.number]}[kill.kind]
        return spawned if spawned is not None and spawned.alive else None  # it may be dead still

    def _kill(self, kill: Kill) -> None:
        process = self._process(kill)
        if process is None:
            return
        before = acknowledged.told(self.client, self.promises)
        self.cluster.kill(process)
        self.kills_done.append(kill)
        self.tally.kills[kill.kind] += 1
        if kill.kind != WORKER:
            batches = None
            if kill.kind == DAEMON and self.cluster.scheduler.alive and "Scheduler at:" in self.cluster.scheduler.said():
                batches = acknowledged.batches_on_disk(self.client)
            looked, missing = acknowledged.missing(self.cluster.data, self.client, before, self.promises, batches)
            self.tally.acknowledged += looked
            self.tally.missing += len(missing)
            self.words += [f"acknowledged, and missing after the kill of the {kill.kind}: {words}" for words in missing[:5]]
        restart = threading.Timer(kill.down, self._restart, [process])
        restart.start()
        self._restarts.append(restart)

    def _restart(self, process: Spawned) -> None:
        again = self.cluster.start_again(process)
        if again is self.cluster.scheduler:
            self._logs[again] = 0

    # ----------------------------------------------------------------------------------------------------------- after

    def _finish(self) -> None:
        moved, before = time.monotonic(), (0, 0)
        while not all(job.done for job in self.jobs):
            self.cluster.processes.check()
            now = (ended(self.path), sum(job.done for job in self.jobs))
            if now != before:
                moved, before = time.monotonic(), now
            if time.monotonic() - moved > STUCK_SECONDS_MAX:
                stuck = [job.name for job in self.jobs if not job.done]
                for name in stuck:
                    self._wrong(f"{name} does not end: nothing has happened for {STUCK_SECONDS_MAX:.0f} s")
                return
            time.sleep(LOOK_SECONDS)
        for job in self.jobs:
            self.tally.results += job.checked
            if job.problem:
                self._wrong(job.problem)

    def _count(self) -> None:
        runs = Runs.read(self.path)
        tally = self.tally
        tally.runs = runs.ended.total()
        if WORKER in tally.kills:
            return
        tally.runs_guarded = tally.runs
        tally.again, tally.doubled = runs.again.total(), runs.doubled.total()
        for what, found in (("ran again", runs.again), ("was started twice", runs.doubled)):
            self.words += [f"{label} {what}" for label in list(found)[:5]]

    def _nothing_left(self) -> None:
        """All futures are gone, so all tasks go."""
        # Errors of calls that were interrupted name their frames, and these futures, in circles.
        gc.collect()
        deadline = time.monotonic() + LEFT_SECONDS_MAX
        while left := self._left():
            self.cluster.processes.check()
            if time.monotonic() > deadline:
                self.tally.left = left[0]
                self.words.append(f"left behind: {left[1]}")
                return
            time.sleep(LOOK_SECONDS)

    def _left(self) -> tuple[int, str] | None:
        try:
            with Reader(self.cluster.url) as reader:
                status = reader.status()
                if status.tasks:
                    tasks = reader.list_tasks(limit=5).tasks
                    return status.tasks, f"{status.tasks} tasks in the store: {tasks}"
        except TaskDBError as e:
            return 1, f"the daemon does not answer: {e}"
        resident: list[str] = self.client.run_on_scheduler(_resident)
        return (len(resident), f"{len(resident)} tasks in the scheduler: {resident[:5]}") if resident else None

    def _verify(self) -> None:
        """Every rule of the engine, over the whole store."""
        command = [sys.executable, "-m", "taskdb", "verify", "--data", str(self.cluster.data), "--output", "json"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            self.tally.faults += 1
            first = json.loads(done.stdout)["first"] if done.stdout else ""
            self.words.append(f"taskdb verify: {first or done.stderr}")

    def _faults(self) -> None:
        for scheduler in self._logs:
            found = faults(scheduler.said())
            new, self._logs[scheduler] = found[self._logs[scheduler] :], len(found)
            self.tally.faults += len(new)
            self.words += new[:3]

    def state(self) -> str:
        """Of the scheduler and the store, for whoever looks into a failure."""
        try:
            said: str = self.client.run_on_scheduler(_state)
        except Exception as e:
            said = f"the scheduler does not answer: {e!r}"
        command = [sys.executable, "-m", "taskdb", "tasks", "--url", self.cluster.url, "--limit", "200"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        return f"{said}\n\n{done.stdout}{done.stderr}"


def _resident(dask_scheduler: Any) -> list[str]:
    return [str(key) for key in dask_scheduler.tasks]


def _state(dask_scheduler: Any) -> str:
    lines = [f"{dask_scheduler}", f"clients: {list(dask_scheduler.clients)}", f"workers: {list(dask_scheduler.workers)}"]
    for ts in list(dask_scheduler.tasks.values())[:300]:
        resident = dask_scheduler.taskdb.pager.window.by_key.get(ts.key)
        lines.append(
            f"{ts!r} wanted by {[cs.client_key for cs in ts.who_wants or ()]} processing on {ts.processing_on} "
            f"waits for {list(ts.waiting_on or ())[:5]} needed by {len(ts.dependents or ())} "
            f"held by {[ws.name for ws in ts.who_has or ()]} told {resident and resident.told}"
        )
    pager = dask_scheduler.taskdb.pager
    lines.append(
        f"backlog {pager.backlog}, recovering {pager.recovering}, connected {pager.session.connected}, in flight {pager.session.in_flight}"
    )
    return "\n".join(lines)
