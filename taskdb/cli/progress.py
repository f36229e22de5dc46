"""How far a long command has got, on stderr: one line that is written over, and nothing at all if stderr is no terminal."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import Self

#: Pause between two lines, so that a fast terminal is not all we do.
_SECONDS = 0.1
_CLEAR = "\r\x1b[K"


class Progress:
    """Call it with the amount done so far; `total` 0: not known."""

    def __init__(self) -> None:
        self._on = sys.stderr.isatty()
        self._next = 0.0
        self.begin("")

    def begin(self, what: str, total: int = 0) -> None:
        self._what = what
        self._total = total

    def __call__(self, done: int) -> None:
        if not self._on or time.monotonic() < self._next:
            return
        self._next = time.monotonic() + _SECONDS
        of = f" of {self._total:,}" if self._total else ""
        print(f"{_CLEAR}{self._what}: {done:,}{of}", end="", file=sys.stderr, flush=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._on:
            print(_CLEAR, end="", file=sys.stderr, flush=True)
