"""Blocks of the history <-> bytes: what became of tasks, column by column. A block can be read alone: it brings its names with it.

Keys stand apart from the rest, because who looks for a task looks for its key first.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgpack
import numpy as np
import numpy.typing as npt

from taskdb.errors import StoreCorrupt

#: Fast; columns and keys of one graph shrink to a quarter all the same.
_LEVEL = 1
#: Bytes a block may unpack to, against a damaged one.
_BYTES_MAX = 64 << 20


@dataclass(slots=True)
class Block:
    #: Graph -> (submission, client, label, submitted), of all graphs named.
    graphs: dict[int, tuple[str, str, str, float]] = field(default_factory=dict)
    #: (graph, number) -> name of a group.
    groups: dict[tuple[int, int], str] = field(default_factory=dict)
    #: A move each: when, which task, its TaskState then (0: forgotten), its graph and the number of its group.
    times: list[float] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)
    states: list[int] = field(default_factory=list)
    of_graph: list[int] = field(default_factory=list)
    of_group: list[int] = field(default_factory=list)
    #: Tasks that came -> packed key.
    keys: dict[int, bytes] = field(default_factory=dict)
    #: (task, worker, began, seconds)
    runs: list[tuple[int, str, float, float]] = field(default_factory=list)
    #: (task, text)
    failures: list[tuple[int, str]] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.ids) + len(self.runs)


def encode_block(block: Block) -> bytes:
    packed: bytes = msgpack.packb(
        (
            block.times[0] if block.times else 0.0,
            block.times[-1] if block.times else 0.0,
            list(block.graphs),
            _zip((list(block.keys), list(block.keys.values()))),
            _zip(
                (
                    np.array(block.times, "<f8").tobytes(),
                    np.array(block.ids, "<u8").tobytes(),
                    bytes(block.states),
                    np.array(block.of_graph, "<u8").tobytes(),
                    np.array(block.of_group, "<u4").tobytes(),
                    list(block.graphs.items()),
                    list(block.groups.items()),
                    block.runs,
                    block.failures,
                )
            ),
        )
    )
    return packed


def _zip(value: Any) -> bytes:
    return zlib.compress(msgpack.packb(value), _LEVEL)


class StoredBlock:
    """A block as stored; its parts are unpacked when they are asked for. Raises StoreCorrupt."""

    def __init__(self, data: bytes) -> None:
        try:
            begin, end, graphs, self._keys, self._rest = msgpack.unpackb(data)
            self.begin, self.end = float(begin), float(end)
            self.graphs: Sequence[int] = tuple(int(graph) for graph in graphs)
        except (ValueError, TypeError, msgpack.exceptions.UnpackException):
            raise _corrupt() from None

    def ids_of(self, key: bytes) -> list[int]:
        """Tasks that came under this packed key."""
        packed = _unzip(self._keys)
        if key not in packed:
            return []
        ids, keys = _unpack(packed)
        return [task_id for task_id, other in zip(ids, keys) if other == key]

    def keys(self) -> dict[int, bytes]:
        ids, keys = _unpack(_unzip(self._keys))
        return dict(zip(ids, keys))

    def columns(self) -> Columns:
        try:
            times, ids, states, graphs, groups, names, group_names, runs, failures = _unpack(_unzip(self._rest))
            found = Columns(
                np.frombuffer(times, "<f8"),
                np.frombuffer(ids, "<u8"),
                np.frombuffer(states, "u1"),
                np.frombuffer(graphs, "<u8"),
                np.frombuffer(groups, "<u4"),
                {graph: (str(name[0]), str(name[1]), str(name[2]), float(name[3])) for graph, name in names},
                {(part[0], part[1]): str(name) for part, name in group_names},
                [(int(task), str(worker), float(began), float(seconds)) for task, worker, began, seconds in runs],
                [(int(task), str(text)) for task, text in failures],
            )
        except (ValueError, TypeError, IndexError):
            raise _corrupt() from None
        if len({len(found.times), len(found.ids), len(found.states), len(found.of_graph), len(found.of_group)}) != 1:
            raise _corrupt()
        return found


@dataclass(frozen=True, slots=True)
class Columns:
    """The fields of Block, as arrays."""

    times: npt.NDArray[np.float64]
    ids: npt.NDArray[np.uint64]
    states: npt.NDArray[np.uint8]
    of_graph: npt.NDArray[np.uint64]
    of_group: npt.NDArray[np.uint32]
    graphs: dict[int, tuple[str, str, str, float]]
    groups: dict[tuple[int, int], str]
    runs: list[tuple[int, str, float, float]]
    failures: list[tuple[int, str]]


def _unzip(data: bytes) -> bytes:
    unpacker = zlib.decompressobj()
    try:
        found = unpacker.decompress(data, _BYTES_MAX)
    except (zlib.error, TypeError):
        raise _corrupt() from None
    if not unpacker.eof:
        raise _corrupt()
    return found


def _unpack(data: bytes) -> Any:
    try:
        return msgpack.unpackb(data, strict_map_key=False)
    except (ValueError, msgpack.exceptions.UnpackException):
        raise _corrupt() from None


def _corrupt() -> StoreCorrupt:
    return StoreCorrupt("a block of the history cannot be read")
