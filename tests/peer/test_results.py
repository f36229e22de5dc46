"""What is made of the results of distributed's own suite."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.peer import results
from tests.peer.run_distributed_suite import EXCEPTIONS


def write(folder: Path, regime: str, **outcomes: str) -> None:
    lines = [json.dumps({"test": f"distributed/tests/test_x.py::test_{name}", "outcome": outcome}) for name, outcome in outcomes.items()]
    (folder / f"{regime}.jsonl").write_text("\n".join(lines) + "\n")


def test_only_what_passes_stock_counts(tmp_path: Path) -> None:
    write(tmp_path, "stock", a="passed", b="passed", c="passed", d="passed", e="failed", f="passed", g="skipped")
    write(tmp_path, "paged", a="passed", b="failed", c="failed", d="hung", e="failed", g="failed")
    exceptions = {"distributed/tests/test_x.py::test_b": {"paged": "it looks at all of Scheduler.tasks"}}
    (row,) = results.rows(results.read(tmp_path), exceptions)
    assert (row.passed_stock, row.passed, row.missing) == (5, 1, 1)
    assert [len(found) for found in (row.excepted, row.differ, row.hung)] == [1, 1, 1]
    assert row.differ == ["distributed/tests/test_x.py::test_c"]
    assert "| all | paged | 5 | 1 | 1 | 1 | 1 | 1 |" in results.markdown([row])


def test_a_reason_for_one_regime_is_none_for_the_other(tmp_path: Path) -> None:
    write(tmp_path, "stock", b="passed")
    write(tmp_path, "default", b="failed")
    (row,) = results.rows(results.read(tmp_path), {"distributed/tests/test_x.py::test_b": {"paged": "it looks at Scheduler.tasks"}})
    assert len(row.differ) == 1


def test_stock_is_asked_about_failures_only(tmp_path: Path) -> None:
    write(tmp_path, "default", a="passed", b="failed", c="failed", d="skipped", e="hung")
    write(tmp_path, "stock", c="failed")
    found = results.read(tmp_path)
    assert [test[-1] for test in results.unknown(found, "default")] == ["b", "e"]
    write(tmp_path, "stock", b="passed", c="failed", e="passed")
    (row,) = results.rows(results.read(tmp_path), {})
    assert (row.passed_stock, row.passed, row.missing) == (3, 1, 0)
    assert (len(row.differ), len(row.hung)) == (1, 1)


@pytest.mark.parametrize("reason", ["", "it hangs", "a result is lost"])
def test_no_reason(tmp_path: Path, reason: str) -> None:
    file = tmp_path / "x.toml"
    file.write_text(f'[[exception]]\ntests = ["a"]\nreason = "{reason}"\n')
    with pytest.raises(ValueError, match="not a reason"):
        results.read_exceptions(file)


def test_the_exceptions_that_are_kept() -> None:
    results.read_exceptions(EXCEPTIONS)
