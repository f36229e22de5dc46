"""Tasks of a rule: made when they are about to be needed, and as if they had come one by one. Every step checks all rules."""

from __future__ import annotations

import msgpack
import pytest

from taskdb import commands as c
from taskdb.engine import hunger
from taskdb.model import Level, TaskFlag
from taskdb.rules import Layer, Rule
from tests.support.grown_world import Grown, anomaly, grid, tree

pytestmark = pytest.mark.usefixtures("few_at_a_time")


def test_all_tasks_run_once_in_order(world: Grown) -> None:
    rule = grid(4)
    world.submit("g", rule, [(2, 0)])
    world.run(threads=1)
    expected = [rule.key(layer, rule.indices(layer, element)) for layer, element in rule.emit([0, 0, 0], 100)]
    assert world.order == expected
    assert len(expected) == 21
    assert world.state("z") == "memory"


def test_it_is_made_only_as_it_is_needed(world: Grown) -> None:
    world.submit("g", grid(10), [(2, 0)])
    assert world.tasks() == 1
    world.settle()
    assert world.tasks() <= 1 + 3 + 5
    for lease in world.take(3):
        world.finish_ids(lease.id)
    world.settle()
    assert world.tasks() <= 1 + 3 + 3 + 2 * 5


def test_many_that_wait_for_one_are_not_all_made(world: Grown, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hunger, "GROW_WAITING", 20)
    layers = [Layer(b"x", (), (), [b"x"]), Layer(b"y", (0,), (0,), [b"y"]), Layer(b"z", (), (1,), [b"z"])]
    world.submit("g", Rule((200,), layers), [(2, 0)])
    world.settle()
    assert world.tasks() <= 1 + 20 + 5
    world.run()
    assert world.state("z") == "memory"
    assert len(world.order) == 202


def test_specs_and_dependencies(world: Grown) -> None:
    world.submit("g", grid(3), [(2, 0)])
    leases = {}
    while taken := world.take(1):
        leases[taken[0].key] = taken[0]
        world.finish_ids(taken[0].id)
    assert leases[b"x" + msgpack.packb(2) + msgpack.packb(1)].spec == b"x " + bytes([2, 0, 0, 0, 1, 0, 0, 0])
    y = leases[b"y" + msgpack.packb(1)]
    assert y.spec == b"y \1\0\0\0:\0\0\0\0,\1\0\0\0,\2\0\0\0,"
    assert sorted(y.deps) == sorted(lease.id for key, lease in leases.items() if key[:1] == b"x" and key[2:] == b"\1")
    assert leases[b"z"].spec == b"z"


def test_results_stay_until_their_last_dependent_is_there(world: Grown) -> None:
    """In a second pass over x its results are used again, long after they were computed."""
    world.submit("g", anomaly(6), [(2, element) for element in range(36)])
    released: set[int] = set()
    finished: set[int] = set()
    while leases := world.take(2):
        for lease in leases:
            assert not released & set(lease.deps)
            assert set(lease.deps) <= finished
            finished.add(lease.id)
            released |= set(world.finish_ids(lease.id).release)
    assert len(finished) == 36 + 6 + 36
    assert len(released) == 36 + 6


def test_all_of_it_is_forgotten_and_counted(world: Grown) -> None:
    world.submit("g", grid(4), [(2, 0)])
    world.run()
    world.note(world.do(c.Unwant("client", [b"z"])))
    world.settle()
    assert world.tasks() == 0
    assert world.forgotten == {"g0": 16, "g1": 4, "g2": 1}


def test_given_up_half_way(world: Grown) -> None:
    world.submit("g", grid(10), [(2, 0)])
    for lease in world.take(7)[:3]:
        world.finish_ids(lease.id)
    world.note(world.do(c.Unwant("client", [b"z"])))
    world.settle()
    assert world.tasks() == 0
    assert world.forgotten == {"g0": 100, "g1": 10, "g2": 1}
    assert not world.take(10)


@pytest.mark.parametrize("seal", [True, False])
def test_aborted(world: Grown, seal: bool) -> None:
    world.submit("g", grid(10), [(2, 0)], seal=seal)
    if seal:
        world.finish_ids(*[lease.id for lease in world.take(4)])
    world.note(world.do(c.AbortGraph("g")))
    world.settle()
    assert world.tasks() == 0
    assert world.forgotten == {"g0": 100, "g1": 10, "g2": 1}


def test_a_new_scheduler_goes_on_with_it(world: Grown) -> None:
    world.submit("g", grid(4), [(2, 0)])
    taken = world.take(3)
    world.finish_ids(taken[0].id)
    world.begin_epoch()
    world.do(c.EndRecovery())
    world.run()
    assert world.state("z") == "memory"
    assert len(set(world.order)) == 21


def test_a_submission_that_was_not_complete_is_gone_with_its_scheduler(world: Grown) -> None:
    world.submit("g", grid(4), [(2, 0)], seal=False)
    world.begin_epoch()
    world.settle()
    assert world.tasks() == 0


