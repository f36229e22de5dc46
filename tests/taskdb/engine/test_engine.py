"""One test a rule of docs/engine.md, the smallest graph that shows it."""

from __future__ import annotations

import pytest

from taskdb import commands as c
from taskdb.engine import refs, transitions
from taskdb.errors import InvalidRequest, StaleEpoch
from taskdb.limits import CHUNK_TASKS_MAX, KEY_BYTES_MAX, STORE_RESERVE_BYTES
from taskdb.model import Level, TaskFlag, TaskState
from taskdb.store.schema import Table
from tests.support.engine_world import World

CHAIN = {"a": [], "b": ["a"], "c": ["b"]}


def chain() -> World:
    world = World()
    world.add("g", CHAIN, want="c")
    return world


def test_a_chain_runs_and_is_forgotten() -> None:
    world = chain()
    assert world.states("abc") == ["queued", "waiting", "waiting"]
    assert world.lease(1, 1) == ["a"]
    assert world.finish("a").release == []
    assert world.lease(1, 1) == ["b"]
    assert world.finish("b").release == [world.id("a")]
    assert world.lease(1, 1) == ["c"]
    assert world.finish("c").release == [world.id("b")]
    assert world.states("abc") == ["released", "released", "memory"]
    last = world.id("c")
    result = world.do(c.Unwant("client", [b"c"]))
    assert result.release == [last]
    assert result.forgotten == [c.GroupCount("g", "group", 3)]
    with world.store.read() as txn:
        left = {table.name for table in Table if txn.count(table)}
    assert left == {"META", "SESSIONS", "EPOCHS"}


def test_a_lease_carries_everything() -> None:
    world = World()
    world.do(
        c.BeginGraph("g", "client", 2.0, 0.0),
        c.AddTasks(
            "g", 0, [b"a", b"b"], [b"A", b"B"], [0, int(TaskFlag.WANTED | TaskFlag.DATA_PRODUCER)], [0, 1], [0], [1, 0],
            [5.0, 4.0], [0.0, -1.0], [0, 1], ["x", "y"], [0, 1], [b"notes"],
        ),
    )  # fmt: skip
    world.do(c.Report([2], [Level.OUT], [], [3], [1]))
    txn = world.store.write()
    leases, _ = world.engine.lease(txn, 0, 9)
    txn.commit()
    assert leases == [
        c.Lease(1, b"a", b"A", 0, c.Rank(0.0, 2.0, 5.0), [], "x", "g", b"", -1, 0, [], 1),
        c.Lease(
            2, b"b", b"B", int(TaskFlag.DATA_PRODUCER), c.Rank(-1.0, 2.0, 4.0), [1], "y", "g", b"notes", 3, 1, ["client"], 0, 1 << 32 | 1
        ),
    ]


def test_look_ahead_goes_by_rank_and_never_past_a_task_on_disk() -> None:
    world = World()
    # d stands before c in the order, and becomes possible once a is leased.
    world.add("g", {"a": [], "b": ["a"], "c": [], "d": ["b", "c"]}, want="d")
    assert world.lease(1, 2) == ["a", "b"]
    assert world.state("d") == "waiting"
    assert world.lease(0, 5) == ["c", "d"]


def test_ready_comes_before_look_ahead() -> None:
    world = World()
    world.add("g", {"a": [], "b": ["a"], "c": [], "d": []}, want="bcd")
    assert world.lease(2, 3) == ["a", "c", "b"]


def test_a_lost_result_is_computed_again_with_all_it_needs() -> None:
    world = chain()
    world.lease(9, 9)
    world.finish("a", "b")
    world.finish("c")
    assert world.states("abc") == ["released", "released", "memory"]
    world.report(Level.OUT, "c")
    assert world.states("abc") == ["queued", "waiting", "waiting"]


def test_a_lease_given_back_is_queued_again() -> None:
    world = chain()
    world.lease(2, 2)
    world.report(Level.OUT, "a", "b")
    assert world.states("ab") == ["queued", "waiting"]


def test_released_together_nothing_is_computed_again() -> None:
    world = World()
    world.add("g", {"a": [], "b": ["a"]}, want="b")
    world.lease(9, 9)
    world.finish("a")
    world.do(c.Unwant("client", [b"b"]))
    assert world.states("ab") == ["forgotten", "forgotten"]


