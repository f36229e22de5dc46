"""The daemon as a process: start, addresses, rights, locks, signals, death."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import stat
import subprocess
import sys
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from taskdb.client import Client
from tests.taskdb.server.procs import (
    PATIENCE_SECONDS,
    Daemon,
    Recorder,
    command,
    environment,
    graph,
    key,
    run,
    until,
)

pytestmark = pytest.mark.e2e


def test_a_socket_is_for_its_owner_only_and_goes_away(tmp_path: Path) -> None:
    with Daemon(tmp_path) as daemon:
        path = tmp_path / "sock"
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert daemon.words() == f"taskdb: serving {daemon.data} on unix:{path}\n"
        assert daemon.send(signal.SIGTERM) == 0
        assert not path.exists()


def test_a_port_of_zero_is_said(tmp_path: Path) -> None:
    with Daemon(tmp_path, listen="127.0.0.1:0") as daemon:
        assert not daemon.address.endswith(":0")
        with Client(daemon.address) as client:
            assert client.status().tasks == 0
        assert daemon.send(signal.SIGINT) == 0


def test_it_is_healthy(tmp_path: Path) -> None:
    with Daemon(tmp_path) as daemon, grpc.insecure_channel(daemon.address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        for name in ("", "taskdb.v1.TaskDB"):
            reply = stub.Check(health_pb2.HealthCheckRequest(service=name), timeout=PATIENCE_SECONDS)
            assert reply.status == health_pb2.HealthCheckResponse.SERVING


def test_a_second_daemon_on_the_folder_is_refused(tmp_path: Path) -> None:
    with Daemon(tmp_path) as daemon:
        second = run("serve", "--data", str(daemon.data), "--listen", "127.0.0.1:0")
        assert second.returncode == 4
        assert second.stderr.count("\n") == 1
        assert str(daemon.data) in second.stderr
        with Client(daemon.address) as client:
            client.status()


def test_a_port_in_use_is_refused(tmp_path: Path) -> None:
    with Daemon(tmp_path, listen="127.0.0.1:0") as daemon:
        second = run("serve", "--data", str(tmp_path / "other"), "--listen", daemon.address)
        assert second.returncode == 1
        assert f"cannot listen on {daemon.address}" in second.stderr
        assert "Traceback" not in second.stderr


def test_a_socket_in_use_is_refused_and_left(tmp_path: Path) -> None:
    with Daemon(tmp_path) as daemon:
        second = run("serve", "--data", str(tmp_path / "other"), "--listen", daemon.address)
        assert second.returncode == 1
        assert "another process listens" in second.stderr
        with Client(daemon.address) as client:
            client.status()


def test_a_stale_socket_is_removed(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(tmp_path / "sock"))
    with Daemon(tmp_path) as daemon, Client(daemon.address) as client:
        client.status()


def test_a_file_that_is_no_socket_is_left(tmp_path: Path) -> None:
    (tmp_path / "sock").write_text("mine")
    done = run("serve", "--data", str(tmp_path / "data"), "--listen", f"unix:{tmp_path / 'sock'}")
    assert done.returncode == 1
    assert (tmp_path / "sock").read_text() == "mine"


def test_it_ends_with_stdin(tmp_path: Path) -> None:
    ready = tmp_path / "ready"
    args = ["serve", "--data", str(tmp_path / "data"), "--listen", "127.0.0.1:0", "--ready-file", str(ready), "--exit-with-parent"]
    with subprocess.Popen(command(*args), stdin=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment()) as process:
        until(ready.exists, "the daemon to serve")
        assert process.stdin is not None
        process.stdin.close()
        assert process.wait(PATIENCE_SECONDS) == 0


def test_it_ends_with_its_parent_though_stdin_stays_open(tmp_path: Path) -> None:
    ready, pid = tmp_path / "ready", tmp_path / "pid"
    args = command("serve", "--data", str(tmp_path / "data"), "--listen", f"unix:{tmp_path / 'sock'}", "--ready-file", str(ready))
    program = (
        "import subprocess, sys, time, pathlib\n"
        f"child = subprocess.Popen({[*args, '--exit-with-parent']!r})\n"
        f"pathlib.Path({str(pid)!r}).write_text(str(child.pid))\n"
        "time.sleep(600)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment())
    try:
        until(ready.exists, "the daemon to serve")
    finally:
        parent.kill()
        parent.wait()
    until(lambda: not (tmp_path / "sock").exists(), "the daemon to end")
    assert parent.stdin is not None
    parent.stdin.close()
    until(lambda: not os.path.exists(f"/proc/{pid.read_text()}") or _zombie(pid.read_text()), "the process to end")


def _zombie(pid: str) -> bool:
    try:
        return ") Z " in Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return True


def test_what_is_durable_is_there_after_a_kill(tmp_path: Path) -> None:
    async def story() -> None:
        async with Recorder(daemon.address) as scheduler:
            await scheduler.ask(*graph("s", [key("x", i) for i in range(10)]))
            await scheduler.durable()
            daemon.kill()
            daemon.start()
            await scheduler.told("live")

    with Daemon(tmp_path) as daemon:
        asyncio.run(story())
        with Client(daemon.address) as client:
            assert client.status().tasks == 10
            assert [x.found for x in client.get_tasks([key("x", 3), key("y")])] == [True, False]


def test_sigterm_commits_and_tells_the_scheduler(tmp_path: Path) -> None:
    async def story() -> None:
        async with Recorder(daemon.address) as scheduler:
            await scheduler.ask(*graph("s", [key("x", i) for i in range(10)]))
            assert await asyncio.to_thread(daemon.send, signal.SIGTERM) == 0
            assert "daemon is shutting down" in await scheduler.told("lost")

    # So rarely that only the shutdown can have committed it.
    with Daemon(tmp_path, "--commit-interval-ms", "10000") as daemon:
        asyncio.run(story())
        daemon.start()
        with Client(daemon.address) as client:
            assert client.status().tasks == 10


def test_a_store_of_another_format_is_refused(tmp_path: Path) -> None:
    with Daemon(tmp_path) as daemon:
        daemon.send(signal.SIGTERM)
    _set_format(daemon.data, 99)
    done = run("serve", "--data", str(daemon.data), "--listen", "127.0.0.1:0")
    assert done.returncode == 4
    assert done.stderr.count("\n") == 1
    assert str(daemon.data) in done.stderr


def _set_format(folder: Path, version: int) -> None:
    from taskdb.store.lmdb_store import LmdbStore
    from taskdb.store.schema import U64, Meta, Table, meta_key

    store = LmdbStore(folder)
    txn = store.write()
    txn.put(Table.META, meta_key(Meta.FORMAT_VERSION), U64.pack(version))
    txn.commit()
    store.close()
