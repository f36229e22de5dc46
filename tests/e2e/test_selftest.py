"""`taskdb selftest crash`: a few rounds, its planted faults, and that its counts count."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from scheduler_adapter.selftest import work
from scheduler_adapter.selftest.plan import DAEMON, SCHEDULER, plan
from scheduler_adapter.selftest.tally import Tally
from tests.support.cluster import ROOT

#: Rounds begin here: one in which scheduler and daemon are killed at once, in the middle of a large graph, and two simpler ones.
SEED = 3015


@pytest.mark.e2e
@pytest.mark.timeout(400)
def test_rounds_and_planted_faults(tmp_path: Path) -> None:
    program = "from scheduler_adapter.selftest.command import selftest; selftest()"
    words = ["crash", "--rounds", "2", "--seed", str(SEED), "--logs", str(tmp_path / "logs")]
    done = subprocess.run(
        [sys.executable, "-c", program, *words],
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=380,
        check=False,
    )
    said = done.stdout + done.stderr
    assert done.returncode == 0, said
    assert len(re.findall(r"^planted: .* caught$", said, re.MULTILINE)) == 3, said
    assert len(re.findall(r"^round .* ok$", said, re.MULTILINE)) == 2, said
    assert re.search(r"^finished tasks that ran again +0  \(of [1-9]", said, re.MULTILINE), said
    assert re.search(r"^acknowledged writes missing +0  \(of [1-9]", said, re.MULTILINE), said
    assert not (tmp_path / "logs").exists(), "nothing is kept when all went well"


def test_runs_are_counted(tmp_path: Path) -> None:
    path = tmp_path / "runs"
    lines = ["start a", "start b", "end a", "start a", "start b", "end b", "end a", "end b", "start c", "end c"]
    path.write_text("".join(f"{line} 1 0.0\n" for line in lines))
    runs = work.Runs.read(path)
    assert runs.ended == {"a": 2, "b": 2, "c": 1}
    assert runs.again == {"a": 1}, "it began after it had ended"
    assert runs.doubled == {"b": 1}, "it began while it ran"
    assert work.ended(path) == 5
    assert work.ended(tmp_path / "none") == 0


def test_lines_of_tasks_are_whole(tmp_path: Path) -> None:
    path = str(tmp_path / "runs")
    assert work.value(path, "@x", 0.0, 4) + work.total(path, "@y", 0.0, [1, 2]) == 7
    with pytest.raises(work.Planned, match="@z 3"):
        work.fail(path, "@z", 0.0, [3])
    assert work.Runs.read(tmp_path / "runs").ended == {"@x": 1, "@y": 1, "@z": 1}


def test_a_seed_says_all_of_a_round() -> None:
    shapes = [str(i) for i in range(10)]
    plans = [plan(seed, shapes, 3) for seed in range(300)]
    assert plans == [plan(seed, shapes, 3) for seed in range(300)]
    kinds = {kill.kind for one in plans for kill in one.kills}
    assert len(kinds) == 3
    assert {name for one in plans for name in one.jobs} == set(shapes)
    assert any(one.workers_die for one in plans)
    guarded = [one for one in plans if not one.workers_die]
    assert any({kill.kind for kill in one.kills} == {SCHEDULER, DAEMON} and len({kill.at for kill in one.kills}) == 1 for one in guarded)


COUNTS = ["wrong", "again", "doubled", "missing", "left", "faults"]


@pytest.mark.parametrize("name", COUNTS)
def test_each_count_makes_it_fail(name: str) -> None:
    tally = Tally()
    assert tally.bad == 0
    tally.add(Tally(rounds=1, **{name: 2}))
    assert tally.bad == 2
    assert tally.rounds == 1


def test_a_planted_fault_that_is_not_caught_makes_it_fail() -> None:
    assert Tally(controls=3, caught=3).bad == 0
    assert Tally(controls=3, caught=2).bad == 1
