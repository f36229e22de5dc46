"""The tutorial is a valid notebook, and its cells run from the first to the last."""

from __future__ import annotations

from pathlib import Path

import nbformat
import pytest

from tests.support.cluster import run

NOTEBOOK = Path(__file__).resolve().parents[1] / "docs/tutorial.ipynb"

#: As a kernel does it: one namespace, and what a cell ends with is displayed, as a notebook would.
KERNEL = """
import ast, json, sys
space = {"__name__": "__main__"}
for number, source in enumerate(json.load(sys.stdin)):
    tree = ast.parse(source)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, f"cell {number}", "exec"), space)
    if last is not None:
        value = eval(compile(ast.Expression(last.value), f"cell {number}", "eval"), space)
        print("shown:", value, getattr(value, "_repr_html_", str)() if value is not None else "")
print("done")
"""


def cells(kind: str) -> list[str]:
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbformat.validate(notebook)
    return [cell.source for cell in notebook.cells if cell.cell_type == kind]


def test_it_carries_no_outputs_of_a_machine() -> None:
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    assert [cell.id for cell in notebook.cells if cell.cell_type == "code" and (cell.outputs or cell.execution_count)] == []


@pytest.mark.e2e
def test_it_runs(tmp_path: Path) -> None:
    import json

    done = run(["-W", "ignore", "-c", KERNEL], input=json.dumps(cells("code")), cwd=tmp_path, timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == "done"
    assert "something else, meanwhile" in done.stdout
    assert "ZeroDivisionError" in done.stdout
    assert "['answer']" in done.stdout
    assert "<strong>Task database:</strong> live" in done.stdout
