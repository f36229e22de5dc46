"""`python -m tests.simulation --seed N [--count K] [--verbose]`

Runs seeds, and stops at the first failure, which is shown with the command that repeats it.
"""

from __future__ import annotations

import argparse
import os
import sys
import time

if os.environ.get("PYTHONHASHSEED") != "0":
    # The order of sets is part of what a seed repeats.
    os.environ["PYTHONHASHSEED"] = "0"
    os.execv(sys.executable, [sys.executable, "-m", "tests.simulation", *sys.argv[1:]])

#: Seeds in which a control must be caught.
CONTROL_SEEDS = 100


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=1)
    parser.add_argument("--verbose", action="store_true", help="print the trace, with what goes over the link")
    parser.add_argument("--keep-going", action="store_true", help="do not stop at the first failure")
    parser.add_argument("--faults", default="", help="kinds of faults, with commas, instead of all")
    parser.add_argument("--reuse", type=float, help="how often a step gives the key of an old task to a new one, 0 to 1")
    parser.add_argument("--wholes", type=float, default=0.0, help="how many graphs can only be held whole, 0 to 1")
    parser.add_argument("--controls", action="store_true", help="show that faults in the system itself are caught")
    args = parser.parse_args()
    # What is left of processes that were killed ends when the collector finds it, and complains.
    sys.unraisablehook = lambda unraisable: None
    return controls(args.seed) if args.controls else seeds(args)


def seeds(args: argparse.Namespace) -> int:
    from tests.simulation.plan import Plan
    from tests.simulation.run import run

    began = time.perf_counter()
    failed = []
    done = 0
    for seed in range(args.seed, args.seed + args.count):
        plan = Plan.of(seed, *([tuple(args.faults.split(","))] if args.faults else []))
        plan.verbose = args.verbose
        if args.reuse is not None:
            plan.reuse, plan.steps = args.reuse, 8
        plan.wholes = args.wholes
        outcome = run(plan)
        done += 1
        if args.verbose:
            print(plan)
            print("\n".join(outcome.trace))
        if args.count == 1:
            print(f"seed {seed}: digest {outcome.digest}")
        if outcome.failures:
            failed.append(seed)
            options = f" --faults {args.faults}" if args.faults else ""
            options += f" --reuse {args.reuse}" if args.reuse is not None else ""
            options += f" --wholes {args.wholes}" if args.wholes else ""
            print(f"seed {seed} FAILED: python -m tests.simulation --seed {seed}{options}")
            for words in outcome.failures[:20]:
                print(f"  {words}")
            if not args.keep_going:
                print(outcome.details)
                break
        sys.stdout.flush()
    print(f"{done} seeds in {time.perf_counter() - began:.1f} s, {len(failed)} failed {failed[:50] or ''}")
    return 1 if failed else 0


def controls(first: int) -> int:
    from tests.simulation.controls import CONTROLS

    missed = 0
    for control in CONTROLS:
        outcome = control.hunt(first, CONTROL_SEEDS)
        if outcome is None:
            missed += 1
            print(f"{control.name}: NOT caught in {CONTROL_SEEDS} seeds")
        else:
            print(f"{control.name}: caught, seed {outcome.seed}: {outcome.failures[0][:200]}")
        sys.stdout.flush()
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
