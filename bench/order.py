"""How many results are live at once, in our order and in that of `dask.order`: a simulation, without processes.

So many threads take the first tasks of the order that can run; all take equally long. A result is live from its end until all that
depends on it has ended; a wanted one stays.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, cast

import dask.order
from dask._expr import FinalizeCompute
from dask.base import collections_to_expr
from dask.core import flatten
from distributed import Client

from bench.workloads import Workload
from scheduler_adapter.graph import materialise
from scheduler_adapter.keys import unpack_key
from scheduler_adapter.order import depth_first
from scheduler_adapter.symbolic import Symbolic, compile_rule


@dataclass(frozen=True)
class Order:
    """A graph and a place for each of its tasks."""

    deps: Mapping[Any, Collection[Any]]
    places: Mapping[Any, float]
    wanted: Collection[Any]


class _Submitted(BaseException):
    """What a job would have submitted first."""


class _Capture:
    """In the place of a client: takes the collection that a job submits, and ends the job."""

    def compute(self, collection: Any) -> Any:
        raise _Submitted(FinalizeCompute(collections_to_expr([collection])))

    def persist(self, collection: Any) -> Any:
        raise _Submitted(collections_to_expr([collection]))


def submitted(workload: Workload, tasks: int) -> Any:
    """The first expression of a job, optimised; None if it submits something else than collections."""
    try:
        workload.build(tasks).run(cast(Client, _Capture()), False)
    except _Submitted as found:
        return found.args[0].optimize()
    except AttributeError:
        return None
    return None


def orders(expr: Any) -> tuple[Order, Order]:
    """That of `dask.order`, and ours, each on the graph that it is for."""
    wanted = set(flatten(expr.__dask_keys__()))
    found = compile_rule(expr, wanted, {}, None)
    dsk, _ = materialise(expr)
    deps = {key: task.dependencies for key, task in dsk.items()}
    theirs = Order(deps, dask.order.order(dsk), wanted)
    if found is not None:
        return theirs, _of_rule(found, wanted)
    # As for a graph of so many tasks that another order is tried.
    written = depth_first(dsk, wanted)
    return theirs, theirs if written is None else Order(deps, written, wanted)


def _of_rule(found: Symbolic, wanted: Collection[Any]) -> Order:
    rule = found.rule
    deps: dict[Any, Collection[Any]] = {key: task.dependencies for key, task in found.rest.dsk.items()}
    places = dict(found.rest.order)
    for number, (layer, element) in enumerate(rule.emit([0] * len(rule.layers), rule.tasks)):
        indices = rule.indices(layer, element)
        key = unpack_key(rule.key(layer, indices))
        deps[key] = [unpack_key(rule.key(dep, at)) for dep, at in rule.deps(layer, indices)]
        places[key] = number
    return Order(deps, places, wanted)


def peak_live(order: Order, threads: int) -> int:
    """Most results that are live at once. O(tasks log tasks)."""
    deps, places = order.deps, order.places
    waiting = {key: len(set(needed)) for key, needed in deps.items()}
    dependents: dict[Any, list[Any]] = {key: [] for key in deps}
    for key, needed in deps.items():
        for dep in set(needed):
            dependents[dep].append(key)
    left = {key: len(users) + (key in order.wanted) for key, users in dependents.items()}
    ready = [(places[key], number, key) for number, (key, count) in enumerate(waiting.items()) if not count]
    heapq.heapify(ready)
    live = peak = 0
    number = len(deps)
    while ready:
        done = [heapq.heappop(ready)[2] for _ in range(min(threads, len(ready)))]
        live += len(done)
        peak = max(peak, live)
        for key in done:
            for dep in set(deps[key]):
                left[dep] -= 1
                live -= not left[dep]
            for user in dependents[key]:
                waiting[user] -= 1
                if not waiting[user]:
                    number += 1
                    heapq.heappush(ready, (places[user], number, user))
    return peak
