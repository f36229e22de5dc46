"""Faults in the system itself, each of which the simulation must see: else its silence would say nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

from taskdb import commands as c
from taskdb.client import Session
from taskdb.model import Level
from tests.simulation.plan import Plan
from tests.simulation.run import Outcome, run


@dataclass
class Control:
    name: str
    #: Kinds of faults, and what else is set in each plan.
    kinds: tuple[str, ...]
    settings: dict[str, Any]
    #: Words of which the failure has some.
    words: tuple[str, ...]
    session: type[Session] = Session
    sabotage: Callable[[], Any] = nullcontext

    def plan(self, seed: int) -> Plan:
        plan = Plan.of(seed, self.kinds)
        for name, value in self.settings.items():
            setattr(plan, name, value)
        return plan

    def hunt(self, first: int, count: int) -> Outcome | None:
        """The first failure the sabotage brings about, or None."""
        for seed in range(first, first + count):
            with self.sabotage():
                outcome = run(self.plan(seed), self.session)
            if any(word in failure for failure in outcome.failures for word in self.words):
                return outcome
        return None


class Forgetful(Session):
    """Does not send again what is not durable."""

    def _resume(self, *args: Any) -> None:
        self._unacked.clear()
        super()._resume(*args)


class Losing(Session):
    """Loses what is reported of one finished task."""

    _lost = False

    def send(self, commands: Sequence[c.Command]) -> int:
        kept = []
        for command in commands:
            if not self._lost and type(command) is c.Report and Level.MEMORY in command.levels:
                self._lost = True
                continue
            kept.append(command)
        return super().send(kept)


@contextmanager
def inventories_ignored() -> Iterator[None]:
    async def ignore(*args: Any) -> None: ...

    with patch("scheduler_adapter.recovery.Recovery._take_in", ignore):
        yield


@contextmanager
def resync_first() -> Iterator[None]:
    """What is held is compared at once, before what was lost has been said again, and what is leased for that is believed."""
    resume = Session._resume

    def early(self: Session, link: Any, last_seq: int) -> None:
        resume(self, link, last_seq)
        at = next(i for i, message in enumerate(self._outgoing) if message.WhichOneof("kind") == "resync")
        message = self._outgoing[at]
        del self._outgoing[at]
        self._outgoing.appendleft(message)

    with patch.object(Session, "_resume", early), patch("scheduler_adapter.pager.Pager._news", lambda pager, leases: leases):
        yield


CONTROLS = [
    Control("unsynced", ("daemon",), {"sync": False}, ("was said to be durable", "came after batch", "is over")),
    Control("nothing is sent again", ("daemon", "link"), {}, ("came after batch", "hung", "left at the end"), Forgetful),
    Control("a report is lost", ("worker",), {}, ("hung", "left at the end", "runs again"), Losing),
    Control("inventories are ignored", ("scheduler",), {"survive": True}, ("runs again",), sabotage=inventories_ignored),
    Control("resync comes first", ("daemon", "link"), {}, ("runs again", "hung"), sabotage=resync_first),
]
