"""How commands find a daemon and get in: `--url`, and files with certificates and the token."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import click

from taskdb.access import Access, Daemon, parse_address
from taskdb.config import ADDRESS_DEFAULT
from taskdb.errors import InvalidRequest

_FILE = click.Path(dir_okay=False)


def reaching(command: Callable[..., Any]) -> Callable[..., Any]:
    """A function with a parameter `url` becomes one with these options, and gets a Daemon as `url`."""

    @functools.wraps(command)
    def reached(
        *args: Any,
        url: str,
        tls_ca_file: str | None,
        tls_cert: str | None,
        tls_key: str | None,
        tls_name: str | None,
        token_file: str | None,
        **rest: Any,
    ) -> Any:
        try:
            address = parse_address(url)
        except InvalidRequest as error:
            raise click.BadParameter(str(error), param_hint="--url") from None
        if tls_ca_file is not None and address.scheme == "tcp":
            url = f"tls://{address.target}"
        return command(*args, url=Daemon(url, Access(tls_ca_file, tls_cert, tls_key, tls_name, token_file)), **rest)

    for option in reversed(_OPTIONS):
        reached = option(reached)
    return reached


_OPTIONS = (
    click.option(
        "--url",
        envvar="TASKDB_URL",
        default=ADDRESS_DEFAULT,
        show_default=True,
        show_envvar=True,
        help="The daemon: HOST:PORT, tls://HOST:PORT or unix:PATH.",
    ),
    click.option(
        "--tls-ca-file", envvar="TASKDB_TLS_CA_FILE", show_envvar=True, type=_FILE, help="Speak TLS; this authority vouches for the daemon."
    ),
    click.option("--tls-cert", envvar="TASKDB_TLS_CERT", show_envvar=True, type=_FILE, help="Our certificate, if the daemon asks for one."),
    click.option(
        "--tls-key", envvar="TASKDB_TLS_KEY", show_envvar=True, type=_FILE, help="Its private key, if that is in a file of its own."
    ),
    click.option(
        "--tls-name", envvar="TASKDB_TLS_NAME", show_envvar=True, help="The name in the daemon's certificate, if it is not HOST of --url."
    ),
    click.option("--token-file", envvar="TASKDB_TOKEN_FILE", show_envvar=True, type=_FILE, help="The token, if the daemon asks for one."),
)
