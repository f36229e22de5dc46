"""Blocking reads of a running daemon, for the command line and for tests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

import grpc

from taskdb.access import Daemon
from taskdb.errors import Unavailable
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

    def list_tasks(
        self, *, submission: str = "", state: str = "", prefix: str = "", cursor: bytes = b"", limit: int = 100
    ) -> pb.ListTasksReply:
        request = pb.ListTasksRequest(submission=submission, state=state, prefix=prefix, cursor=cursor, limit=limit)
        reply: pb.ListTasksReply = self._read("ListTasks", request)
        return reply

    def explain(self, key: bytes, limit: int = 10) -> pb.ExplainReply:
        reply: pb.ExplainReply = self._read("Explain", pb.ExplainRequest(key=key, limit=limit))
        return reply

    def _read(self, method: str, request: Any) -> Any:
        try:
            return getattr(self._stub, method)(request, timeout=self._timeout_seconds)
        except grpc.RpcError as error:
            explained = status.from_rpc_error(error, self.address)
            if isinstance(explained, Unavailable) and error.code() is grpc.StatusCode.UNAVAILABLE:
                denied = diagnosis.why(self._daemon)
                if denied is not None:
                    raise denied from None
                raise unreachable(self.address, error.details()) from None
            raise explained from None
