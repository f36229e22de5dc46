"""The pages, and what stands in them."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted((ROOT / "docs").glob("*.md"))
#: Pages that stand elsewhere, but are read like these.
OTHERS = [ROOT / "deploy/README.md"]

_BLOCK = re.compile(r"^(?:<!-- tested: (?P<tag>\w+) -->\n)?```(?P<language>\w*)\n(?P<body>.*?)^```", re.DOTALL | re.MULTILINE)


def blocks(page: Path, language: str) -> Iterator[tuple[str, str]]:
    """(tag, text) of the page's fenced blocks of a language. The tag is that of the comment `<!-- tested: tag -->` above, or empty."""
    for found in _BLOCK.finditer(page.read_text()):
        if found["language"] == language:
            yield found["tag"] or "", found["body"]


def commands(page: Path, tag: str | None = None) -> Iterator[list[str]]:
    """The command lines of a page, as words; those of one tag."""
    for found, body in blocks(page, "bash"):
        if tag is None or found == tag:
            yield from filter(None, (shlex.split(line, comments=True) for line in body.splitlines()))


def spans(page: Path) -> set[str]:
    """What stands between backticks, blocks aside."""
    return set(re.findall(r"`([^`\n]+)`", _BLOCK.sub("", page.read_text())))


def anchors(page: Path) -> set[str]:
    """Names of the page's headings, as links say them."""
    heads = re.findall(r"^#+ (.*)$", _BLOCK.sub("", page.read_text()), re.MULTILINE)
    return {re.sub(r"[\s-]+", "-", re.sub(r"[^\w\s-]", "", head.lower())).strip("-") for head in heads}


def links(page: Path) -> Iterator[tuple[str, str]]:
    """(file, anchor) of the page's links, either may be empty; those to other hosts aside."""
    for target in re.findall(r"\]\(([^)\s]+)\)", _BLOCK.sub("", page.read_text())):
        if "://" not in target:
            file, _, anchor = target.partition("#")
            yield file, anchor
