"""The scheduler preload: `dask scheduler --preload scheduler_adapter --taskdb-url HOST:PORT`.

In one program: `from scheduler_adapter import LocalCluster`.
"""

from __future__ import annotations

import gc
import logging
import os
import sys
from pathlib import Path
from typing import Any

import click

from scheduler_adapter.config import AdapterConfig, register_defaults
from scheduler_adapter.supported import check_supported

logger = logging.getLogger("distributed.taskdb")
register_defaults()


@click.command()
@click.option(
    "--taskdb-url",
    default=None,
    help="Address of the daemon: HOST:PORT, tls://HOST:PORT or unix:PATH. Without it, one is started as a child.",
)
@click.option("--taskdb-token-file", default=None, type=click.Path(dir_okay=False), help="File with the token the daemon asks for.")
@click.option("--taskdb-window", default=None, type=click.IntRange(min=0), help="Budget of resident tasks; 0 pages everything.")
@click.option("--taskdb-data", default=None, type=click.Path(file_okay=False), help="Folder of the child daemon's store.")
async def dask_setup(
    scheduler: Any, taskdb_url: str | None, taskdb_token_file: str | None, taskdb_window: int | None, taskdb_data: str | None
) -> None:
    """Keep the scheduler's task state in taskdb."""
    try:
        check_supported()
        if _own_process():
            # What gRPC's core says of a link that fails, the adapter says in one line. Read when gRPC is imported.
            os.environ.setdefault("GRPC_VERBOSITY", "NONE")
        # Inside: an error here must not be one that Dask logs and passes over.
        from scheduler_adapter.adapter import Adapter

        config = AdapterConfig.load(url=taskdb_url, token_file=taskdb_token_file, window=taskdb_window, data=taskdb_data)
        adapter = Adapter(scheduler, config)
        await adapter.start()
        if _own_process():
            gc.freeze()  # modules stay: no collection shall look at them again
    except Exception as e:
        _fail(scheduler, e)


async def dask_teardown(scheduler: Any) -> None:
    adapter = getattr(scheduler, "taskdb", None)
    if adapter is not None:
        await adapter.close()


def _own_process() -> bool:
    """Whether this process is a scheduler's own."""
    return Path(sys.argv[0]).name in ("dask", "dask-scheduler", "__main__.py")


def __getattr__(name: str) -> Any:
    # Not at once: whoever preloads this needs nothing of it.
    if name == "LocalCluster":
        from scheduler_adapter.local_cluster import LocalCluster

        return LocalCluster
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _fail(scheduler: Any, error: Exception) -> None:
    """End the process, if it is a scheduler's own; else (LocalCluster) let whoever starts the scheduler see it."""
    from distributed.diagnostics.plugin import SchedulerPlugin

    line = f"taskdb: the scheduler cannot start: {error}"
    if _own_process():
        logger.debug("", exc_info=error)
        click.echo(line, err=True)
        os._exit(1)

    class Failed(SchedulerPlugin):
        """Dask logs an error of a preload and runs on without it; one of a plugin's start, which comes next, it raises."""

        name = "taskdb"

        async def start(self, scheduler: Any) -> None:
            raise RuntimeError(line) from error

    scheduler.add_plugin(Failed(), name=Failed.name)
