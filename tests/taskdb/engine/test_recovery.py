"""A new scheduler: what the one before held, who may claim it, and what becomes of the rest. One test a rule of docs/engine.md."""

from __future__ import annotations

import pytest

from taskdb import commands as c
from taskdb.engine import leasing, recovery
from taskdb.engine.queries import explain
from taskdb.errors import StoreCorrupt
from taskdb.limits import IDS_SKIPPED_AT_START, KEY_BYTES_MAX, STORE_RESERVE_BYTES
from taskdb.model import GraphFlag, Level, TaskFlag
from taskdb.store.schema import U64, Meta, Table, meta_key
from tests.support.engine_world import World

MEMORY, HELD = Level.MEMORY, Level.HELD
CHAIN = {"a": [], "b": ["a"], "c": ["b"]}


def taken_over() -> World:
    """a is in memory and b runs, in epoch 1; this is epoch 2."""
    world = World()
    world.add("g", CHAIN, want="c")
    world.lease(1, 1)
    world.finish("a")
    world.lease(1, 1)
    world.begin_epoch()
    assert world.states("abc") == ["memory", "processing", "queued"]
    return world


def is_recovering(world: World) -> bool:
    with world.store.read() as txn:
        return txn.get(Table.META, meta_key(Meta.RECOVERING)) is not None


def owner(world: World, key: str) -> int:
    with world.store.read() as txn:
        return int.from_bytes(txn.get(Table.HOLDS, U64.pack(world.id(key))) or b"")


# --------------------------------------------------------------------------------------------------------------- parking


def test_nothing_is_leased_before_its_inputs_are_claimed() -> None:
    world = taken_over()
    assert world.lease(9, 9) == []
    assert world.adopt(1, b=HELD)["b"].lease is not None
    assert world.lease(9, 9) == ["c"]


def test_what_needs_no_orphan_is_leased_at_once() -> None:
    world = taken_over()
    world.add("h", {"d": [], "e": ["d"]}, want="e")
    assert world.lease(9, 9) == ["d", "e"]


@pytest.mark.parametrize("how", ["adopted", "finished", "held", "resync", "lost", "given back"])
def test_whatever_becomes_of_an_orphan_frees_what_was_parked(how: str) -> None:
    world = World()
    world.add("g", {"a": [], "b": ["a"]}, want="b")
    world.lease(1, 1)
    if how != "held":
        world.finish("a")
    world.begin_epoch()
    assert world.lease(9, 9) == []
    if how == "adopted":
        world.adopt(1, a=MEMORY)
    elif how == "finished":
        world.finish("a")
    elif how == "held":
        world.report(HELD, "a")
    elif how == "resync":
        txn = world.store.write()
        world.engine.resync(txn, world.epoch, [world.id("a")])
        txn.commit()
    elif how == "lost":
        world.report(Level.OUT, "a")
    else:
        world.do(c.EndRecovery())
    again = how in ("lost", "given back")
    assert world.lease(9, 9) == (["a", "b"] if again else ["b"])


def test_an_orphan_that_fails_fails_what_was_parked() -> None:
    world = taken_over()
    assert world.lease(9, 9) == []
    world.do(c.Fail(world.id("b"), b"payload", "text"))
    assert world.state("c") == "erred"


def test_a_task_with_two_orphans_waits_for_both() -> None:
    world = World()
    world.add("g", {"a": [], "b": [], "z": ["a", "b"]}, want="z")
    world.lease(2, 2)
    world.finish("a", "b")
    world.begin_epoch()
    assert world.lease(9, 9) == []
    world.adopt(1, a=MEMORY)
    assert world.lease(9, 9) == []
    world.adopt(1, b=MEMORY)
    assert world.lease(9, 9) == ["z"]


def test_parking_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leasing, "LEASE_PARKED_MAX", 3)
    world = World()
    world.add("g", {"a": [], **{f"k{i}": ["a"] for i in range(7)}, "z": []}, want=[*(f"k{i}" for i in range(7)), "z"])
    world.lease(1, 1)
    world.finish("a")
    world.begin_epoch()
    assert [(world.lease(9, 9), world.more) for _ in range(3)] == [([], True), ([], True), (["z"], False)]


