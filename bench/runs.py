"""One measured run of one side: start everything, warm up, settle, submit, wait, read, stop.

Stock is `dask scheduler`; ours is the same with `--preload scheduler_adapter` and a `taskdb serve` of its own on an
empty folder. All else is the same.
"""

from __future__ import annotations

import contextlib
import os
import platform
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

import dask
import distributed
from distributed import Client, Future

from bench import probe
from bench.figures import Figures
from bench.watch import Guard, Watch, rss
from bench.workloads import Job, TaskFailed, Workload, check
from scheduler_adapter.local.processes import ProcessDied, Processes, Spawned, await_port, free_port

#: Tasks of the job that is run before the clock starts, so that imports are paid for.
WARM_UP_TASKS = 60
#: Bound on starting one process, seconds.
START_S = 60.0
#: Bound on the scheduler getting empty and quiet after the warm-up, seconds.
SETTLE_S = 20.0
#: Pause between two looks at how many tasks are done, seconds.
FIRST_POLL_S = 0.2
#: Time a dying process has to end before something else is named as the reason, seconds.
DEATH_S = 0.5
#: Resident memory counts as quiet when it moves less than this in half a second, bytes.
QUIET_BYTES = 256 * 1024


@dataclass(frozen=True)
class Options:
    """What a run is asked to do."""

    tasks: int
    workers: int
    #: Threads of each worker.
    nthreads: int
    #: Real workers compute; zero workers only answer.
    real_workers: bool
    #: Result size that zero workers claim, bytes.
    nbytes: int
    #: Passed to our scheduler as --taskdb-window; None leaves its default.
    window: int | None
    #: Bound on the whole run, seconds.
    timeout_s: float
    #: End the measurement when so many tasks are done; 0: all.
    first: int = 0
    #: Where the files of the run are made; None is the system's temporary folder.
    folder: Path | None = None


class Interrupted(BaseException):
    """A signal asked us to end. Not an Exception, so that nothing on the way takes it for a failure of its own."""


class Alarm:
    """Turns signals, and what another thread finds, into an exception in the main thread.

    As a context it owns the signal handlers. Only inside `armed` does it raise; what comes at another time waits for
    the next `armed` or for the end, so neither starting nor stopping a process can be cut in two.
    """

    _SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)

    def __init__(self) -> None:
        self._armed = False
        self._found: BaseException | None = None
        self._pending: BaseException | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Alarm:
        self._before = {number: signal.signal(number, self._on_signal) for number in self._SIGNALS}
        return self

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        if isinstance(self._pending, Interrupted):
            raise self._pending

    @contextlib.contextmanager
    def armed(self) -> Iterator[None]:
        """Inside this block signals raise."""
        self._rearm()
        try:
            yield
        finally:
            self._armed = False

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Inside this block, which stands inside `armed`, they do not; what came meanwhile is raised at its end."""
        self._armed = False
        yield
        self._rearm()

    def ring(self, found: BaseException) -> None:
        """Raise `found` in the main thread. For other threads."""
        self._found = found
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR1)

    def _rearm(self) -> None:
        if self._pending is not None:
            pending, self._pending = self._pending, None
            raise pending
        self._armed = True

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        reason = Interrupted(f"ended by {signal.Signals(number).name}")
        if number == signal.SIGUSR1 and self._found is not None:
            raised: BaseException = self._found
        else:
            raised = reason
        if self._armed:
            self._armed = False
            raise raised
        self._pending = self._pending or raised


class Side:
    """The processes of one side, started one after the other."""

    def __init__(self, side: str, options: Options, processes: Processes, alarm: Alarm) -> None:
        self._side = side
        self._options = options
        self._processes = processes
        self._alarm = alarm
        self.scheduler: Spawned | None = None
        self.daemon: Spawned | None = None
        #: Folder of the daemon's store; None for stock.
        self.data: Path | None = None

    def _start(self, name: str, *args: str) -> Spawned:
        with self._alarm.held():
            return self._processes.start(name, list(args))

    def start(self) -> str:
        """Start all of them and return the scheduler's address. Raises ProcessDied or TimeoutError."""
        ours = self._start_daemon() if self._side == "ours" else []
        port = free_port()
        listen = ["--host", "127.0.0.1", "--port", str(port), "--dashboard-address", "127.0.0.1:0"]
        self.scheduler = self._start("scheduler", "-m", "dask", "scheduler", *listen, *ours)
        await_port(self.scheduler, port, START_S)
        address = f"tcp://127.0.0.1:{port}"
        for number in range(self._options.workers):
            self._start_worker(address, number)
        return address

    def _start_daemon(self) -> list[str]:
        """Start `taskdb serve`, and return what our scheduler is told about it."""
        self.data = self._processes.folder / "data"
        url = f"127.0.0.1:{(port := free_port())}"
        self.daemon = self._start("daemon", "-m", "taskdb", "serve", "--data", str(self.data), "--listen", url)
        await_port(self.daemon, port, START_S)
        window = self._options.window
        return [
            *("--preload", "scheduler_adapter", "--taskdb-url", url),
            *(() if window is None else ("--taskdb-window", str(window))),
        ]

    def _start_worker(self, address: str, number: int) -> None:
        options = self._options
        common = ["--nthreads", str(options.nthreads), "--name", f"worker-{number}"]
        if options.real_workers:
            files = ["--local-directory", str(self._processes.folder)]
            kind = ["-m", "dask", "worker", address, "--host", "127.0.0.1", "--no-nanny", "--no-dashboard", *files]
        else:
            kind = ["-m", "bench.zero_worker", address, "--nbytes", str(options.nbytes)]
        self._start(f"worker-{number}", *kind, *common)


