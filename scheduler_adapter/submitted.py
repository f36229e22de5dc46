"""What is remembered of a graph once it was sent, and until the database has forgotten the last of its tasks."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any


@dataclass(eq=False)
class Submission:
    """What the scheduler must remember of a graph while tasks of it exist. O(groups), whatever the graph's size."""

    name: str
    client: str
    span_metadata: Any = None
    code: Any = ()
    computation: Any = None
    #: Resident whole: stock counts its groups itself, but for the tasks that left for the database.
    followed: bool = False
    #: New tasks that the database has not forgotten yet, and all there were.
    remaining: int = 0
    total: int = 0
    #: All of it has been sent.
    sealed: bool = False
    #: Its client has sent it before, to another scheduler.
    resent: bool = False
    #: Runs sent and not answered.
    runs_under_way: int = 0
    #: Names of its groups.
    groups: set[str] = field(default_factory=set)
    #: Tasks of a followed graph that left for the database, by group.
    left: Counter[str] = field(default_factory=Counter)
