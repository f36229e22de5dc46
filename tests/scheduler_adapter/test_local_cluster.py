"""`from scheduler_adapter import LocalCluster`."""

from __future__ import annotations

import asyncio
import os
import re
import signal
from pathlib import Path
from typing import Any

import dask
import distributed
import pytest
from distributed import Client

from scheduler_adapter import LocalCluster, local_cluster
from scheduler_adapter.local_cluster import _preloads
from tests.e2e import functions as f

pytestmark = pytest.mark.e2e

OPTIONS: dict[str, Any] = {"n_workers": 1, "threads_per_worker": 2, "processes": False, "dashboard_address": None}


def test_it_runs_and_its_repr_has_all_that_the_client_was_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with LocalCluster(**OPTIONS, window=0, data=tmp_path / "data") as cluster, Client(cluster) as client:
        assert isinstance(cluster, distributed.LocalCluster)
        gate = tmp_path / "gate"
        first = client.submit(f.wait_for_file, str(gate), pure=False)
        held = client.map(f.add, range(19), y=first, pure=False)
        for number in range(5):
            assert client.submit(f.inc, number, pure=False).result() == number + 1
            # The client has just been told: neither it nor a result is unfinished, at once.
            assert ", unfinished=20)" in repr(cluster)
        text = repr(cluster)
        assert text.startswith("LocalCluster(")
        assert "taskdb=live" in text
        assert "window=0" in text
        html = cluster._repr_html_()
        assert re.search(r"<strong>Unfinished tasks:</strong> 20 in [1-9] graphs<", html)
        assert "<strong>Task database:</strong> live, epoch 1" in html
        assert "<strong>Using processes:</strong> False" in html
        gate.touch()
        client.gather(held)
        assert ", unfinished=0)" in repr(cluster)
        monkeypatch.setattr(local_cluster, "ANSWER_SECONDS", 0.3)
        os.kill(cluster.scheduler.taskdb.daemon.pid, signal.SIGSTOP)
        try:
            # It does not answer: what the scheduler knows is told all the same.
            text = repr(cluster)
            assert "taskdb=live" in text
            assert "unfinished" not in text
            assert "no answer" in cluster._repr_html_()
        finally:
            os.kill(cluster.scheduler.taskdb.daemon.pid, signal.SIGCONT)
    assert "taskdb" not in repr(cluster)
    with LocalCluster(**OPTIONS, data=tmp_path / "data") as again:
        state = again.taskdb
        assert state is not None
        assert state.daemon is not None
        assert state.daemon.epoch == 2


def test_in_an_event_loop() -> None:
    async def play() -> None:
        async with LocalCluster(**OPTIONS, window=5, asynchronous=True) as cluster, Client(cluster, asynchronous=True) as client:
            assert await client.submit(f.inc, 1) == 2
            assert "taskdb=live, resident=" in repr(cluster)
            assert "window=5" in repr(cluster)
            assert "live, no answer" in cluster._repr_html_()

    asyncio.run(play())


@pytest.mark.parametrize("options", [{"window": -1}, {"window": 1.5}, {"window": "all"}])
def test_a_bad_window_is_one_line(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"^taskdb\.window is .*; it is a number of tasks, 0 or more$"):
        LocalCluster(**OPTIONS, **options)


def test_a_folder_of_another_daemon_is_refused() -> None:
    with pytest.raises(ValueError, match="either data or url"):
        LocalCluster(**OPTIONS, data="here", url="127.0.0.1:7070")


def test_other_preloads_are_kept() -> None:
    with dask.config.set({"distributed.scheduler.preload": ["a", "b"], "distributed.scheduler.preload-argv": ["x"]}):
        assert _preloads({}, ["w"]) == {"preload": ["a", "b", "scheduler_adapter"], "preload_argv": [["x"], ["x"], ["w"]]}
    assert _preloads({"preload": "a"}, []) == {"preload": ["a", "scheduler_adapter"], "preload_argv": [[], []]}
    both = {"preload": ["scheduler_adapter", "a"], "preload_argv": [["v"], ["x"]]}
    assert _preloads(both, ["w"]) == {"preload": ["scheduler_adapter", "a"], "preload_argv": [["v", "w"], ["x"]]}


def test_it_is_imported_only_when_asked_for() -> None:
    import scheduler_adapter

    with pytest.raises(AttributeError, match="no attribute 'Cluster'"):
        _ = scheduler_adapter.Cluster
