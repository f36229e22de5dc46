"""Pickles go through the daemon as bytes: it never loads one, and none stands in its log or in what it refuses with."""

from __future__ import annotations

import asyncio
import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from taskdb import commands as c
from taskdb.client import Client
from taskdb.errors import TaskDBError
from taskdb.ingest import Ingest
from taskdb.model import Level, TaskFlag
from tests.taskdb.server.procs import Daemon, Recorder, begin, environment, graph, key, run, until_async

pytestmark = pytest.mark.e2e

SECRET = "s3cr3t-payload"
CAUGHT = 99


class Evil:
    """Ends whoever loads it, with another code than that of the hook."""

    def __reduce__(self) -> tuple[object, ...]:
        return os._exit, (98,), SECRET


EVIL = pickle.dumps(Evil())

#: Python runs this in every process that has its folder on its path, before anything else.
HOOK = f"""
import os, sys

def caught(event, arguments):
    if event == "pickle.find_class":
        os.write(2, b"a pickle was loaded\\n")
        os._exit({CAUGHT})

sys.addaudithook(caught)
"""


@pytest.fixture(scope="module")
def hooked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Processes that are started from here end when a pickle is loaded in them."""
    folder = tmp_path_factory.mktemp("hook")
    (folder / "sitecustomize.py").write_text(HOOK)
    with pytest.MonkeyPatch.context() as patch:
        before = os.environ.get("PYTHONPATH")
        patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(folder), before])))
        yield


def test_the_hook_works(hooked: None) -> None:
    program = "import pickle, sys; pickle.loads(pickle.dumps(sys.intern))"
    done = subprocess.run([sys.executable, "-c", program], env=environment(), capture_output=True, check=False)
    assert done.returncode == CAUGHT


def refused_batches() -> list[c.Command]:
    """What the engine refuses, with a payload in all places."""
    name = key("bad")
    return [
        c.AddTasks("bad", 7, [name], [EVIL], [0]),
        c.AddTasks("unknown", 0, [name], [EVIL], [0]),
        c.AddTasks("bad", 0, [name], [EVIL, EVIL], [0]),
        c.AddTasks("bad", 0, [name], [EVIL], [0], new_shared=[EVIL], shared=[9]),
        c.AddRule("bad", 0, EVIL, ["g"], [EVIL], [0], [0], [0], [0]),
        c.Keep([b"name"], [EVIL, EVIL]),
        c.Fail(10**9, EVIL, SECRET),
    ]


def _answered(scheduler: Recorder, seq: int) -> bool:
    return bool(scheduler.states) or any(x[0] == seq for x in scheduler.results)


async def _story(daemon: Daemon, errors: list[str]) -> None:
    async with Recorder(daemon.address) as scheduler:
        keys = [key("evil", 0), key("evil", 1)]
        flags = [int(TaskFlag.WANTED)] * 2
        run = c.AddTasks("evil", 0, keys, [EVIL, EVIL], flags, shared=[1, 1], new_shared=[EVIL])
        await scheduler.ask(begin("evil"), run, c.SealGraph("evil"), scheduler.credit(10))
        await scheduler.ask(c.Keep([b"plugin/x"], [EVIL]), *graph("other", [key("other")]))
        ids = sorted(scheduler.held)
        assert len(ids) >= 2
        assert {lease.spec for lease in scheduler.leases} >= {EVIL}
        await scheduler.ask(scheduler.finish(ids[:1]), c.Fail(ids[1], EVIL, SECRET))
    for number, command in enumerate(refused_batches()):
        async with Recorder(daemon.address, f"bad-{number}") as scheduler:
            seq = scheduler.session.send([begin("bad"), command])
            answered = partial(_answered, scheduler, seq)
            await until_async(answered, f"an answer to {number}")
            errors += [words for _, words in scheduler.states]
            errors += [words for _, _, refused in scheduler.results for _, _, _, words in refused]
    async with Recorder(daemon.address, "scheduler-2") as scheduler:
        assert [x async for x in scheduler.session.restore()]
        try:
            with Ingest(daemon.address, scheduler.session.epoch) as stream:
                stream.begin(begin("late"))
                stream.add(c.AddTasks("late", 3, [key("late")], [EVIL], [0]))
                stream.seal()
        except TaskDBError as error:
            errors.append(str(error))
        await scheduler.ask(c.Adopt(scheduler.session.epoch - 1, [key("evil", 0)], [Level.MEMORY], [8]), c.EndRecovery())


async def _again(daemon: Daemon) -> None:
    async with Recorder(daemon.address, "scheduler-3") as scheduler:
        assert [x async for x in scheduler.session.restore()]
        await scheduler.ask(c.EndRecovery(), scheduler.credit(10))


def test_nothing_is_loaded_and_nothing_is_told(hooked: None, tmp_path: Path) -> None:
    errors: list[str] = []
    with Daemon(tmp_path, "--log-level", "debug") as daemon:
        asyncio.run(_story(daemon, errors))
        _look(daemon)
        daemon.kill()
        daemon.start()
        asyncio.run(_again(daemon))
        _look(daemon)
        for words in (("verify",), ("backup", "--to", str(tmp_path / "copy"))):
            done = run(words[0], "--data", str(daemon.data), *words[1:])
            assert done.returncode == 0, done.stderr
        assert daemon.send(signal.SIGTERM) == 0
        done = run("recover", "--data", str(daemon.data))
        assert done.returncode == 0, done.stderr
        assert errors, "nothing was refused"
        for text in (*errors, daemon.words(), done.stdout, done.stderr):
            assert SECRET not in text
            assert repr(EVIL)[2:20] not in text


def _look(daemon: Daemon) -> None:
    with Client(daemon.address) as client:
        client.status()
        client.list_tasks(limit=100)
        for number in range(2):
            client.explain(key("evil", number))
        stored = client.get_tasks([key("evil", 0), key("evil", 1), key("other")], with_spec=True)
        assert any(task.spec == EVIL for task in stored), "the payload is there, for those who may load it"
