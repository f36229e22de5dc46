"""What the tasks of the self-test do: each run leaves a line where it begins and one where it ends, in one file for all workers."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

START, END = "start", "end"


class Planned(Exception):
    """A task that is to fail."""


def note(path: str, what: str, label: str) -> None:
    """Append one line. One write to a file opened with O_APPEND is never cut in two by another."""
    fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        os.write(fd, f"{what} {label} {os.getpid()} {time.time():.3f}\n".encode())
    finally:
        os.close(fd)


def value(path: str, label: str, seconds: float, x: int) -> int:
    """`x`, after some time."""
    note(path, START, label)
    time.sleep(seconds)
    note(path, END, label)
    return x


def total(path: str, label: str, seconds: float, xs: Iterable[int]) -> int:
    """The sum of `xs`, after some time."""
    note(path, START, label)
    time.sleep(seconds)
    x = sum(xs)
    note(path, END, label)
    return x


def fail(path: str, label: str, seconds: float, xs: Iterable[int]) -> int:
    note(path, START, label)
    time.sleep(seconds)
    note(path, END, label)
    raise Planned(f"{label} {sum(xs)}")


@dataclass
class Runs:
    """What the lines say."""

    #: Runs that ended, by label.
    ended: Counter[str] = field(default_factory=Counter)
    #: Runs that began after one of the same task had ended, by label.
    again: Counter[str] = field(default_factory=Counter)
    #: Runs that began while one of the same task had begun and not ended, by label.
    doubled: Counter[str] = field(default_factory=Counter)

    @classmethod
    def read(cls, path: Path) -> Runs:
        runs = cls()
        begun: Counter[str] = Counter()
        for line in path.read_text().splitlines() if path.exists() else ():
            what, label, _, _ = line.split(" ")
            if what == END:
                runs.ended[label] += 1
                continue
            if runs.ended[label]:
                runs.again[label] += 1
            elif begun[label]:
                runs.doubled[label] += 1
            begun[label] += 1
        return runs


def ended(path: Path) -> int:
    """Runs that have ended, so far."""
    return path.read_bytes().count(f"\n{END} ".encode()) if path.exists() else 0  # the first line is of a start
