"""A base image made by debootstrap, so that no registry of images is asked."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from tests.compose.engine import Engine, Failed, run

NAME = "taskdb-base:test"
#: Debian's releases by their Python: wheels made here must fit it.
SUITES = {(3, 11): "bookworm", (3, 13): "trixie"}


def suite(version: tuple[int, int] = sys.version_info[:2]) -> str:
    """The Debian release that has this Python. Raises Failed."""
    if version not in SUITES:
        known = ", ".join(f"{major}.{minor} ({name})" for (major, minor), name in SUITES.items())
        raise Failed(f"no Debian release has Python {version[0]}.{version[1]}; run this with one of: {known}")
    return SUITES[version]


def base(folder: Path) -> Path:
    """The base system as a tar file in the folder; made once, it stays there. Raises Failed."""
    name = suite()
    path = folder / f"base-{name}.tar"
    if not path.exists():
        tree = folder / "base"
        shutil.rmtree(tree, ignore_errors=True)
        run(["debootstrap", "--variant=minbase", "--include=python3,python3-venv", name, str(tree)])
        part = path.with_suffix(".part")
        run(["tar", "-C", str(tree), "--exclude=./var/cache/apt/*", "-cf", str(part), "."])
        part.rename(path)
        shutil.rmtree(tree)
    return path


def load(engine: Engine, path: Path) -> None:
    """Make the tar file the image NAME."""
    engine.docker("import", str(path), NAME)


def wheels(root: Path) -> int:
    """Make the project's wheel and those it needs, in build/wheels; how many. Raises Failed."""
    run(["make", "--no-print-directory", "-C", str(root), "wheels"])
    return len(list((root / "build/wheels").glob("*.whl")))
