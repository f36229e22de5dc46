"""`make releases`: end-to-end tests in a fresh environment with the oldest, and one with the newest, supported release of Dask.

The range is that of pyproject.toml; which releases of it exist is what pip finds. If only one does, it is tried once.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from scheduler_adapter.supported import SUPPORTED

ROOT = Path(__file__).resolve().parents[2]
#: What a new release may break: the touched names, then a cluster in each regime.
FILES = [
    "tests/scheduler_adapter/test_dask_internals.py",
    "tests/scheduler_adapter/test_dask_client.py",
    "tests/scheduler_adapter/test_dask_dashboard.py",
    "tests/scheduler_adapter/test_dashboard.py",
    "tests/e2e/test_futures.py",
    "tests/e2e/test_collections.py",
    "tests/e2e/test_lookups.py",
]


def supported(versions: str) -> list[str]:
    """Of what `pip index versions` says, the releases in the range, oldest first."""
    line = next((line for line in versions.splitlines() if line.startswith("Available versions:")), "")
    found = re.findall(r"\d+(?:\.\d+)+", line)
    low, high = SUPPORTED
    return sorted(
        (v for v in found if low <= tuple(map(int, v.split(".")))[:2] < high), key=lambda version: [int(n) for n in version.split(".")]
    )


def try_release(version: str, folder: Path, words: list[str]) -> int:
    """Run the tests with this release. Returns pytest's exit code; raises CalledProcessError if it cannot be installed."""
    python = folder / "bin" / "python"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", str(python), "install", "--quiet"]
    subprocess.run([*pip, "--editable", f"{ROOT}[test]", f"dask=={version}", f"distributed=={version}"], check=True)
    env = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONDONTWRITEBYTECODE")}
    return subprocess.run([str(python), "-m", "pytest", "-q", *(words or FILES)], cwd=ROOT, env=env, check=False).returncode


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.releases", description=__doc__)
    parser.add_argument("words", nargs="*", help="what pytest is to run instead of the usual files")
    words = parser.parse_args().words
    said = subprocess.run(
        [sys.executable, "-m", "pip", "index", "versions", "distributed"], capture_output=True, text=True, check=True
    ).stdout
    versions = supported(said)
    if not versions:
        print("pip finds no supported release of distributed", file=sys.stderr)
        return 2
    failed = []
    for version in dict.fromkeys((versions[0], versions[-1])):
        print(f"dask, distributed {version}", flush=True)
        with tempfile.TemporaryDirectory(prefix="taskdb-releases-") as folder:
            if try_release(version, Path(folder) / "venv", words):
                failed.append(version)
    print(f"failed with: {', '.join(failed)}" if failed else "all passed")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
