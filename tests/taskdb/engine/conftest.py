"""Rules whose tasks are made a few at a time."""

from __future__ import annotations

import pytest

from taskdb.engine import growth, hunger
from tests.support.grown_world import Grown


@pytest.fixture
def few_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(growth, "GROW_TASKS", 5)
    monkeypatch.setattr(hunger, "GROW_QUEUED", 3)


@pytest.fixture
def world(few_at_a_time: None) -> Grown:
    return Grown()
