"""Cold results: finished tasks of paged graphs whose data one worker holds, and of which the scheduler has no task. Pure bookkeeping.

To the database such a task is in memory and held. A row takes some 360 bytes, a task of stock ten times that; what many results have in
common stands once, in their *kind*.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

#: Retries left, and how often a worker died of it.
Failures = tuple[int, int]


class Kind:
    """What results have in common, and their rows."""

    __slots__ = ("clients", "failures", "group", "rows", "type", "worker")

    def __init__(self, worker: str, group: str, type: str | None, failures: Failures, clients: frozenset[str]):
        #: Address of the worker that has them.
        self.worker = worker
        #: Name of the task group.
        self.group = group
        #: Name of the results' type.
        self.type = type
        self.failures = failures
        #: Who wants them.
        self.clients = clients
        #: Id, bytes and name of the submission, by packed key.
        self.rows: dict[bytes, tuple[int, int, str]] = {}

    def identity(self, clients: frozenset[str] | None = None) -> tuple[object, ...]:
        return self.worker, self.group, self.type, self.failures, self.clients if clients is None else clients


class Cold(NamedTuple):
    """One result, taken out."""

    key: bytes
    id: int
    nbytes: int
    submission: str
    kind: Kind


class ColdResults:
    """All of them, by packed key and by id. Each call takes time in proportion to the keys it is given or gives back; `drop_client` and
    `has_group` also to the number of kinds."""

    def __init__(self) -> None:
        self._kinds: dict[tuple[object, ...], Kind] = {}
        self._by_key: dict[bytes, Kind] = {}
        self._by_id: dict[int, bytes] = {}

    def __len__(self) -> int:
        return len(self._by_key)

    def __contains__(self, key: bytes) -> bool:
        return key in self._by_key

    def ids(self) -> Iterable[int]:
        return self._by_id.keys()

    def key_of(self, id: int) -> bytes | None:
        return self._by_id.get(id)

    def kind_of(self, key: bytes) -> Kind | None:
        return self._by_key.get(key)

    def nbytes_of(self, key: bytes) -> int:
        return self._by_key[key].rows[key][1]

    def kinds(self) -> Iterable[Kind]:
        return self._kinds.values()

    def of_worker(self, address: str) -> Iterator[Kind]:
        return (kind for kind in self._kinds.values() if kind.worker == address)

    def has_group(self, name: str) -> bool:
        return any(kind.group == name for kind in self._kinds.values())

    def add(self, result: Cold) -> None:
        """`result.kind` need not be one of this table's."""
        kind = self._kind(result.kind, result.kind.clients)
        kind.rows[result.key] = (result.id, result.nbytes, result.submission)
        self._by_key[result.key] = kind
        self._by_id[result.id] = result.key

    def take(self, key: bytes) -> Cold | None:
        """Take it out, if it is there."""
        kind = self._by_key.pop(key, None)
        if kind is None:
            return None
        id, nbytes, submission = kind.rows.pop(key)
        del self._by_id[id]
        self._drop_empty(kind)
        return Cold(key, id, nbytes, submission, kind)

    def want(self, key: bytes, client: str) -> bool | None:
        """Whether the client did not want it before; None: it is not there."""
        kind = self._by_key.get(key)
        if kind is None:
            return None
        if client in kind.clients:
            return False
        self._move(key, kind, kind.clients | {client})
        return True

    def unwant(self, key: bytes, client: str) -> None:
        kind = self._by_key.get(key)
        if kind is not None and client in kind.clients:
            self._move(key, kind, kind.clients - {client})

    def unwant_all(self, key: bytes) -> None:
        kind = self._by_key.get(key)
        if kind is not None and kind.clients:
            self._move(key, kind, frozenset())

    def wanted_by(self, client: str) -> list[bytes]:
        return [key for kind in self._kinds.values() if client in kind.clients for key in kind.rows]

    def drop_client(self, client: str) -> None:
        for old in [kind for kind in self._kinds.values() if client in kind.clients]:
            clients = old.clients - {client}
            del self._kinds[old.identity()]
            new = self._kinds.get(old.identity(clients))
            if new is None:
                old.clients = clients
                self._kinds[old.identity()] = old
            else:
                new.rows.update(old.rows)
                self._by_key.update(dict.fromkeys(old.rows, new))

    def clear(self) -> None:
        self._kinds.clear()
        self._by_key.clear()
        self._by_id.clear()

    def _kind(self, like: Kind, clients: frozenset[str]) -> Kind:
        identity = like.identity(clients)
        kind = self._kinds.get(identity)
        if kind is None:
            kind = self._kinds[identity] = Kind(like.worker, like.group, like.type, like.failures, clients)
        return kind

    def _move(self, key: bytes, old: Kind, clients: frozenset[str]) -> None:
        new = self._kind(old, clients)
        new.rows[key] = old.rows.pop(key)
        self._by_key[key] = new
        self._drop_empty(old)

    def _drop_empty(self, kind: Kind) -> None:
        if not kind.rows:
            del self._kinds[kind.identity()]
