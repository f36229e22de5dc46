"""The commands of `python -m bench`. Tables go to stdout, words to stderr; exit 0 ok, 1 a run failed, 2 usage."""

from __future__ import annotations

import json
import shutil
import statistics
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from bench import cancel, curves, figures, order, queries
from bench.recovery import make_store, start_to_first
from bench.runs import Interrupted, Options, machine, run
from bench.workloads import WORKLOADS
from bench.zero_worker import NBYTES

#: Threads of a worker when nothing is said.
NTHREADS_ZERO, NTHREADS_REAL = 4, 1
#: Sizes of the stores that a scheduler is started on.
SIZES = (10_000, 100_000, 1_000_000)


@click.group()
def main() -> None:
    """Measure our scheduler against the stock one."""


@main.command("list")
def list_workloads() -> None:
    """Show the workloads."""
    table = Table("workload", "shape")
    for workload in WORKLOADS.values():
        table.add_row(workload.name, workload.shape)
    Console().print(table)


def _order(side: str, repeat: int) -> list[str]:
    """The runs to make: in turn, and every second round the other way round, against drift of the machine."""
    sides = list(figures.SIDES) if side == "both" else [side]
    return [name for number in range(repeat) for name in (sides if number % 2 == 0 else sides[::-1])]


def _run_all(order: list[str], workload: str, options: Options) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """Make all runs; a side that failed once is not tried again. Returns the runs, and what failed by side."""
    runs: list[dict[str, Any]] = []
    failed: dict[str, str] = {}
    for number, side in enumerate(order, 1):
        if side in failed:
            continue
        click.echo(f"run {number} of {len(order)}: {workload}, {side}", err=True)
        try:
            runs.append({"side": side, "figures": run(side, WORKLOADS[workload], options)})
        except Exception as exc:
            failed[side] = "\n".join([f"{type(exc).__name__}: {exc}", *getattr(exc, "__notes__", [])])
            click.echo(f"{side} failed: {failed[side]}", err=True)
    return runs, failed


@main.command()
@click.option("--workload", type=click.Choice(list(WORKLOADS)), required=True)
@click.option("--tasks", type=click.IntRange(1), default=2000, show_default=True, help="About how many tasks.")
@click.option("--window", type=click.IntRange(0), help="Window of our scheduler, tasks.")
@click.option("--json", "json_file", type=click.Path(dir_okay=False, path_type=Path), help="Write everything here.")
@click.option("--real-workers", is_flag=True, help="Workers that compute; results are checked.")
@click.option("--workers", type=click.IntRange(1), default=2, show_default=True)
@click.option("--nthreads", type=click.IntRange(1), help="Threads a worker.  [default: 4, real workers 1]")
@click.option("--nbytes", type=click.IntRange(1), default=NBYTES, show_default=True, help="Size zero workers claim.")
@click.option("--repeat", type=click.IntRange(1), default=1, show_default=True, help="Rounds; medians are shown.")
@click.option("--side", type=click.Choice(["both", *figures.SIDES]), default="both", show_default=True)
@click.option("--timeout", type=click.FloatRange(1), default=600, show_default=True, help="Bound on a run, seconds.")
@click.option("--first", type=click.IntRange(0), default=0, help="Stop when so many tasks are done.  [default: all]")
@click.option("--folder", type=click.Path(path_type=Path, file_okay=False), help="Keep logs and stores here.")
def compare(
    workload: str,
    tasks: int,
    window: int | None,
    json_file: Path | None,
    real_workers: bool,
    workers: int,
    nthreads: int | None,
    nbytes: int,
    repeat: int,
    side: str,
    timeout: float,
    first: int,
    folder: Path | None,
) -> None:
    """Run one workload on both sides in turn and show their figures side by side."""
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        folder = folder.resolve()
    options = Options(
        tasks=tasks,
        workers=workers,
        nthreads=nthreads or (NTHREADS_REAL if real_workers else NTHREADS_ZERO),
        real_workers=real_workers,
        nbytes=nbytes,
        window=window,
        timeout_s=timeout,
        first=first,
        folder=folder,
    )
    try:
        runs, failed = _run_all(_order(side, repeat), workload, options)
    except Interrupted as exc:
        click.echo(str(exc), err=True)
        sys.exit(1)
    asked = {**asdict(options), "repeat": repeat, "worker_kind": "real" if real_workers else "zero"}
    del asked["folder"]
    head = {"workload": workload, "options": asked, "machine": machine(), "failed": failed}
    content = figures.document(head, runs)
    if json_file is not None:
        json_file.write_text(json.dumps(content, indent=2) + "\n")
    if runs:
        Console().print(figures.side_by_side(content))
    if failed:
        sys.exit(1)