def test_an_error_fails_what_depends_on_it_and_tells_who_wants_it() -> None:
    world = chain()
    world.lease(1, 1)
    result = world.do(c.Fail(world.id("a"), b"payload", "text"))
    assert world.states("abc") == ["erred"] * 3
    assert result.erred == [c.Erred("client", b"c", b"a", b"payload")]
    result = world.do(c.Want("other", [b"b"]))
    assert result.wants == [c.WantState("other", b"b", world.id("b"), TaskState.ERRED, b"a", b"payload")]


def test_leased_dependents_are_left_to_the_scheduler() -> None:
    world = chain()
    world.lease(9, 2)
    result = world.do(c.Fail(world.id("a"), b"payload", "text"))
    assert world.states("abc") == ["erred", "processing", "queued"]
    assert result.erred == []
    result = world.do(c.Blame(world.id("b"), world.id("a")))
    assert world.states("abc") == ["erred"] * 3
    assert result.erred == [c.Erred("client", b"c", b"a", b"payload")]


def test_retry_finds_the_task_that_failed() -> None:
    world = chain()
    world.lease(1, 1)
    world.do(c.Fail(world.id("a"), b"payload", "text"))
    world.do(c.Retry([b"c"]))
    assert world.states("abc") == ["queued", "waiting", "waiting"]


def test_a_revived_task_is_named_for_release_once() -> None:
    """The scheduler may hold it as failed."""
    world = chain()
    a, b, c_ = (world.id(key) for key in "abc")
    world.lease(1, 1)
    world.do(c.Fail(a, b"payload", "text"))
    world.do(c.Retry([b"c"]))
    assert world.states("abc") == ["queued", "waiting", "waiting"]
    assert world.finish("b").release == [a]
    assert sorted(world.do(c.Unwant("client", [b"c"])).release) == [b, c_]


def test_a_revived_task_that_was_leased_is_like_any_other() -> None:
    world = chain()
    world.lease(1, 1)
    world.do(c.Fail(world.id("a"), b"payload", "text"))
    world.do(c.Retry([b"c"]))
    assert world.lease(1, 1) == ["a"]
    world.report(Level.OUT, "a")
    assert world.finish("b").release == []
    assert world.states("ab") == ["released", "memory"]


def test_a_revived_task_that_fails_again_is_kept() -> None:
    """It is ERRED for whoever comes: not released, though nobody that can run needs it."""
    world = chain()
    world.lease(1, 1)
    world.do(c.Fail(world.id("a"), b"payload", "text"))
    world.do(c.Retry([b"c"]))
    assert world.do(c.Fail(world.id("a"), b"payload", "text")).release == []
    assert world.states("abc") == ["erred"] * 3


def test_a_new_dependent_of_an_erred_task_fails() -> None:
    world = chain()
    world.lease(1, 1)
    world.do(c.Fail(world.id("a"), b"payload", "text"))
    result = world.add("h", {"a": [], "d": ["a"]}, want="d", a=TaskFlag.EXTERNAL)
    assert world.state("d") == "erred"
    assert result.erred == [c.Erred("client", b"d", b"a", b"payload")]


def test_an_existing_erred_key_that_is_wanted_is_told() -> None:
    world = chain()
    world.lease(1, 1)
    world.do(c.Fail(world.id("a"), b"payload", "text"))
    assert world.add("h", {"c": []}, want="c").erred == [c.Erred("client", b"c", b"a", b"payload")]


def test_lost_data_cancels_its_dependents() -> None:
    world = World()
    world.add("g", {"a": [], "b": ["a"]}, want="b", a=TaskFlag.DATA | TaskFlag.HELD)
    world.finish("a")
    assert world.states("ab") == ["memory", "queued"]
    result = world.report(Level.OUT, "a")
    assert result.cancelled == [c.Cancelled("", b"b")]
    assert result.erred == []
    assert world.states("ab") == ["forgotten", "forgotten"]


def test_cancel_takes_dependents_along_but_not_what_others_want() -> None:
    world = chain()
    world.do(c.Want("other", [b"c"]), c.Want("client", [b"a"]))
    result = world.do(c.Cancel("client", [b"a"], False))
    assert result.cancelled == [c.Cancelled("", b"a")]
    assert world.state("c") == "waiting"
    result = world.do(c.Cancel("client", [b"a"], True))
    assert result.cancelled == [c.Cancelled("", b"c")]
    assert world.states("abc") == ["forgotten"] * 3