def test_twice_at_a_time(world: Grown) -> None:
    """Another client submits the same: it is computed once."""
    world.submit("g", grid(4), [(2, 0)])
    world.finish_ids(*[lease.id for lease in world.take(4)])
    world.submit("h", grid(4), [(2, 0)])
    world.run()
    assert len(world.order) == 21 - 4
    world.note(world.do(c.Unwant("client", [b"z"])))
    world.settle()
    assert world.tasks() == 0
    assert world.forgotten == {"g0": 16, "g1": 4, "g2": 1, "h0": 16, "h1": 4}


def test_keys_in_common_with_another_graph(world: Grown) -> None:
    """Tasks that are there when their turn comes are used as they are."""
    key = b"x" + msgpack.packb(1) + msgpack.packb(1)
    world.do(
        c.BeginGraph("a", "other", 0.0, 0.0),
        c.AddTasks("a", 0, [key], [b"its own"], [int(TaskFlag.WANTED)], new_groups=["a"]),
        c.SealGraph("a"),
    )
    world.submit("g", grid(3), [(2, 0)])
    specs = {}
    while taken := world.take(1):
        specs[taken[0].key] = taken[0].spec
        world.finish_ids(taken[0].id)
    assert specs[key] == b"its own"
    assert len(specs) == 9 + 3 + 1
    world.note(world.do(c.Unwant("client", [b"z"]), c.Unwant("other", [key])))
    world.settle()
    assert world.tasks() == 0
    assert world.forgotten == {"g0": 9, "g1": 3, "g2": 1, "a": 1}


def test_an_error_reaches_outputs_that_are_yet_to_be_made(world: Grown) -> None:
    world.submit("g", grid(4), [(2, 0)])
    lease = world.take(1)[0]
    erred = list(world.do(c.Fail(lease.id, b"payload", "no luck")).erred)
    while leases := world.take(3):
        world.finish_ids(*[lease.id for lease in leases])
    world.settle()
    assert world.state("z") == "erred"
    assert not erred


def test_retry_of_a_failed_task(world: Grown) -> None:
    world.submit("g", grid(3), [(2, 0)])
    lease = world.take(1)[0]
    world.do(c.Fail(lease.id, b"payload", "no luck"))
    world.run()
    assert world.state("z") == "erred"
    world.do(c.Retry([b"z"]))
    world.run()
    assert world.state("z") == "memory"


def test_a_lost_result_is_computed_again(world: Grown) -> None:
    world.submit("g", grid(3), [(2, 0)])
    while world.state("y" + "\1") != "memory":
        for lease in world.take(1):
            world.finish_ids(lease.id)
    with world.store.read() as txn:
        from taskdb.engine.refs import find_key

        y = find_key(txn, b"y\1")
    world.do(c.Report([y], [Level.OUT]))
    world.run()
    assert world.state("z") == "memory"


def test_cancelled(world: Grown) -> None:
    world.submit("g", grid(6), [(2, 0)])
    world.take(3)
    result = world.do(c.Cancel("client", [b"z"], False))
    results = [result, *world.drain()]
    assert [x.key for r in results for x in r.cancelled] == [b"z"]
    world.settle()
    assert world.tasks() == 0


def test_ids_that_a_crash_undid_come_true_again(world: Grown) -> None:
    world.submit("g", grid(5), [(2, 0)])
    txn = world.store.write()
    world.engine.grow(txn)
    world.engine.grow(txn)
    leases, _ = world.engine.lease(txn, 10, 10)
    txn.abort()
    told = {lease.key: lease.id for lease in leases}
    assert len(told) == 5
    result = world.note(world.do(c.Report(list(told.values()), [Level.MEMORY] * len(told), [8] * len(told))))
    assert not result.release
    again = {}
    while taken := world.take(1):
        again[taken[0].key] = taken[0].id
        world.finish_ids(taken[0].id)
    assert not again.keys() & told.keys()
    assert len(again) + len(told) == 31


def test_tasks_outside_the_rule_depend_on_outputs(world: Grown) -> None:
    rule = grid(3)
    add = c.AddRule("g", 0, rule.write(), ["x", "y", "z"], [], [1, 1, 1], [0, 1, 2], [0, 0, 0], [1, 1, 1])
    rest = c.AddTasks("g", 3, [b"sum"], [b"sum"], [int(TaskFlag.WANTED)], [3], [0, 1, 2], [0], new_groups=["sum"], groups=[3])
    world.do(c.BeginGraph("g", "client", 0.0, 0.0), add, rest, c.SealGraph("g"))
    world.run()
    assert world.state("sum") == "memory"
    # z is nobody's: it is made, and let go of, or not made at all.
    assert b"z" not in world.order
    world.do(c.Unwant("client", [b"sum"]))
    world.settle()
    assert world.tasks() == 0


