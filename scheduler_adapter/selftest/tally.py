"""What was counted, and how it is said."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field


@dataclass
class Tally:
    """Of one round, or of all.

    A *finished task that ran again* is a run that begins after a run of the same task has ended, whether or not anybody had heard of its
    result by then. It is counted in rounds in which no worker is killed: there the worker that ran it has its result, or the task was not
    needed any more, so nothing excuses a second run. A *running task that was started twice* is one that begins while a run of it has
    not ended, in such rounds.

    An *acknowledged write* is a submission whose client was told that it is on disk, data it has scattered, a dataset or Variable whose
    call has returned, and the batches that the scheduler was told are on disk. It is *missing* if the store does not have it right after
    a kill of the daemon or the scheduler.
    """

    rounds: int = 0
    kills: Counter[str] = field(default_factory=Counter)
    #: Results that were compared.
    results: int = 0
    wrong: int = 0
    #: Runs of tasks that ended, and those of them in rounds in which no worker was killed.
    runs: int = 0
    runs_guarded: int = 0
    again: int = 0
    doubled: int = 0
    acknowledged: int = 0
    missing: int = 0
    #: Tasks nobody needs that were still there, faults in logs, rules of the store that were broken.
    left: int = 0
    faults: int = 0
    #: Seeds of rounds that failed.
    failed: list[int] = field(default_factory=list)
    controls: int = 0
    caught: int = 0

    def add(self, other: Tally) -> None:
        for name, value in vars(other).items():
            mine = getattr(self, name)
            if isinstance(mine, Counter):
                mine.update(value)
            else:
                setattr(self, name, mine + value)

    @property
    def bad(self) -> int:
        return self.wrong + self.again + self.doubled + self.missing + self.left + self.faults + (self.controls - self.caught)

    def lines(self) -> list[str]:
        kills = ", ".join(f"{kind} {count}" for kind, count in sorted(self.kills.items())) or "none"
        rows = [
            ("rounds", f"{self.rounds}"),
            ("kills", kills),
            ("wrong results", f"{self.wrong}  (of {self.results:,} compared)"),
            ("finished tasks that ran again", f"{self.again}  (of {self.runs_guarded:,} runs in rounds in which no worker was killed)"),
            ("running tasks started twice", f"{self.doubled}"),
            ("acknowledged writes missing", f"{self.missing}  (of {self.acknowledged:,} looked for)"),
            ("tasks left behind", f"{self.left}"),
            ("faults in logs, broken rules", f"{self.faults}"),
        ]
        if self.controls:
            rows.append(("planted faults caught", f"{self.caught} of {self.controls}"))
        if self.failed:
            rows.append(("failed rounds, by seed", " ".join(map(str, self.failed))))
        return [f"{name:32}{value}" for name, value in rows]
