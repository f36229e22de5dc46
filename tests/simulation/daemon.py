"""The daemon: the real engine, writer and service on a memory store, which can die at named points."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from random import Random
from typing import Any

from taskdb import commands as c
from taskdb.config import ServerConfig, StoreConfig
from taskdb.engine.engine import Engine
from taskdb.server.reads import StoreInfo
from taskdb.server.service import Service
from taskdb.server.writer import Writer
from taskdb.store.base import WriteTxn
from taskdb.store.memory_store import MemoryStore
from tests.simulation.loop import Killed, Process
from tests.simulation.network import End, Network
from tests.simulation.rpc import Handlers

#: Where the daemon can be told to die. A commit is on disk, or not, as a whole.
POINTS = ("apply", "applied", "leased", "step", "commit", "committed", "attached")
#: Longest time it is away, seconds.
AWAY_SECONDS = 3.0


class Daemon:
    """Life after life of the daemon on one store."""

    def __init__(self, world: Any, network: Network, chance: Random, *, sync: bool = True) -> None:
        self.world = world
        self.network = network
        self._chance = chance
        self.store = MemoryStore(sync=sync)
        commit_ms, commands = chance.choice(((50, 512), (50, 512), (5, 512), (200, 4), (20, 1)))
        self._config = ServerConfig(StoreConfig(Path("simulated")), commit_interval_ms=commit_ms, commit_commands_max=commands)
        #: Point to die at, and how many times it is passed first.
        self.armed: tuple[str, int] | None = None
        #: Epoch and last seq the Session was told are durable.
        self.durable = (0, 0)
        self.start()

    def start(self) -> None:
        self.process = Process("daemon", self.world)
        self.process.run(self._start)

    def _start(self) -> None:
        engine = _Engine(self.store.free_bytes, self)
        self.writer = _Writer(self._disk(), engine, self._config, self._fatal)
        self.writer.daemon = self
        self._handlers = Handlers(Service(self.store, self.writer, StoreInfo("simulated", 0, self.store.bytes_max)))
        self.writer.start()
        self._check_durable(engine)

    def _disk(self) -> Any:
        return _Disk(self.store, self)

    def _fatal(self, error: BaseException) -> None:
        self.world.failed(f"the daemon stopped: {error!r}", error, fatal=True)

    def accept(self, path: str, metadata: Any, end: End) -> None:
        self._handlers.start(self.process, path, metadata, end)

    # ----------------------------------------------------------------------------------------------------------- deaths

    def passes(self, point: str) -> None:
        """Die here, if so told."""
        if self.armed is not None and self.armed[0] == point:
            if self.armed[1] <= 0:
                self.kill(f"at {point}")
                raise Killed
            self.armed = (point, self.armed[1] - 1)

    def kill(self, where: str) -> None:
        """kill -9 and a power cut: nothing of the process runs any more, and what was not synced is gone."""
        if not self.process.alive:
            return
        self.armed = None
        self.world.note("daemon killed", where)
        self.network.kill(self.process)
        self.store.crash()
        away = self._chance.choice((0.001, 0.05, 0.3, self._chance.uniform(0, AWAY_SECONDS)))
        self.world.later(away, self._start_again)

    def _start_again(self) -> None:
        if not self.process.alive:
            self.world.note("daemon starts")
            self.start()

    def _check_durable(self, engine: Engine) -> None:
        epoch, seq = self.durable
        with self.store.read() as txn:
            last = engine.last_seq(txn, epoch)
            if epoch and epoch == self.epoch() and last < seq:
                self.world.failed(f"batch {seq} of epoch {epoch} was said to be durable, and after a crash the last one is {last}")

    def epoch(self) -> int:
        from taskdb.engine.engine import current_epoch

        with self.store.read() as txn:
            return current_epoch(txn)


class _Disk:
    """The store as the writer sees it."""

    def __init__(self, store: MemoryStore, daemon: Daemon) -> None:
        self._store = store
        self._daemon = daemon

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def write(self) -> WriteTxn:
        txn = self._store.write()
        commit = txn.commit

        def dying_commit() -> None:
            self._daemon.passes("commit")
            commit()
            self._daemon.passes("committed")

        txn.commit = dying_commit  # type: ignore[method-assign]
        return txn


class _Writer(Writer):
    daemon: Daemon

    def attach(self, *args: Any, **kwargs: Any) -> Any:
        found = super().attach(*args, **kwargs)
        self.daemon.passes("attached")
        return found

    def _commit(self) -> None:
        peer, seq = self._peer, self._seq
        super()._commit()
        if peer is not None and seq:
            self.daemon.durable = max(self.daemon.durable, (peer.epoch, seq))


def brief(x: Any) -> str:
    """A command, an answer, or a part of one, in few words."""
    if isinstance(x, bytes):
        return repr(x)[2:-1][-24:]
    if isinstance(x, list | tuple):
        return "[" + " ".join(map(brief, x)) + "]"
    if isinstance(x, c.Lease):
        return f"{x.id}:{brief(x.key)}<-{x.deps} {x.clients} d{x.dependents}"
    if is_dataclass(x):
        found = {f.name: getattr(x, f.name) for f in fields(x) if f.name not in HIDDEN}
        return type(x).__name__ + "(" + " ".join(f"{name}={brief(value)}" for name, value in found.items() if value or value == 0) + ")"
    return str(x)


#: Columns that say little.
HIDDEN = ("specs", "flags", "orders", "user_priorities", "groups", "new_groups", "shared", "new_shared", "payload", "nbytes", "label")


class _Engine(Engine):
    def __init__(self, free_bytes: Any, daemon: Daemon) -> None:
        super().__init__(free_bytes)
        self._daemon = daemon

    def apply(self, txn: WriteTxn, epoch: int, seq: int, commands: Sequence[c.Command]) -> Any:
        self._daemon.passes("apply")
        done = super().apply(txn, epoch, seq, commands)
        if self._daemon.world.plan.verbose:
            self._daemon.world.detail(f"batch {epoch}/{seq}", *map(brief, commands), "->", brief(done[0]), done[1] or "")
        self._daemon.passes("applied")
        return done

    def lease(self, txn: WriteTxn, ready: int, total: int) -> Any:
        done = super().lease(txn, ready, total)
        if self._daemon.world.plan.verbose:
            self._daemon.world.detail(f"leases {ready} {total}", *map(brief, done[0]))
        if done[0]:
            self._daemon.passes("leased")
        return done

    def step(self, txn: WriteTxn, items_max: int = 1) -> Any:
        done = super().step(txn, items_max)
        if self._daemon.world.plan.verbose:
            self._daemon.world.detail("step", brief(done[0]))
        if done[0]:
            self._daemon.passes("step")
        return done

    def resync(self, txn: WriteTxn, epoch: int, held_ids: Sequence[int]) -> c.Result:
        result = super().resync(txn, epoch, held_ids)
        if self._daemon.world.plan.verbose:
            self._daemon.world.detail("resync", list(held_ids), "->", brief(result))
        return result