def _settle(client: Client, scheduler_pid: int) -> None:
    """Return once the scheduler is empty and its memory is at rest, or, with a word, when the bound is reached."""
    deadline = time.monotonic() + SETTLE_S
    before = 0
    while time.monotonic() < deadline:
        resident = client.run_on_scheduler(probe.tasks_resident)
        client.run_on_scheduler(probe.reset)
        now = rss(scheduler_pid)
        if not resident and abs(now - before) < QUIET_BYTES:
            return
        before = now
        time.sleep(0.5)
    print(f"the scheduler did not come to rest in {SETTLE_S:.0f} s ({resident} tasks resident)", file=sys.stderr)


def _figures(readings: probe.Readings, watch: Watch, makespan_s: float, submitted: float, submission_s: float | None) -> Figures:
    tasks = readings.tasks_finished
    per_task = 1 / tasks if tasks else float("nan")
    ours = watch.data is not None
    cpu_s = (watch.scheduler.cpu_s, watch.daemon.cpu_s, watch.ingest.cpu_s)
    return {
        "tasks": tasks,
        "submission_s": submission_s,
        "makespan_s": makespan_s,
        "makespan_per_task_s": makespan_s * per_task,
        "scheduler_cpu_per_task_s": cpu_s[0] * per_task,
        "daemon_cpu_per_task_s": cpu_s[1] * per_task if ours else None,
        "ingest_cpu_per_task_s": cpu_s[2] * per_task if ours else None,
        "all_cpu_per_task_s": sum(cpu_s) * per_task,
        "scheduler_rss_growth_bytes": watch.scheduler.rss_max - watch.scheduler_rss_idle,
        "daemon_rss_max_bytes": watch.daemon.rss_max if ours else None,
        "ingest_rss_max_bytes": watch.ingest.rss_max if ours else None,
        "tasks_resident_max": readings.tasks_resident_max,
        "stall_max_s": readings.stall_max_s,
        "first_task_s": readings.first_start - submitted if readings.first_start is not None else None,
        "disk_bytes_per_task": (watch.disk_bytes_max - watch.disk_bytes_start) * per_task if ours else None,
        "worker_bytes_max": readings.worker_bytes_max,
    }


