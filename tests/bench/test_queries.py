"""The benches of questions and of pruning run, small."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.queries import make_finished_store, measure, prune
from bench.recovery import make_store

pytestmark = pytest.mark.e2e


def test_questions(tmp_path: Path) -> None:
    store = tmp_path / "store"
    found = measure(tmp_path, store, make_store(store, 3_000), rate=50, pace=500, seconds=0.5, rounds=1)
    assert set(found.latencies) >= {"status", "tasks", "explain"}
    assert all(seconds for seconds in found.latencies.values())
    assert found.without[0].per_second > 0
    assert found.asked[0].per_second > 0


def test_pruning(tmp_path: Path) -> None:
    store = tmp_path / "store"
    make_finished_store(store, 2_000)
    found = prune(tmp_path, store, 2_000, pace=500, seconds=0.5)
    assert found.used_bytes < found.used_bytes_before
    assert found.meanwhile.per_second > 0
