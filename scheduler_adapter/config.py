"""Settings of the adapter: Dask's config (`taskdb.*`, environment DASK_TASKDB__*), overridden by the preload's options."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import dask
import yaml
from dask.utils import parse_bytes, parse_timedelta

DEFAULTS = Path(__file__).with_name("taskdb.yaml")


def register_defaults() -> None:
    """Make `taskdb.*` known to dask.config. What the user has set is kept."""
    shipped = _shipped()
    if any(known is shipped for known in dask.config.defaults):
        # Dask would keep them once more, and merge all it keeps.
        dask.config.update(dask.config.config, shipped, priority="old")
    else:
        dask.config.update_defaults(shipped)


@functools.cache
def _shipped() -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(DEFAULTS.read_text())
    return found


@dataclass(frozen=True)
class AdapterConfig:
    #: HOST:PORT, tls://HOST:PORT or unix:PATH; None: a child daemon.
    url: str | None
    #: PEM files for a daemon that speaks TLS, in the place of Dask's own; the name in its certificate, if it is not its address's.
    tls_ca_file: str | None
    tls_cert: str | None
    tls_key: str | None
    tls_name: str | None
    #: File with the token it asks for.
    token_file: str | None
    #: Folder of the child daemon's store; None: temporary.
    data: str | None
    #: Budget of resident tasks; 0 pages everything.
    window: int
    #: Most leased tasks of paged graphs, before the number of threads is looked at.
    lookahead: int
    #: Results of paged graphs that stay resident though nothing resident needs them. None: all.
    warm: int | None
    flush_interval_ms: float
    connect_timeout_seconds: float
    local_bytes: int
    local_tasks: int
    #: Fewest tasks of a graph that is sent as a rule.
    rule_tasks: int
    #: After a restart: how long the workers and the clients of the scheduler before are waited for.
    workers_return_seconds: float
    clients_return_seconds: float

    @classmethod
    def load(cls, **overrides: Any) -> AdapterConfig:
        """From dask.config; an override that is None is not one. Raises ValueError with one line for a bad value."""
        found = _found()
        found.update({k.replace("_", "-"): v for k, v in overrides.items() if v is not None})

        def read(name: str, convert: Callable[[Any], Any], expected: str, least: float) -> Any:
            return _read(found, name, convert, expected, least)

        return cls(
            url=found["url"],
            tls_ca_file=found["tls-ca-file"],
            tls_cert=found["tls-cert"],
            tls_key=found["tls-key"],
            tls_name=found["tls-name"],
            token_file=found["token-file"],
            data=found["data"],
            window=read("window", _whole, "a number of tasks", 0),
            lookahead=read("lookahead", _whole, "a number of tasks", 1),
            warm=None if found["warm"] is None else read("warm", _whole, "a number of results, or null", 0),
            flush_interval_ms=read("flush-interval", float, "a number of milliseconds", 0),
            connect_timeout_seconds=read("connect-timeout", _seconds, 'a number of seconds, or a text like "10s"', 0),
            local_bytes=read("local-bytes", _size, 'a number of bytes, or a text like "1 MiB"', 0),
            local_tasks=read("local-tasks", _whole, "a number of tasks", 0),
            rule_tasks=read("rule-tasks", _whole, "a number of tasks", 0),
            workers_return_seconds=read("workers-return", _seconds, 'a number of seconds, or a text like "30s"', 0),
            clients_return_seconds=read("clients-return", _seconds, 'a number of seconds, or a text like "1m"', 0),
        )


def address_in(scheduler_file: str | None) -> str | None:
    """The address in the file of `dask scheduler --scheduler-file`; None if there is none (yet)."""
    if not scheduler_file:
        return None
    try:
        address: str = json.loads(Path(scheduler_file).read_text())["address"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return address


def scheduler_return_seconds() -> float:
    """How long workers and clients wait for a scheduler that has died. Raises ValueError with one line for a bad value."""
    seconds: float = _read(_found(), "scheduler-return", _seconds, 'a number of seconds, or a text like "10m"', 0)
    return seconds


def _found() -> dict[str, Any]:
    register_defaults()
    return {k.replace("_", "-"): v for k, v in dask.config.get("taskdb").items()}


def _read(found: dict[str, Any], name: str, convert: Callable[[Any], Any], expected: str, least: float) -> Any:
    value = found[name]
    try:
        result = convert(value)
        if not result >= least:
            raise ValueError(value)
    except (TypeError, ValueError, KeyError, OverflowError):
        raise ValueError(f"taskdb.{name} is {value!r}; it is {expected}, {least:g} or more") from None
    return result


def _whole(value: Any) -> int:
    number = float(value)
    if number != int(number):
        raise ValueError(value)
    return int(number)


def _seconds(value: Any) -> float:
    return float(parse_timedelta(value))


def _size(value: Any) -> int:
    return int(parse_bytes(value))