@main.command()
@click.option("--tasks", type=click.IntRange(1), multiple=True, default=SIZES, show_default=True, help="Unfinished tasks.")
@click.option("--repeat", type=click.IntRange(1), default=3, show_default=True, help="Rounds; medians are shown.")
def recovery(tasks: tuple[int, ...], repeat: int) -> None:
    """Time from a scheduler's start to its first task, on stores with unfinished work, in turn with a stock scheduler's start."""
    with tempfile.TemporaryDirectory(prefix="taskdb-bench-") as name:
        folder = Path(name)
        sizes = {}
        for count in tasks:
            click.echo(f"making a store with {count:,} unfinished tasks", err=True)
            sizes[count] = make_store(folder / str(count), count)
        times: dict[int, list[float]] = {count: [] for count in (0, *tasks)}
        for number in range(repeat):
            click.echo(f"round {number + 1} of {repeat}", err=True)
            for count in times:
                # Each start is a recovery of its own: the store is as the crash left it.
                store = folder / str(count)
                copy = folder / "copy"
                if count:
                    shutil.copytree(store, copy)
                times[count].append(start_to_first(folder, copy if count else None))
                shutil.rmtree(copy, ignore_errors=True)
    table = Table("store", "unfinished tasks", "start to first task, s", "over stock, s")
    stock = statistics.median(times.pop(0))
    table.add_row("stock: a registered worker", "", f"{stock:.2f}", "")
    for count, seconds in times.items():
        median = statistics.median(seconds)
        table.add_row("ours", f"{sizes[count]:,}", f"{median:.2f}", f"{median - stock:.2f}")
    Console().print(table)


_pace = click.option(
    "--pace", type=click.FloatRange(0), default=1_000.0, show_default=True, help="Tasks a second the graph runs at; 0: as fast as can be."
)


@main.command("queries")
@click.option("--tasks", type=click.IntRange(100), default=100_000, show_default=True, help="Unfinished tasks in the store.")
@click.option("--rate", type=click.FloatRange(0.1), default=20.0, show_default=True, help="Questions a second.")
@_pace
@click.option("--seconds", type=click.FloatRange(0.5), default=10.0, show_default=True, help="Of each phase.")
@click.option("--rounds", type=click.IntRange(1), default=3, show_default=True, help="Phases without and with questions.")
def ask_queries(tasks: int, rate: float, pace: float, seconds: float, rounds: int) -> None:
    """What questions take on a large store while a graph is ingested and run, and what that graph notices."""
    with tempfile.TemporaryDirectory(prefix="taskdb-bench-") as name:
        folder = Path(name)
        click.echo(f"making a store with {tasks:,} unfinished tasks", err=True)
        measured = queries.measure(folder, folder / "store", make_store(folder / "store", tasks), rate, pace, seconds, rounds)
    shown = Table("question", "asked", "p50, ms", "p99, ms", "longest, ms")
    for question, found in measured.latencies.items():
        ordered = sorted(1000 * x for x in found)
        p50, p99 = (ordered[min(len(ordered) - 1, int(share * len(ordered)))] for share in (0.5, 0.99))
        shown.add_row(question, f"{len(ordered):,}", f"{p50:.1f}", f"{p99:.1f}", f"{ordered[-1]:.1f}")
    Console().print(shown)
    shown = Table("the graph that runs", "tasks/s, median", "longest wait for an answer, ms")
    for words, phases in (("without questions", measured.without), ("with questions", measured.asked)):
        rate_median = statistics.median(phase.per_second for phase in phases)
        shown.add_row(words, f"{rate_median:,.0f}", f"{1000 * max(phase.waited_max_s for phase in phases):.0f}")
    Console().print(shown)
    click.echo(f"with questions a task takes {measured.slowdown:.3f} times as long", err=True)


