"""Specs of tasks of one function as bytes: the *head*, which is the same for all of them and stored once, and the *rest* of each.

A head and a rest join to a pickle that takes `pickle.loads` and Dask to read, nothing of ours, and gives the task that was written down.
A rest takes 2 µs where the pickle of a task takes 20, or 150 if its function is pickled by value; and it is as small as that deflated.

A part is pickled by itself, so objects that two parts of a task have in common would come apart: such tasks have no rest.
"""

from __future__ import annotations

import pickle
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from struct import Struct
from typing import Any

from dask._task_spec import Alias, Task, TaskRef
from distributed.protocol.pickle import dumps

from scheduler_adapter.specs import pickle_spec

#: The longest head: it goes to a worker with each task.
HEAD_BYTES_MAX = 32 * 1024
#: A function of fewer tasks gets no template.
TEMPLATE_TASKS = 8

_NEW: Any = object()

_INT = Struct("<i").pack
_LENGTH = Struct("<I").pack
_FLOAT = Struct(">d").pack
_SMALL = range(-(2**31), 2**31)
# Protocol 4: the first in which a module may be named by text on the stack.
_BEGIN = pickle.PROTO + b"\x04"
_END = pickle.TUPLE + pickle.REDUCE + pickle.STOP
#: What the head tells, by its place in the memo.
_FUNC, _TASK_REF, _ALIAS, _LOADS = (pickle.BINGET + bytes((i,)) for i in range(4))


def _text(value: str) -> bytes:
    data = value.encode("utf-8", "surrogatepass")
    return pickle.BINUNICODE + _LENGTH(len(data)) + data


def _bytes(value: bytes) -> bytes:
    return pickle.BINBYTES + _LENGTH(len(value)) + value


def _int(value: int) -> bytes:
    # Protocol 2 has no frames: between the opcode for the protocol and that for the end there is only the value.
    return pickle.BININT + _INT(value) if value in _SMALL else pickle.dumps(value, 2)[2:-1]


#: How values are written that refer to nothing before them and cannot be changed.
_ATOMS: dict[type, Callable[[Any], bytes]] = {
    str: _text,
    int: _int,
    float: lambda value: pickle.BINFLOAT + _FLOAT(value),
    bool: lambda value: pickle.NEWTRUE if value else pickle.NEWFALSE,
    type(None): lambda value: pickle.NONE,
}


def _atom(value: Any) -> bytes | None:
    """Of an atom, or a tuple of atoms; None for anything else."""
    write = _ATOMS.get(type(value))
    if write is not None:
        return write(value)
    if type(value) is not tuple:
        return None
    items = list(map(_atom, value))
    return None if None in items else pickle.MARK + b"".join(items) + pickle.TUPLE  # type: ignore[arg-type]


def _loaded(blob: bytes) -> bytes:
    """What these bytes are a pickle of; `_LOADS` is told."""
    return _LOADS + _bytes(blob) + pickle.TUPLE1 + pickle.REDUCE


def _name(module: str, name: str) -> bytes:
    return _text(module) + _text(name) + pickle.STACK_GLOBAL


def _told(piece: bytes, reference: bytes) -> bytes:
    return piece + pickle.BINPUT + reference[1:] + pickle.POP


