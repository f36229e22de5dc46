"""What a scheduler takes, and what is on its way to it."""

from __future__ import annotations

from taskdb import commands as c

#: Leases made in one go: bounds a message and the time it takes to make.
LEASES_SLICE_MAX = 512


class CreditLine:
    """What may still be leased: a Credit is absolute, so leases made since the scheduler wrote it are subtracted."""

    def __init__(self, sent: int = 0) -> None:
        #: Leases sent in this epoch.
        self.sent = sent
        self.ready = 0
        self.total = 0

    def renew(self, credit: c.Credit) -> None:
        if credit.leases_seen > self.sent:  # said by a scheduler that knows more than we do: we were started again
            self.sent = credit.leases_seen
        under_way = self.sent - credit.leases_seen
        self.ready = credit.ready - under_way
        self.total = credit.total - under_way

    def spend(self, count: int) -> None:
        self.sent += count
        self.ready -= count
        self.total -= count

    def room(self) -> tuple[int, int]:
        return min(max(self.ready, 0), LEASES_SLICE_MAX), min(max(self.total, 0), LEASES_SLICE_MAX)