def test_explain_names_the_scheduler_that_is_gone() -> None:
    world = taken_over()
    world.lease(9, 9)
    with world.store.read() as txn:
        assert explain(txn, b"b").reason.startswith("processing: with a scheduler that is gone")
        assert explain(txn, b"c").reason.startswith("queued: what it depends on was with a scheduler that is gone")


# ---------------------------------------------------------------------------------------------------------------- Adopt


def test_what_is_adopted_is_answered_with_its_lease() -> None:
    world = taken_over()
    answers = world.adopt(1, a=MEMORY, b=HELD)
    a, b = (answers[key].lease for key in "ab")
    assert a is not None
    assert b is not None
    assert (a.id, a.spec, a.submission, a.dependents, a.clients) == (world.id("a"), b"spec a", "g", 1, [])
    assert (b.id, b.deps) == (world.id("b"), [world.id("a")])
    assert [owner(world, key) for key in "ab"] == [2, 2]


def test_results_come_first_and_prove_what_runs_unneeded() -> None:
    world = taken_over()
    answers = world.adopt(1, b=HELD, c=MEMORY)
    assert list(answers) == ["c", "b"]
    assert answers["c"].lease is not None
    assert answers["b"].lease is None
    assert world.states("abc") == ["released", "released", "memory"]


def test_a_result_the_database_had_not_heard_of_is_taken() -> None:
    world = taken_over()
    assert world.adopt(1, b=MEMORY)["b"].lease is not None
    assert world.states("abc") == ["released", "memory", "queued"]


def test_a_running_task_without_its_inputs_is_not_adopted() -> None:
    """They will be computed again, and it after them."""
    world = World()
    world.add("g", CHAIN, want="c")
    world.begin_epoch()
    answers = world.adopt(1, a=HELD, c=HELD)
    assert answers["a"].lease is not None
    assert answers["c"].lease is None
    assert world.states("abc") == ["processing", "queued", "waiting"]


def test_a_second_copy_that_runs_is_not_adopted() -> None:
    world = taken_over()
    assert world.adopt(1, a=HELD)["a"].lease is None
    assert owner(world, "a") == 1


def test_a_result_of_what_this_scheduler_runs_is_not_adopted() -> None:
    world = World()
    world.add("g", {"a": []}, want="a")
    world.begin_epoch()
    world.lease(1, 1)
    assert world.adopt(1, a=MEMORY)["a"].lease is None
    assert world.state("a") == "processing"
    # But asked again, after the answer was lost, what was adopted is answered as before.
    assert world.adopt(1, a=HELD)["a"].lease is not None


def test_what_failed_or_nobody_needs_is_let_go_of() -> None:
    world = taken_over()
    world.do(c.Want("client", [b"b"]), c.Fail(world.id("b"), b"payload", "text"))
    assert world.adopt(1, a=MEMORY, b=MEMORY) == {"a": c.Adopted(b"a", MEMORY, None), "b": c.Adopted(b"b", MEMORY, None)}


def test_a_key_nobody_knows_is_said_to_be_out() -> None:
    assert taken_over().adopt(1, x=MEMORY)["x"] == c.Adopted(b"x", Level.OUT, None)


@pytest.mark.parametrize(("flags", "adopted"), [(0, False), (GraphFlag.RESENT, True)])
def test_another_task_of_the_same_name_is_believed_only_if_it_was_sent_again(flags: int, adopted: bool) -> None:
    world = taken_over()
    world.do(c.Unwant("client", [b"c"]))
    assert world.states("abc") == ["forgotten"] * 3
    wanted = int(TaskFlag.WANTED)
    world.do(c.BeginGraph("h", "client", 0.0, 0.0, flags=flags), c.AddTasks("h", 0, [b"a"], [b"other"], [wanted]), c.SealGraph("h"))
    assert (world.adopt(1, a=MEMORY)["a"].lease is not None) == adopted
    assert world.state("a") == ("memory" if adopted else "queued")


@pytest.mark.parametrize(("epoch", "adopted"), [(0, False), (1, True), (2, True), (3, False), (4, False), (2**64 - 1, False)])
def test_a_worker_is_believed_about_what_was_there_while_its_scheduler_lasted(epoch: int, adopted: bool) -> None:
    world = taken_over()
    world.begin_epoch()
    assert (world.adopt(epoch, a=MEMORY)["a"].lease is not None) == adopted


