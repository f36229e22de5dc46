"""The picture of figures over sizes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from bench import curves
from bench.__main__ import main
from bench.figures import FORMAT


def document(workload: str, tasks: int, **sides: float) -> dict[str, Any]:
    medians = {side: {name: value for name, _, _ in curves.PANELS} for side, value in sides.items()}
    return {"format": FORMAT, "workload": workload, "options": {"tasks": tasks}, "medians": medians}


def test_points_are_in_order_and_a_side_may_be_missing() -> None:
    found = curves.points([document("grid", 1000, ours=3.0), document("grid", 10, ours=1.0, stock=2.0)])
    assert {side: list(by_size) for side, by_size in found.items()} == {"stock": [10], "ours": [10, 1000]}


def test_the_same_figures_give_the_same_file(tmp_path: Path) -> None:
    files = []
    for tasks in (10, 1000):
        files.append(tmp_path / f"{tasks}.json")
        files[-1].write_text(json.dumps(document("grid", tasks, ours=1.0, stock=float(tasks))))
    pictures = [tmp_path / "a.svg", tmp_path / "b.svg"]
    for picture in pictures:
        done = CliRunner().invoke(main, ["curves", *map(str, files), "-o", str(picture)])
        assert done.exit_code == 0, done.output
    assert pictures[0].read_bytes() == pictures[1].read_bytes()
    assert b"<svg" in pictures[0].read_bytes()


def test_one_workload_a_picture(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="chain, grid"):
        curves.draw([document("grid", 10, ours=1.0), document("chain", 10, ours=1.0)], tmp_path / "x.svg")
