"""`make demo`: an array of N chunks on a small cluster, watched while it runs, and checked against the closed form.

`make demo-crash`: the same, with the scheduler killed at one third and the daemon at two thirds.
"""

from __future__ import annotations

import argparse
import logging
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import dask
import dask.array as da
import psutil
from distributed import Client, Future
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from demo.cluster import temporary_cluster
from demo.crash import Crashes
from scheduler_adapter.local.cluster import FAILURES, Cluster
from scheduler_adapter.local.processes import ProcessDied

#: Elements of a chunk: so few that the job is nothing but tasks.
CHUNK_SIZE = 10
#: Seconds between two looks at the scheduler.
POLL_SECONDS = 0.5
#: Seconds between two lines where there is no terminal to draw on.
LINE_SECONDS = 2.0
#: Seconds without a finished task after which the job counts as stuck.
STUCK_SECONDS_MAX = 180.0
MIB = 2**20


def job(chunks: int) -> tuple[da.Array, int]:
    """A tree sum over `chunks` chunks, and what it must come to: (x + 1) summed over 0 … n-1 is n (n + 1) / 2."""
    n = chunks * CHUNK_SIZE
    return (da.arange(n, chunks=CHUNK_SIZE) + 1).sum(), n * (n + 1) // 2


def probe(dask_scheduler) -> tuple[int, int, int, bool]:  # type: ignore[no-untyped-def]
    """Runs in the scheduler: tasks it holds, tasks there are, tasks that are done, whether it has its daemon."""
    states: dict[str, int] = {}
    for group in dask_scheduler.task_groups.values():
        for state, count in group.states.items():
            states[state] = states.get(state, 0) + count
    done = sum(states.get(state, 0) for state in ("memory", "released", "forgotten", "erred"))
    adapter = getattr(dask_scheduler, "taskdb", None)
    return len(dask_scheduler.tasks), sum(states.values()), done, adapter is None or adapter.session.connected


@dataclass
class Watch:
    """What was seen so far. Groups of tasks that are done may vanish, so the highest counts stand."""

    cluster: Cluster
    #: None: nothing is killed.
    crashes: Crashes | None = None
    started: float = field(default_factory=time.monotonic)
    done: int = 0
    total: int = 0
    resident: int = 0
    resident_max: int = 0
    rss: int = 0
    rss_idle: int = 0
    rss_max: int = 0
    store_bytes: int = 0
    answer_seconds_max: float = 0.0
    makespan: float = 0.0
    #: When the counts last moved.
    moved: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        self.scheduler = psutil.Process(self.cluster.scheduler.pid)
        self.rss = self.rss_idle = self.rss_max = self.scheduler.memory_info().rss

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.started

    def look(self, client: Client) -> None:
        asked = time.monotonic()
        self.resident, total, done, whole = client.run_on_scheduler(probe)
        now = time.monotonic()
        if self.crashes is None:
            self.answer_seconds_max = max(self.answer_seconds_max, now - asked)
        elif whole:
            self.crashes.back()
        if (total, done) > (self.total, self.done):
            self.moved = now
        self.total, self.done = max(self.total, total), max(self.done, done)
        self.resident_max = max(self.resident_max, self.resident)
        self.rss = self.scheduler.memory_info().rss
        self.rss_max = max(self.rss_max, self.rss)
        self.store_bytes = disk_bytes(self.cluster.data)

    def crash(self) -> bool:
        """Kill what is due; whether anything was."""
        started = self.crashes.kill(self.done, self.total) if self.crashes is not None else None
        if started is self.cluster.scheduler:
            self.scheduler = psutil.Process(started.pid)
        return started is not None

    def line(self) -> str:
        return (
            f"{self.seconds:6.1f} s   {self.done:,} of {self.total:,} tasks done   {self.resident:,} in the scheduler   "
            f"scheduler {self.rss / MIB:.0f} MiB   store {self.store_bytes / MIB:.1f} MiB"
            + "".join(f"   {crash}" for crash in (self.crashes.all if self.crashes is not None else ()) if crash.done is not None)
        )


def disk_bytes(folder: Path) -> int:
    """Bytes the files of a folder take. The store's file is sparse: its length says nothing."""
    return sum(path.stat().st_blocks * 512 for path in folder.rglob("*") if path.is_file()) if folder.exists() else 0


class LiveView:
    """A progress bar and the figures below it."""

    def __init__(self, console: Console, watch: Watch) -> None:
        self.watch = watch
        self.progress = Progress(TextColumn("tasks"), BarColumn(40), MofNCompleteColumn(), TimeElapsedColumn(), console=console)
        self.bar = self.progress.add_task("tasks", total=None)
        self.live = Live(console=console, get_renderable=self.draw, refresh_per_second=4)

    def draw(self) -> RenderableType:
        watch = self.watch
        self.progress.update(self.bar, total=watch.total or None, completed=watch.done)
        table = Table.grid(padding=(0, 2))
        table.add_row("tasks in the scheduler", f"{watch.resident:,}", f"most {watch.resident_max:,}")
        table.add_row("scheduler memory", f"{watch.rss / MIB:.0f} MiB", f"idle {watch.rss_idle / MIB:.0f} MiB")
        table.add_row("store on disk", f"{watch.store_bytes / MIB:.1f} MiB", "")
        if watch.crashes is not None:
            return Group(self.progress, table, *map(str, watch.crashes.all))
        return Group(self.progress, table)