def test_data_can_be_adopted_and_is_lost_if_it_is_not() -> None:
    for brought in (True, False):
        world = World()
        world.add("g", {"a": [], "b": ["a"]}, want="b", a=TaskFlag.DATA | TaskFlag.HELD)
        world.finish("a")
        world.begin_epoch()
        if brought:
            lease = world.adopt(1, a=MEMORY)["a"].lease
            assert lease is not None
            assert lease.flags == TaskFlag.DATA
        result = world.do(c.EndRecovery())
        assert result.cancelled == ([] if brought else [c.Cancelled("", b"b")])
        assert world.state("b") == ("queued" if brought else "forgotten")


def test_flags_of_our_own_are_not_handed_out() -> None:
    world = World()
    world.add("g", CHAIN, want="c")
    world.lease(1, 1)
    world.do(c.Fail(world.id("a"), b"payload", "text"), c.Retry([b"c"]))
    world.begin_epoch()
    lease = world.adopt(1, b=MEMORY)["b"].lease
    assert lease is not None
    assert lease.flags == 0


@pytest.mark.parametrize(
    "command",
    [
        c.Adopt(1, [b"a", b"b"], [MEMORY]),
        c.Adopt(1, [b"a"], [MEMORY], [1, 2]),
        c.Adopt(1, [b"a", b"b"], [MEMORY, Level.OUT]),
    ],
)
def test_an_adopt_that_cannot_be_is_refused_whole(command: c.Adopt) -> None:
    world = taken_over()
    assert world.do(command).adopted == []
    assert [kind for _, _, kind, _ in world.refused] == ["invalid_request"]
    assert owner(world, "a") == 1


def test_tasks_that_arrive_held_are_the_schedulers() -> None:
    """Also one in memory with the scheduler before: this one has it, and not its result."""
    world = taken_over()
    world.add("h", {"a": [], "b": []}, want="ab", a=TaskFlag.HELD, b=TaskFlag.HELD)
    assert world.states("ab") == ["processing", "processing"]
    world.do(c.EndRecovery())
    assert world.states("ab") == ["processing", "processing"]


# -------------------------------------------------------------------------------------------------------------- the end


def test_what_nobody_claims_is_given_back() -> None:
    world = taken_over()
    world.adopt(1, a=MEMORY)
    world.do(c.EndRecovery(), c.EndRecovery())
    assert world.states("abc") == ["memory", "queued", "waiting"]
    assert not is_recovering(world)
    assert world.lease(9, 9) == ["b", "c"]


def test_it_is_given_back_in_bounded_steps() -> None:
    world = World()
    keys = [f"k{i:04}" for i in range(2000)]
    world.add("g", {key: [] for key in keys}, want=keys)
    world.lease(2000, 2000)
    world.begin_epoch()
    world.do(c.EndRecovery())
    assert 0 < sum(world.state(key) == "released" for key in keys) < 2000
    assert is_recovering(world)
    txn = world.store.write()
    world.engine.step(txn, 100)
    txn.commit()
    world.check()
    # Meanwhile workers may still come, and what is given back is leased.
    assert world.adopt(1, k1999=HELD)["k1999"].lease is not None
    assert world.lease(1, 1) == ["k0000"]
    world.drain(100)
    assert not is_recovering(world)
    assert [world.state(key) for key in ("k0000", "k0001", "k1998", "k1999")] == ["processing", "queued", "queued", "processing"]


def test_what_was_said_in_the_same_batch_counts() -> None:
    """The table of holds is behind the records then."""
    world = World()
    world.add("g", {"a": [], "b": [], "c": []}, want="abc")
    world.lease(3, 3)
    world.begin_epoch()
    ids = [world.id(key) for key in "abc"]
    world.do(c.Report(ids, [MEMORY, Level.ERRED, HELD]), c.EndRecovery())
    assert world.states("abc") == ["memory", "erred", "processing"]


def test_what_is_held_again_after_it_was_given_back_in_one_batch_is_the_schedulers() -> None:
    world = taken_over()
    # A known key: background work is done before it.
    world.do(c.EndRecovery(), c.BeginGraph("h", "client", 0.0, 0.0), c.AddTasks("h", 0, [b"c"]), c.Report([world.id("b")], [HELD]))
    assert (world.state("b"), owner(world, "b")) == ("processing", 2)