def test_dropping_a_client_runs_in_steps() -> None:
    world = World()
    world.add("g", {f"k{i:04}": [] for i in range(700)}, want=[f"k{i:04}" for i in range(700)])
    result = world.do(c.DropClient("client"))
    assert 0 < sum(count.count for count in result.forgotten) + 1 < 700
    counts = [sum(count.count for count in done.forgotten) for done in world.drain(50)]
    assert max(counts) <= 50


def test_a_name_means_a_new_client_while_the_old_one_is_dropped() -> None:
    world = World()
    keys = [f"k{i:04}" for i in range(900)]
    world.add("g", {key: [] for key in keys}, want=keys)
    world.do(c.DropClient("client"), c.Want("client", [b"k0899"]))
    world.drain()
    assert world.state("k0899") == "queued"
    assert world.state("k0898") == "forgotten"


# ------------------------------------------------------------------------------------------------------------ submissions


def test_tasks_are_live_before_the_seal_and_kept_for_what_is_to_come() -> None:
    world = World()
    world.do(c.BeginGraph("g", "client", 0.0, 0.0), c.AddTasks("g", 0, [b"a"], dependent_counts=[1]))
    assert world.lease(1, 1) == ["a"]
    assert world.finish("a").release == []
    assert world.state("a") == "memory"
    world.do(c.AddTasks("g", 1, [b"b"], flags=[int(TaskFlag.WANTED)], dep_counts=[1], deps=[0]), c.SealGraph("g"))
    assert world.states("ab") == ["memory", "queued"]


def test_a_seal_lets_go_of_dependents_that_never_came() -> None:
    world = World()
    world.do(c.BeginGraph("g", "client", 0.0, 0.0), c.AddTasks("g", 0, [b"a"], dependent_counts=[5]))
    world.do(c.SealGraph("g"))
    assert world.state("a") == "forgotten"


def test_a_known_key_keeps_its_id_and_is_needed_once_more() -> None:
    world = chain()
    world.lease(9, 9)
    world.finish("a", "b", "c")
    assert world.state("b") == "released"
    before = world.id("b")
    result = world.add("h", {"b": [], "d": ["b"]}, want="d")
    assert result.added[0].ids == [before, world.id("d")]
    assert world.states("abd") == ["queued", "waiting", "waiting"]


def test_external_keys_that_are_missing_are_named() -> None:
    """And nothing of the graph is added: it would run without its input."""
    world = World()
    result = world.add("g", {"x": [], "b": ["x"]}, want="b", seal=False, x=TaskFlag.EXTERNAL)
    assert result.added == [c.Added("g", 0, [0, 0], [b"x"], [0, 1])]
    assert world.lease(1, 1) == []
    assert world.state("b") == "forgotten"


def test_a_key_that_was_let_go_of_and_comes_again_is_a_new_task() -> None:
    """In one batch, and with what it depends on: else the first one's spec would run, or its result be taken."""
    world = World()
    world.add("g", {"a": [], "b": ["a"]}, want="b")
    old = world.id("a"), world.id("b")
    wanted = int(TaskFlag.WANTED)
    world.do(
        c.Unwant("client", [b"b"]),
        c.BeginGraph("h", "client", 1.0, 0.0),
        c.AddTasks("h", 0, [b"a", b"b"], [b"A2", b"B2"], [0, wanted], [0, 1], [0], [1, 0]),
        c.SealGraph("h"),
    )
    assert world.id("a") not in old
    assert world.id("b") not in old
    assert world.lease(2, 2) == ["a", "b"]


def test_an_input_that_was_let_go_of_in_the_same_batch_is_missing() -> None:
    """As in stock: what nobody wants any more is forgotten before the next graph comes."""
    world = World()
    world.add("g", {"a": []}, want="a")
    flags = [int(TaskFlag.EXTERNAL), int(TaskFlag.WANTED)]
    result = world.do(
        c.Unwant("client", [b"a"]),
        c.BeginGraph("h", "client", 1.0, 0.0),
        c.AddTasks("h", 0, [b"a", b"b"], [b"", b"B"], flags, [0, 1], [0], [1, 0]),
    )
    assert result.added == [c.Added("h", 0, [0, 0], [b"a"], [0, 1])]
    assert world.state("b") == "forgotten"


