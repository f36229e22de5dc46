"""The demo's cluster, in a folder that goes with it.

`python -m demo.cluster [options] -- COMMAND … {address} …` runs COMMAND against one.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shlex
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from scheduler_adapter.local.cluster import FAILURES, Cluster
from scheduler_adapter.local.processes import interruptible

#: How long a stock worker may take to end when its scheduler has died.
END_SECONDS_MAX = 60.0


@contextlib.contextmanager
def temporary_cluster(**options: Any) -> Iterator[Cluster]:
    """A cluster in a folder that is removed with it. SIGTERM stops it just as Ctrl-C does."""
    with (
        interruptible(),
        tempfile.TemporaryDirectory(prefix="taskdb-", ignore_cleanup_errors=True) as folder,
        Cluster(Path(folder), **options) as cluster,
    ):
        yield cluster


def restart(cluster: Cluster) -> None:
    """Kill the scheduler with -9, and start it by the same command; stock workers end with it, and are started again, too."""
    cluster.restart_scheduler()
    if not cluster.survive:
        for worker in list(cluster.workers):
            worker.popen.wait(END_SECONDS_MAX)
            cluster.processes.ended(worker)
            cluster.await_worker(cluster.start_again(worker))


def hook(cluster: Cluster, folder: Path) -> tuple[threading.Thread, str]:
    """A thread that restarts the scheduler when asked, and the shell command that asks and waits until it is done."""
    asked, done = folder / "asked", folder / "done"
    os.mkfifo(asked)
    os.mkfifo(done)

    def serve() -> None:
        while asked.read_text():
            try:
                restart(cluster)
                answer = ""
            except (*FAILURES, subprocess.TimeoutExpired) as failure:
                answer = str(failure)
            done.write_text(f"{answer}\n")

    ask = f"echo now > {shlex.quote(str(asked))} && read -r answer < {shlex.quote(str(done))}"
    return threading.Thread(target=serve, daemon=True), f'{ask} && if [ -n "$answer" ]; then echo "$answer" >&2; exit 1; fi'


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m demo.cluster", description="Run a command against a small cluster.")
    parser.add_argument("--window", type=int, help="tasks the scheduler may hold")
    parser.add_argument("--stock", action="store_true", help="without the database, for comparison")
    parser.add_argument("--survive", action="store_true", help="workers, and clients of the command, that outlive their scheduler")
    parser.add_argument("--nanny", action="store_true", help="a worker that dies is started again")
    parser.add_argument("--hook", action="store_true", help="MIDWAY_HOOK for the command: kills the scheduler with -9 and starts it again")
    parser.add_argument("--times", type=int, default=1, metavar="N", help="run the command so often")
    parser.add_argument("command", nargs="+", help="{address} stands for the scheduler's address")
    args = parser.parse_args()
    env = dict(os.environ)
    if args.survive:
        env["DASK_DISTRIBUTED__CLIENT__PRELOAD"] = "['scheduler_adapter.client']"
    failed = 0
    try:
        worker = ("--nanny",) if args.nanny else ()
        with temporary_cluster(stock=args.stock, window=args.window, survive=args.survive, worker=worker) as cluster:
            if args.hook:
                thread, env["MIDWAY_HOOK"] = hook(cluster, cluster.folder)
                thread.start()
            words = [word.replace("{address}", cluster.address) for word in args.command]
            for _ in range(args.times):
                code = subprocess.run(words, env=env, check=False).returncode
                failed += code != 0
        if args.times == 1:
            return code
        print(f"{args.times - failed} of {args.times} passed")
        return int(failed > 0)
    except FAILURES as failure:
        print(failure, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
