"""What the daemon has done since it started. Plain numbers that only the loop's thread changes, and any thread may read."""

from __future__ import annotations

from bisect import bisect_left

from taskdb import commands as c

#: Upper ends of the classes of commit durations, in seconds: from the page cache to a disk that hangs.
COMMIT_SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)


class Counters:
    def __init__(self) -> None:
        #: Batches of the Session.
        self.batches = 0
        #: Tasks that senders of graphs added, and that were new.
        self.tasks_added = 0
        #: Tasks handed to schedulers.
        self.leases = 0
        #: Transactions that were given up, and with them what they would have changed.
        self.dropped = 0
        #: Group commits: how many, by duration (one class more than COMMIT_SECONDS: above), and the time of all and of the last of them.
        self.commits = 0
        self.commits_by_seconds = [0] * (len(COMMIT_SECONDS) + 1)
        self.commit_seconds = 0.0
        self.commit_seconds_last = 0.0

    def answered(self, result: c.Result) -> None:
        self.tasks_added += sum(len(x.ids) - len(x.known) for x in result.added)
        self.leases += len(result.leases)

    def committed(self, seconds: float) -> None:
        self.commits_by_seconds[bisect_left(COMMIT_SECONDS, seconds)] += 1
        self.commits += 1
        self.commit_seconds += seconds
        self.commit_seconds_last = seconds
