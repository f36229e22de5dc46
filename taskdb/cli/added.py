"""Commands that other installed packages add to `taskdb`: entry points of the group `taskdb.commands`, each a click command."""

from __future__ import annotations

from importlib.metadata import EntryPoint, entry_points
from typing import IO, Any

import click

from taskdb.cli import exits
from taskdb.errors import TaskDBError

GROUP = "taskdb.commands"
_ANY_WORDS = {"ignore_unknown_options": True, "allow_extra_args": True}


class Refused(click.ClickException):
    """A TaskDBError, for people."""

    def __init__(self, error: TaskDBError) -> None:
        super().__init__(str(error))
        self.exit_code = exits.code_of(error)  # type: ignore[misc]

    def show(self, file: IO[Any] | None = None) -> None:
        click.echo(f"taskdb: {self.message}", file=file, err=True)


class Commands(click.Group):
    """The commands of this package, and those that were added. An added one is loaded only when it is asked for."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted({*super().list_commands(ctx), *entry_points(group=GROUP).names})

    def invoke(self, ctx: click.Context) -> Any:
        """Every known error is one line and its exit code, whether they were called as `taskdb` or as `dask taskdb`."""
        try:
            return super().invoke(ctx)
        except TaskDBError as error:
            raise Refused(error) from None

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        command = super().get_command(ctx, name)
        if command is None:
            for entry in entry_points(group=GROUP, name=name):
                return _load(entry)
        return command


def _load(entry: EntryPoint) -> click.Command:
    try:
        command = entry.load()
        if isinstance(command, click.Command):
            return command
        problem = f"{entry.value} is no click command"
    except Exception as error:
        # Whatever is wrong with it, the other commands go on.
        problem = str(error) or repr(error)
    package = entry.dist.name if entry.dist is not None else "an installed package"
    words = f"the command {entry.name}, which {package} adds, cannot be loaded: {problem}"

    def refuse() -> None:
        raise click.ClickException(words)

    return click.Command(entry.name, callback=refuse, help=f"({words})", context_settings=_ANY_WORDS)