@pytest.mark.parametrize(
    "change",
    [
        {"layers": [3]},
        {"elements": [1]},
        {"flags": []},
        {"new_groups": ["x"]},
        {"first_index": 1},
        {"rule": b"no rule"},
        {"layers": [2, 2], "elements": [0, 0], "flags": [0, 0], "dependent_counts": [0, 0]},
    ],
)
def test_what_is_not_one_is_refused(world: Grown, change: dict[str, object]) -> None:
    values: dict[str, object] = {
        "submission": "g",
        "first_index": 0,
        "rule": grid(3).write(),
        "new_groups": ["x", "y", "z"],
        "new_shared": [],
        "layers": [2],
        "elements": [0],
        "flags": [1],
        "dependent_counts": [0],
    }
    world.do(c.BeginGraph("g", "client", 0.0, 0.0), c.AddRule(**{**values, **change}))  # type: ignore[arg-type]
    assert len(world.refused) == 1
    world.settle()
    assert world.tasks() == 0


def test_a_tree_of_sums(world: Grown) -> None:
    """Each sum comes as soon as its parts have, so few results are held at a time; the last ones of a level have fewer parts."""
    rule = tree(22, 4)
    assert rule.counts == (22, 6, 2, 1)
    world.submit("g", rule, [(3, 0)])
    deps: dict[int, list[int]] = {}
    keys: dict[int, bytes] = {}
    specs: dict[bytes, bytes] = {}
    held = most = 0
    while taken := world.take(1):
        lease = taken[0]
        keys[lease.id], deps[lease.id], specs[lease.key] = lease.key, lease.deps, lease.spec
        held += 1 - len(world.finish_ids(lease.id).release)
        most = max(most, held)
    assert len(keys) == 31
    assert most <= 4 + 3 + 2
    by_key = {key: [keys[dep] for dep in deps[task_id]] for task_id, key in keys.items()}
    assert by_key[b"4-\5"] == [b"x\x14", b"x\x15"]
    assert by_key[b"16-\1"] == [b"4-\4", b"4-\5"]
    assert by_key[b"64-\0"] == [b"16-\0", b"16-\1"]
    assert specs[b"4-\5"] == b"+\5\0\0\0:\x14\0\0\0,\x15\0\0\0,"


@pytest.mark.parametrize("rule", [grid(3), anomaly(4), tree(23, 3), tree(8, 2)], ids=["grid", "anomaly", "tree", "full tree"])
def test_the_order_of_a_rule(rule: Rule) -> None:
    """Dependencies first; it can be taken up anywhere; everything about a task follows from its place."""
    order = rule.emit([0] * len(rule.layers), rule.tasks + 1)
    assert len(order) == len(set(order)) == rule.tasks
    seen: set[tuple[int, int]] = set()
    dependents: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for number, (layer, element) in enumerate(order):
        indices = rule.indices(layer, element)
        assert rule.element(layer, indices) == element
        assert rule.number(layer, element) == number
        assert rule.cursors(number) == [sum(other == layer for other, _ in seen) for layer in range(len(rule.layers))]
        for dep, at in rule.deps(layer, indices):
            assert (dep, rule.element(dep, at)) in seen
            dependents.setdefault((dep, rule.element(dep, at)), []).append((layer, element))
        seen.add((layer, element))
    for layer, element in order:
        coming = sorted(dependents.get((layer, element), []))
        assert sorted(rule.dependents_of(layer, rule.indices(layer, element))) == coming
        assert rule.dependents[layer] == len(coming)
    assert Rule.read(rule.write()).write() == rule.write()


def test_an_output_of_an_aborted_rule_that_another_needs(world: Grown) -> None:
    """Its turn never comes: what it is computed from is made for it."""
    world.submit("g", grid(3), [(2, 0)], seal=False)
    add = c.AddTasks("f", 0, [b"z", b"f"], [b"", b"f"], [int(TaskFlag.EXTERNAL), 1], [0, 1], [0], [1, 0], new_groups=["f"])
    world.note(world.do(c.BeginGraph("f", "other", 0.0, 0.0), add, c.SealGraph("f")))
    world.note(world.do(c.AbortGraph("g")))
    world.run()
    assert world.state("f") == "memory"
    assert len(world.order) == 14
    world.note(world.do(c.DropClient("other")))
    world.settle()
    assert world.tasks() == 0
    assert world.forgotten == {"g0": 9, "g1": 3, "g2": 1, "f": 1}


def test_an_output_that_was_leased_before_a_crash_undid_its_turn(world: Grown) -> None:
    """Its turn comes with the report: what depends on it hears of it."""
    rule = grid(2)
    world.submit("g", rule, [(0, element) for element in range(4)] + [(2, 0)])
    x = world.id("x\0\0")
    add = c.AddTasks("f", 0, [b"x\0\0", b"f"], [b"", b"f"], [int(TaskFlag.EXTERNAL), 1], [0, 1], [0], [1, 0], new_groups=["f"])
    world.note(world.do(c.BeginGraph("f", "other", 0.0, 0.0), add, c.SealGraph("f")))
    world.finish_ids(x)
    world.run()
    assert b"x\0\0" not in world.order
    assert [world.state("f"), world.state("z")] == ["memory", "memory"]
