"""The releases of Dask the adapter was made for. Imports nothing of it that another release may lack."""

from __future__ import annotations

import distributed

#: First supported release, and the first one that is not.
SUPPORTED = ((2026, 8), (2026, 9))


class UnsupportedDask(Exception):
    """Dask is outside the tested range."""


def check_supported(version: str = distributed.__version__) -> None:
    """Refuse a `distributed` that `dask_internals.py` was not read against. Raises UnsupportedDask with one line."""
    found = tuple(int(p) for p in version.split(".")[:2])
    low, high = SUPPORTED
    if not low <= found < high:
        raise UnsupportedDask(
            f"distributed {version} is not supported: dask-taskdb works with {low[0]}.{low[1]} up to, but not including, "
            f"{high[0]}.{high[1]}; install a release in that range, or a dask-taskdb made for yours"
        )
