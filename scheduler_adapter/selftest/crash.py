"""`taskdb selftest crash`: rounds on one cluster; after a round that failed, on a new one. Its logs are kept."""

from __future__ import annotations

import contextlib
import logging
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import dask
from distributed import Client

from scheduler_adapter.local.cluster import FAILURES, Cluster
from scheduler_adapter.local.processes import Spawned, interruptible
from scheduler_adapter.selftest.controls import CONTROLS
from scheduler_adapter.selftest.jobs import SHAPES
from scheduler_adapter.selftest.plan import plan
from scheduler_adapter.selftest.rounds import Round
from scheduler_adapter.selftest.tally import Tally

#: Rounds with one client; then another one takes its place.
CLIENT_ROUNDS = 5
#: What the processes of a self-test are set to.
ENV = {"DASK_DISTRIBUTED__SCHEDULER__VALIDATE": "True"}
CONFIG = {"distributed.client.preload": ["scheduler_adapter.client"]}


@dataclass(frozen=True)
class Options:
    rounds: int
    seed: int
    window: int
    workers: int
    threads: int
    #: Whether planted faults are tried.
    controls: bool
    #: Where logs of failed rounds go; None: a temporary folder.
    logs: Path | None


def crash(options: Options, say: Callable[[str], None]) -> Tally:
    """Run it all. `say` is given a line for each round, and the table at the end."""
    folder = options.logs or Path(tempfile.mkdtemp(prefix="taskdb-selftest-"))
    folder.mkdir(parents=True, exist_ok=True)
    tally = Tally()
    say(f"seed {options.seed}, window {options.window}, {options.workers} workers; every round's seed repeats it: --rounds 1 --seed SEED")
    with interruptible(), dask.config.set(CONFIG), _client_log(folder / "client.log"):
        if options.controls:
            _controls(options, folder, tally, say)
        number = 0
        while number < options.rounds:
            number = _some_rounds(options, folder, number, tally, say)
    for line in tally.lines():
        say(line)
    if tally.bad:
        say(f"logs are in {folder}")
    else:
        shutil.rmtree(folder, ignore_errors=True)
    return tally


def _some_rounds(options: Options, folder: Path, number: int, tally: Tally, say: Callable[[str], None]) -> int:
    """Rounds on one cluster, until all are done or one has failed. Returns the number of rounds done."""
    here = folder / f"from-round-{number + 1}"
    here.mkdir()
    bad = False
    cluster = Cluster(here, window=options.window, survive=True, workers=options.workers, threads=options.threads, env=ENV)
    logs: dict[Spawned, int] = {}
    with cluster:
        while number < options.rounds and not bad:
            with contextlib.closing(Client(cluster.address)) as client:
                for _ in range(CLIENT_ROUNDS):
                    seed = options.seed + number
                    number += 1
                    bad = not _round(cluster, client, options, seed, number, logs, tally, say)
                    if bad or number == options.rounds:
                        break
    if not bad:
        shutil.rmtree(here, ignore_errors=True)
    return number


def _round(
    cluster: Cluster,
    client: Client,
    options: Options,
    seed: int,
    number: int,
    logs: dict[Spawned, int],
    tally: Tally,
    say: Callable[[str], None],
) -> bool:
    started = time.monotonic()
    it = Round(cluster, client, plan(seed, [shape.__name__ for shape in SHAPES], options.workers), number, logs)
    it.run()
    tally.add(it.tally)
    kills = ", ".join(map(str, it.kills_done)) or "none came in time"
    right = not it.tally.bad
    line = f"round {number:3}  seed {seed}  killed: {kills};  {it.tally.runs:,} tasks ran, {time.monotonic() - started:.1f} s"
    say(f"{line}  {'ok' if right else 'FAILED'}")
    if not right:
        tally.failed.append(seed)
        say("\n".join(f"    {words}" for words in it.words))
        (cluster.folder / f"failed-round-{number}.txt").write_text("\n".join([line, *it.words, "", it.state()]))
    return right


def _controls(options: Options, folder: Path, tally: Tally, say: Callable[[str], None]) -> None:
    for control in CONTROLS:
        here = folder / f"control-{control.__name__}"
        here.mkdir()
        tally.controls += 1
        caught, words = control(here, options.window)
        tally.caught += caught
        say(f"planted: {words}  {'caught' if caught else 'NOT CAUGHT'}")
        if caught:
            shutil.rmtree(here, ignore_errors=True)


@contextlib.contextmanager
def _client_log(path: Path) -> Iterator[None]:
    """What the client says goes into a file, not between the lines of the report."""
    handler = logging.FileHandler(path)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    # Dask gives some of its loggers a handler of their own.
    loggers = [logging.getLogger(name) for name in ("distributed", "distributed.client")]
    before = [logger.handlers[:] for logger in loggers]
    for logger in loggers:
        logger.handlers[:] = [handler]
    try:
        yield
    finally:
        for logger, handlers in zip(loggers, before, strict=True):
            logger.handlers[:] = handlers
        handler.close()


__all__ = ["FAILURES", "Options", "crash"]
