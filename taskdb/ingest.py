"""One submission on its way to the database, from a process of its own. Blocking. See `client.py` for the rest.

Every error that leaves this module is a `taskdb.errors.TaskDBError`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from types import TracebackType
from typing import Any, Self

import grpc

from taskdb import commands as c
from taskdb import limits
from taskdb.access import Daemon
from taskdb.errors import InvalidRequest, LimitExceeded, Unavailable
from taskdb.wire import convert, status
from taskdb.wire import taskdb_pb2 as pb
from taskdb.wire import taskdb_pb2_grpc as pb_grpc
from taskdb.wire.channel import open_blocking_channel

#: Runs an ingest process may be ahead of the database: the back-pressure.
INGEST_RUNS_AHEAD = 4


class MissingKeys(InvalidRequest):
    """A submission names EXTERNAL keys the database does not know (they were forgotten, or never came)."""

    def __init__(self, keys: Sequence[bytes]):
        self.keys = list(keys)
        super().__init__(f"{len(self.keys)} keys from outside the submission are not in the database")


class Ingest:
    """One submission, from a process of its own. Left without `seal` it is not done: another Ingest goes on with it, or its scheduler
    aborts it (AbortGraph); if neither does for some time, the daemon does."""

    def __init__(self, daemon: str | Daemon, epoch: int, on_added: Callable[[c.AddTasks, list[int]], None] | None = None):
        """`on_added(run, positions)` is told of each run that is in the database, with the positions of tasks it knew before."""
        self.address = str(daemon)
        self.epoch = epoch
        self._on_added = on_added
        self._unanswered: deque[c.AddTasks | None] = deque()
        self._channel = open_blocking_channel(Daemon.at(daemon))
        self._requests: SimpleQueue[pb.IngestRequest | None] = SimpleQueue()
        self._call: Any = None
        self._ahead = 0
        self._tasks = 0
        #: Of the last answer.
        self._known: list[int] = []
        self._submission = ""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._requests.put(None)
        if self._call is not None:
            # The daemon sees the stream's end at once.
            self._call.cancel()
        self._channel.close()

    def begin(self, command: c.BeginGraph) -> int:
        """Register the submission; on disk on return. How many tasks of it are there already, from a stream that broke: they are
        to be said again, in the same runs. Raises Unavailable, StaleEpoch, InvalidRequest, StoreFull."""
        if self._call is not None:
            raise InvalidRequest("an Ingest carries one submission")
        self._submission = command.submission
        self._call = pb_grpc.TaskDBStub(self._channel).Ingest(iter(self._requests.get, None))
        self._write(pb.IngestRequest(epoch=self.epoch, begin_graph=convert.begin_graph_to_proto(command)))
        self._settle(0)
        return self._tasks

    def add(self, command: c.AddTasks) -> None:
        """Send a run; returns when at most INGEST_RUNS_AHEAD runs are unanswered. Raises MissingKeys, StoreFull, … of any run."""
        message = convert.add_tasks_to_proto(command)
        if message.ByteSize() + 64 > limits.MESSAGE_BYTES_MAX:
            raise LimitExceeded(f"a run of {len(command.keys)} tasks is over {limits.MESSAGE_BYTES_MAX} bytes: split it")
        self._settle(INGEST_RUNS_AHEAD - 1)
        self._write(pb.IngestRequest(epoch=self.epoch, add_tasks=message), command)

    def add_rule(self, command: c.AddRule) -> list[int]:
        """Send a rule, and wait for the answer: positions of outputs that were known before. Raises LimitExceeded, StoreFull, …"""
        message = convert.add_rule_to_proto(command)
        if message.ByteSize() + 64 > limits.MESSAGE_BYTES_MAX:
            raise LimitExceeded(f"a rule is over {limits.MESSAGE_BYTES_MAX} bytes")
        self._settle(0)
        self._write(pb.IngestRequest(epoch=self.epoch, add_rule=message))
        self._settle(0)
        return self._known

    def settle(self) -> None:
        """Wait until all runs sent so far are answered. Raises what any was refused with."""
        self._settle(0)

    def seal(self) -> int:
        """Complete the submission; on disk on return. The number of its tasks."""
        self._settle(0)  # so that nothing is sealed that named missing keys
        self._write(pb.IngestRequest(epoch=self.epoch, seal_graph=pb.SealGraph(submission=self._submission)))
        self._settle(0)
        return self._tasks

    def _write(self, message: pb.IngestRequest, run: c.AddTasks | None = None) -> None:
        if self._call is None:
            raise InvalidRequest("begin first")
        self._unanswered.append(run)
        self._ahead += 1
        self._requests.put(message)

    def _settle(self, ahead_max: int) -> None:
        while self._ahead > ahead_max:
            try:
                reply = next(self._call)
            except grpc.RpcError as error:
                raise status.from_rpc_error(error, self.address) from None
            except StopIteration:
                raise Unavailable(f"{self.address}: the daemon ended the stream") from None
            self._ahead -= 1
            self._tasks = reply.tasks
            self._known = list(reply.known)
            run = self._unanswered.popleft()
            if run is not None and not reply.missing and self._on_added is not None:
                self._on_added(run, list(reply.known))
            if reply.missing:
                raise MissingKeys(reply.missing)