def test_a_missing_input_ends_the_submission_with_what_came_before() -> None:
    world = World()
    world.do(c.BeginGraph("g", "client", 0.0, 0.0), c.AddTasks("g", 0, [b"a"], dependent_counts=[1]))
    external = int(TaskFlag.EXTERNAL)
    result = world.do(c.AddTasks("g", 1, [b"x", b"b"], flags=[external, 0], dep_counts=[0, 1], deps=[0]), c.SealGraph("g"))
    assert result.added == [c.Added("g", 1, [0, 0], [b"x"], [0, 1])]
    assert [refused[:3] for refused in world.refused] == [(1, "g", "invalid_request")]
    assert world.states("ab") == ["forgotten", "forgotten"]


def test_what_an_open_submission_found_stays_until_it_is_sealed() -> None:
    world = chain()
    world.add("h", {"c": []}, seal=False)
    world.do(c.Unwant("client", [b"c"]))
    assert world.state("c") == "waiting"
    world.do(c.SealGraph("h"))
    assert world.state("c") == "forgotten"


def test_a_key_that_comes_twice_is_kept_for_the_dependents_of_both() -> None:
    world = World()
    world.do(c.BeginGraph("g", "client", 0.0, 0.0), c.AddTasks("g", 0, [b"a", b"a"], dependent_counts=[0, 1]))
    wanted = int(TaskFlag.WANTED)
    world.do(c.AddTasks("g", 2, [b"b"], flags=[wanted], dep_counts=[1], deps=[1]), c.SealGraph("g"))
    assert world.refused == []
    assert world.states("ab") == ["queued", "waiting"]


def test_an_abort_forgets_only_what_came_with_it() -> None:
    world = chain()
    world.add("h", {"c": [], "d": ["c"], "e": []}, want="cde", seal=False)
    world.do(c.Want("other", [b"e"]))
    world.do(c.AbortGraph("h"))
    assert world.states("abcde") == ["queued", "waiting", "waiting", "forgotten", "queued"]


def test_a_sealed_submission_takes_no_more() -> None:
    world = chain()
    result = world.do(c.BeginGraph("g", "client", 0.0, 0.0), c.AddTasks("g", 0, [b"c", b"new"]), c.SealGraph("g"))
    assert result.added == [c.Added("g", 0, [world.id("c"), 0], [], [0, 1])]
    assert world.refused == []
    assert world.state("new") == "forgotten"


def test_held_tasks_arrive_leased() -> None:
    world = World()
    world.add("g", CHAIN, want="c", a=TaskFlag.HELD, b=TaskFlag.HELD, c=TaskFlag.HELD)
    assert world.states("abc") == ["processing"] * 3
    assert world.finish("a", "b").release == [world.id("a")]


@pytest.mark.parametrize(
    ("kind", "add"),
    [
        ("invalid_request", c.AddTasks("g", 2, [b"n"])),
        ("invalid_request", c.AddTasks("g", 1, [b"n", b""])),
        ("limit_exceeded", c.AddTasks("g", 1, [b"n" * (KEY_BYTES_MAX + 1)])),
        ("limit_exceeded", c.AddTasks("g", 1, [b"n"] * (CHUNK_TASKS_MAX + 1))),
        ("invalid_request", c.AddTasks("g", 1, [b"n"], dep_counts=[1], deps=[1])),
        ("invalid_request", c.AddTasks("g", 1, [b"n"], dep_counts=[1], deps=[-1])),
        ("invalid_request", c.AddTasks("g", 1, [b"n"], dep_counts=[2], deps=[0])),
        ("invalid_request", c.AddTasks("g", 1, [b"n"], specs=[b"", b""])),
        ("invalid_request", c.AddTasks("g", 1, [b"n"], flags=[64])),
        ("invalid_request", c.AddTasks("g", 1, [b"n"], groups=[0])),
        ("invalid_request", c.AddTasks("g", 1, [b"n"], shared=[1])),
        ("invalid_request", c.AddTasks("g", 1, [b"n"], orders=[float("nan")])),
        ("invalid_request", c.AddTasks("other", 0, [b"n"])),
    ],
)
def test_a_refused_run_leaves_nothing_and_the_rest_of_the_batch_stands(kind: str, add: c.AddTasks) -> None:
    world = World()
    world.do(c.BeginGraph("g", "client", 0.0, 0.0), c.AddTasks("g", 0, [b"a"], flags=[int(TaskFlag.WANTED)]))
    world.add("h", {"z": []})
    world.do(add, c.Want("client", [b"z"]), c.BeginGraph("i", "client", 0.0, 0.0))
    assert [(position, submission, refused) for position, submission, refused, _ in world.refused] == [(0, add.submission, kind)]
    assert world.state("n") == "forgotten"
    assert world.state("a") == ("forgotten" if add.submission == "g" else "queued")
    assert world.do(c.SealGraph("i")) is not None
    assert world.refused == []