class Template:
    """Tasks of one function that differ in their keys and arguments."""

    def __init__(self, func: Any, kwargs: dict[str, Any] | None = None, data_producer: bool = False):
        """Raises what pickling the function or the keywords raises."""
        func_blob = dumps(func)
        maker_blob = b""
        if kwargs or data_producer:
            maker_blob = dumps(partial(Task, **(kwargs or {}), **({"_data_producer": True} if data_producer else {})))
        #: Whether code is carried along, which may have globals in common with that of an argument.
        self._by_value = b"cloudpickle" in func_blob + maker_blob
        #: Whether the keywords may have objects in common with an argument.
        self._keywords = any(_atom(value) is None for value in (kwargs or {}).values())
        self.head = b"".join(
            (
                _BEGIN,
                _told(_name("pickle", "loads"), _LOADS),
                _told(_loaded(func_blob), _FUNC),
                _told(_name(TaskRef.__module__, "TaskRef"), _TASK_REF),
                _told(_name(Alias.__module__, "Alias"), _ALIAS),
                _loaded(maker_blob) if maker_blob else _name(Task.__module__, "Task"),
                pickle.MARK,
            )
        )
        #: Whether this may be used at all.
        self.fits = len(self.head) <= HEAD_BYTES_MAX and not (maker_blob and self._by_value and self._keywords)

    def rest(self, key: Any, args: Sequence[Any]) -> bytes | None:
        """What follows the head in the task's spec; None for a task that has to be pickled as a whole."""
        pieces = [_atom(key), _FUNC]
        others = 0
        for arg in args:
            kind = type(arg)
            write = _ATOMS.get(kind)
            if write is not None:
                piece: bytes | None = write(arg)
            elif kind is TaskRef:
                piece = _reference(_TASK_REF, arg.key)
            elif kind is Alias and arg.key == arg.target:
                piece = _reference(_ALIAS, arg.target)
            elif (piece := _atom(arg)) is None:
                others += 1
                if others > 1 or self._keywords:
                    return None
                blob = dumps(arg)
                if self._by_value and b"cloudpickle" in blob:
                    return None
                piece = _loaded(blob)
            pieces.append(piece)
        if None in pieces:
            return None
        pieces.append(_END)
        return b"".join(pieces)  # type: ignore[arg-type]


def _reference(maker: bytes, key: Any) -> bytes | None:
    piece = _atom(key)
    return None if piece is None else maker + piece + pickle.TUPLE1 + pickle.REDUCE


def is_plain(value: Any) -> bool:
    """Whether it is what it is for Dask, too: no container, no future, no node of a graph; and cannot be changed."""
    return type(value) in _ATOMS


class Calls:
    """What calls of one function have in common."""

    def __init__(self, func: Any, kwargs: dict[str, Any]):
        self.func = func
        self.kwargs = kwargs
        #: Of the keywords.
        self.dependencies: frozenset[Any] = Task(None, func, **kwargs).dependencies


class Call:
    """Stands for `Task(key, func, *args, **kwargs)`, if that has no dependencies; all of `args` are plain."""

    __slots__ = ("args", "calls")

    dependencies: frozenset[Any] = frozenset()
    data_producer = False

    def __init__(self, calls: Calls, args: tuple[Any, ...]):
        self.calls = calls
        self.args = args

    def task(self, key: Any) -> Task:
        return Task(key, self.calls.func, *self.args, **self.calls.kwargs)


class Templates:
    """Templates of the functions of one graph, and the specs they make."""

    def __init__(self) -> None:
        #: By what tells functions apart; None: does not pay, or does not work. Functions are kept, or another could be told the same.
        self._templates: dict[Any, Template | None] = {}
        self._counts: Counter[Any] = Counter()
        self._kept: list[Any] = []

    def see(self, spec: Any) -> None:
        """To be done for all specs of the graph, before any is written."""
        if type(spec) is Task and not spec.kwargs:
            self._counts[id(spec.func), spec._data_producer] += 1

    def write(self, key: Any, spec: Any) -> tuple[bytes, Template | None]:
        """The spec: what follows the template's head; or, without one, all of it. Raises what pickling raises."""
        kind = type(spec)
        if kind is Call:
            calls = spec.calls
            at: Any = id(calls)
        elif kind is Task and not spec.kwargs:
            calls = None
            at = id(spec.func), spec._data_producer
            if self._counts[at] < TEMPLATE_TASKS:
                return pickle_spec(spec), None
        else:
            return pickle_spec(spec), None
        template = self._templates.get(at, _NEW)
        if template is _NEW:
            made = Template(calls.func, calls.kwargs) if calls is not None else Template(spec.func, None, spec._data_producer)
            template = self._templates[at] = made if made.fits else None
            self._kept.append(calls or spec.func)
        rest = template.rest(key, spec.args) if template is not None else None
        if rest is None:
            return pickle_spec(spec.task(key) if calls is not None else spec), None
        return rest, template
