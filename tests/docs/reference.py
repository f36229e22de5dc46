"""The parts of the pages that repeat what the code says: `python -m tests.docs.reference` writes them anew, a test compares.

In a page such a part stands between `<!-- generated: NAME -->` and `<!-- end -->`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import click
import yaml

from taskdb import errors, limits
from taskdb.cli import exits
from taskdb.cli.main import cli

ROOT = Path(__file__).resolve().parents[2]
PAGES = ROOT / "docs"
PART = re.compile(r"(?<=<!-- generated: )(\w+)( -->\n).*?(?=<!-- end -->)", re.DOTALL)


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table of markdown."""
    lines = [head, ["---"] * len(head), *([cell.replace("|", "\\|").replace("\n", " ") for cell in row] for row in rows)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def code(text: object) -> str:
    return f"`{text}`"


# -------------------------------------------------------------------------------------------------------- the command line


def leaves(command: click.Command, name: str) -> Iterator[tuple[str, click.Command]]:
    """All commands that are no groups, with their full names."""
    if not isinstance(command, click.Group):
        yield name, command
        return
    context = click.Context(command)
    for sub in command.list_commands(context):
        found = command.get_command(context, sub)
        assert found is not None
        yield from leaves(found, f"{name} {sub}")


def commands() -> str:
    return table(("command", "does"), ((code(name), found.get_short_help_str(200)) for name, found in leaves(cli, "taskdb")))


def default(option: click.Option) -> str:
    if option.required:
        return "has to be said"
    if isinstance(option.show_default, str):
        return code(option.show_default)
    if option.is_flag or option.default is None or callable(option.default) or not isinstance(option.default, str | int | float | Path):
        return ""
    return code(option.default)


def serve() -> str:
    found = dict(leaves(cli, "taskdb"))["taskdb serve"]
    options = [option for option in found.params if isinstance(option, click.Option) and not option.hidden]
    return table(("option", "default", "is"), ((code(option.opts[0]), default(option), option.help or "") for option in options))


def exit_codes() -> str:
    said = exits.HELP.split("Exit codes:")[1].strip().rstrip(".").replace("\n", " ")
    return table(("code", "means"), (word.strip().split(" ", 1) for word in said.split(",")))


# ------------------------------------------------------------------------------------------------------------- the settings


def settings() -> str:
    folder = ROOT / "scheduler_adapter"
    schema = yaml.safe_load((folder / "taskdb-schema.yaml").read_text())["properties"]["taskdb"]["properties"]
    defaults = yaml.safe_load((folder / "taskdb.yaml").read_text())["taskdb"]
    shown = ((name, "null" if defaults[name] is None else defaults[name], about["description"]) for name, about in schema.items())
    return table(("setting", "default", "is"), ((code(f"taskdb.{name}"), code(value), text) for name, value, text in shown))


# ------------------------------------------------------------------------------------------------------- the store, the wire


def commented(text: str, definition: str) -> Iterator[tuple[re.Match[str], str]]:
    """Every line that matches, with the comment (`//` or `#:`) above it, on one line. Up to an empty line it stands for all below it."""
    comment: list[str] = []
    over = False
    for line in text.splitlines():
        if found := re.match(r"\s*(?://|#:) ?(.*)", line):
            comment = [*([] if over else comment), found[1].strip()]
            over = False
        elif not line.strip():
            comment = []
        else:
            over = True
            if found := re.match(definition, line):
                yield found, " ".join(comment)


def tables() -> str:
    source = (ROOT / "taskdb/store/schema.py").read_text()
    body = re.split(r"^class ", source, flags=re.MULTILINE)
    (text,) = (part for part in body if part.startswith("Table("))
    found = commented(text, r"    ([A-Z_]+) = (\d+)$")
    return table(("table", "number", "key → value"), ((code(m[1].lower()), m[2], about.replace("->", "→")) for m, about in found))


def calls() -> str:
    source = (ROOT / "proto/taskdb.proto").read_text()
    found = commented(source, r"  rpc (\w+)\((stream )?(\w+)\) returns \((stream )?(\w+)\);")

    def arrow(m: re.Match[str]) -> str:
        return f"{m[2] or ''}{m[3]} → {m[4] or ''}{m[5]}"

    return table(("call", "from → to", "is"), ((code(m[1]), arrow(m), about) for m, about in found))


def subclasses(cls: type[errors.TaskDBError]) -> Iterator[type[errors.TaskDBError]]:
    for sub in cls.__subclasses__():
        if sub.__module__ == errors.__name__:
            yield sub
            yield from subclasses(sub)


def error_kinds() -> str:
    rows = ((code(cls.kind), "yes" if cls.retryable else "no", (cls.__doc__ or "").strip()) for cls in subclasses(errors.TaskDBError))
    return table(("kind", "retryable", "means"), rows)


def bounds() -> str:
    source = (ROOT / "taskdb/limits.py").read_text()
    found = commented(source, r"([A-Z_]+) = (?!1024\b|1024 \*)")
    rows = ((code(m[1]), f"{getattr(limits, m[1]):,}", about) for m, about in found if about)
    return table(("bound", "value", "is"), rows)


PARTS: dict[str, Callable[[], str]] = {
    "commands": commands,
    "exits": exit_codes,
    "serve": serve,
    "settings": settings,
    "tables": tables,
    "calls": calls,
    "errors": error_kinds,
    "limits": bounds,
}


def renewed(text: str) -> str:
    """The page with its generated parts as the code says them. Raises KeyError for an unknown part."""
    return PART.sub(lambda found: found[1] + found[2] + PARTS[found[1]](), text)


def main() -> None:
    for page in sorted(PAGES.glob("*.md")):
        before = page.read_text()
        after = renewed(before)
        if after != before:
            page.write_text(after)
            print(f"written anew: {page.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