def test_a_full_store_refuses_new_tasks_and_takes_reports() -> None:
    free = [STORE_RESERVE_BYTES * 2]
    world = World(lambda: free[0])
    world.add("g", CHAIN, want="c")
    free[0] = STORE_RESERVE_BYTES
    world.add("h", {"d": []}, want="d")
    assert [(position, kind) for position, _, kind, _ in world.refused] == [(1, "store_full"), (2, "invalid_request")]
    assert world.state("d") == "forgotten"
    world.lease(9, 9)
    world.finish("a", "b", "c")
    assert world.state("c") == "memory"


# ------------------------------------------------------------------------------------------------------- epochs, sequence


def test_a_lower_epoch_writes_nothing() -> None:
    world = chain()
    txn = world.store.write()
    world.engine.begin_epoch(txn, "next")
    for epoch in (world.epoch, world.epoch + 2):
        with pytest.raises(StaleEpoch):
            world.engine.apply(txn, epoch, 1, [c.DropClient("client")])
        with pytest.raises(StaleEpoch):
            world.engine.resync(txn, epoch, [])
    txn.abort()
    assert world.state("c") == "waiting"


def test_a_new_epoch_keeps_wants_and_what_is_held_and_aborts_what_is_open() -> None:
    world = chain()
    world.add("h", {"c": [], "d": ["c"]}, want="d", seal=False)
    world.lease(2, 2)
    world.finish("a")
    world.begin_epoch()
    assert world.states("abcd") == ["memory", "processing", "queued", "forgotten"]
    # What c needs is (or was) with the old scheduler's workers.
    assert world.lease(9, 9) == []


def test_a_repeated_seq_changes_nothing_and_a_gap_is_refused() -> None:
    world = chain()
    txn = world.store.write()
    assert world.engine.last_seq(txn, world.epoch) == 1
    assert world.engine.apply(txn, world.epoch, 1, [c.DropClient("client")]) == (c.Result(), [])
    with pytest.raises(InvalidRequest):
        world.engine.apply(txn, world.epoch, 3, [])
    txn.abort()
    assert world.state("c") == "waiting"


def test_resync_says_again_what_was_missed() -> None:
    world = chain()
    world.lease(2, 2)
    a, b, last = (world.id(key) for key in "abc")
    txn = world.store.write()
    result = world.engine.resync(txn, world.epoch, [a, last, 99])
    txn.commit()
    world.check()
    assert [lease.id for lease in result.leases] == [b]
    assert result.release == [99]
    assert world.states("abc") == ["processing"] * 3


# ----------------------------------------------------------------------------------------------------------------- bounds


def test_a_hub_is_linear_both_ways(monkeypatch: pytest.MonkeyPatch) -> None:
    """A task with many dependencies, and one with many dependents: each neighbour is adjusted a few times, not once for each other."""
    adjusted = 0
    adjust = transitions._adjust

    def counting(*args: object) -> None:
        nonlocal adjusted
        adjusted += 1
        adjust(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(transitions, "_adjust", counting)
    world = World()
    width = 1000
    middle = [f"m{i:04}" for i in range(width)]
    world.add("g", {"a": [], **{key: ["a"] for key in middle}, "z": middle}, want="z")
    while keys := world.lease(200, 200):
        world.finish(*keys)
    assert world.state("z") == "memory"
    assert adjusted <= 4 * width + 10


def test_colliding_digests(monkeypatch: pytest.MonkeyPatch) -> None:
    from taskdb.engine import invariants, tables, wants

    for module in (refs, tables, wants, invariants):
        monkeypatch.setattr(module, "digest", lambda name: b"always the same!")
    world = chain()
    world.add("h", {"d": [], "e": ["d"]}, want="e")
    world.lease(1, 1)
    world.finish("a")
    world.do(c.Want("other", [b"b"]), c.Unwant("client", [b"c"]))
    assert world.states("abcde") == ["memory", "queued", "forgotten", "queued", "waiting"]
    assert world.lease(2, 2) == ["d", "b"]


def test_what_is_reported_and_not_known_need_not_be_held() -> None:
    world = World()
    assert world.do(c.Report([77, 78], [Level.MEMORY, Level.OUT])).release == [77]
