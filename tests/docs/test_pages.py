"""What the pages say is so: commands, options, settings, names, messages, links. `test_run.py` runs what can be run."""

from __future__ import annotations

import ast
import importlib
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import click
import pytest
import yaml

from taskdb.cli.main import cli
from taskdb.model import TaskState
from tests.docs.pages import OTHERS, PAGES, ROOT, anchors, blocks, commands, links, spans
from tests.docs.reference import PARTS, leaves, renewed
from tests.support.commands import problems

MAKEFILE = (ROOT / "Makefile").read_text()
#: Programs of others, whose options are theirs to say.
OTHER_PROGRAMS = frozenset(("pip", "python3", "kubectl", "useradd", "cp", "install", "openssl", "systemctl"))
#: Options that stand in the text, of programs of others.
OTHER_OPTIONS = frozenset(("--volumes",))

every_page = pytest.mark.parametrize("page", [*PAGES, *OTHERS], ids=lambda page: page.relative_to(ROOT).as_posix())


@cache
def settings() -> frozenset[str]:
    return frozenset(yaml.safe_load((ROOT / "scheduler_adapter/taskdb.yaml").read_text())["taskdb"])


@cache
def options() -> frozenset[str]:
    """Of all commands a page may speak of."""
    found = [command for _, command in leaves(cli, "taskdb")]
    found += [importlib.import_module(f"distributed.cli.dask_{name}").main for name in ("scheduler", "worker")]
    found.append(importlib.import_module("scheduler_adapter").dask_setup)
    named = (option for command in found for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts))
    return frozenset(named) | {"--help"}


# ---------------------------------------------------------------------------------------------------------------- commands


@every_page
def test_commands_exist(page: Path) -> None:
    for words in commands(page):
        while re.fullmatch(r"[A-Z_]+=\S*", words[0]):  # said to the environment
            words = words[1:]
        program = Path(words[0]).name
        if program == "make":
            assert re.search(rf"^{words[1]}:", MAKEFILE, re.MULTILINE), f"no target {words[1]}"
        elif program in ("taskdb", "dask"):
            assert problems([program, *words[1:]]) == []
        else:
            assert program in OTHER_PROGRAMS
        for word in words:
            if word.startswith("deploy/"):
                assert (ROOT / word).exists(), word


@every_page
def test_make_targets_in_the_text_exist(page: Path) -> None:
    for span in spans(page):
        if found := re.match(r"make ([\w-]+)", span):
            assert re.search(rf"^{found[1]}:", MAKEFILE, re.MULTILINE), span


@every_page
def test_commands_in_the_text_exist(page: Path) -> None:
    known = {name for name, _ in leaves(cli, "taskdb")}
    for span in spans(page):
        if re.match(r"taskdb [a-z]", span):
            assert any(span == name or span.startswith(f"{name} ") for name in known), span
        for option in re.findall(r"(?<![\w-])--[a-z][a-z-]+", span):
            assert option in options() | OTHER_OPTIONS or span.split()[0] in OTHER_PROGRAMS | {"docker"}, span


@every_page
def test_python_is_python(page: Path) -> None:
    for _, text in blocks(page, "python"):
        compile(text, str(page), "exec")


# ------------------------------------------------------------------------------------------------------------------- names


@every_page
def test_settings_exist(page: Path) -> None:
    # `taskdb.lock` is a file.
    named = {found[1] for span in spans(page) if (found := re.fullmatch(r"taskdb\.([a-z][a-z-]*)", span))} - {"lock"}
    assert named <= settings()
    for _, text in blocks(page, "yaml"):
        said = yaml.safe_load(text)
        assert set(said.get("taskdb", {})) <= settings()
    for span in spans(page):
        for name in re.findall(r"DASK_TASKDB__([A-Z_]+)", span):
            assert name.lower().replace("_", "-") in settings()
        for name in re.findall(r"(?<!_)TASKDB_([A-Z_]+)\b", span):
            assert f"--{name.lower().replace('_', '-')}" in options()


@every_page
def test_files_exist(page: Path) -> None:
    for span in spans(page):
        if re.fullmatch(r"(taskdb|scheduler_adapter|deploy|proto|docs|bench|tests)/[\w./-]+", span):
            assert (ROOT / span).exists(), span