def test_a_newer_scheduler_waits_anew_for_what_was_about_to_be_given_back() -> None:
    world = World()
    keys = [f"k{i:04}" for i in range(1000)]
    world.add("g", {key: [] for key in keys}, want=keys)
    world.lease(1000, 1000)
    world.begin_epoch()
    world.do(c.EndRecovery())
    world.begin_epoch()
    world.drain()
    assert world.state("k0999") == "processing"
    assert world.adopt(1, k0999=HELD)["k0999"].lease is not None


def test_with_nothing_held_there_is_nothing_to_recover() -> None:
    world = taken_over()
    world.do(c.Unwant("client", [b"c"]))
    assert is_recovering(world)
    world.begin_epoch()
    assert not is_recovering(world)
    assert not world.do(c.EndRecovery())


# ---------------------------------------------------------------------------------------------------------- TakeWhole


def whole(world: World) -> c.Result:
    """a and b are in memory, c runs; d of another submission needs b."""
    world.do(
        c.BeginGraph("w", "client", 0.0, 0.0, flags=GraphFlag.WHOLE),
        c.AddTasks("w", 0, [b"a", b"b", b"c"], [], [0, 0, int(TaskFlag.WANTED)], [0, 1, 1], [0, 1], [1, 1, 0]),
        c.SealGraph("w"),
    )
    world.add("h", {"b": [], "d": ["b"]}, want="d", b=TaskFlag.EXTERNAL)
    world.lease(1, 1)
    world.finish("a")
    world.lease(1, 1)
    world.finish("b")
    world.lease(1, 1)
    world.begin_epoch()
    return world.do(c.TakeWhole("w"))


def test_a_whole_submission_is_taken_in_at_once() -> None:
    world = World()
    (answer,) = whole(world).whole
    assert (answer.submission, [lease.key for lease in answer.leases]) == ("w", [b"a", b"b", b"c"])
    assert [owner(world, key) for key in "abc"] == [2, 2, 2]


def test_nothing_of_an_unfinished_whole_is_adopted() -> None:
    world = World()
    whole(world)
    world.begin_epoch()
    assert world.adopt(2, a=MEMORY, c=HELD) == {"a": c.Adopted(b"a", MEMORY, None), "c": c.Adopted(b"c", HELD, None)}


def test_a_key_that_comes_twice_is_taken_once_and_an_unknown_submission_has_nothing() -> None:
    world = World()
    world.do(c.BeginGraph("w", "client", 0.0, 0.0), c.AddTasks("w", 0, [b"a", b"a"], flags=[int(TaskFlag.WANTED)] * 2), c.SealGraph("w"))
    assert [[lease.id for lease in answer.leases] for answer in world.do(c.TakeWhole("w"), c.TakeWhole("x")).whole] == [[1], []]


# ------------------------------------------------------------------------------------------------------------- told ids


def after_a_crash() -> World:
    world = World()
    txn = world.store.write()
    world.engine.opened(txn)
    txn.commit()
    return world


@pytest.mark.parametrize(
    ("keys", "told", "given"),
    [
        ([b"a", b"b"], [7, 8], [7, 8]),
        ([b"a", b"a", b"b"], [7, 7, 8], [7, 7, 8]),
        ([b"a", b"b"], [8, 7], None),
        ([b"a", b"b"], [7, 7], None),
        ([b"a", b"b"], [7, 9], None),
        ([b"a", b"b"], [0, 1], None),
        ([b"a"], [IDS_SKIPPED_AT_START + 1], None),
        ([b"a"], [2**63], None),
    ],
)
def test_ids_that_were_told_are_given_again_if_they_can_be(keys: list[bytes], told: list[int], given: list[int] | None) -> None:
    world = after_a_crash()
    flags = [int(TaskFlag.WANTED)] * len(keys)
    (added,) = world.do(c.BeginGraph("g", "client", 0.0, 0.0), c.AddTasks("g", 0, keys, flags=flags, told_ids=told)).added
    if given is None:
        assert added.ids == [IDS_SKIPPED_AT_START + 1 + at for at in range(len(keys))]
    else:
        assert added.ids == given
    # And no number is given twice.
    (more,) = world.do(c.AddTasks("g", len(keys), [b"x", b"y"], flags=[1, 1])).added
    assert set(more.ids).isdisjoint(added.ids)


