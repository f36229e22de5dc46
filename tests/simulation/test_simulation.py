"""A slice of the simulation's seeds, its controls, and that a seed repeats itself.

SIMULATION_SLICE (default 0) chooses the slice, SIMULATION_SEEDS (default 150) its size: slices 0 to 66 cover 10,000 seeds.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SEEDS = int(os.environ.get("SIMULATION_SEEDS", "150"))
FIRST = int(os.environ.get("SIMULATION_SLICE", "0")) * SEEDS


def simulate(*arguments: object, seconds: float) -> subprocess.CompletedProcess[str]:
    """As on the command line: a failure prints the command that repeats it."""
    command = [sys.executable, "-m", "tests.simulation", *map(str, arguments)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONHASHSEED": "0"}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=seconds, check=False)


@pytest.mark.timeout(600)
def test_a_slice_of_seeds() -> None:
    ended = simulate("--seed", FIRST, "--count", SEEDS, seconds=590)
    assert ended.returncode == 0, ended.stdout[-8000:] + ended.stderr[-4000:]
    assert f"{SEEDS} seeds" in ended.stdout


@pytest.mark.timeout(300)
@pytest.mark.parametrize("first", [95, 130, 240])
def test_keys_that_are_used_again_while_schedulers_die(first: int) -> None:
    """What belongs to the old task must not come to the new one: wants, reports, copies on workers."""
    ended = simulate("--seed", first, "--count", 10, "--reuse", 0.5, "--faults", "scheduler,scheduler,daemon,rival", seconds=290)
    assert ended.returncode == 0, ended.stdout[-8000:] + ended.stderr[-4000:]


@pytest.mark.parametrize("seed", [3, 12, 40])
def test_a_seed_repeats_itself(seed: int) -> None:
    first, second = (simulate("--seed", seed, "--verbose", seconds=100).stdout for _ in range(2))
    assert first.splitlines()[:-1] == second.splitlines()[:-1]
    assert "digest" in first


@pytest.mark.timeout(300)
def test_controls_are_caught() -> None:
    ended = simulate("--controls", seconds=290)
    assert ended.returncode == 0, ended.stdout[-4000:] + ended.stderr[-4000:]
    assert ended.stdout.count(": caught") == 5


@pytest.mark.parametrize(
    "seed", [217, 4370, 7541, 7644, 21952, 24181, 25002, 25280, 30321, 30426, 30532, 31476, 33166, 35498, 35870, 37313, 37414]
)
def test_seeds_that_found_a_fault(seed: int) -> None:
    assert "0 failed" in simulate("--seed", seed, seconds=100).stdout
