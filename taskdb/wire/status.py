"""The one table between our exceptions and gRPC: code, plus trailing metadata with kind and retryable. Both sides use it."""

from __future__ import annotations

from collections.abc import Iterator

import grpc

from taskdb import errors

KIND_KEY = "taskdb-kind"
RETRYABLE_KEY = "taskdb-retryable"

Metadata = tuple[tuple[str, str], ...]

#: First match wins, so a class stands before its bases.
_CODES: tuple[tuple[type[errors.TaskDBError], grpc.StatusCode], ...] = (
    (errors.InvalidRequest, grpc.StatusCode.INVALID_ARGUMENT),
    (errors.NotFound, grpc.StatusCode.NOT_FOUND),
    (errors.StaleEpoch, grpc.StatusCode.FAILED_PRECONDITION),
    (errors.LimitExceeded, grpc.StatusCode.RESOURCE_EXHAUSTED),
    (errors.StoreFull, grpc.StatusCode.RESOURCE_EXHAUSTED),
    (errors.AccessDenied, grpc.StatusCode.UNAUTHENTICATED),
    (errors.Unavailable, grpc.StatusCode.UNAVAILABLE),
    (errors.StoreLocked, grpc.StatusCode.FAILED_PRECONDITION),
    (errors.FormatMismatch, grpc.StatusCode.FAILED_PRECONDITION),
    (errors.StoreCorrupt, grpc.StatusCode.DATA_LOSS),
    (errors.TaskDBError, grpc.StatusCode.INTERNAL),
)

#: What a status that does not come from our handlers (the transport, an interceptor) means.
_BY_CODE: dict[grpc.StatusCode, type[errors.TaskDBError]] = {
    grpc.StatusCode.UNAVAILABLE: errors.Unavailable,
    grpc.StatusCode.DEADLINE_EXCEEDED: errors.Unavailable,
    grpc.StatusCode.CANCELLED: errors.Unavailable,
    grpc.StatusCode.RESOURCE_EXHAUSTED: errors.LimitExceeded,
    grpc.StatusCode.INVALID_ARGUMENT: errors.InvalidRequest,
    grpc.StatusCode.NOT_FOUND: errors.NotFound,
    grpc.StatusCode.UNIMPLEMENTED: errors.InvalidRequest,
    grpc.StatusCode.UNAUTHENTICATED: errors.AccessDenied,
    grpc.StatusCode.PERMISSION_DENIED: errors.AccessDenied,
}


def to_status(error: errors.TaskDBError) -> tuple[grpc.StatusCode, str, Metadata]:
    """Code, details and trailing metadata of an exception."""
    code = next(code for cls, code in _CODES if isinstance(error, cls))
    return code, str(error), ((KIND_KEY, error.kind), (RETRYABLE_KEY, "1" if error.retryable else "0"))


def _classes(root: type[errors.TaskDBError] = errors.TaskDBError) -> Iterator[type[errors.TaskDBError]]:
    yield root
    for cls in root.__subclasses__():
        yield from _classes(cls)


def from_kind(kind: str, message: str) -> errors.TaskDBError:
    """The exception of a stable kind (also: of a refused command). An unknown kind is a plain TaskDBError."""
    cls = next((x for x in _classes() if x.kind == kind), errors.TaskDBError)
    return cls(message)


def from_rpc_error(error: grpc.RpcError, address: str = "") -> errors.TaskDBError:
    """The exception a failed call stands for; `address` is named in what the transport says."""
    code = error.code() if hasattr(error, "code") else None
    details = (error.details() if hasattr(error, "details") else None) or str(error)
    trailing = error.trailing_metadata() if hasattr(error, "trailing_metadata") else None
    for key, value in trailing or ():
        if key == KIND_KEY:
            return from_kind(value.decode() if isinstance(value, bytes) else value, details)
    cls = _BY_CODE.get(code, errors.TaskDBError) if code is not None else errors.TaskDBError
    return cls(f"{address}: {details}" if address else details)
