"""Tasks of a rule that are finished and that nobody needs are dropped, and made again if they have to run again: as if they had stayed."""

from __future__ import annotations

import random
from unittest import mock

import msgpack
import pytest

from taskdb import commands as c
from taskdb.engine import endings, listing, queries, recovery, transitions
from taskdb.engine.refs import dropped_by_group, find_graph, find_key
from taskdb.model import Level, TaskFlag, TaskState
from taskdb.rules import Layer, Rule
from taskdb.store.schema import Table
from tests.support.grown_world import Grown, anomaly, grid, tree

pytestmark = pytest.mark.usefixtures("few_at_a_time")


def key(name: str, *indices: int) -> bytes:
    return name.encode() + b"".join(map(msgpack.packb, indices))


def id_of(world: Grown, name: bytes) -> int:
    with world.store.read() as txn:
        return find_key(txn, name)


def dropped(world: Grown, name: str) -> int:
    with world.store.read() as txn:
        return sum(dropped_by_group(txn, find_graph(txn, name)).values())


def outputs_of(rule: Rule, *layers: int) -> list[tuple[int, int]]:
    return [(layer, element) for layer in layers or (len(rule.layers) - 1,) for element in range(rule.counts[layer])]


def lose(world: Grown, *names: bytes) -> c.Result:
    return world.note(world.do(c.Report([id_of(world, name) for name in names], [Level.OUT] * len(names))))


def state(world: Grown, name: bytes) -> str:
    with world.store.read() as txn:
        stored = queries.get_tasks(txn, [name])[0]
    return stored.info.state if stored else "gone"


def test_few_records_stay(world: Grown) -> None:
    """However large the graph, there is only what is needed yet."""
    rule = tree(64, 4)
    world.submit("g", rule, [(3, 0)])
    most = 0
    while leases := world.take(1):
        world.finish_ids(leases[0].id)
        most = max(most, world.tasks())
    assert world.tasks() == 1
    assert dropped(world, "g") == rule.tasks - 1
    assert most <= 1 + 4 * 3 + 5 + 3
    assert world.forgotten == {}
    with world.store.read() as txn:
        for table in (Table.TASKS, Table.NAMES, Table.KEYS, Table.SPECS):
            assert txn.count(table) == 1
        assert txn.count(Table.EDGES) == txn.count(Table.REDGES) == 0


def test_what_was_dropped_is_forgotten_with_its_graph(world: Grown) -> None:
    world.submit("g", tree(16, 4), [(2, 0)])
    world.run()
    world.note(world.do(c.Unwant("client", [key("16-", 0)])))
    world.settle()
    assert world.tasks() == 0
    assert world.forgotten == {"g0": 16, "g1": 4, "g2": 1}
    with world.store.read() as txn:
        assert txn.count(Table.DROPPED) == 0


def test_a_new_scheduler_hears_of_what_was_dropped(world: Grown) -> None:
    world.submit("g", tree(16, 4), [(2, 0)])
    world.run()
    with world.store.read() as txn:
        (graph,) = recovery.graphs(txn)
    assert (graph.tasks, graph.unfinished, graph.groups) == (21, 0, {"g0": 16, "g1": 4, "g2": 1})


def test_what_was_dropped_is_made_and_computed_again(world: Grown) -> None:
    """Under the same ids, down to where results are left."""
    world.submit("g", tree(16, 4), [(2, 0)])
    ids: dict[bytes, int] = {}
    specs: dict[bytes, bytes] = {}
    while leases := world.take(1):
        ids[leases[0].key], specs[leases[0].key] = leases[0].id, leases[0].spec
        if leases[0].key == key("4-", 3):
            break
        world.finish_ids(leases[0].id)
    # Three of four sums are there; one is lost.
    lose(world, key("4-", 1))
    world.order.clear()
    world.finish_ids(leases[0].id)
    while leases := world.take(1):
        lease = leases[0]
        world.order.append(lease.key)
        assert (ids.setdefault(lease.key, lease.id), specs.setdefault(lease.key, lease.spec)) == (lease.id, lease.spec)
        world.finish_ids(lease.id)
    assert sorted(world.order) == sorted([*(key("x", i) for i in range(4, 8)), key("4-", 1), key("16-", 0)])
    assert dropped(world, "g") == 20


