"""A task's run spec as the scheduler holds it: pickled once, never unpickled here.

Stock `distributed` keeps the spec as an object and pickles it whenever it sends the task to a worker, which is a quarter of what a task
costs it. A `StoredSpec` carries the bytes instead and stands in for the object wherever the scheduler looks at one.
"""

from __future__ import annotations

import pickle
import zlib
from typing import Any

from distributed.protocol.pickle import dumps

from taskdb.commands import Lease
from taskdb.model import TaskFlag

#: The few specs the scheduler itself looks into keep their object (by module and name, to import nothing early).
_KEEP_OBJECT = {"P2PBarrierTask"}
#: Blobs kept as they were read, by their bytes: one or two a group, usually.
SHARED_KEPT = 1000


class StoredSpec:
    """Pickled run spec. Pickling it yields the original object on the other side; attributes it lacks come from the object."""

    __slots__ = ("data", "dependencies", "data_producer")

    def __init__(self, data: bytes, dependencies: frozenset[Any] = frozenset(), data_producer: bool = False):
        self.data = data
        #: Keys; empty for specs that came out of the database (their links are in the database).
        self.dependencies = dependencies
        self.data_producer = data_producer

    @classmethod
    def of(cls, spec: Any) -> StoredSpec:
        return cls(pickle_spec(spec), frozenset(spec.dependencies), bool(spec.data_producer))

    def load(self) -> Any:
        """The run spec itself. Unpickles: for diagnostics only, never on the way of a task."""
        return pickle.loads(self.data)

    def __reduce__(self) -> tuple[Any, ...]:
        # The other side needs nothing of ours to read it: workers run stock Dask.
        return pickle.loads, (self.data,)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.load(), name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # A run spec is callable, and dumps of the cluster's state leave callables out.
        return self.load()(*args, **kwargs)

    def __sizeof__(self) -> int:
        return object.__sizeof__(self) + len(self.data)

    def __repr__(self) -> str:
        return f"<StoredSpec {len(self.data)} bytes>"


class Shared:
    """What tasks of a group have in common: their annotations, and what their specs have. Read once, used for many.

    `head` is what their specs begin with (`templates.py`), `dictionary` the first of them, or what follows its head. Specs of one group
    differ in little, so deflate with such a dictionary makes tens of bytes of thousands, in some 10 µs, and gives them back in 4 µs.
    """

    __slots__ = ("annotations", "dictionary", "head")

    def __init__(self, annotations: dict[str, Any], dictionary: bytes = b"", head: bytes = b""):
        self.annotations = annotations
        self.dictionary = dictionary
        self.head = head

    def write(self) -> bytes:
        return dumps((self.annotations, self.dictionary, self.head) if self.head else (self.annotations, self.dictionary))

    @classmethod
    def read(cls, data: bytes) -> Shared:
        return cls(*pickle.loads(data))

    def spec(self, stored: bytes) -> bytes:
        """The whole of a spec."""
        return self.head + unshrink(stored, self.dictionary)


class Specs:
    """Reads the specs of leases, and what they share once."""

    def __init__(self) -> None:
        self._shared: dict[bytes, Shared] = {}

    def of(self, lease: Lease) -> tuple[StoredSpec, dict[str, Any]]:
        """The lease's run spec and annotations."""
        producer = bool(lease.flags & TaskFlag.DATA_PRODUCER)
        if not lease.shared:
            return StoredSpec(lease.spec, data_producer=producer), {}
        shared = self._shared.get(lease.shared)
        if shared is None:
            if len(self._shared) >= SHARED_KEPT:
                self._shared.clear()
            shared = self._shared[lease.shared] = Shared.read(lease.shared)
        return StoredSpec(shared.spec(lease.spec), data_producer=producer), shared.annotations


def shrink(spec: bytes, dictionary: bytes) -> bytes:
    """The spec as it is stored. Without a dictionary: as it is."""
    if not dictionary:
        return spec
    deflate = zlib.compressobj(1, zdict=dictionary)
    return deflate.compress(spec) + deflate.flush()


def unshrink(stored: bytes, dictionary: bytes) -> bytes:
    if not dictionary:
        return stored
    return zlib.decompressobj(zdict=dictionary).decompress(stored)


def keeps_object(spec: Any) -> bool:
    return type(spec).__name__ in _KEEP_OBJECT


def looked_into(spec: StoredSpec) -> Any:
    """The spec as the scheduler must have it: the object itself, of those few."""
    if any(name.encode() in spec.data for name in _KEEP_OBJECT):
        loaded = spec.load()
        if keeps_object(loaded):
            return loaded
    return spec


def is_p2p(spec: Any) -> bool:
    """Whether the spec is part of a P2P shuffle that the scheduler looks at as one unit."""
    return type(spec).__name__ == "P2PBarrierTask"


def pickle_spec(spec: Any) -> bytes:
    """Bytes that `pickle.loads` turns into the spec, on a worker that has what the function needs."""
    data: bytes = dumps(spec)
    return data
