"""What a call did to tasks, for the history: noted where records are written, so a task that ends as it began has not moved."""

from __future__ import annotations


class Moves:
    """Gathers until it is emptied. The clock is the caller's: all of one call happened at once."""

    __slots__ = ("failures", "keys", "runs", "states")

    def __init__(self) -> None:
        #: (task, its TaskState now; 0: forgotten, graph, number of its group), in order.
        self.states: list[tuple[int, int, int, int]] = []
        #: (task that came, its packed key)
        self.keys: list[tuple[int, bytes]] = []
        #: (task that ran, worker, when it began, seconds)
        self.runs: list[tuple[int, str, float, float]] = []
        #: (task that failed itself, text)
        self.failures: list[tuple[int, str]] = []

    def clear(self) -> None:
        for gathered in (self.states, self.keys, self.runs, self.failures):
            gathered.clear()
