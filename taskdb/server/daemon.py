"""The composition root: open the store, serve, drain, close. The order of shutdown matters and stands in `_drain`."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import resource
import shutil
import signal
import sys
import threading
from collections.abc import Iterator

import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1._async import HealthServicer

from taskdb.config import ServerConfig
from taskdb.engine.engine import Engine
from taskdb.errors import TaskDBError
from taskdb.limits import CONNECTIONS_MAX
from taskdb.server import listening, reads
from taskdb.server.guard import Guard
from taskdb.server.metrics import Collector, serving
from taskdb.server.service import Service
from taskdb.server.writer import Writer
from taskdb.store.base import Store
from taskdb.store.lmdb_store import LmdbStore
from taskdb.wire import taskdb_pb2_grpc as pb_grpc
from taskdb.wire.channel import SERVER_OPTIONS

logger = logging.getLogger("taskdb.server")

#: Reads share the interpreter with the loop; the default of 5 ms would show in every round trip.
SWITCH_INTERVAL_SECONDS = 0.0005
#: Objects between two looks for cycles, of which the daemon makes next to none: what a batch makes goes by itself.
GARBAGE_OBJECTS = 50_000
#: How long open calls may take to end at shutdown.
GRACE_SECONDS = 1.5
#: How often a child looks whether its parent still lives (stdin's end is noticed at once).
PARENT_POLL_SECONDS = 1.0
#: File descriptors besides those of connections.
OTHER_FILES_MAX = 256

_HEALTH_NAMES = ("", "taskdb.v1.TaskDB")


def run(config: ServerConfig) -> None:
    """Open the store and serve it until SIGTERM, SIGINT or the end of the parent.

    Raises NotSafe, AddressInUse, CannotServe, AccessDenied, StoreLocked, FormatMismatch, StoreCorrupt, StoreFull, StoreError, or the
    error that stopped it.
    """
    listening.check(config.listen, config.access)
    if config.metrics is not None:
        listening.check_metrics(config.metrics, config.access)
    sys.setswitchinterval(SWITCH_INTERVAL_SECONDS)
    gc.freeze()  # modules stay
    gc.set_threshold(GARBAGE_OBJECTS)
    _allow_files()
    store = LmdbStore(config.store.path, sync=config.store.durability == "fsync", bytes_max=config.store.bytes_max)
    daemon = None
    try:
        info = reads.store_info(store, config.store.bytes_max)
        daemon = Daemon(config, store, info)
        asyncio.run(daemon.run())
    finally:
        store.close()
        if daemon is not None and daemon.orphaned and config.temporary is not None:
            shutil.rmtree(config.temporary, ignore_errors=True)


class Daemon:
    def __init__(self, config: ServerConfig, store: Store, info: reads.StoreInfo):
        self._config = config
        self._store = store
        self._info = info
        self._fatal: BaseException | None = None
        #: The parent has ended.
        self.orphaned = False

    async def run(self) -> None:
        self._stop = asyncio.Event()
        writer = Writer(self._store, Engine(self._store.free_bytes), self._config, self._on_fatal)
        service = Service(self._store, writer, self._info)
        server = grpc.aio.server(options=SERVER_OPTIONS, interceptors=[Guard(self._config.access.token)])
        pb_grpc.add_TaskDBServicer_to_server(service, server)
        health = HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(health, server)
        for name in _HEALTH_NAMES:
            await health.set(name, health_pb2.HealthCheckResponse.SERVING)
        with listening.listening(server, self._config.listen, self._config.access) as address, self._metrics(writer):
            await server.start()
            writer.start()
            self._watch_signals()
            if self._config.exit_with_parent:
                self._watch_parent()
            self._announce(address)
            await self._stop.wait()
            await self._drain(server, writer, service, health)
        if self._fatal is not None:
            raise self._fatal

    @contextlib.contextmanager
    def _metrics(self, writer: Writer) -> Iterator[None]:
        if self._config.metrics is None:
            yield
            return
        with serving(Collector(self._store, writer, self._info), self._config.metrics) as address:
            print(f"taskdb: metrics on http://{address}/metrics", file=sys.stderr, flush=True)
            yield

    async def _drain(self, server: grpc.aio.Server, writer: Writer, service: Service, health: HealthServicer) -> None:
        """IMPORTANT: the commit comes before the Session ends, so that the scheduler hears Durable of all it was answered (if it listens);
        reads end before the store closes under their snapshots."""
        await health.enter_graceful_shutdown()
        writer.close()
        await server.stop(GRACE_SECONDS)
        service.close()

    def _on_fatal(self, error: BaseException) -> None:
        if self._fatal is None:
            # What the store or the system does is said in words, a fault of ours with where it is.
            logger.critical("stopping: %s", error, exc_info=None if isinstance(error, TaskDBError) else error)
            self._fatal = error
        self._stop.set()

    def _watch_signals(self) -> None:
        loop = asyncio.get_running_loop()
        for name in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(name, self._stop.set)

    def _watch_parent(self) -> None:
        """Stop at the end of stdin (the parent holds the other end of the pipe), or when the parent changes."""
        loop = asyncio.get_running_loop()
        parent = os.getppid()

        def wait_for_end() -> None:
            with contextlib.suppress(OSError):
                while os.read(0, 4096):
                    pass
            with contextlib.suppress(RuntimeError):  # the loop is closed: we are ending anyway
                loop.call_soon_threadsafe(ended)

        def ended() -> None:
            self.orphaned = True
            self._stop.set()

        def look() -> None:
            if os.getppid() != parent:
                ended()
            else:
                loop.call_later(PARENT_POLL_SECONDS, look)

        threading.Thread(target=wait_for_end, name="taskdb-parent", daemon=True).start()
        loop.call_later(PARENT_POLL_SECONDS, look)

    def _announce(self, address: str) -> None:
        print(f"taskdb: serving {self._config.store.path} on {address}", file=sys.stderr, flush=True)
        ready = self._config.ready_file
        if ready is not None:
            part = ready.with_name(f"{ready.name}.{os.getpid()}.part")
            part.write_text(address + "\n")
            part.replace(ready)


def _allow_files() -> None:
    """For so many connections, if the system lets us."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = CONNECTIONS_MAX + OTHER_FILES_MAX
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted if hard == resource.RLIM_INFINITY else min(wanted, hard), hard))
