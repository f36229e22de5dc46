"""The daemon that is a child of its scheduler leaves nothing behind, also if the scheduler is killed."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest
from distributed import Client

from tests.e2e import functions as f
from tests.support.cluster import PATIENCE_SECONDS, Cluster, descendants, until

pytestmark = pytest.mark.e2e


@pytest.mark.parametrize("data", [False, True], ids=["temporary", "kept"])
def test_killed(tmp_path: Path, data: bool) -> None:
    folder = tmp_path / "t"
    folder.mkdir()
    with Cluster(tmp_path, embedded=True, data=data, workers=1, env={"TMPDIR": str(folder)}) as cluster:
        with Client(cluster.address) as client:
            assert client.submit(f.inc, 1).result(timeout=PATIENCE_SECONDS) == 2
        until(lambda: len(list(folder.glob("taskdb-*/socket"))) == 2, "the daemon's socket, and the ingest process's")
        children = descendants(cluster.scheduler.pid)
        cluster.kill(cluster.scheduler)
        assert psutil.wait_procs(children, timeout=PATIENCE_SECONDS)[1] == []
        until(lambda: not list(folder.glob("taskdb-*")), "the folders are gone")
        assert (tmp_path / "data").exists() is data
