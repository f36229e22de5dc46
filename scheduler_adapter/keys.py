"""Dask keys to bytes and back. Equal keys give equal bytes, and what comes back is equal to what went in."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from typing import Any

import msgpack

from taskdb.errors import LimitExceeded
from taskdb.limits import KEY_BYTES_MAX

_PLAIN = (str, int)


def _normal(part: Any) -> Any:
    """One form for parts of a key that compare equal (1, 1.0, True, numpy.int64(1))."""
    if isinstance(part, tuple):
        return tuple(_normal(p) for p in part)
    if isinstance(part, (str, bytes)):
        return part
    if isinstance(part, bool):
        return int(part)
    if isinstance(part, int):
        return int(part)
    if isinstance(part, float) or hasattr(part, "dtype"):
        value = part.item() if hasattr(part, "item") else part
        whole = isinstance(value, bool) or (isinstance(value, float) and value.is_integer() and -(2.0**63) <= value < 2.0**64)
        return int(value) if whole else value
    return part


def pack_key(key: Any) -> bytes:
    """The key as msgpack. Raises LimitExceeded for a key over KEY_BYTES_MAX, TypeError for one msgpack cannot hold."""
    if type(key) is not str:
        if type(key) is tuple:
            for part in key:
                if type(part) not in _PLAIN:
                    key = _normal(key)
                    break
        else:
            key = _normal(key)
    try:
        packed: bytes = msgpack.packb(key, use_bin_type=True)
    except (OverflowError, UnicodeEncodeError, ValueError, TypeError) as e:
        raise TypeError(f"task key {str(key)[:80]!r} cannot be stored ({e}); use text, 64-bit integers and tuples of them") from e
    if len(packed) > KEY_BYTES_MAX:
        raise LimitExceeded(
            f"a task key has {len(packed):,} bytes, over the bound of {KEY_BYTES_MAX:,} "
            f"(it begins {str(key)[:60]!r}); give the task a shorter name, for instance with `dask_key_name`"
        )
    return packed


def pack_keys(keys: Iterable[Any]) -> list[bytes]:
    """Keys a client names. One that cannot be packed is left out: the database cannot have it."""
    packed = []
    for key in keys:
        with suppress(LimitExceeded, TypeError):
            packed.append(pack_key(key))
    return packed


def unpack_key(packed: bytes) -> Any:
    return msgpack.unpackb(packed, use_list=False, raw=False, strict_map_key=False)
