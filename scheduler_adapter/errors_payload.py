"""A failed task's exception and traceback as the opaque bytes the database keeps.

The exception itself stays as the worker serialised it.
"""

from __future__ import annotations

import pickle
from typing import Any

from distributed.protocol.serialize import Serialized


def _storable(x: Any) -> Any:
    """Frames may be views of a buffer of the comm: copy them."""
    if isinstance(x, Serialized):
        return Serialized(dict(x.header), [bytes(f) for f in x.frames])
    return x


def write_error(exception: Any, traceback: Any) -> bytes:
    return pickle.dumps((_storable(exception), _storable(traceback)))


def read_error(payload: bytes) -> tuple[Any, Any]:
    """(exception, traceback) as stock puts them into a `task-erred` message."""
    if not payload:
        return pickle.dumps(RuntimeError("the task failed; its exception was lost")), None
    exception, traceback = pickle.loads(payload)
    return exception, traceback
