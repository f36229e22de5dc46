"""`taskdb prune` against a daemon, with a scheduler attached and without."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from tests.taskdb.server.procs import Daemon, Recorder, graph, invoke, key


def ask(daemon: Daemon, *args: str, code: int = 0) -> Any:
    done = invoke(daemon, *args, "--output", "json")
    assert done.exit_code == code, done.stderr
    return json.loads(done.stdout)


@pytest.mark.e2e
def test_prune(tmp_path: Path) -> None:
    async def fill(address: str) -> None:
        async with Recorder(address) as scheduler:
            # Submitted at second 1 of the epoch, as all of these.
            for number in range(3):
                keys = [key(f"x{number}", i) for i in range(200)]
                await scheduler.ask(*graph(f"graph-{number}", keys), scheduler.credit(10_000))
            for name in ("graph-0", "graph-1"):
                await scheduler.ask(scheduler.finish([lease.id for lease in scheduler.leases if lease.submission == name]))
            await scheduler.durable()
            # While the scheduler is attached: it hears of it.
            done = await asyncio.to_thread(ask, daemon, "prune", "graph-0")
            assert [graph["submission"] for graph in done["graphs"]] == ["graph-0"]
            assert sum(len(result.cancelled) for _, result, _ in scheduler.results) == 200
            assert sum(len(result.release) for _, result, _ in scheduler.results) == 200

    with Daemon(tmp_path) as daemon:
        asyncio.run(fill(daemon.address))
        assert [graph["submission"] for graph in ask(daemon, "graphs")["graphs"]] == ["graph-1", "graph-2"]
        refused = invoke(daemon, "prune", "graph-2")
        assert refused.exit_code == 1
        assert "unfinished tasks" in refused.stderr
        assert [graph["submission"] for graph in ask(daemon, "prune", "--older-than", "1h", "--dry-run")["graphs"]] == ["graph-1"]
        assert ask(daemon, "graphs")["graphs"][0]["submission"] == "graph-1"
        # More than there is to be had: all that is finished goes, and the exit code says that it was not enough.
        done = ask(daemon, "prune", "--budget", "1K", code=1)
        assert done["used_bytes"] < done["used_bytes_before"]
        assert [graph["submission"] for graph in ask(daemon, "graphs")["graphs"]] == ["graph-2"]
        assert ask(daemon, "prune", "--budget", "1G")["graphs"] == []


@pytest.mark.parametrize("args", [["prune"], ["prune", "--older-than", "soon"], ["prune", "--budget", "little"]])
def test_usage(args: list[str]) -> None:
    assert invoke(Daemon(Path("nowhere")), *args).exit_code == 2
