"""Exit codes, and the one place that turns an error into one line and a code."""

from __future__ import annotations

from taskdb import errors

OK = 0
PROBLEM = 1
USAGE = 2
UNREACHABLE = 3
LOCKED_OR_FORMAT = 4
CORRUPT = 5
DENIED = 6

#: For the help of every command (\\b keeps click from folding it).
HELP = """\b
Exit codes: 0 ok, 1 problem found or request refused, 2 usage, 3 daemon unreachable,
4 store locked or of another format, 5 store corrupt, 6 access denied."""


def code_of(error: BaseException) -> int:
    if isinstance(error, errors.Unavailable):
        return UNREACHABLE
    if isinstance(error, errors.StoreLocked | errors.FormatMismatch):
        return LOCKED_OR_FORMAT
    if isinstance(error, errors.StoreCorrupt):
        return CORRUPT
    if isinstance(error, errors.AccessDenied):
        return DENIED
    return PROBLEM