def follow(client: Client, cluster: Cluster, future: Future, watch: Watch, tell: Callable[[bool], None]) -> int:
    """Look at the scheduler until the future is done; its result. `tell(at_once)` shows what was seen."""
    while not future.done():
        cluster.processes.check()
        tell(watch.crash())
        try:
            watch.look(client)
        except OSError as lost:
            if watch.crashes is None:
                raise ProcessDied(f"the scheduler does not answer: {lost}; its log ends:\n{cluster.scheduler.tail()}") from lost
        if time.monotonic() - watch.moved > STUCK_SECONDS_MAX:
            raise TimeoutError(f"no task finished within {STUCK_SECONDS_MAX:.0f} s; the scheduler's log ends:\n{cluster.scheduler.tail()}")
        time.sleep(POLL_SECONDS)
    # A scheduler that is lost cancels futures, which is not the thing to tell.
    cluster.processes.check()
    result = int(future.result())
    watch.makespan = watch.seconds
    watch.look(client)
    # Groups of tasks go when nobody needs them, so they may be gone before they were counted; the result says that all ran.
    watch.done = watch.total
    tell(True)
    return result


def run(console: Console, cluster: Cluster, chunks: int, crash: bool = False) -> bool:
    """Run the job; whether the result is right (and all that was to be killed was)."""
    array, expected = job(chunks)
    with Client(cluster.address, set_as_default=False) as client:
        # What scheduler and workers import for the first array is neither part of the makespan nor of the growth.
        first = client.compute(job(2)[0])
        cluster.wait_for(cluster.scheduler, first.done)
        del first
        cluster.wait_for(cluster.scheduler, lambda: client.run_on_scheduler(probe)[1] == 0)
        watch = Watch(cluster, Crashes(cluster) if crash else None)
        future = client.compute(array)
        if console.is_terminal:
            view = LiveView(console, watch)
            with view.live:
                result = follow(client, cluster, future, watch, lambda at_once: None)
        else:
            next_line = 0.0

            def tell(at_once: bool) -> None:
                nonlocal next_line
                if watch.seconds >= next_line or at_once:
                    next_line = watch.seconds + LINE_SECONDS
                    console.print(watch.line(), highlight=False, soft_wrap=True)

            result = follow(client, cluster, future, watch, tell)
        right = report(console, watch, result, expected)
        if not cluster.stock:
            console.print(f"taskdb status --url {cluster.url}", style="bold", highlight=False)
            status = subprocess.run(
                [sys.executable, "-m", "taskdb", "status", "--url", cluster.url], capture_output=True, text=True, check=False
            )
            console.out(status.stdout + status.stderr, end="", highlight=False)
    return right


def report(console: Console, watch: Watch, result: int, expected: int) -> bool:
    right = result == expected
    verdict = "[green]right[/]" if right else f"[red]wrong, expected {expected:,}[/]"
    console.print(f"sum = {result:,}  {verdict}", highlight=False)
    table = Table(show_header=False)
    table.add_row("tasks", f"{watch.total:,}")
    table.add_row("makespan", f"{watch.makespan:.1f} s")
    table.add_row("most tasks in the scheduler", f"{watch.resident_max:,}")
    table.add_row("scheduler memory growth", f"{(watch.rss_max - watch.rss_idle) / MIB:.1f} MiB")
    if watch.crashes is None:
        table.add_row("longest wait for an answer of the scheduler", f"{watch.answer_seconds_max:.2f} s")
    table.add_row("store on disk", f"{watch.store_bytes / MIB:.1f} MiB")
    for crash in watch.crashes.all if watch.crashes is not None else ():
        name, _, what = str(crash).partition(": ")
        table.add_row(name, what)
    console.print(table)
    if watch.crashes is not None and not watch.crashes.over:
        console.print("the job was over before all was killed: take more chunks", style="red")
        return False
    return right


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m demo", description=__doc__)
    parser.add_argument("--chunks", type=int, default=20_000, metavar="N", help="chunks of the array (default %(default)s)")
    parser.add_argument("--window", type=int, metavar="N", help="tasks the scheduler may hold")
    parser.add_argument("--stock", action="store_true", help="without the database, for comparison")
    parser.add_argument("--crash", action="store_true", help="kill the scheduler with -9 at one third, the daemon at two thirds")
    args = parser.parse_args()
    if args.chunks < 1:
        parser.error("--chunks must be at least 1")
    if args.crash and args.stock:
        parser.error("a stock scheduler that is killed takes everything with it")
    console = Console()
    logging.getLogger("distributed.preloading").setLevel(logging.WARNING)
    try:
        console.print("starting " + ("" if args.stock else "a daemon, ") + "a scheduler and two workers", highlight=False)
        preloads = {"distributed.client.preload": ["scheduler_adapter.client"]} if args.crash else {}
        with (
            dask.config.set(preloads),
            temporary_cluster(stock=args.stock, window=args.window, survive=args.crash) as cluster,
        ):
            return 0 if run(console, cluster, args.chunks, args.crash) else 1
    except FAILURES as failure:
        console.print(str(failure), style="red", markup=False, highlight=False, soft_wrap=True)
        return 1
    except KeyboardInterrupt:
        console.print("stopped")
        return 130


if __name__ == "__main__":
    sys.exit(main())
