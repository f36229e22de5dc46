"""Settings of the adapter: Dask's config (`taskdb.*`, environment DASK_TASKDB__*), overridden by the preload's options."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import dask
import yaml
from dask.utils import parse_bytes, parse_timedelta

DEFAULTS = Path(__file__).with_name("taskdb.yaml")


def register_defaults() -> None:
    """Make `taskdb.*` known to dask.config. What the user has set is kept."""
    defaults = yaml.safe_load(DEFAULTS.read_text())
    dask.config.update_defaults(defaults)


@dataclass(frozen=True)
class AdapterConfig:
    #: HOST:PORT or unix:PATH; None: a child daemon.
    url: str | None
    #: Folder of the child daemon's store; None: temporary.
    data: str | None
    #: Budget of resident tasks; 0 pages everything.
    window: int
    #: Most leased tasks of paged graphs, before the number of threads is looked at.
    lookahead: int
    flush_interval_ms: float
    connect_timeout_seconds: float
    local_bytes: int
    local_tasks: int

    @classmethod
    def load(cls, **overrides: Any) -> AdapterConfig:
        """From dask.config; an override that is None is not one. Raises ValueError with one line for a bad value."""
        register_defaults()
        found = {k.replace("-", "_"): v for k, v in dask.config.get("taskdb").items()}
        found.update({k: v for k, v in overrides.items() if v is not None})
        try:
            config = cls(
                url=found["url"],
                data=found["data"],
                window=int(found["window"]),
                lookahead=int(found["lookahead"]),
                flush_interval_ms=float(found["flush_interval"]),
                connect_timeout_seconds=float(parse_timedelta(found["connect_timeout"])),
                local_bytes=int(parse_bytes(found["local_bytes"])),
                local_tasks=int(found["local_tasks"]),
            )
        except (TypeError, ValueError) as e:
            raise ValueError(f"a setting under `taskdb` is not valid: {e}; see taskdb.yaml for what is expected") from e
        if config.window < 0:
            raise ValueError(f"taskdb.window is {config.window}; it is a number of tasks, 0 or more")
        if config.lookahead < 1:
            raise ValueError(f"taskdb.lookahead is {config.lookahead}; it is a number of tasks, 1 or more")
        return config
