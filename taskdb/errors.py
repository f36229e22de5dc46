"""The errors of the database, grouped by what a handler would do. `kind` strings are stable: they travel and are stored.

InvariantBroken stands apart: it is a fault of this program, never of a request, and the daemon stops on it.
"""

from __future__ import annotations


class TaskDBError(Exception):
    """Base of everything that a caller may handle. Not raised itself."""

    #: Stable name, for the wire and for programs. Never changes, never reused.
    kind = "error"
    #: The same request may succeed later, unchanged.
    retryable = False

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message


class InvalidRequest(TaskDBError):
    """The request contradicts the contract; sending it again will not help."""

    kind = "invalid_request"


class SaidOtherwise(InvalidRequest):
    """A submission whose stream broke came again, and not as it was. It is aborted, and may begin anew."""

    kind = "said_otherwise"
    retryable = True


class NotFound(TaskDBError):
    """What the request names does not exist."""

    kind = "not_found"


class StaleEpoch(TaskDBError):
    """A newer scheduler owns the store: stop, and write nothing more."""

    kind = "stale_epoch"


class LimitExceeded(TaskDBError):
    """Larger than a bound of taskdb/limits.py."""

    kind = "limit_exceeded"


class StoreFull(TaskDBError):
    """The store may not grow. Nothing of the transaction was written. Succeeds once space was made."""

    kind = "store_full"
    retryable = True


class StoreError(TaskDBError):
    """The store failed for another reason (IO). Nothing of the transaction was written."""

    kind = "store_error"


class StoreCorrupt(StoreError):
    """What the store holds cannot be read. Never retry; restore it or begin a new one."""

    kind = "store_corrupt"


class StoreLocked(TaskDBError):
    """Another process has the store open."""

    kind = "store_locked"


class FormatMismatch(TaskDBError):
    """The store was written by another format version than this program can read."""

    kind = "format_mismatch"


class AccessDenied(TaskDBError):
    """The daemon does not let us in, or is not the one we trust: a token or a certificate is missing, wrong or out of date."""

    kind = "access_denied"


class Unavailable(TaskDBError):
    """Not now (starting, draining, link down): try again."""

    kind = "unavailable"
    retryable = True


class InvariantBroken(AssertionError):
    """A rule of the engine or of a store does not hold: a fault of this program. Never caught and passed over."""


def is_fatal(error: BaseException) -> bool:
    """Whether no caller can answer for it: a fault of this program, or a damaged store."""
    return not isinstance(error, TaskDBError) or isinstance(error, InvariantBroken | StoreCorrupt)
