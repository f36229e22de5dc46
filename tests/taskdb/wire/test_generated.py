"""The generated code that is checked in is what proto/ generates."""

from __future__ import annotations

from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


def test_generated_code_is_fresh(tmp_path: Path) -> None:
    protoc = pytest.importorskip("grpc_tools.protoc")
    args = [f"--{kind}={tmp_path}" for kind in ("python_out", "pyi_out", "grpc_python_out")]
    assert protoc.main(["protoc", f"-Itaskdb/wire={ROOT / 'proto'}", *args, "taskdb/wire/taskdb.proto"]) == 0
    made = {path.relative_to(tmp_path): path.read_text() for path in tmp_path.rglob("*.py*") if path.is_file()}
    assert len(made) == 3
    assert [str(name) for name, text in made.items() if (ROOT / name).read_text() != text] == [], "run `make proto`"
