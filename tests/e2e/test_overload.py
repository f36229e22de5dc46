"""A daemon that falls behind: more is submitted than it takes, while it does not answer at all."""

from __future__ import annotations

import signal
from pathlib import Path

import psutil
import pytest
from distributed import Client

from tests.e2e import functions as f
from tests.e2e.conftest import nothing_is_left
from tests.support.cluster import Cluster, until

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

TASKS, CLIENTS = 1_000, 4
#: What is submitted is some 90 MiB; each part may grow by a fraction of it.
PAYLOAD, GROWTH_MIB_MAX = 24_000, 64
MIB = 2**20


def graph(number: int) -> dict[str, object]:
    found: dict[str, object] = {f"{number}-{i}": (f.first, i, f"{number}-{i}".encode().ljust(PAYLOAD)) for i in range(TASKS)}
    found[f"sum-{number}"] = (f.total, list(found))
    return found


def rss_mib(pid: int) -> float:
    return psutil.Process(pid).memory_info().rss / MIB


def test_a_daemon_that_stands_still(tmp_path: Path, window: int | None) -> None:
    """Longer than the link's patience. Nothing is lost, nobody gets an error, and what cannot be written yet waits with who submits it."""
    with Cluster(tmp_path, window=window, workers=2) as cluster, Client(cluster.address) as first:
        assert first.submit(f.inc, 1).result(timeout=60) == 2
        before = rss_mib(cluster.daemon.pid)
        clients = [first, *(Client(cluster.address) for _ in range(CLIENTS - 1))]
        try:
            cluster.daemon.popen.send_signal(signal.SIGSTOP)
            sums = [client.get(graph(i), f"sum-{i}", sync=False) for i, client in enumerate(clients)]
            until(lambda: "the daemon is gone" in cluster.scheduler_log(), "the link is given up", patience=60)
            assert first.run_on_scheduler(lambda: "answers") == "answers"
            cluster.daemon.popen.send_signal(signal.SIGCONT)
            expected = sum(range(TASKS))
            assert [future.result(timeout=300) for future in sums] == [expected] * CLIENTS
            assert rss_mib(cluster.daemon.pid) - before < GROWTH_MIB_MAX + cluster_store_mib(cluster)
            assert cluster.faults() == []
            del sums
            nothing_is_left(cluster)
        finally:
            for client in clients[1:]:
                client.close()


def cluster_store_mib(cluster: Cluster) -> float:
    """Pages of the store that the daemon has mapped count as its memory."""
    return float(cluster.taskdb("status")["store_bytes"]) / MIB