def _measure(client: Client, side: Side, workload: Workload, options: Options) -> Figures:
    """Warm up, settle, then submit and wait between two readings. Raises TaskFailed or WrongAnswer."""
    assert side.scheduler is not None
    scheduler_pid = client.run_on_scheduler(probe.install)
    if scheduler_pid != side.scheduler.pid:
        raise RuntimeError(f"the scheduler runs as {scheduler_pid}, not as the process {side.scheduler.pid} we started")
    workload.build(min(WARM_UP_TASKS, options.tasks)).run(client, options.real_workers)
    job = workload.build(options.tasks)
    _settle(client, scheduler_pid)

    watch = Watch(scheduler_pid, side.daemon.pid if side.daemon else None, side.data)
    # Reset first: it collects garbage, which is not the run's CPU time.
    client.run_on_scheduler(probe.reset)
    watch.start()
    try:
        submitted, started = time.time(), time.perf_counter()
        futures = _run_first(client, job, options.first) if options.first else job.run(client, options.real_workers)
        makespan_s = time.perf_counter() - started
        while options.first and client.run_on_scheduler(probe.submission_s, submitted) is None:
            time.sleep(FIRST_POLL_S)
        readings = probe.Readings(*client.run_on_scheduler(probe.read))
        submission_s = client.run_on_scheduler(probe.submission_s, submitted)
    finally:
        watch.stop()
    if options.real_workers and not options.first:
        check(client.gather(futures), job.expected())
    return _figures(readings, watch, makespan_s, submitted, submission_s)


def _run_first(client: Client, job: Job, count: int) -> list[Future]:
    """Submit, and return when so many tasks are done. Raises TaskFailed if one did not end well."""
    if job.submit is None:
        raise TaskFailed("this workload is more than one submission: --first cannot be said of it")
    futures = job.submit(client)
    while (readings := probe.Readings(*client.run_on_scheduler(probe.read))).tasks_finished < count:
        if readings.tasks_erred or any(future.status in ("error", "cancelled") for future in futures):
            raise TaskFailed("a task did not end well")
        if all(future.done() for future in futures):
            break
        time.sleep(FIRST_POLL_S)
    return futures


def run(side_name: str, workload: Workload, options: Options) -> Figures:
    """Run the workload once on one side, and leave no process behind. Main thread only (it handles signals).

    Raises ProcessDied, TimeoutError, TaskFailed, WrongAnswer or Interrupted, with the end of the scheduler's log.
    """
    with contextlib.ExitStack() as stack:
        alarm = stack.enter_context(Alarm())
        if options.folder is None:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-", ignore_cleanup_errors=True)))
        else:
            folder = Path(tempfile.mkdtemp(prefix=f"{workload.name}-{side_name}-", dir=options.folder))
        processes = stack.enter_context(Processes(folder))
        guard = Guard(processes.check, time.monotonic() + options.timeout_s, alarm.ring)
        guard.start()
        stack.callback(guard.stop)
        side = Side(side_name, options, processes, alarm)
        try:
            with alarm.armed():
                address = side.start()
                client = Client(address, timeout=START_S)
                stack.callback(_close, client)
                client.wait_for_workers(options.workers, timeout=START_S)
                return _measure(client, side, workload, options)
        except ProcessDied:
            raise
        except Exception as exc:
            # A client notices that its scheduler died before we do, and names another reason.
            time.sleep(DEATH_S)
            try:
                processes.check()
            except ProcessDied as died:
                raise died from exc
            if side.scheduler is not None:
                exc.add_note(f"the scheduler's log ends:\n{side.scheduler.tail()}")
            raise


def _close(client: Client) -> None:
    """Close the client; the scheduler may be gone, and then closing may fail, which changes nothing for us."""
    with contextlib.suppress(Exception):
        client.close(timeout=2)


def machine() -> dict[str, Any]:
    """What a reader needs to know of where it was measured."""
    return {
        "cpus": os.cpu_count(),
        "platform": platform.platform(),
        "python": platform.python_version(),
        "dask": dask.__version__,
        "distributed": distributed.__version__,
    }
