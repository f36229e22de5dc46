"""The ingest process: frames, one job, and what happens when it ends in the middle."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
from dask._task_spec import Task, TaskRef
from distributed.protocol.pickle import dumps
from hypothesis import given
from hypothesis import strategies as st

from scheduler_adapter.ingest.client import IngestFailed, IngestProcess
from scheduler_adapter.ingest.frames import receive, receive_async, send, send_async
from taskdb.client import Session
from taskdb.wire.reader import Client as Reader
from tests.e2e import functions as f
from tests.taskdb.server.procs import Daemon

# -------------------------------------------------------------------------------------------------------------- frames


@given(st.binary(max_size=50), st.lists(st.binary(max_size=600_000), max_size=4))
def test_frames_there_and_back(head: bytes, frames: list[bytes]) -> None:
    async def main() -> tuple[bytes, list[bytes], bytes]:
        ours, theirs = socket.socketpair()
        reader, writer = await asyncio.open_connection(sock=ours)
        loop = asyncio.get_running_loop()
        received = loop.run_in_executor(None, receive, theirs)
        await send_async(writer, head, frames)
        got_head, got_frames = await received
        await loop.run_in_executor(None, send, theirs, got_head)
        back = await receive_async(reader)
        writer.close()
        theirs.close()
        return got_head, got_frames, back

    assert asyncio.run(asyncio.wait_for(main(), 20)) == (head, frames, head)


def test_the_other_side_is_gone() -> None:
    ours, theirs = socket.socketpair()
    ours.sendall(b"\x01\x00\x00\x00\x10\x00")
    ours.close()
    with pytest.raises(EOFError):
        receive(theirs)
    theirs.close()


# ----------------------------------------------------------------------------------------------------------- a process


class Expr:
    """The part of an expression that is used."""

    def __init__(self, dsk: dict[Any, Any]):
        self.dsk = dsk

    def __dask_graph__(self) -> dict[Any, Any]:
        return self.dsk

    def __dask_annotations__(self) -> dict[str, Any]:
        return {}


class Kills(Expr):
    def __dask_graph__(self) -> dict[Any, Any]:
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError


class Waits(Expr):
    def __dask_graph__(self) -> dict[Any, Any]:
        time.sleep(60)
        raise AssertionError


class Fails(Expr):
    def __dask_graph__(self) -> dict[Any, Any]:
        raise KeyError("no such layer")


class FailsOddly(Expr):
    def __dask_graph__(self) -> dict[Any, Any]:
        class Odd(Exception):
            def __reduce__(self) -> Any:
                raise TypeError("cannot be pickled")

        raise Odd("odd")


def graph(n: int) -> dict[Any, Any]:
    dsk: dict[Any, Any] = {f"t-{i}": Task(f"t-{i}", f.inc, i) for i in range(n)}
    dsk["s"] = Task("s", f.first, 0, *[TaskRef(k) for k in list(dsk)])
    return dsk


def job(daemon: Daemon, epoch: int, name: str, expr: Any, keys: set[Any]) -> tuple[dict[str, Any], list[bytes]]:
    return {
        "submission": name,
        "client": "c",
        "generation": 0.0,
        "submitted": 0.0,
        "label": "test",
        "flags": 0,
        "daemon": daemon.address,
        "epoch": epoch,
        "config": {},
        "header": {"serializer": "pickle", "writeable": ()},
        "details": [dumps((None, False)), dumps((list(keys), {}))],
    }, [dumps(expr)]


@asynccontextmanager
async def attached(daemon: Daemon) -> AsyncIterator[tuple[IngestProcess, int]]:
    session = Session(daemon.address, "test", on_result=lambda *a: None, on_state=lambda *a: None, held=list)
    info = await session.attach(10)
    process = IngestProcess()
    try:
        process.start()
        yield process, info.epoch
    finally:
        await process.close()
        await session.close()


async def messages(process: IngestProcess, work: tuple[dict[str, Any], list[bytes]]) -> list[dict[str, Any]]:
    return [m async for m in process.run(*work)]


def play(daemon: Daemon, test: Any) -> None:
    async def main() -> None:
        async with attached(daemon) as (process, epoch):
            await asyncio.wait_for(test(process, epoch), 60)

    asyncio.run(main())


@pytest.fixture
def daemon(tmp_path: Path) -> Any:
    with Daemon(tmp_path) as daemon:
        yield daemon


def test_a_graph_goes_to_the_database(daemon: Daemon) -> None:
    async def test(process: IngestProcess, epoch: int) -> None:
        said = await messages(process, job(daemon, epoch, "g", Expr(graph(2000)), {"s"}))
        assert said[0]["op"] == "graph"
        assert said[0]["tasks"] == 2001
        assert said[0]["groups"] == {"t": 2000, "s": 1}
        assert said[-1]["op"] == "done"
        assert said[-1]["tasks"] == 2001
        counts: dict[str, int] = {}
        for message in said:
            if message["op"] == "run":
                for name, count in message["new"].items():
                    counts[name] = counts.get(name, 0) + count
        assert counts == {"t": 2000, "s": 1}

    play(daemon, test)
    with Reader(daemon.address) as reader:
        assert len(reader.list_tasks(prefix="t-1", limit=2000).tasks) + len(reader.list_tasks(prefix="s").tasks) > 0


def test_crash_of_the_child_fails_one_submission_only(daemon: Daemon) -> None:
    async def test(process: IngestProcess, epoch: int) -> None:
        with pytest.raises(IngestFailed, match="ingest process ended") as caught:
            await messages(process, job(daemon, epoch, "bad", Kills({}), {"s"}))
        assert "\n" not in str(caught.value)
        pid = process.pid
        said = await messages(process, job(daemon, epoch, "good", Expr(graph(10)), {"s"}))
        assert said[-1]["op"] == "done"
        assert process.pid == pid, "the server was not hurt"

    play(daemon, test)


def test_crash_while_the_graph_is_sent(daemon: Daemon) -> None:
    async def test(process: IngestProcess, epoch: int) -> None:
        await messages(process, job(daemon, epoch, "first", Expr(graph(3)), {"s"}))
        assert process.pid is not None
        # It accepts nothing, so what is sent stays on the way.
        os.kill(process.pid, signal.SIGSTOP)
        asyncio.get_running_loop().call_later(0.3, os.kill, process.pid, signal.SIGKILL)
        work, _ = job(daemon, epoch, "second", Expr({}), {"s"})
        with pytest.raises(IngestFailed, match="ingest process ended"):
            await messages(process, (work, [bytes(2**26)]))

    play(daemon, test)


def test_crash_of_the_server_is_mended(daemon: Daemon) -> None:
    async def test(process: IngestProcess, epoch: int) -> None:
        await messages(process, job(daemon, epoch, "first", Expr(graph(10)), {"s"}))
        assert process.pid is not None
        first = process.pid
        os.kill(first, signal.SIGKILL)
        assert process._process is not None
        await process._process.wait()
        said = await messages(process, job(daemon, epoch, "second", Expr(graph(10)), {"s"}))
        assert said[-1]["op"] == "done"
        assert process.pid != first

    play(daemon, test)


@pytest.mark.parametrize(
    ("expr", "kind", "text"), [(Fails({}), KeyError, "no such layer"), (FailsOddly({}), RuntimeError, "odd")], ids=["plain", "odd"]
)
def test_errors_are_told_as_they_are(daemon: Daemon, expr: Any, kind: type[Exception], text: str) -> None:
    async def test(process: IngestProcess, epoch: int) -> None:
        (said,) = await messages(process, job(daemon, epoch, "g", expr, {"s"}))
        assert said["op"] == "error"
        assert type(said["exception"]) is kind
        assert text in str(said["exception"])

    play(daemon, test)


def test_an_input_nobody_has(daemon: Daemon) -> None:
    async def test(process: IngestProcess, epoch: int) -> None:
        dsk = {"a": Task("a", f.inc, TaskRef("nobody"))}
        said = await messages(process, job(daemon, epoch, "g", Expr(dsk), {"a"}))
        assert said[0]["external"] == ["nobody"]
        assert said[-1] == {"op": "missing", "keys": ["nobody"]}

    play(daemon, test)


def test_closing_the_iterator_stops_the_work(daemon: Daemon) -> None:
    async def test(process: IngestProcess, epoch: int) -> None:
        async def consume() -> None:
            await messages(process, job(daemon, epoch, "g", Waits({}), {"s"}))

        await messages(process, job(daemon, epoch, "first", Expr(graph(3)), {"s"}))
        server = psutil.Process(process.pid)
        task = asyncio.ensure_future(consume())
        deadline = time.monotonic() + 20
        while not server.children():
            assert time.monotonic() < deadline
            await asyncio.sleep(0.01)
        (child,) = server.children()
        task.cancel()
        while child.is_running() and child.status() != psutil.STATUS_ZOMBIE:
            assert time.monotonic() < deadline
            await asyncio.sleep(0.01)

    play(daemon, test)


def test_nothing_is_left_when_it_is_closed(daemon: Daemon) -> None:
    family: list[psutil.Process] = []
    folders: list[Path] = []

    async def test(process: IngestProcess, epoch: int) -> None:
        await messages(process, job(daemon, epoch, "first", Expr(graph(3)), {"s"}))
        family.append(psutil.Process(process.pid))
        folders.append(process._socket.parent)

    play(daemon, test)
    assert psutil.wait_procs(family, timeout=10)[1] == []
    assert not folders[0].exists()