@main.command("prune")
@click.option("--tasks", type=click.IntRange(1), default=100_000, show_default=True, help="Tasks of the graph that is pruned.")
@_pace
@click.option("--seconds", type=click.FloatRange(0.5), default=10.0, show_default=True, help="Of the phase before.")
def prune_while_running(tasks: int, pace: float, seconds: float) -> None:
    """What a graph that runs notices of another one being pruned."""
    with tempfile.TemporaryDirectory(prefix="taskdb-bench-") as name:
        folder = Path(name)
        click.echo(f"making a store with {tasks:,} finished tasks", err=True)
        queries.make_finished_store(folder / "store", tasks)
        found = queries.prune(folder, folder / "store", tasks, pace, seconds)
    shown = Table("the graph that runs", "tasks/s", "longest wait for an answer, ms")
    for words, phase in (("before", found.before), ("while the other is pruned", found.meanwhile)):
        shown.add_row(words, f"{phase.per_second:,.0f}", f"{1000 * phase.waited_max_s:.0f}")
    Console().print(shown)
    click.echo(
        f"{found.tasks:,} tasks pruned in {found.seconds:.1f} s; bytes in use {found.used_bytes_before:,}, then {found.used_bytes:,}; "
        f"the file {found.file_bytes_before:,} and {found.file_bytes:,}",
        err=True,
    )


@main.command("cancel")
@click.option("--tasks", type=click.IntRange(1), default=100_000, show_default=True, help="Futures that are cancelled.")
@click.option("--window", type=click.IntRange(0), help="Window of our scheduler, tasks.")
@click.option("--side", type=click.Choice(["both", *figures.SIDES]), default="ours", show_default=True)
def time_cancel(tasks: int, window: int | None, side: str) -> None:
    """Time `client.cancel` of many siblings. In the stock scheduler it grows with the square of their number: 8,000 take seconds."""
    shown = Table("side", "futures", "cancel returns, s", "all is gone, s", "longest answer to another client, s")
    for name in _order(side, 1):
        click.echo(f"cancelling {tasks:,} futures, {name}", err=True)
        shown.add_row(name, f"{tasks:,}", *(f"{seconds:.2f}" for seconds in cancel.run(name, tasks, window)))
    Console().print(shown)


@main.command("order")
@click.option("--tasks", type=click.IntRange(1), default=2000, show_default=True, help="About how many tasks.")
@click.option("--threads", type=click.IntRange(1), default=8, show_default=True)
def compare_orders(tasks: int, threads: int) -> None:
    """Most results live at once in the order of each large graph, simulated, against `dask.order`."""
    shown = Table("workload", "tasks", "order of a large graph", "dask.order: peak live", "ours: peak live", "ratio")
    for workload in WORKLOADS.values():
        expr = order.submitted(workload, tasks)
        if expr is None:
            continue
        theirs, ours = order.orders(expr)
        kind = "dask.order" if ours is theirs else "ours"
        peaks = order.peak_live(theirs, threads), order.peak_live(ours, threads)
        shown.add_row(workload.name, f"{len(ours.deps):,}", kind, *(f"{peak:,}" for peak in peaks), f"{peaks[1] / peaks[0]:.2f}")
    Console().print(shown)


@main.command()
@click.argument("files", nargs=-1, required=True, type=click.Path(exists=True, dir_okay=False, path_type=Path))
def table(files: tuple[Path, ...]) -> None:
    """Show files of `compare --json` as one Markdown table."""
    try:
        contents = [figures.load(file) for file in files]
    except ValueError as exc:
        raise click.UsageError(str(exc)) from exc
    click.echo(figures.markdown(contents))


@main.command("curves")
@click.argument("files", nargs=-1, required=True, type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("-o", "--output", type=click.Path(dir_okay=False, path_type=Path), required=True, help="Picture to write (.svg, .png).")
def draw_curves(files: tuple[Path, ...], output: Path) -> None:
    """Draw files of `compare --json` of one workload over the number of tasks."""
    try:
        curves.draw([figures.load(file) for file in files], output)
    except ValueError as exc:
        raise click.UsageError(str(exc)) from exc


if __name__ == "__main__":
    main(prog_name="python -m bench")
