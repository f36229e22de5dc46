"""Blocking reads of a running daemon, for the command line and for tests."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Self

import grpc

from taskdb.access import Daemon
from taskdb.errors import TaskDBError, Unavailable
from taskdb.wire import diagnosis, status
from taskdb.wire import taskdb_pb2 as pb
from taskdb.wire import taskdb_pb2_grpc as pb_grpc
from taskdb.wire.channel import READ_SECONDS, open_blocking_channel, unreachable


class Client:
    """Raises TaskDBError; Unavailable names the address and the remedy, AccessDenied what is wrong with the token or a certificate."""

    def __init__(self, daemon: str | Daemon, timeout_seconds: float = READ_SECONDS):
        self._daemon = Daemon.at(daemon)
        self.address = self._daemon.address
        self._timeout_seconds = timeout_seconds
        self._channel = open_blocking_channel(self._daemon)
        self._stub: Any = pb_grpc.TaskDBStub(self._channel)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *details: object) -> None:
        self._channel.close()

    def status(self) -> pb.StatusReply:
        reply: pb.StatusReply = self._read("Status", pb.StatusRequest())
        return reply

    def get_tasks(self, keys: Sequence[bytes], with_spec: bool = False) -> list[pb.StoredTask]:
        reply: pb.GetTasksReply = self._read("GetTasks", pb.GetTasksRequest(keys=keys, with_spec=with_spec))
        return list(reply.tasks)

    def list_tasks(self, *, cursor: bytes = b"", limit: int = 100, **filters: Any) -> pb.ListTasksReply:
        """One page. `filters`: the fields of ListTasksRequest."""
        request = pb.ListTasksRequest(cursor=cursor, limit=limit, **filters)
        reply: pb.ListTasksReply = self._read("ListTasks", request)
        return reply

    def tasks(self, *, cursor: bytes = b"", page: int = 1_000, **filters: Any) -> Iterator[pb.TaskInfo]:
        """All that pass, page after page, by id. Each page is a snapshot of its own."""
        while True:
            reply = self.list_tasks(cursor=cursor, limit=page, **filters)
            yield from reply.tasks
            cursor = reply.cursor
            if not cursor:
                return

    def sorted_tasks(self, limit: int, **filters: Any) -> list[pb.TaskInfo]:
        """The first `limit` by `sort`, of the whole store. Their tokens go on from there (`after`)."""
        best: list[pb.TaskInfo] = []
        cursor = b""
        while True:
            reply = self.list_tasks(cursor=cursor, limit=limit, **filters)
            best = sorted([*best, *reply.tasks], key=lambda task: task.token)[:limit]
            cursor = reply.cursor
            if not cursor:
                return best

    def errors(self, submission: str = "") -> list[pb.ErrorGroup]:
        """Those that most tasks failed with first."""
        groups: dict[tuple[str, str], pb.ErrorGroup] = {}
        cursor = b""
        while True:
            reply = self._read("Errors", pb.ErrorsRequest(submission=submission, cursor=cursor))
            for group in reply.groups:
                known = groups.setdefault((group.exception, group.prefix), group)
                if known is not group:
                    known.failed += group.failed
                    known.blamed += group.blamed
            cursor = reply.cursor
            if not cursor:
                return sorted(groups.values(), key=lambda group: (-group.failed - group.blamed, group.exception, group.prefix))

    def story(self, key: bytes, limit: int = 0) -> pb.StoryReply:
        reply: pb.StoryReply = self._read("Story", pb.StoryRequest(key=key, limit=limit))
        return reply

    def history(self, submission: str = "", names: bool = False) -> Iterator[pb.HistoryReply]:
        """What the history has of graphs whose names begin with this, in order; or only which graphs these are."""
        call = self._stub.History(pb.HistoryRequest(submission=submission, names=names))
        try:
            yield from call
        except grpc.RpcError as error:
            raise self._explain(error) from None
        finally:
            call.cancel()

    def prune(self, submissions: Sequence[str] = (), **request: Any) -> list[pb.GraphStatus]:
        """Graphs that are being forgotten. `request`: the other fields of PruneRequest."""
        return list(self._read("Prune", pb.PruneRequest(submissions=submissions, **request)).graphs)

    def act(self, action: str, keys: Sequence[bytes]) -> int:
        """Have the scheduler `cancel` or `retry` these tasks, at most ASK_KEYS_MAX. Returns how many it did it to."""
        reply: pb.ActReply = self._read("Act", pb.ActRequest(action=action, keys=keys))
        return reply.count

    def explain(self, key: bytes, limit: int = 10) -> pb.ExplainReply:
        reply: pb.ExplainReply = self._read("Explain", pb.ExplainRequest(key=key, limit=limit))
        return reply

    def _read(self, method: str, request: Any) -> Any:
        try:
            return getattr(self._stub, method)(request, timeout=self._timeout_seconds)
        except grpc.RpcError as error:
            raise self._explain(error) from None

    def _explain(self, error: grpc.RpcError) -> TaskDBError:
        explained = status.from_rpc_error(error, self.address)
        if isinstance(explained, Unavailable) and error.code() is grpc.StatusCode.UNAVAILABLE:
            return diagnosis.why(self._daemon) or unreachable(self.address, error.details())
        return explained
