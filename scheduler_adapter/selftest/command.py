"""`taskdb selftest`, as the command line sees it (entry point group `taskdb.commands`). Imports Dask only when it runs."""

from __future__ import annotations

import random
import sys
from pathlib import Path

import click


@click.group(help="Try it on this machine, with processes of its own.\n\nNeeds no running daemon, and touches none. Leaves nothing behind.")
def selftest() -> None:
    pass


@selftest.command()
@click.option("--rounds", type=click.IntRange(min=0), default=10, show_default=True, help="Some 15 seconds each.")
@click.option("--seed", type=click.IntRange(min=0), default=None, help="Of the first round; each further one adds 1.  [default: any]")
@click.option(
    "--window", type=click.IntRange(min=0), default=100, show_default=True, help="Tasks the scheduler may hold; 0 pages everything."
)
@click.option("--workers", type=click.IntRange(min=1), default=3, show_default=True)
@click.option("--threads", type=click.IntRange(min=1), default=2, show_default=True, help="Of each worker.")
@click.option("--controls/--no-controls", default=True, show_default=True, help="Plant faults that the checks must find.")
@click.option(
    "--logs", type=click.Path(file_okay=False, path_type=Path), help="Folder for the logs of failed rounds.  [default: a temporary one]"
)
def crash(rounds: int, seed: int | None, window: int, workers: int, threads: int, controls: bool, logs: Path | None) -> None:
    """Kill scheduler, daemon and workers with -9 while graphs of several shapes are computed, and start them again.

    Every result is compared with its closed form, every run of a task is counted, and whatever was acknowledged is looked for in the store
    after a kill.

    \b
    Exit codes: 0 if all counts are 0 and each planted fault was caught, 1 otherwise, 2 usage.
    """
    from scheduler_adapter.selftest.crash import FAILURES, Options
    from scheduler_adapter.selftest.crash import crash as run

    if seed is None:
        seed = random.SystemRandom().randrange(1_000_000)
    try:
        tally = run(Options(rounds, seed, window, workers, threads, controls, logs), lambda line: click.echo(line))
    except FAILURES as e:
        raise click.ClickException(str(e)) from None
    except KeyboardInterrupt:
        raise click.Abort from None
    sys.exit(1 if tally.bad else 0)
