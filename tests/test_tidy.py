"""Rules about the code itself: who may import what, how long a file may be, and what no file may name."""

from __future__ import annotations

import ast
import re
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("taskdb", "scheduler_adapter", "bench", "demo", "tests")
#: Code that decides and does not act: no IO, no clock, no chance, no Dask.
PURE = ("taskdb/engine/", "scheduler_adapter/core/")
IMPURE = frozenset(("asyncio", "threading", "grpc", "google", "lmdb", "dask", "distributed", "time", "random", "os", "logging"))
WIRE = ("taskdb/wire/", "taskdb/server/", "taskdb/client.py", "taskdb/ingest.py")
#: The only places that touch private names of distributed.
INTERNALS = "scheduler_adapter/dask_"
LINES_MAX = 500
#: Files that may be longer, each with its reason.
LONGER: dict[str, str] = {
    "tests/stress/run.py": "one seeded mix, and the model of what must come of it",
    "tests/support/engine_model.py": "the engine once more: its rules share its state",
    "tests/property/test_engine_stateful.py": "one machine: its rules share its state",
    "tests/scheduler_adapter/test_dask_internals.py": "one test a touch point",
}


def sources() -> list[str]:
    """Python files of the project, relative, without generated ones."""
    paths = [path.relative_to(ROOT).as_posix() for package in PACKAGES for path in (ROOT / package).rglob("*.py")]
    return sorted(path for path in paths if "_pb2" not in path)


@cache
def tree(path: str) -> ast.Module:
    return ast.parse((ROOT / path).read_text(), path)


def imports(path: str) -> Iterator[tuple[int, str]]:
    """Line and full dotted name of everything a file imports, wherever the statement stands."""
    package = path.split("/")[:-1]
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            for alias in node.names:
                yield node.lineno, f"{module}.{alias.name}"


def importers(*tops: str) -> Iterator[tuple[str, str]]:
    """(file, "file:line imports name") of the project's code, tests aside, that imports from these top-level packages."""
    for path in sources():
        if not path.startswith(("tests/", "bench/", "demo/")):
            for line, name in imports(path):
                if name.split(".")[0] in tops:
                    yield path, f"{path}:{line} imports {name}"


def test_pure_code_imports_nothing_that_acts() -> None:
    assert [words for path, words in importers(*IMPURE) if path.startswith(PURE)] == []


def test_only_the_lmdb_store_imports_lmdb() -> None:
    assert [words for path, words in importers("lmdb") if path != "taskdb/store/lmdb_store.py"] == []


def test_only_the_wire_side_imports_grpc_and_protobuf() -> None:
    assert [words for path, words in importers("grpc", "grpc_health", "google") if not path.startswith(WIRE)] == []


def test_taskdb_knows_nothing_of_dask() -> None:
    assert [words for path, words in importers("dask", "distributed", "scheduler_adapter") if path.startswith("taskdb/")] == []


def test_the_database_cannot_load_pickles() -> None:
    loaders = importers("pickle", "_pickle", "cloudpickle", "dill", "marshal", "shelve", "joblib")
    assert [words for path, words in loaders if path.startswith("taskdb/")] == []


def private_uses(path: str) -> Iterator[str]:
    """Private names imported from distributed, and private attributes of anything imported from it."""
    names = set()
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == "distributed":
                    names.add((alias.asname or alias.name).split(".")[0])
                    if "._" in alias.name:
                        yield f"{path}:{node.lineno} imports {alias.name}"
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "distributed" and not node.level:
            for alias in node.names:
                names.add(alias.asname or alias.name)
                if _private(alias.name) or "._" in (node.module or ""):
                    yield f"{path}:{node.lineno} imports {node.module}.{alias.name}"
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Attribute) and _private(node.attr):
            value: ast.expr = node
            while isinstance(value, ast.Attribute):
                value = value.value
            if isinstance(value, ast.Name) and value.id in names:
                yield f"{path}:{node.lineno} uses {ast.unparse(node)}"


def _private(name: str) -> bool:
    return name.startswith("_") and not (name.startswith("__") and name.endswith("__"))


def test_private_names_of_distributed_stand_in_one_place() -> None:
    assert [use for path in sources() if not path.startswith((INTERNALS, "tests/")) for use in private_uses(path)] == []


def test_no_file_is_too_long() -> None:
    lengths = {path: len((ROOT / path).read_text().splitlines()) for path in sources()}
    assert {path: length for path, length in lengths.items() if length > LINES_MAX and path not in LONGER} == {}
    assert [path for path in LONGER if lengths.get(path, 0) <= LINES_MAX] == [], "listed as longer, but is not"


def tracked() -> list[Path]:
    """Text files that belong to the project: tracked, or new and not ignored."""
    listing = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if listing.returncode != 0:
        pytest.skip("not a git work tree")
    return [path for name in listing.stdout.split("\0") if name and (path := ROOT / name).is_file()]


MACHINE_PATH = re.compile(r"""(?<![\w.$}~*-])/(?:work|root|tmp|home/(?!dask\b)\w+)(?![\w-])""")
# docker.io alone is Debian's package of the engine.
REGISTRY = re.compile(r"\b(pypi\.org|pythonhosted\.org|docker\.io(?=/)|ghcr\.io|quay\.io|npmjs\.org)(?!\w)")


def test_no_file_names_a_machine_or_a_registry() -> None:
    found = []
    for path in tracked():
        try:
            text = path.read_text()
        except UnicodeDecodeError:
            continue
        if path == Path(__file__):
            continue
        for number, line in enumerate(text.splitlines(), 1):
            if MACHINE_PATH.search(line) or REGISTRY.search(line):
                found.append(f"{path.relative_to(ROOT)}:{number}: {line.strip()[:100]}")
    assert found == []


@pytest.mark.parametrize("line", ['open("/tmp/x")', "cd /work/main", "= /root/.cache", "/home/me/x", "at /tmp"])
def test_machine_paths_are_recognised(line: str) -> None:
    assert MACHINE_PATH.search(line)


@pytest.mark.parametrize("line", ["a/tmp/x", "tests/work", "/home/dask", "https://host/root/", "/workers", "$HOME/tmp", "./work"])
def test_other_paths_are_let_through(line: str) -> None:
    assert not MACHINE_PATH.search(line)


def test_registries_are_recognised() -> None:
    assert REGISTRY.search("FROM docker.io/library/python:3")
    assert REGISTRY.search("https://pypi.org/simple")
    assert not REGISTRY.search("apt-get install docker.io docker-compose")
