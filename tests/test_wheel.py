"""The wheel is whole: installed into an empty environment it runs the README's program, the commands and the demo."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import venv
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
#: Building, and downloading what it needs.
INSTALL_SECONDS_MAX = 600

pytestmark = [pytest.mark.slow, pytest.mark.timeout(2 * INSTALL_SECONDS_MAX)]


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """An interpreter that has the wheel, what it asks for, and nothing else."""
    folder = tmp_path_factory.mktemp("wheel")
    # Of a copy: a build leaves folders in the tree.
    tracked = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in filter(None, tracked.split("\0")):
        if name.startswith(("taskdb/", "scheduler_adapter/")) or "/" not in name:
            (folder / "tree" / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / "tree" / name)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    _run([*pip, "wheel", "--quiet", "--no-deps", "--wheel-dir", str(folder), str(folder / "tree")], folder)
    [wheel] = folder.glob("*.whl")
    venv.create(folder / "venv", with_pip=False)
    python = folder / "venv/bin/python"
    _run([*pip, "--python", str(python), "install", "--quiet", str(wheel), "dask[array]", "bokeh"], folder)
    yield python
    shutil.rmtree(folder / "venv")


def _run(words: list[str], folder: Path) -> str:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, timeout=INSTALL_SECONDS_MAX, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_commands(python: Path, tmp_path: Path) -> None:
    commands = python.parent
    assert re.match(r"taskdb \d", _run([str(commands / "taskdb"), "--version"], tmp_path))
    assert "crash" in _run([str(commands / "taskdb"), "selftest", "--help"], tmp_path)


def test_the_program_of_the_readme(python: Path, tmp_path: Path) -> None:
    [program] = re.findall(r"^<!-- tested: python -->\n```python\n(.*?)^```", (ROOT / "README.md").read_text(), re.S | re.M)
    body = "".join(f"    {line}\n" for line in program.splitlines())
    (tmp_path / "program.py").write_text(f"if __name__ == '__main__':\n{body}")
    assert _run([str(python), "program.py"], tmp_path).strip() == "6"


def test_the_demo(python: Path, tmp_path: Path) -> None:
    shutil.copytree(ROOT / "demo", tmp_path / "demo", ignore=shutil.ignore_patterns("__pycache__"))
    where = "import scheduler_adapter; print(scheduler_adapter.__file__)"
    assert str(python.parents[1]) in _run([str(python), "-c", where], tmp_path)
    said = _run([str(python), "-m", "demo", "--chunks", "500"], tmp_path)
    assert re.search(r"sum = [\d,]+  right", said), said
