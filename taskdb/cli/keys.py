"""Dask keys as people write them <-> packed keys (msgpack) as the database stores them."""

from __future__ import annotations

import ast
import json
from typing import Any

import msgpack

from taskdb.engine.reader import key_text


def parse_key(text: str) -> bytes:
    """Packed key of `text`: a Python or JSON literal of a tuple or list, or else the text itself.

    Raises ValueError for a tuple of something that is no part of a key.
    """
    key: Any = text
    if text.lstrip()[:1] in ("(", "["):
        for read in (ast.literal_eval, json.loads):
            try:
                key = read(text.strip())
                break
            except (ValueError, SyntaxError):
                continue
    try:
        packed: bytes = msgpack.packb(key, use_bin_type=True)
    except (TypeError, OverflowError) as error:
        raise ValueError(f"{text!r} is not a key: {error}") from None
    return packed


def unpack_key(key: bytes) -> Any:
    """The key: text, number, or tuple. What is not msgpack is shown in hexadecimal."""
    try:
        return msgpack.unpackb(key, raw=False, use_list=False, strict_map_key=False)
    except Exception:  # msgpack raises many kinds; a display must not fail over bytes
        return f"0x{key.hex()}"


#: A key for people, on one line.
show_key = key_text
