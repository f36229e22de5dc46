"""What simulated tasks compute: a number that differs for every name and every order of inputs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from dask._task_spec import Task, TaskRef

from tests.stress.model import Node
from tests.stress.tasks import Planned, mix

#: How often each flaky task has been run, as a file would count it.
attempts: Counter[str] = Counter()


def work(name: str, salt: int, mode: str, failures: int, *inputs: int) -> int:
    if mode == "fail":
        raise Planned(name)
    if mode == "flaky":
        attempts[name] += 1
        if attempts[name] <= failures:
            raise Planned(name)
    return mix(salt, inputs)


class P2PBarrierTask(Task):
    """Its name is what makes a graph whole."""


class Graph:
    """As much of a Dask expression as the scheduler asks for."""

    _parameters = ("dsk",)

    def __init__(self, nodes: list[Node], retries: int, *, whole: bool = False):
        kinds = [P2PBarrierTask if whole and i == 0 else Task for i in range(len(nodes))]
        self._dsk = {
            node.key: kind(node.key, work, node.name, node.salt, node.mode, node.failures, *(TaskRef(dep.key) for dep in node.deps))
            for node, kind in zip(nodes, kinds, strict=True)
        }
        self._retries = retries

    def walk(self) -> Iterator[Graph]:
        yield self

    def operand(self, name: str) -> Mapping[Any, Task]:
        return self._dsk

    def __dask_graph__(self) -> Mapping[Any, Task]:
        return self._dsk

    def __dask_annotations__(self) -> dict[str, dict[Any, Any]]:
        return {"retries": dict.fromkeys(self._dsk, self._retries)} if self._retries else {}