def test_told_ids_that_are_taken_or_not_younger_than_what_they_depend_on_are_not_given() -> None:
    world = after_a_crash()
    world.do(c.BeginGraph("g", "client", 0.0, 0.0), c.AddTasks("g", 0, [b"a"], flags=[1], dependent_counts=[9], told_ids=[7]))
    for index, (told, deps) in enumerate([(7, []), (5, [0]), (6, [0])], 1):
        run = c.AddTasks("g", index, [b"k%d" % index], flags=[1], dep_counts=[len(deps)], deps=deps, told_ids=[told])
        assert world.do(run).added[0].ids[0] > IDS_SKIPPED_AT_START
    world.do(c.AddTasks("g", 4, [b"z"], told_ids=[1, 2]))
    assert [kind for _, _, kind, _ in world.refused] == ["invalid_request"]


# ----------------------------------------------------------------------------------------------------------------- Keep


def kept(world: World, section: bytes = b"") -> dict[bytes, bytes]:
    with world.store.read() as txn:
        return dict(recovery.kept(txn, section))


def test_kept_items_are_set_replaced_and_removed_and_outlive_the_scheduler() -> None:
    world = World()
    world.do(c.Keep([b"datasets\0a", b"datasets\0b", b"files\0a"], [b"1", b"2", b"3"]))
    world.do(c.Keep([b"datasets\0a", b"datasets\0b", b"none"], [b"", b"4", b""]))
    world.begin_epoch()
    assert kept(world) == {b"datasets\0b": b"4", b"files\0a": b"3"}
    assert kept(world, b"files\0") == {b"files\0a": b"3"}


@pytest.mark.parametrize(
    ("kind", "command"),
    [
        ("invalid_request", c.Keep([b"a", b"b"], [b"x"])),
        ("limit_exceeded", c.Keep([b"a", b""], [b"x", b"x"])),
        ("limit_exceeded", c.Keep([b"a", b"n" * (KEY_BYTES_MAX + 1)], [b"x", b"x"])),
    ],
)
def test_a_keep_that_cannot_be_is_refused_whole(kind: str, command: c.Keep) -> None:
    world = World()
    world.do(command)
    assert [refused for _, _, refused, _ in world.refused] == [kind]
    assert kept(world) == {}


def test_a_full_store_refuses_to_keep_and_takes_removals() -> None:
    free = [STORE_RESERVE_BYTES * 2]
    world = World(lambda: free[0])
    world.do(c.Keep([b"a"], [b"x"]))
    free[0] = STORE_RESERVE_BYTES
    world.do(c.Keep([b"b"], [b"x"]), c.Keep([b"a"], [b""]))
    assert [(position, kind) for position, _, kind, _ in world.refused] == [(0, "store_full")]
    assert kept(world) == {}


def test_two_names_of_one_digest_are_not_mixed_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recovery, "digest", lambda name: b"always the same!")
    world = World()
    world.do(c.Keep([b"a"], [b"x"]))
    with pytest.raises(StoreCorrupt):
        world.do(c.Keep([b"b"], [b"y"]))


# --------------------------------------------------------------------------------------------------- what is told of it


def test_a_new_scheduler_is_told_of_sealed_graphs_and_of_clients() -> None:
    world = World()
    world.do(c.BeginGraph("g", "alice", 3.0, 0.0, flags=GraphFlag.WHOLE), c.AddTasks("g", 0, [b"a", b"b"], flags=[1, 1], new_groups=["x"]))
    world.do(c.SealGraph("g"), c.Want("bob", [b"a"]))
    world.do(c.BeginGraph("open", "carol", 3.0, 0.0), c.AddTasks("open", 0, [b"a"]))
    world.lease(1, 1)
    world.finish("a")
    with world.store.read() as txn:
        assert list(recovery.graphs(txn)) == [recovery.StoredGraph("g", "alice", GraphFlag.WHOLE, 3.0, 2, 1, {"x": 2}, False)]
        assert sorted(recovery.clients(txn)) == ["alice", "bob"]
