"""A pytest plugin: the adapter in every scheduler that a test starts, and a line of JSON for each test.

TASKDB_PEER_REGIME: stock, default or paged. TASKDB_PEER_RESULTS, TASKDB_PEER_RUNNING: files. Schedulers in the test process, and in
processes that it spawns, share what `farm.py` starts; those that are started by command start a daemon and an ingest process, as shipped.
When a scheduler has closed, its store is verified: a violation fails the test.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import traceback
from contextlib import suppress
from pathlib import Path
from typing import Any

import dask
import pytest

from tests.peer.farm import DAEMON_SECONDS, TEXT_CHARS, Farm, ForkedDaemon, install

STOCK, DEFAULT, PAGED = REGIMES = ("stock", "default", "paged")
REGIME = os.environ.get("TASKDB_PEER_REGIME", STOCK)
RESULTS = Path(os.environ.get("TASKDB_PEER_RESULTS", os.devnull))
#: Names the test that runs, for whoever finds this process dead.
RUNNING = Path(os.environ.get("TASKDB_PEER_RUNNING", os.devnull))

if REGIME != STOCK:
    os.environ["DASK_DISTRIBUTED__SCHEDULER__PRELOAD"] = '["tests.peer.farm", "scheduler_adapter"]'
if REGIME == PAGED:
    os.environ["DASK_TASKDB__WINDOW"] = "0"
# Spawning takes seconds for each of a test's three processes. Not if the environment says otherwise.
os.environ.setdefault("DASK_DISTRIBUTED__WORKER__MULTIPROCESSING_METHOD", "forkserver")
# Another package's plugin may have imported Dask, and with it its configuration, before this.
dask.config.refresh()


class Record:
    """What is known of the test that runs."""

    def __init__(self) -> None:
        self.outcome = "passed"
        self.seconds = 0.0
        self.text = ""
        self.logged: list[str] = []
        self.violations: list[str] = []
        #: Schedulers closed, and tasks leased to them: 0 of an adapter's test means that it shows nothing of paging.
        self.schedulers = self.leases = 0


current = Record()
farm: Farm | None = None


class _Log(logging.Handler):
    """Warnings of ours, and errors of the scheduler."""

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        if record.exc_info and record.exc_info[0]:
            text += "\n" + "".join(traceback.format_exception(*record.exc_info))
        ours = record.name.startswith(("taskdb", "distributed.taskdb")) or "scheduler_adapter" in text
        if (ours and record.levelno >= logging.WARNING) or (record.levelno >= logging.ERROR and record.name == "distributed.scheduler"):
            current.logged.append(f"{record.levelname} {record.name}: {text[-TEXT_CHARS:]}")


def _fill_fork_server() -> None:
    """All that a scheduler or worker in a child process imports, imported once. Not `farm`: it acts when a child imports it."""
    from distributed.utils import get_mp_context

    context = get_mp_context()
    if context.get_start_method() == "forkserver":
        names = ["tests.peer.forked", "distributed.utils_test", "distributed.dashboard.scheduler", "dask.array", "dask.dataframe"]
        if REGIME != STOCK:
            names += ["scheduler_adapter.adapter", "scheduler_adapter.dashboard"]
        context.set_forkserver_preload(names)


async def _warm_up() -> None:
    """Make gRPC's threads before the first test looks for leaked ones; they are kept."""
    from grpc._cython import cygrpc

    from taskdb.client import Session

    cygrpc.init_grpc_aio()
    daemon = ForkedDaemon(None)
    await daemon.start(DAEMON_SECONDS)
    session = Session(daemon.address, "warm-up", on_result=lambda *_: None, on_state=lambda *_: None, held=list)
    await session.attach(DAEMON_SECONDS)
    await session.close()
    await daemon.close()


# ---------------------------------------------------------------------------------------------------------------- pytest


def pytest_configure(config: pytest.Config) -> None:
    global farm
    # Of pytest-rerunfailures: a flaky test is not run again here.
    config.addinivalue_line("markers", "flaky: may fail")
    if REGIME != STOCK:
        assert "scheduler_adapter" in dask.config.get("distributed.scheduler.preload")
        farm = Farm()
        install()
        asyncio.run(_warm_up())
    _fill_fork_server()
    for name in ("taskdb", "distributed"):
        logging.getLogger(name).addHandler(_Log())


def pytest_unconfigure(config: pytest.Config) -> None:
    if farm is not None:
        farm.close()


def pytest_runtest_logstart(nodeid: str, location: Any) -> None:
    global current
    current = Record()
    with suppress(FileNotFoundError):
        RUNNING.write_text(nodeid)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    current.seconds += report.duration
    if report.outcome == "failed":
        current.outcome = "hung" if "Timeout (>" in str(report.longreprtext) else "failed"
        current.text += str(report.longreprtext)[-TEXT_CHARS:]
    elif report.outcome == "skipped" and current.outcome == "passed":
        current.outcome = "skipped"


def pytest_runtest_logfinish(nodeid: str, location: Any) -> None:
    for told in farm.told() if farm is not None else ():
        current.violations += told.get("violations", ())
        current.schedulers += "leases" in told
        current.leases += told.get("leases", 0)
    if current.violations and current.outcome != "hung":
        current.outcome = "failed"
    line = {"test": nodeid, **vars(current)}
    with suppress(FileNotFoundError), RESULTS.open("a") as file:
        file.write(json.dumps(line) + "\n")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what stands in the results."""
    done = set()
    if RESULTS.is_file():
        done = {json.loads(line)["test"] for line in RESULTS.read_text().splitlines()}
    items[:] = [item for item in items if item.nodeid not in done]