def test_everything_is_lost_at_the_end(world: Grown) -> None:
    rule = tree(22, 3)
    world.submit("g", rule, outputs_of(rule))
    world.run()
    lose(world, rule.key(len(rule.layers) - 1, {0: 0}))
    world.order.clear()
    world.run()
    assert len(world.order) == len(set(world.order)) == rule.tasks
    assert world.tasks() == 1


def test_what_several_need_again_is_made_once(world: Grown) -> None:
    """x[i, j] -> m[i], and x[i, j] and m[i] -> a[i, j]."""
    rule = anomaly(3)
    world.submit("g", rule, outputs_of(rule))
    world.run()
    lose(world, key("a", 0, 0), key("a", 0, 1))
    world.order.clear()
    world.run()
    assert sorted(world.order) == sorted([*(key("x", 0, j) for j in range(3)), key("m", 0), key("a", 0, 0), key("a", 0, 1)])
    assert world.tasks() == 9


def test_one_that_stayed_is_linked_again_once(world: Grown) -> None:
    """a[0, 0] is lost while m[0], which it is linked to again, is there: that stands among its dependents twice, and counts once."""
    rule = anomaly(4)
    world.submit("g", rule, outputs_of(rule))
    while state(world, key("a", 0, 1)) != "memory":
        world.finish_ids(world.take(1)[0].id)
    assert state(world, key("m", 0)) == "memory"
    for _ in range(2):
        lose(world, key("a", 0, 0), key("a", 0, 1))
        lose(world, key("m", 0))
        world.settle()
        while state(world, key("a", 0, 0)) != "memory" or state(world, key("a", 0, 1)) != "memory":
            world.finish_ids(world.take(1)[0].id)
    world.run()
    assert world.tasks() == 16
    assert dropped(world, "g") == 20


def test_an_output_that_was_let_go_of_is_made_again(world: Grown) -> None:
    """Of two outputs one depends on the other. Its id was told for good, so it gets the one its number has in the order."""
    rule = grid(3)
    world.submit("g", rule, outputs_of(rule, 1, 2))
    world.run()
    old = id_of(world, key("y", 1))
    world.note(world.do(c.Unwant("client", [key("y", 1)])))
    world.settle()
    assert state(world, key("y", 1)) == "gone"
    assert world.forgotten == {}
    lose(world, b"z")
    world.order.clear()
    world.run()
    assert world.order == [*(key("x", i, 1) for i in range(3)), key("y", 1), b"z"]
    assert world.do(c.Report([old], [Level.MEMORY])).release == [old]
    world.note(world.do(c.DropClient("client")))
    world.settle()
    assert world.forgotten == {"g0": 9, "g1": 3, "g2": 1}


def test_what_another_submission_needs_stays(world: Grown) -> None:
    """Links from outside the rule cannot be made again."""
    world.submit("g", grid(3), [(2, 0)])
    for lease in world.take(3):
        world.finish_ids(lease.id)
    inner = key("x", 1, 0)
    assert state(world, inner) == "memory"
    add = c.AddTasks("f", 0, [inner, b"f"], [b"", b"f"], [int(TaskFlag.EXTERNAL), 1], [0, 1], [0], [1, 0], new_groups=["f"])
    world.note(world.do(c.BeginGraph("f", "other", 0.0, 0.0), add, c.SealGraph("f")))
    world.run()
    assert [state(world, k) for k in (b"z", b"f", inner, key("x", 0, 0))] == ["memory", "memory", "released", "gone"]
    lose(world, b"f")
    world.order.clear()
    world.run()
    assert world.order == [inner, b"f"]


