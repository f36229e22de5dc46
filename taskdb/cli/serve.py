"""`taskdb serve`: validate everything, build the ServerConfig, run the daemon."""

from __future__ import annotations

import logging
import re
from functools import partial
from pathlib import Path

import click

from taskdb import limits
from taskdb.access import parse_address, read_token
from taskdb.cli import exits
from taskdb.config import ADDRESS_DEFAULT, AccessConfig, Durability, ServerConfig, StoreConfig
from taskdb.errors import AccessDenied, InvalidRequest

_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
#: A Unix socket's path, with its final zero byte, must fit into sun_path.
_SOCKET_PATH_BYTES_MAX = 107
#: Below this not even an empty store fits.
_STORE_BYTES_MIN = 1 << 20
#: What is wrong with a file is said where it is read.
_FILE = click.Path(dir_okay=False)


class Size(click.ParamType[int]):
    """Bytes: 1000000, 512M, 10GiB."""

    name = "size"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if isinstance(value, int):
            return value
        match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(?:I?B)?", str(value).strip().upper())
        if match is None:
            self.fail(f"{value!r} is not a size, such as 512M or 10GiB", param, ctx)
        return int(float(match[1]) * _UNITS[match[2]])


#: Options that say who gets in. In the environment they would be a client's, or those of a scheduler that starts a daemon of its own.
_access = partial(click.option, allow_from_autoenv=False)

#: The option of every command that writes to a store.
store_bytes_max_option = click.option(
    "--store-bytes-max",
    type=Size(),
    default=limits.STORE_BYTES_MAX,
    show_default="64GiB",
    help="The store may not grow beyond this.",
)


class Listen(click.ParamType[str]):
    """HOST:PORT, tls://HOST:PORT or unix:PATH."""

    name = "address"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> str:
        text = str(value)
        if text.startswith("unix:"):
            return self._socket(text, param, ctx)
        try:
            return str(parse_address(text))
        except InvalidRequest as error:
            self.fail(str(error), param, ctx)

    def _socket(self, text: str, param: click.Parameter | None, ctx: click.Context | None) -> str:
        path = Path(text.removeprefix("unix:").removeprefix("//")).absolute()
        if not path.parent.is_dir():
            self.fail(f"there is no folder {path.parent}", param, ctx)
        if len(str(path).encode()) > _SOCKET_PATH_BYTES_MAX:
            self.fail(f"{path} is longer than the {_SOCKET_PATH_BYTES_MAX} bytes a socket's path may have", param, ctx)
        return f"unix:{path}"


class Metrics(Listen):
    """HOST:PORT, or PORT on loopback."""

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> str:
        text = str(value).removeprefix(":")
        if text.startswith(("unix:", "tls:")):
            self.fail("metrics are served over plain HTTP: say HOST:PORT", param, ctx)
        return super().convert(text if ":" in text else f"127.0.0.1:{text}", param, ctx)


@click.command(
    help=f"Serve the store in a folder (made if it is not there). Ends cleanly on SIGTERM and SIGINT.\n\n{exits.HELP}",
    context_settings={"auto_envvar_prefix": "TASKDB"},
)
@click.option("--data", required=True, type=click.Path(file_okay=False, readable=False, path_type=Path), help="Folder of the store.")
@click.option("--listen", default=ADDRESS_DEFAULT, show_default=True, type=Listen(), help="HOST:PORT or unix:PATH.")
@_access("--tls-cert", type=_FILE, help="Serve with TLS: a PEM file with the daemon's certificate.")
@_access("--tls-key", type=_FILE, help="Its private key, if that is in a file of its own.")
@_access("--tls-ca-file", type=_FILE, help="Ask clients for certificates that this authority vouches for.")
@_access("--token-file", type=_FILE, help="Ask clients for the token in this file.")
@_access("--insecure", is_flag=True, help="Listen where others can reach it without TLS, or without knowing who they are.")
@click.option(
    "--durability",
    type=click.Choice(["fsync", "os"]),
    default="fsync",
    show_default=True,
    help="fsync: on disk before it is acknowledged. os: left to the page cache, and a power cut may corrupt the store.",
)
@store_bytes_max_option
@click.option(
    "--commit-interval-ms",
    type=click.IntRange(1, 10_000),
    default=limits.COMMIT_INTERVAL_MS,
    show_default=True,
    help="Longest time between a report and its commit.",
)
@click.option(
    "--commit-commands-max",
    type=click.IntRange(1),
    default=limits.COMMIT_COMMANDS_MAX,
    show_default=True,
    help="Commands after which a commit is made at once.",
)
@click.option(
    "--history-bytes-max",
    type=Size(),
    default=limits.HISTORY_BYTES_MAX,
    show_default="64MiB",
    help="What became of tasks, for story and report: the oldest goes above this. 0: nothing is kept.",
)
@click.option(
    "--ready-file",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Write the address here once the daemon serves.",
)
@click.option(
    "--exit-with-parent", is_flag=True, help="End when stdin (a pipe that the parent holds) is closed, or the parent process ends."
)
@click.option("--metrics", type=Metrics(), help="Serve metrics for Prometheus here: HOST:PORT, or PORT on this machine alone.")
@click.option("--temporary", type=click.Path(file_okay=False, exists=True, path_type=Path), hidden=True)
@click.option(
    "--log-level",
    type=click.Choice(["debug", "info", "warning", "error"]),
    default="warning",
    show_default=True,
    help="What is told on stderr.",
)
def serve(
    data: Path,
    listen: str,
    tls_cert: str | None,
    tls_key: str | None,
    tls_ca_file: str | None,
    token_file: str | None,
    insecure: bool,
    durability: Durability,
    store_bytes_max: int,
    commit_interval_ms: int,
    commit_commands_max: int,
    history_bytes_max: int,
    ready_file: Path | None,
    exit_with_parent: bool,
    metrics: str | None,
    temporary: Path | None,
    log_level: str,
) -> None:
    if not _STORE_BYTES_MIN <= store_bytes_max <= limits.STORE_MAP_BYTES:
        raise click.BadParameter(f"between {_STORE_BYTES_MIN} and {limits.STORE_MAP_BYTES} bytes", param_hint="--store-bytes-max")
    if ready_file is not None and not ready_file.absolute().parent.is_dir():
        raise click.BadParameter(f"there is no folder {ready_file.absolute().parent}", param_hint="--ready-file")
    try:
        token = None if token_file is None else read_token(token_file)
    except AccessDenied as error:
        raise click.UsageError(str(error)) from None
    config = ServerConfig(
        store=StoreConfig(path=data, durability=durability, bytes_max=store_bytes_max),
        listen=listen,
        access=AccessConfig(tls_cert, tls_key, tls_ca_file, token, insecure),
        commit_interval_ms=commit_interval_ms,
        commit_commands_max=commit_commands_max,
        history_bytes_max=history_bytes_max,
        ready_file=ready_file,
        exit_with_parent=exit_with_parent,
        metrics=metrics,
        temporary=temporary,
    )
    logging.basicConfig(level=log_level.upper(), format="taskdb: %(levelname)s %(message)s")
    from taskdb.server.daemon import run  # grpc.aio and lmdb: not for every command
    from taskdb.server.listening import AddressInUse, NotSafe
    from taskdb.server.metrics import CannotServe

    try:
        run(config)
    except (AddressInUse, CannotServe) as error:
        raise click.ClickException(str(error)) from None
    except (NotSafe, AccessDenied, InvalidRequest) as error:
        raise click.UsageError(str(error)) from None
