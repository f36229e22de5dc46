"""Medians, ratios, and how figures are shown."""

import json
from pathlib import Path
from typing import Any

import pytest

from bench import figures

OPTIONS = {"workers": 2, "worker_kind": "zero", "repeat": 3}


def _document() -> dict[str, Any]:
    runs = [{"side": "stock", "figures": {"makespan_s": float(s), "stall_max_s": 0.0}} for s in (9, 2, 4)]
    runs += [{"side": "ours", "figures": {"makespan_s": float(s), "stall_max_s": 0.1, "disk_bytes_per_task": 300.0}} for s in (1, 3)]
    return figures.document({"workload": "chain", "options": OPTIONS}, runs)


def test_medians_and_ratios() -> None:
    content = _document()
    assert content["medians"]["stock"]["makespan_s"] == 4
    assert content["medians"]["ours"]["makespan_s"] == 2
    assert content["ratios"]["makespan_s"] == 0.5
    assert content["ratios"]["stall_max_s"] is None, "stock is 0: there is no ratio"
    assert content["ratios"]["disk_bytes_per_task"] is None, "stock has no disk"


def test_one_side_alone_has_no_ratio() -> None:
    content = figures.document({}, [{"side": "stock", "figures": {"tasks": 5}}])
    assert set(content["medians"]) == {"stock"}
    assert set(content["ratios"].values()) == {None}


def test_markdown_has_a_cell_for_every_column(tmp_path: Path) -> None:
    file = tmp_path / "run.json"
    file.write_text(json.dumps(_document()))
    header, rule, row = figures.markdown([figures.load(file)]).splitlines()
    assert header.count("|") == rule.count("|") == row.count("|")
    assert "| 4.00 s → 2.00 s |" in row
    assert "| 300 B |" in row
    assert f"| {figures.DASH} |" in row


def test_other_files_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "other.json"
    file.write_text('{"format": 0}')
    with pytest.raises(ValueError, match="format"):
        figures.load(file)