def test_the_key_of_one_that_was_dropped_comes_again(world: Grown) -> None:
    """It is a new task, of the other submission; what is lost here is computed from that."""
    world.submit("g", grid(2), [(2, 0)])
    world.run()
    again = key("y", 0)
    add = c.AddTasks("f", 0, [again], [b"another"], [1], new_groups=["f"])
    world.note(world.do(c.BeginGraph("f", "other", 0.0, 0.0), add, c.SealGraph("f")))
    world.run()
    lose(world, b"z")
    world.order.clear()
    world.run()
    assert world.order == [key("x", 0, 1), key("x", 1, 1), key("y", 1), b"z"]
    world.note(world.do(c.DropClient("client"), c.DropClient("other")))
    world.settle()
    assert world.forgotten == {"g0": 4, "g1": 2, "g2": 1, "f": 1}


def test_one_that_was_met_is_made_of_its_own_rule(world: Grown) -> None:
    """The submission it was of is over; it was told as forgotten of this one, and still is once."""
    met = key("x", 1, 0)
    add = c.AddTasks("f", 0, [met], [b"its own"], [1], new_groups=["f"])
    world.note(world.do(c.BeginGraph("f", "other", 0.0, 0.0), add, c.SealGraph("f")))
    world.submit("g", grid(2), [(2, 0)])
    world.run()
    world.note(world.do(c.Unwant("other", [met])))
    world.settle()
    assert state(world, met) == "gone"
    lose(world, b"z")
    specs: dict[bytes, bytes] = {}
    while leases := world.take(1):
        specs[leases[0].key] = leases[0].spec
        world.finish_ids(leases[0].id)
    assert len(specs) == 7
    assert specs[met] == b"x " + bytes([1, 0, 0, 0, 0, 0, 0, 0])
    world.note(world.do(c.DropClient("client")))
    world.settle()
    assert world.forgotten == {"g0": 4, "g1": 2, "g2": 1, "f": 1}


def test_an_error_when_it_runs_again(world: Grown) -> None:
    """It goes down to what is to run again; a retry clears it."""
    world.submit("g", tree(9, 3), [(2, 0)])
    world.run()
    lose(world, key("9-", 0))
    lease = world.take(1)[0]
    world.note(world.do(c.Fail(lease.id, b"payload", "no luck")))
    world.run()
    assert [state(world, k) for k in (key("9-", 0), lease.key)] == ["erred", "erred"]
    world.note(world.do(c.Retry([key("9-", 0)])))
    world.order.clear()
    world.run()
    assert state(world, key("9-", 0)) == "memory"
    assert lease.key in world.order
    assert world.tasks() == 1


def test_a_finished_one_that_is_blamed(world: Grown) -> None:
    """It is linked to the cause, so it lives again with it."""
    world.submit("g", grid(2), [(2, 0)])
    world.run()
    z = id_of(world, b"z")
    world.note(world.do(c.Report([z], [Level.HELD])))
    y = id_of(world, key("y", 0))
    world.settle()
    world.note(world.do(c.Report([z], [Level.MEMORY]), c.Report([y], [Level.ERRED]), c.Blame(z, y)))
    world.run()
    world.note(world.do(c.Retry([b"z"])))
    world.run()
    assert state(world, b"z") == "memory"


def test_keys_of_what_it_was_computed_from_are_still_told(world: Grown) -> None:
    world.submit("g", grid(2), [(2, 0)])
    world.run()
    with world.store.read() as txn:
        (task,) = queries.get_tasks(txn, [b"z"])
        page = listing.list_tasks(txn, listing.Filters("g"))
    assert task is not None
    assert task.deps == [key("y", 0), key("y", 1)]
    assert [info.key for info in page.tasks] == [b"z"]


