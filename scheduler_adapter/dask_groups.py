"""Task groups and prefixes of tasks that the scheduler does not hold: what is touched of `TaskGroup`, `TaskPrefix` and `Computation`.

Read in 2026.8.0 and pinned by `tests/scheduler_adapter/test_dask_internals.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from dask.utils import key_split
from distributed.scheduler import Computation, Scheduler, TaskGroup, TaskPrefix, TaskState


class GroupLedger:
    """Shows tasks that are on disk in their task group and prefix, so that progress, `is_rootish`, `is_idle`, spans and adaptive scaling
    see whole graphs: unfinished ones as waiting, finished ones as released.

    A task may enter the scheduler before its run was announced; such debts are paid by the announcement.
    """

    def __init__(self, scheduler: Scheduler):
        self._scheduler = scheduler
        self._debts: dict[str, int] = {}
        #: Whether there are cold results of a group.
        self.elsewhere: Callable[[str], bool] = lambda name: False

    def announce(self, name: str, count: int, computation: Computation | None) -> None:
        """`count` new tasks of a group are on disk."""
        debt = self._debts.pop(name, 0)
        if debt > count:
            self._debts[name] = debt - count
        count = max(count - debt, 0)
        group = self._group(name, computation)
        for c in (group, group.prefix):
            c.states["waiting"] += count
            c._size += count

    def done(self, name: str, count: int) -> None:
        """Of those announced, so many are finished."""
        group = self._scheduler.task_groups.get(name)
        if group is not None:
            for c in (group, group.prefix):
                c.states["waiting"] -= count
                c.states["released"] += count

    def retract(self, name: str, count: int) -> None:
        """Of those announced, `count` were not new."""
        group = self._scheduler.task_groups.get(name)
        if group is not None:
            for c in (group, group.prefix):
                c.states["waiting"] -= count
                c._size -= count

    def enters(self, ts: TaskState) -> None:
        """A task that was on disk is resident (and counted by `new_task`)."""
        group = ts.group
        state = "waiting" if group.states["waiting"] > 0 else "released"
        if state == "released" and group.states["released"] <= 1:  # the one is the task itself, just made
            self._debts[group.name] = self._debts.get(group.name, 0) + 1
            return
        for c in (group, group.prefix):
            c.states[state] -= 1
            c._size -= 1

    def leaves(self, ts: TaskState, done: bool) -> None:
        """A task the scheduler has just forgotten is on disk again. To be called before stock looks whether its group is empty."""
        self._leaves(ts.group, "forgotten", done)

    def cold_leaves(self, name: str, done: bool) -> None:
        """The same for a cold result."""
        group = self._scheduler.task_groups.get(name)
        if group is not None:
            self._leaves(group, "memory", done)

    def _leaves(self, group: TaskGroup, before: str, done: bool) -> None:
        # Below 0: the database has forgotten it before it left.
        state = "released" if done and group.states["waiting"] >= 0 else "waiting"
        for c in (group, group.prefix):
            states: dict[Any, int] = c.states
            states[before] -= 1
            states[state] += 1

    def forgotten(self, name: str, count: int) -> None:
        """The database has forgotten tasks of a group that were on disk."""
        group = self._scheduler.task_groups.get(name)
        if group is None:
            return
        released = min(count, max(group.states["released"], 0))
        for c in (group, group.prefix):
            c.states["released"] -= released
            c.states["waiting"] -= count - released
            c.states["forgotten"] += count
        if all(v == 0 or k == "forgotten" for k, v in group.states.items()) and not self._has_residents(group):
            self._remove(group)

    def settle(self, name: str) -> bool:
        """No graph on disk has tasks of this group any more. Remove it, unless there are residents of it (then: False).

        Its counts may be off: the daemon died, or a graph was given up while it arrived.
        """
        group = self._scheduler.task_groups.get(name)
        self._debts.pop(name, None)
        if group is None:
            return True
        if self._has_residents(group):
            return False
        self._remove(group)
        return True

    def _has_residents(self, group: TaskGroup) -> bool:
        # IMPORTANT: stock removes the group when the last of them is forgotten, and fails if it is not there.
        return self.elsewhere(group.name) or any(ts.group is group for ts in self._scheduler.tasks.values())

    def _remove(self, group: TaskGroup) -> None:
        group.prefix.remove_group(group)
        del self._scheduler.task_groups[group.name]

    def link(self, pairs: Iterable[tuple[str, str]]) -> None:
        """What `add_dependency` does to groups."""
        groups = self._scheduler.task_groups
        for name, dep in pairs:
            if name in groups and dep in groups:
                groups[name].dependencies.add(groups[dep])

    def clear(self) -> None:
        self._debts.clear()

    def _group(self, name: str, computation: Computation | None) -> TaskGroup:
        """As in `new_task`."""
        scheduler = self._scheduler
        group = scheduler.task_groups.get(name)
        if group is None:
            prefix_name = key_split(name)
            prefix = scheduler.task_prefixes.get(prefix_name)
            if prefix is None:
                prefix = scheduler.task_prefixes[prefix_name] = TaskPrefix(prefix_name)
            group = scheduler.task_groups[name] = TaskGroup(name, prefix)
            if computation is not None:
                computation.groups.add(group)
        return group
