"""`python -m tests.simulation --seed N [--count K] [--verbose]`: run seeds; the first failure is shown, with the command to repeat it."""

from __future__ import annotations

import argparse
import os
import sys
import time

if os.environ.get("PYTHONHASHSEED") != "0":
    # The order of sets is part of what a seed repeats.
    os.environ["PYTHONHASHSEED"] = "0"
    os.execv(sys.executable, [sys.executable, "-m", "tests.simulation", *sys.argv[1:]])


def main() -> int:
    from tests.simulation.plan import Plan
    from tests.simulation.run import run

    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=1)
    parser.add_argument("--verbose", action="store_true", help="print the trace")
    parser.add_argument("--keep-going", action="store_true", help="do not stop at the first failure")
    parser.add_argument("--faults", default=None, help="kinds of faults, with commas")
    args = parser.parse_args()
    began = time.perf_counter()
    failed = []
    for seed in range(args.seed, args.seed + args.count):
        plan = Plan.of(seed, tuple(args.faults.split(","))) if args.faults else Plan.of(seed)
        plan.verbose = args.verbose
        outcome = run(plan)
        if args.verbose:
            print(plan)
            print("\n".join(outcome.trace))
        if args.count == 1 or args.verbose:
            print(f"seed {seed}: digest {outcome.digest}")
        if outcome.failures:
            failed.append(seed)
            print(f"seed {seed} FAILED: python -m tests.simulation --seed {seed}")
            for words in outcome.failures[:20]:
                print(f"  {words}")
            if not args.keep_going:
                print(outcome.details)
                break
    seconds = time.perf_counter() - began
    print(f"{seed - args.seed + 1} seeds in {seconds:.1f} s, {len(failed)} failed {failed[:50]}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