@every_page
def test_modules_exist(page: Path) -> None:
    for span in spans(page):
        if found := re.fullmatch(r"(scheduler_adapter(?:\.\w+)+)(?:\((.*)\))?", span):
            module, _, name = found[1].rpartition(".") if found[2] is not None else (found[1], "", "")
            assert not name or hasattr(importlib.import_module(module), name), span
            importlib.import_module(module)


@cache
def strings() -> str:
    """All texts of the code, one a line, `…` where something is put in."""
    return "\n".join(
        text for package in ("taskdb", "scheduler_adapter") for path in (ROOT / package).rglob("*.py") for text in _texts(path)
    )


def _texts(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield re.sub(r"%[-.\d]*[sdrfg]", "…", node.value).replace("\n", " ")
        elif isinstance(node, ast.JoinedStr):
            yield "".join(str(part.value) if isinstance(part, ast.Constant) else "…" for part in node.values).replace("\n", " ")


def messages(page: Path) -> list[str]:
    """First cells of the tables of messages."""
    tables = re.findall(r"^\| message \|.*\n\|[-| ]*\n((?:\|.*\n)+)", page.read_text(), re.MULTILINE)
    return [re.findall(r"`([^`]*)`", row)[0] for table in tables for row in table.splitlines()]


@pytest.mark.parametrize("message", messages(ROOT / "docs/troubleshooting.md"))
def test_messages_are_those_of_the_code(message: str) -> None:
    parts = [re.escape(part.strip()) for part in message.split("…") if part.strip()]
    assert sum(map(len, parts)) >= 8, "too little to be found"
    assert re.search(r"[^\n]*?…[^\n]*?".join(parts), strings())


@every_page
def test_metrics_are_those_of_the_code(page: Path) -> None:
    for span in spans(page):
        # Prometheus adds what a name begins and ends with.
        if found := re.fullmatch(r"(?:dask_)?taskdb_([a-z_]+?)(?:_total)?", span):
            assert re.search(rf"(^|[^a-z]){found[1]}([^a-z]|$)", strings(), re.MULTILINE), span


def test_states_are_those_of_the_code() -> None:
    (table,) = re.findall(r"\| state \| means \|\n.*\n((?:\|.*\n)+)", (ROOT / "docs/concepts.md").read_text())
    assert re.findall(r"^\| `(\w+)`", table, re.MULTILINE) == [state.name.lower() for state in TaskState]


# --------------------------------------------------------------------------------------------------------------- the pages


@every_page
def test_generated_parts_are_as_the_code_says(page: Path) -> None:
    text = page.read_text()
    assert renewed(text) == text, "`make reference` writes them anew"
    assert text.count("<!-- generated: ") == text.count("<!-- end -->")


def test_every_generated_part_stands_somewhere() -> None:
    named = [name for page in PAGES for name in re.findall(r"<!-- generated: (\w+) -->", page.read_text())]
    assert sorted(named) == sorted(PARTS)


@every_page
def test_links_lead_somewhere(page: Path) -> None:
    for file, anchor in links(page):
        target = (page.parent / file).resolve() if file else page
        assert target.exists(), file
        if page in PAGES:
            assert target.is_relative_to(ROOT / "docs"), f"{file} is not in the site"
        if anchor:
            assert anchor in anchors(target), f"{file}#{anchor}"


def _nav(entries: list[object]) -> Iterator[str]:
    for entry in entries:
        if isinstance(entry, dict):
            for value in entry.values():
                yield from _nav(value) if isinstance(value, list) else [str(value)]
        else:
            yield str(entry)


def test_every_page_is_in_the_navigation() -> None:
    site = yaml.safe_load((ROOT / "mkdocs.yml").read_text())
    assert sorted(_nav(site["nav"])) == [page.name for page in PAGES]


def test_the_site_is_built_strictly(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs", reason="it is in the extra `docs`: `make docs`")
    words = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path / "site")]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    built = sorted((tmp_path / "site").glob("*.html"))
    assert {page.stem for page in PAGES} <= {page.stem for page in built}
    for page in built:
        loaded = re.findall(r"""<(?:script|img|iframe)[^>]*?\ssrc="([^"]*)"|<link[^>]*?\shref="([^"]*)\"""", page.read_text())
        assert [url for urls in loaded for url in urls if "//" in url] == [], "it asks another host"


def test_a_wrong_command_is_found() -> None:
    """Else the checks above would say nothing."""
    assert problems(["taskdb", "status", "--nonsense"]) != []
    assert problems(["taskdb", "nonsense"]) != []
    assert "--nonsense" not in options()
    assert isinstance(cli, click.Group)
