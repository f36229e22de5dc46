"""The command group, and what is common to all commands: version, errors, exit codes."""

from __future__ import annotations

import os
import sys
from typing import NoReturn

import click

# What gRPC's core says of a connection that fails, we say in one line. It is read when gRPC is imported.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")

import taskdb
from taskdb.cli import exits
from taskdb.cli.acting import cancel, retry
from taskdb.cli.added import Commands
from taskdb.cli.export import export
from taskdb.cli.failures import errors
from taskdb.cli.listing import graphs, tasks
from taskdb.cli.offline import backup, compact, recover, restore, verify
from taskdb.cli.online import explain, status
from taskdb.cli.prune import prune
from taskdb.cli.report import report
from taskdb.cli.serve import serve
from taskdb.cli.story import story
from taskdb.cli.watch import watch


@click.group(
    # Also as a command of `dask`, which goes by this name.
    name="taskdb",
    cls=Commands,
    help=f"The task state of Dask's scheduler, in a database.\n\n{exits.HELP}",
    context_settings={"help_option_names": ["-h", "--help"]},
)
@click.version_option(taskdb.__version__, prog_name="taskdb", message="%(prog)s %(version)s")
def cli() -> None:
    pass


cli.add_command(serve)
cli.add_command(status)
cli.add_command(graphs)
cli.add_command(tasks)
cli.add_command(explain)
cli.add_command(errors)
cli.add_command(story)
cli.add_command(watch)
cli.add_command(report)
cli.add_command(export)
cli.add_command(prune)
cli.add_command(cancel)
cli.add_command(retry)
cli.add_command(verify)
cli.add_command(backup)
cli.add_command(restore)
cli.add_command(compact)
cli.add_command(recover)


def main() -> NoReturn:
    """Run a command, to its exit code."""
    try:
        cli.main(standalone_mode=False)
        code = exits.OK
    except click.ClickException as error:
        error.show()
        code = error.exit_code
    except click.exceptions.Exit as error:
        code = error.exit_code
    except click.Abort:
        code = 130
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # so that the flush at exit is silent
        code = exits.OK
    sys.exit(code)
