"""The composition root: open the store, serve, drain, close. The order of shutdown matters and stands in `_drain`."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import stat
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1._async import HealthServicer

from taskdb import limits
from taskdb.config import ServerConfig
from taskdb.engine.engine import Engine
from taskdb.server import reads
from taskdb.server.service import Service
from taskdb.server.writer import Writer
from taskdb.store.base import Store
from taskdb.store.lmdb_store import LmdbStore
from taskdb.wire import taskdb_pb2_grpc as pb_grpc

logger = logging.getLogger("taskdb.server")

#: Reads share the interpreter with the loop; the default of 5 ms would show in every round trip.
SWITCH_INTERVAL_SECONDS = 0.0005
#: How long open calls may take to end at shutdown.
GRACE_SECONDS = 1.5
#: How often a child looks whether its parent still lives (stdin's end is noticed at once).
PARENT_POLL_SECONDS = 1.0
#: Calls at the same time: one Session, some Ingests, reads.
CALLS_MAX = 256

_HEALTH_NAMES = ("", "taskdb.v1.TaskDB")


class AddressInUse(Exception):
    """The address cannot be listened on. Says why and what to do."""


def run(config: ServerConfig) -> None:
    """Open the store and serve it until SIGTERM, SIGINT or the end of the parent.

    Raises StoreLocked, FormatMismatch, StoreCorrupt, StoreFull, StoreError, AddressInUse, or the error that stopped it.
    """
    sys.setswitchinterval(SWITCH_INTERVAL_SECONDS)
    store = LmdbStore(config.store.path, sync=config.store.durability == "fsync", bytes_max=config.store.bytes_max)
    try:
        info = reads.store_info(store, config.store.bytes_max)
        asyncio.run(Daemon(config, store, info).run())
    finally:
        store.close()


class Daemon:
    def __init__(self, config: ServerConfig, store: Store, info: reads.StoreInfo):
        self._config = config
        self._store = store
        self._info = info
        self._fatal: BaseException | None = None

    async def run(self) -> None:
        self._stop = asyncio.Event()
        writer = Writer(self._store, Engine(self._store.free_bytes), self._config, self._on_fatal)
        service = Service(self._store, writer, self._info)
        server = grpc.aio.server(options=_options(), maximum_concurrent_rpcs=CALLS_MAX)
        pb_grpc.add_TaskDBServicer_to_server(service, server)
        health = HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(health, server)
        for name in _HEALTH_NAMES:
            await health.set(name, health_pb2.HealthCheckResponse.SERVING)
        with _listening(server, self._config.listen) as address:
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

    async def _drain(self, server: grpc.aio.Server, writer: Writer, service: Service, health: HealthServicer) -> None:
        """IMPORTANT: the commit comes before the Session ends, so that the scheduler hears Durable of all it was answered (if it listens);
        reads end before the store closes under their snapshots."""
        await health.enter_graceful_shutdown()
        writer.close()
        await server.stop(GRACE_SECONDS)
        service.close()

    def _on_fatal(self, error: BaseException) -> None:
        if self._fatal is None:
            logger.critical("stopping", exc_info=error)
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
                loop.call_soon_threadsafe(self._stop.set)

        def look() -> None:
            if os.getppid() != parent:
                self._stop.set()
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


def _options() -> list[tuple[str, int]]:
    return [
        ("grpc.max_receive_message_length", limits.MESSAGE_BYTES_MAX),
        ("grpc.max_send_message_length", limits.MESSAGE_BYTES_MAX),
        # Without this a second daemon could share the port, and each would get half of the calls.
        ("grpc.so_reuseport", 0),
        # A peer that is gone without a word is noticed; peers may ask as often.
        ("grpc.keepalive_time_ms", 10_000),
        ("grpc.keepalive_timeout_ms", 10_000),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.min_recv_ping_interval_without_data_ms", 5_000),
        ("grpc.http2.max_ping_strikes", 0),
    ]


# ------------------------------------------------------------------------------------------------------- addresses


@contextlib.contextmanager
def _listening(server: grpc.aio.Server, address: str) -> Iterator[str]:
    """Bind; the address with its real port. A socket file has owner-only rights from its first moment, and is removed."""
    if not address.startswith("unix:"):
        yield f"{address.rpartition(':')[0]}:{_bind(server, address)}"
        return
    path = Path(address.removeprefix("unix:"))
    _remove_stale(path)
    mask = os.umask(0o177)
    try:
        _bind(server, address)
    finally:
        os.umask(mask)
    path.chmod(0o600)
    try:
        yield address
    finally:
        path.unlink(missing_ok=True)


def _bind(server: grpc.aio.Server, address: str) -> int:
    try:
        port: int = server.add_insecure_port(address)
    except RuntimeError as error:
        port, reason = 0, str(error)
    else:
        reason = ""
    if not port:
        raise AddressInUse(
            f"cannot listen on {address}: in use, or not an address of this machine; choose another with --listen"
            + (f" ({reason})" if "Address already in use" not in reason and reason else "")
        )
    return port


def _remove_stale(path: Path) -> None:
    """Remove a socket file nobody listens on. Anything else under that name is left alone and refused."""
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise AddressInUse(f"cannot listen on unix:{path}: there is a file that is no socket; choose another with --listen")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink(missing_ok=True)
            return
        except OSError as error:
            raise AddressInUse(f"cannot listen on unix:{path}: {error}") from error
    raise AddressInUse(f"cannot listen on unix:{path}: another process listens on it; choose another with --listen")
