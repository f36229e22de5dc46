"""Failed tasks, grouped by exception and prefix: what failed, where, and how much failed because of it. Bounded work a page."""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import islice

from taskdb.engine.reader import Reader, prefix_text
from taskdb.engine.refs import find_graph
from taskdb.errors import InvalidRequest
from taskdb.limits import ERRORS_SCAN_MAX
from taskdb.model import TaskState
from taskdb.store.base import ReadTxn
from taskdb.store.codec import ErrorRecord, decode_error
from taskdb.store.schema import U64, Table

_NAME = re.compile(r"[A-Za-z_][\w.]*")


@dataclass(slots=True)
class ErrorGroup:
    """Tasks of one prefix that failed with one kind of exception."""

    exception: str
    prefix: str
    #: Of the task in front: its key, submission, message and traceback.
    key: bytes
    submission: str
    text: str
    traceback: str
    #: Tasks that failed themselves.
    failed: int = 0
    #: Tasks that are failed because of these.
    blamed: int = 0


def exception_name(text: str) -> str:
    """ValueError, of "ValueError('no')", or of a traceback that ends with "ValueError: no"."""
    lines = text.strip().splitlines() or [""]
    found = _NAME.match(lines[-1] if lines[0].startswith("Traceback") else lines[0])
    return found[0] if found is not None else "unknown"


def errors(txn: ReadTxn, submission: str = "", cursor: bytes = b"") -> tuple[list[ErrorGroup], bytes]:
    """Groups of the next ERRORS_SCAN_MAX failed tasks, by id, and where to go on (b"": that was all). Raises InvalidRequest."""
    if cursor and len(cursor) != U64.size:
        raise InvalidRequest("the cursor is not one of a reply")
    reader = Reader(txn)
    graph = find_graph(txn, submission) if submission else 0
    groups: dict[tuple[str, str], ErrorGroup] = {}
    by_cause: dict[int, ErrorGroup] = {}
    pairs = txn.scan(Table.ERRORS, cursor)
    if submission and not graph:
        return [], b""
    for key, data in islice(pairs, ERRORS_SCAN_MAX):
        task_id = int.from_bytes(key)
        task = reader.task(task_id)
        if task is None or task.state != TaskState.ERRED or (graph and task.graph != graph):
            continue
        record = decode_error(data)
        cause = record.cause or task_id
        group = by_cause.get(cause)
        if group is None:
            found = _group(reader, cause, reader.error(cause)[1])
            group = by_cause[cause] = groups.setdefault((found.exception, found.prefix), found)
        if record.cause:
            group.blamed += 1
        else:
            group.failed += 1
    rest = next(pairs, None)
    return list(groups.values()), b"" if rest is None else rest[0]


def _group(reader: Reader, cause: int, record: ErrorRecord) -> ErrorGroup:
    task = reader.task(cause)
    key = reader.key(cause)
    name = reader.group(task.graph, task.group) if task is not None else ""
    submission = reader.submission(task.graph) if task is not None else ""
    return ErrorGroup(exception_name(record.text), prefix_text(name or key), key, submission, record.text, record.traceback)