def test_an_abort_looks_only_at_what_is_left(world: Grown, monkeypatch: pytest.MonkeyPatch) -> None:
    world.submit("g", tree(64, 4), [(3, 0)])
    for _ in range(60):
        world.finish_ids(world.take(1)[0].id)
    met: list[int] = []
    take_back = endings._own_and_met

    def counted(*args: int) -> tuple[list[int], int | None]:
        ids, rest = take_back(*args)  # type: ignore[arg-type]
        met.extend(ids)
        return ids, rest

    monkeypatch.setattr(endings, "_own_and_met", counted)
    left = world.tasks()
    world.note(world.do(c.AbortGraph("g")))
    world.settle()
    assert 0 < len(met) <= left
    assert world.forgotten == {"g0": 64, "g1": 16, "g2": 4, "g3": 1}


# ------------------------------------------------------------------------------------------------------------- at random


def a_rule(chance: random.Random, prefix: bytes = b"") -> Rule:
    rule = chance.choice([grid(chance.randint(1, 4)), anomaly(chance.randint(1, 4)), tree(chance.randint(1, 30), chance.randint(2, 5))])
    layers = [Layer(prefix + x.prefix, x.axes, x.deps, x.recipe, x.flags, x.user, x.shared, x.factors) for x in rule.layers]
    return Rule(rule.sizes, layers)


Seen = list[tuple[str, object]]


def losses(seed: int, keeps: bool) -> Seen:
    """One graph, and results that are lost in all ways there are, after each of which is noted what a scheduler can see."""
    chance = random.Random(seed)
    world = Grown()
    rule = a_rule(chance)
    layers = [len(rule.layers) - 1, *chance.sample(range(len(rule.layers) - 1), chance.randint(0, len(rule.layers) - 1))]
    seen: Seen = []

    def note(result: c.Result) -> None:
        seen.append(("release", sorted(names[id] for id in result.release)))

    names: dict[int, bytes] = {}
    note(world.submit("g", rule, outputs_of(rule, *sorted(layers))))
    for _ in range(60):
        match chance.randrange(11):
            case 0 | 1 | 2 | 3:
                leases = world.take(chance.randint(1, 4))
                names |= {lease.id: lease.key for lease in leases}
                seen.append(("leases", [(x.id, x.key, x.spec, x.deps, x.rank) for x in leases]))
            case 4 | 5 | 6 | 7 if ids := world.in_states(TaskState.PROCESSING):
                note(world.finish_ids(*[id for _, id in chance.sample(ids, min(len(ids), 3))]))
            case 8 if ids := world.in_states(TaskState.MEMORY, TaskState.PROCESSING):
                level = chance.choice([Level.OUT, Level.OUT, Level.RELEASED, Level.HELD])
                some = chance.sample(ids, min(len(ids), chance.randint(1, 4)))
                note(world.do(c.Report([id for _, id in some], [level] * len(some))))
            case 9 if chance.random() < 0.3:
                ids = world.in_states(TaskState.MEMORY, TaskState.PROCESSING)
                world.begin_epoch()
                some = chance.sample(ids, len(ids) // 2)
                levels = [chance.choice([Level.MEMORY, Level.HELD]) for _ in some]
                result = world.do(c.Adopt(world.epoch - 1, [k for k, _ in some], levels))
                seen.append(("adopted", [(x.key, x.level, x.lease is not None) for x in result.adopted]))
                note(world.do(c.EndRecovery()))
            case 10:
                txn = world.store.write()
                result = world.engine.resync(txn, world.epoch, [id for _, id in world.in_states(TaskState.PROCESSING)])
                txn.commit()
                note(result)
        for result in world.drain():
            note(result)
        world.settle()
        busy = world.in_states(*(state for state in TaskState if state != TaskState.RELEASED))
        seen.append(("states", [(k, world.info_of(id)) for k, id in busy]))
        if not keeps:
            assert not world.in_states(TaskState.RELEASED)
    return seen


@pytest.mark.parametrize("seed", range(30))
def test_nobody_can_tell_that_it_was_dropped(seed: int) -> None:
    with mock.patch.object(transitions, "cut"):
        kept = losses(seed, keeps=True)
    assert losses(seed, keeps=False) == kept
