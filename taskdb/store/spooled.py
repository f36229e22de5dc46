"""Runs of tasks that are stored as they came: records of Table.SPOOL. Nothing but layout."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgpack

from taskdb.errors import StoreCorrupt


@dataclass(frozen=True, slots=True)
class SpooledRun:
    """One run. Its new groups and blobs are not part of it: they are added when it comes."""

    #: The ids that are kept for its tasks follow each other.
    first_id: int
    #: Number of group -> its tasks in this run.
    groups: dict[int, int]
    #: See `columns`.
    packed: bytes

    @property
    def tasks(self) -> int:
        return sum(self.groups.values())

    def columns(self) -> list[Any]:
        """Those of `commands.AddTasks`, none left out: keys, specs, flags, dep_counts, deps, dependent_counts, orders, user_priorities,
        groups, shared. Raises StoreCorrupt."""
        try:
            columns: list[Any] = msgpack.unpackb(zlib.decompress(self.packed))
            _, _, _, dep_counts, deps, *_ = columns
            if len(columns) != 10 or {*map(len, columns[:4]), *map(len, columns[5:])} != {self.tasks} or sum(dep_counts) != len(deps):
                raise ValueError(columns)
        except (zlib.error, ValueError, TypeError, msgpack.exceptions.UnpackException):
            raise StoreCorrupt("a run of tasks cannot be read") from None
        return columns


def pack_columns(columns: Sequence[Any]) -> bytes:
    """Of what deflate makes little less, it still makes half: keys, and places of dependencies."""
    return zlib.compress(msgpack.packb(columns), 1)


def encode_spooled(run: SpooledRun) -> bytes:
    packed: bytes = msgpack.packb((run.first_id, run.groups, run.packed))
    return packed


def decode_spooled(data: bytes) -> SpooledRun:
    """Raises StoreCorrupt."""
    try:
        first_id, groups, packed = msgpack.unpackb(data, strict_map_key=False)
        return SpooledRun(int(first_id), dict(groups), bytes(packed))
    except (ValueError, TypeError, msgpack.exceptions.UnpackException):
        raise StoreCorrupt("a run of tasks cannot be read") from None
