"""The shipped config file turns on the preloads of scheduler, workers and clients: read by real processes, without any option."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.cluster import PATIENCE_SECONDS, Cluster, run, until

pytestmark = pytest.mark.e2e

CONFIG = Path(__file__).resolve().parents[2] / "deploy/dask-taskdb.yaml"
CLIENT = """
import sys
from distributed import Client
with Client(sys.argv[1]) as client:
    print(client.taskdb.epoch, client.submit(abs, -5).result(timeout=30))
"""


def test_one_file_is_read_by_all_three(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = Cluster(tmp_path, stock=True, workers=1)
    monkeypatch.setenv("DASK_CONFIG", str(CONFIG))
    # The environment goes before the file: its port is the default one.
    monkeypatch.setenv("DASK_TASKDB__URL", cluster.url)
    try:
        cluster.start_daemon()
        with cluster:
            assert f"taskdb: epoch 1 on {cluster.url}" in cluster.scheduler_log()
            done = run(["-c", CLIENT, cluster.address], timeout=2 * PATIENCE_SECONDS)
            assert done.stdout.split() == ["1", "5"], done.stderr
            cluster.kill(cluster.scheduler)
            until(lambda: "keeping what this worker holds" in cluster.workers[0].log.read_text(), "the worker outlives its scheduler")
            cluster.start_scheduler()
            until(lambda: "registered with the scheduler of epoch 2" in cluster.workers[0].log.read_text(), "the worker comes back")
    finally:
        cluster.processes.stop()
