"""The simulation of how many results are live."""

from __future__ import annotations

import dask.array as da
import pytest
from click.testing import CliRunner
from dask.base import collections_to_expr

from bench.__main__ import main
from bench.order import Order, orders, peak_live, submitted
from bench.workloads import WORKLOADS

#: Ten pairs, and one that needs the second of each.
PAIRS = {**{("a", i): [] for i in range(10)}, **{("b", i): [("a", i)] for i in range(10)}, "all": [("b", i) for i in range(10)]}


def test_peak_by_hand() -> None:
    depth_first = {key: float(i) for i, key in enumerate(k for n in range(10) for k in (("a", n), ("b", n)))} | {"all": 99.0}
    breadth_first = {key: float(i) for i, key in enumerate(PAIRS)}
    # One thread: nine that are kept, the tenth and what it is made of; or all ten of the first kind, and one.
    assert peak_live(Order(PAIRS, depth_first, {"all"}), 1) == 11
    assert peak_live(Order(PAIRS, breadth_first, {"all"}), 1) == 11
    assert peak_live(Order(PAIRS, breadth_first, {"all"}), 4) == 14
    assert peak_live(Order({"x": [], "y": []}, {"x": 0.0, "y": 1.0}, {"x", "y"}), 1) == 2
    chain = {i: [i - 1] if i else [] for i in range(50)}
    assert peak_live(Order(chain, {i: float(i) for i in chain}, {49}), 8) == 2


@pytest.mark.parametrize("name", ["grid", "tree-sum"])
def test_rules_are_compared_on_their_own_graph(name: str) -> None:
    theirs, ours = orders(submitted(WORKLOADS[name], 500))
    assert ours is not theirs
    assert set(ours.places) == set(ours.deps)
    assert peak_live(ours, 4) <= 1.2 * peak_live(theirs, 4)


def test_index_order_would_be_worse() -> None:
    """A mean over the first axis: by index, all of the array is live."""
    expr = collections_to_expr([da.ones((20, 20), chunks=1).map_blocks(lambda b: b + 1, dtype=float).sum(axis=0)]).optimize()
    theirs, ours = orders(expr)
    assert ours is not theirs
    by_index = Order(ours.deps, {key: (key[1:] if isinstance(key, tuple) else key) for key in ours.deps}, ours.wanted)  # type: ignore[misc]
    assert peak_live(ours, 4) <= 1.2 * peak_live(theirs, 4) < 0.5 * peak_live(by_index, 4)


def test_command() -> None:
    result = CliRunner().invoke(main, ["order", "--tasks", "100"])
    assert result.exit_code == 0, result.output
    assert "vorticity" in result.output
    assert "client-map" not in result.output, "it is no collection"
