"""`python -m tests.stress --seed N [--count K] --seconds S --window W [--kill-workers] [--kill-daemon]`."""

from __future__ import annotations

import argparse
import faulthandler
import logging
import os
import shutil
import signal
import sys
import tempfile
from pathlib import Path

from tests.stress.cluster import Cluster
from tests.stress.run import run_seed


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.stress", description=__doc__)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=1, help="seeds to run one after another on one cluster")
    parser.add_argument("--seconds", type=float, default=20)
    parser.add_argument("--steps", type=int, default=0, help="at most so many actions")
    parser.add_argument("--window", type=int, default=0)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--size", type=int, default=60, help="typical tasks of a graph")
    parser.add_argument("--kill-workers", action="store_true")
    parser.add_argument("--kill-daemon", action="store_true")
    parser.add_argument("--stock", action="store_true", help="without the adapter, to see what is stock's own")
    parser.add_argument("--tolerate-drift", action="store_true", help="counts of task groups may be off at the end")
    parser.add_argument("--hang", type=float, default=60, help="seconds without progress that count as a hang")
    parser.add_argument("--leftover", type=float, default=20, help="seconds until what is left must be gone")
    parser.add_argument("--skip", help="actions to leave out, separated by commas")
    parser.add_argument("--only", help="the only actions to do")
    args = parser.parse_args()
    logging.getLogger("distributed").setLevel(logging.CRITICAL)
    faulthandler.register(signal.SIGUSR1)
    folder = Path(tempfile.mkdtemp(prefix="taskdb-stress-"))
    cluster = Cluster(folder, window=args.window, workers=args.workers, stock=args.stock)
    failed = None
    seed = args.seed
    try:
        cluster.start()
        for seed in range(args.seed, args.seed + args.count):
            failed = run_seed(cluster, args, seed, folder)
            if failed:
                break
    finally:
        cluster.stop()
    if failed:
        settings = " ".join(f"{k}={v}" for k, v in os.environ.items() if k.startswith("DASK_"))
        words = [w for i, w in enumerate(sys.argv[1:]) if w not in ("--seed", "--count") and sys.argv[i] not in ("--seed", "--count")]
        print(f"\nagain: {settings} python -m tests.stress --seed {seed} {' '.join(words)}\nlogs: {folder}", flush=True)
        # Nothing of a client that hangs may keep us.
        os._exit(1)
    shutil.rmtree(folder, ignore_errors=True)
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
