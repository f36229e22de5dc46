"""Pins of everything private or replaced in distributed: names, signatures, and what the adapter relies on that they do.

A failure here after an upgrade names the touch point that must be read again.
"""

from __future__ import annotations

import ast
import asyncio
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import distributed
import pytest
from dask._task_spec import Task, TaskRef
from distributed import Client, Worker
from distributed.diagnostics.progress import MultiProgress, Progress
from distributed.protocol.serialize import Serialized, ToPickle, serialize
from distributed.recreate_tasks import ReplayTaskScheduler
from distributed.scheduler import ClientState, Scheduler, TaskState
from distributed.spans import SpansSchedulerExtension

from scheduler_adapter import dask_internals as internals
from scheduler_adapter import supported
from scheduler_adapter.dask_groups import GroupLedger
from scheduler_adapter.specs import StoredSpec, pickle_spec
from tests.e2e import functions as f

# ----------------------------------------------------------------------------------------------------------- supported


def test_this_distributed_is_supported() -> None:
    supported.check_supported()
    supported.check_supported(distributed.__version__)


@pytest.mark.parametrize("version", ["2026.8.0", "2026.8.1", "2026.8.0+12.gabcdef"])
def test_versions_in_the_range(version: str) -> None:
    supported.check_supported(version)


@pytest.mark.parametrize("version", ["2026.7.9", "2025.12.0", "2026.9.0", "2027.1.0", "1.0"])
def test_versions_outside_the_range_are_refused(version: str) -> None:
    with pytest.raises(supported.UnsupportedDask, match="not supported") as caught:
        supported.check_supported(version)
    said = str(caught.value)
    assert "\n" not in said
    assert version in said
    assert "2026.8" in said
    assert "2026.9" in said
    assert "install" in said


def test_the_range_is_that_of_the_distribution() -> None:
    text = (Path(internals.__file__).parents[1] / "pyproject.toml").read_text()
    (low, high) = supported.SUPPORTED
    for name in ("dask", "distributed"):
        assert f'"{name}>={low[0]}.{low[1]},<{high[0]}.{high[1]}"' in text


# ---------------------------------------------------------------------------------------------------------- signatures

#: Parameters each touch point is called with or replaces, in order.
SIGNATURES: dict[tuple[type, str], list[str]] = {
    (Scheduler, "update_graph"): [
        "client",
        "expr_ser",
        "keys",
        "span_metadata",
        "internal_priority",
        "submitting_task",
        "user_priority",
        "actors",
        "fifo_timeout",
        "code",
        "annotations",
        "stimulus_id",
    ],
    (Scheduler, "_create_taskstate_from_graph"): [
        "start",
        "dsk",
        "keys",
        "ordered",
        "client",
        "annotations_by_type",
        "global_annotations",
        "stimulus_id",
        "submitting_task",
        "span_metadata",
        "user_priority",
        "actors",
        "fifo_timeout",
        "code",
    ],
    (Scheduler, "_find_lost_dependencies"): ["dsk", "keys"],
    (Scheduler, "new_task"): ["key", "spec", "state", "computation"],
    (Scheduler, "_apply_annotations"): ["tasks", "annotations_by_type", "global_annotations"],
    (Scheduler, "_client_releases_keys"): ["keys", "cs", "recommendations"],
    (Scheduler, "_task_to_msg"): ["ts"],
    (Scheduler, "_get_prefix_duration"): ["prefix"],
    (Scheduler, "transitions"): ["recommendations", "stimulus_id"],
    (Scheduler, "stimulus_queue_slots_maybe_opened"): ["stimulus_id"],
    (Scheduler, "stimulus_cancel"): ["keys", "client", "force", "reason", "msg"],
    (Scheduler, "stimulus_retry"): ["keys", "client"],
    (Scheduler, "client_desires_keys"): ["keys", "client"],
    (Scheduler, "client_releases_keys"): ["keys", "client", "stimulus_id"],
    (Scheduler, "remove_client"): ["client", "stimulus_id"],
    (Scheduler, "update_data"): ["who_has", "nbytes", "client"],
    (Scheduler, "restart"): ["client", "timeout", "wait_for_workers", "stimulus_id"],
    (Scheduler, "report"): ["msg", "ts", "client"],
    (Scheduler, "report_on_key"): ["key", "ts", "client"],
    (Scheduler, "client_send"): ["client", "msg"],
    (Scheduler, "adaptive_target"): ["target_duration"],
    (Scheduler, "get_task_status"): ["keys"],
    (SpansSchedulerExtension, "observe_tasks"): ["tss", "code", "span_metadata"],
    (ReplayTaskScheduler, "get_error_cause"): ["args", "keys", "kwargs"],
    (ReplayTaskScheduler, "get_runspec"): ["args", "key", "kwargs"],
    (Progress, "setup"): [],
    (MultiProgress, "setup"): [],
    (TaskState, "add_dependency"): ["other"],
}


@pytest.mark.parametrize(("owner", "name"), SIGNATURES, ids=lambda x: getattr(x, "__name__", x))
def test_signatures(owner: type, name: str) -> None:
    found = list(inspect.signature(inspect.unwrap(getattr(owner, name))).parameters)
    if owner in (Progress, MultiProgress):
        # May have been replaced in this process already.
        assert found in ([], ["self"])
    else:
        assert found[1:] == SIGNATURES[owner, name]


def test_coroutines_are_coroutines() -> None:
    for name in ("update_graph", "restart"):
        assert inspect.iscoroutinefunction(getattr(Scheduler, name)), name
    for name in ("stimulus_cancel", "stimulus_retry", "update_data", "client_desires_keys", "client_releases_keys", "remove_client"):
        assert not inspect.iscoroutinefunction(getattr(Scheduler, name)), name


def test_every_private_name_is_pinned_here() -> None:
    """Names with an underscore that the module uses of distributed's objects stand in this file."""
    tree = ast.parse(Path(internals.__file__).read_text())
    own = {n.name for n in ast.walk(tree) if isinstance(n, ast.FunctionDef)} | {"_scheduler", "_debts", "_steps", "_progress_asks"}
    used = {n.attr for n in ast.walk(tree) if isinstance(n, ast.Attribute) and n.attr.startswith("_") and not n.attr.startswith("__")}
    here = Path(__file__).read_text()
    assert [name for name in sorted(used - own) if name not in here] == []


# ------------------------------------------------------------------------------------------------- a scheduler in here


WORKERS: list[Worker] = []


@asynccontextmanager
async def scheduler(workers: int = 0) -> AsyncIterator[Scheduler]:
    async with Scheduler(port=0, host="127.0.0.1", dashboard=False, validate=True) as s:
        WORKERS[:] = [await Worker(s.address, nthreads=1) for _ in range(workers)]
        try:
            yield s
        finally:
            for worker in WORKERS:
                await worker.close()


def on_scheduler(workers: int = 0) -> Callable[[Callable[[Scheduler], Awaitable[None]]], Callable[[], None]]:
    def decorate(test: Callable[[Scheduler], Awaitable[None]]) -> Callable[[], None]:
        async def play() -> None:
            async with scheduler(workers) as s:
                await asyncio.wait_for(test(s), 30)

        def run() -> None:
            asyncio.run(play())

        run.__name__, run.__doc__ = test.__name__, test.__doc__
        return run

    return decorate


def spec(key: str, *deps: str) -> StoredSpec:
    return StoredSpec(pickle_spec(Task(key, f.first, 1, *[TaskRef(d) for d in deps])), frozenset(deps))


async def until(condition: Callable[[], Any]) -> None:
    while not condition():
        await asyncio.sleep(0.01)


@on_scheduler()
async def test_names_that_are_replaced_or_read(s: Scheduler) -> None:
    for op in (
        "update-graph",
        "client-desires-keys",
        "client-releases-keys",
        "cancel-keys",
        "close-client",
        "update-data",
        "report-key",
        "heartbeat-client",
    ):
        assert op in s.stream_handlers, op
    for op in (
        "restart",
        "retry",
        "update_data",
        "get_task_status",
        "get_error_cause",
        "get_runspec",
        "adaptive_target",
        "variable_set",
        "queue_put",
    ):
        assert op in s.handlers, op
    assert s._active_graph_updates == 0
    assert isinstance(s._last_time, (int, float))
    assert isinstance(s.generation, (int, float))
    assert {("released", "forgotten"), ("memory", "forgotten"), ("released", "waiting")} <= set(type(s)._TRANSITIONS_TABLE)
    assert list(inspect.signature(type(s)._TRANSITIONS_TABLE["memory", "forgotten"]).parameters) == ["self", "key", "stimulus_id"]
    assert "spans" in s.extensions
    assert s.idle_task_count is not None
    assert hasattr(s._ongoing_background_tasks, "call_soon")
    assert s.UNKNOWN_TASK_DURATION > 0


@on_scheduler()
async def test_undo_takes_everything_back(s: Scheduler) -> None:
    handlers, streams = dict(s.handlers), dict(s.stream_handlers)
    undo = internals.Undo()
    undo.set_item(s.handlers, "retry", 1)
    undo.set_item(s.stream_handlers, "no-such-op", 2)
    undo.set_attr(s, "stimulus_cancel", 3)
    internals.suppress_cancelled(s, undo, lambda ts: True)
    internals.send_stored_specs(s, undo)
    assert (s.handlers["retry"], s.stream_handlers["no-such-op"], s.stimulus_cancel) == (1, 2, 3)
    undo.run()
    assert (dict(s.handlers), dict(s.stream_handlers)) == (handlers, streams)
    for name in ("stimulus_cancel", "_TRANSITIONS_TABLE", "_task_to_msg"):
        assert name not in s.__dict__


@on_scheduler()
async def test_stock_looks_its_table_up_on_the_instance(s: Scheduler) -> None:
    """Else a shadow of `_TRANSITIONS_TABLE` or `_task_to_msg` would have no effect."""
    assert "self._TRANSITIONS_TABLE" in inspect.getsource(type(s)._transition)
    assert "self._task_to_msg(" in inspect.getsource(Scheduler)


def test_expression_that_cannot_be_unpickled() -> None:
    header, frames = serialize(f.CannotBeUnpickled(), serializers=["pickle"])
    with pytest.raises(RuntimeError, match="Error during deserialization of the task graph"):
        internals.load_expr(Serialized(header, frames))
    assert "Error during deserialization of the task graph" in inspect.getsource(Scheduler.update_graph)


@on_scheduler()
async def test_active_graph_updates_keep_it_from_being_idle(s: Scheduler) -> None:
    s.idle_timeout = 0.01
    assert s.check_idle() is not None or s.check_idle() is not None
    internals.graph_update_begins(s)
    assert s.check_idle() is None
    internals.graph_update_ends(s)
    assert s._active_graph_updates == 0


@on_scheduler()
async def test_generations_go_as_stocks(s: Scheduler) -> None:
    """As `_set_priorities`: a new one after the FIFO timeout, below its own for a nested graph."""
    first = internals.next_generation(s, None, "100ms", start=1000.0)
    assert internals.next_generation(s, None, "100ms", start=1000.05) == first
    later = internals.next_generation(s, None, "100ms", start=1001.0)
    assert later > first
    ts = s.new_task("t", spec("t"), "released")
    ts.priority = (0, later, 5)
    assert internals.next_generation(s, "t", "100ms", start=2000.0) < later
    assert "self._last_time + fifo_timeout < start" in inspect.getsource(Scheduler._set_priorities)
    assert "- 0.01" in inspect.getsource(Scheduler._set_priorities)


@on_scheduler()
async def test_holder_keeps_a_result_and_is_no_client(s: Scheduler) -> None:
    holder = internals.holder()
    assert isinstance(holder, ClientState)
    ts = s.new_task("t", spec("t"), "released")
    internals.hold(ts, holder)
    internals.hold(ts, holder)
    assert ts.who_wants == {holder}
    assert holder.wants_what == {ts}
    assert internals.HOLDER not in s.clients
    internals.unhold(ts, holder)
    assert not ts.who_wants
    assert not holder.wants_what


def linked(s: Scheduler) -> dict[str, TaskState]:
    """a <- b <- c."""
    tasks = {key: s.new_task(key, spec(key), "released") for key in "abc"}
    tasks["b"].add_dependency(tasks["a"])
    tasks["c"].add_dependency(tasks["b"])
    return tasks


@on_scheduler()
async def test_links_are_cut_and_made(s: Scheduler) -> None:
    t = linked(s)
    internals.unlink(t["b"])
    assert t["b"].dependencies == set()
    assert t["a"].dependents == set()
    assert t["b"].has_lost_dependencies
    internals.relink(t["b"], [t["a"]])
    assert t["b"].dependencies == {t["a"]}
    assert t["a"].dependents == {t["b"]}
    assert not t["b"].has_lost_dependencies
    internals.cut_dependents(t["b"])
    assert t["c"].dependencies == set()
    assert t["c"].has_lost_dependencies
    assert t["b"].dependents == set()


@on_scheduler(workers=1)
async def test_let_go_frees_the_result_on_its_worker(s: Scheduler) -> None:
    holder = internals.holder()
    ts = s.new_task("t", spec("t"), "released")
    ts.priority = (0, 0, 0)
    internals.hold(ts, holder)
    internals.observe(s, [ts], None, ())
    undo = internals.Undo()
    internals.send_stored_specs(s, undo)
    s.transitions({"t": "waiting"}, "test")
    await until(lambda: ts.state == "memory")
    (ws,) = ts.who_has
    await asyncio.sleep(0)
    assert ts in ws.has_what, "kept, though no client wants it"
    internals.unlink(ts)
    internals.let_go(s, holder, [ts], "test")
    assert ts.state == "forgotten"
    assert "t" not in s.tasks
    assert ts not in ws.has_what
    undo.run()


@on_scheduler(workers=1)
async def test_stored_spec_is_run_by_a_stock_worker(s: Scheduler) -> None:
    undo = internals.Undo()
    internals.send_stored_specs(s, undo)
    ts = s.new_task("sum", StoredSpec(pickle_spec(Task("sum", f.add, 20, 22))), "released")
    ts.priority = (0, 0, 0)
    internals.observe(s, [ts], None, ())
    internals.hold(ts, internals.holder())
    s.transitions({"sum": "waiting"}, "test")
    await until(lambda: ts.state == "memory")
    (worker,) = WORKERS
    assert worker.data["sum"] == 42
    assert type(s._task_to_msg(ts)["run_spec"]) is Serialized
    plain = s.new_task("plain", Task("plain", f.inc, 1), "released")
    plain.priority = (0, 0, 1)
    assert type(s._task_to_msg(plain)["run_spec"]) is ToPickle, "objects go as stock sends them"


@on_scheduler()
async def test_tasks_that_run_again_are_not_told_cancelled(s: Scheduler) -> None:
    told: list[Any] = []
    s.send_all = lambda client_msgs, worker_msgs: told.extend(m for ms in client_msgs.values() for m in ms)  # type: ignore[method-assign]
    for ours in (True, False):
        undo = internals.Undo()
        internals.suppress_cancelled(s, undo, lambda ts, ours=ours: ours)
        cs = s.clients[f"c-{ours}"] = ClientState("c")
        ts = s.new_task(f"t-{ours}", spec("t"), "released")
        internals.hold(ts, cs)
        ts.has_lost_dependencies = True
        s.transitions({ts.key: "forgotten"}, "test")
        assert ts.key not in s.tasks
        assert not cs.wants_what
        assert bool(told) is not ours
        undo.run()


@on_scheduler()
async def test_stubs_satisfy_stocks_validation(s: Scheduler) -> None:
    internals.new_stub(s, "here", None)
    erred = internals.new_stub(s, "failed", (Serialized({}, []), Serialized({}, [])))
    s.validate_state()
    assert erred.exception_blame is erred
    assert s.tasks["here"].has_lost_dependencies


@on_scheduler()
async def test_annotations_are_read_by_stock(s: Scheduler) -> None:
    ts = s.new_task("t", spec("t"), "released")
    internals.annotate(
        s,
        ts,
        {"workers": ["tcp://127.0.0.1:5"], "resources": {"GPU": 1}, "retries": 3, "allow_other_workers": True, "priority": 9, "note": "x"},
    )
    assert ts.worker_restrictions == {"tcp://127.0.0.1:5"}
    assert ts.resource_restrictions == {"GPU": 1}
    assert (ts.retries, ts.loose_restrictions, ts.annotations["note"]) == (3, True, "x")


@on_scheduler()
async def test_client_state_is_made_as_for_a_queue(s: Scheduler) -> None:
    cs = internals.ensure_client_state(s, "queue-x")
    assert internals.ensure_client_state(s, "queue-x") is cs
    assert internals.client_state(s, "queue-x") is cs
    assert internals.client_state(s, "nobody") is None


# -------------------------------------------------------------------------------------------------------------- groups


def counts(s: Scheduler, name: str) -> dict[str, int]:
    group = s.task_groups.get(name)
    return {} if group is None else {k: v for k, v in group.states.items() if v}


@on_scheduler()
async def test_ledger_shows_the_whole_graph(s: Scheduler) -> None:
    ledger = GroupLedger(s)
    ledger.announce("g", 5, None)
    assert counts(s, "g") == {"waiting": 5}
    assert len(s.task_groups["g"]) == 5
    ts = s.new_task("g-1", spec("g-1"), "released")
    ledger.enters(ts)
    assert counts(s, "g") == {"waiting": 4, "released": 1}
    assert len(s.task_groups["g"]) == len(s.task_prefixes["g"]) == 5
    ledger.retract("g", 1)
    assert counts(s, "g") == {"waiting": 3, "released": 1}


@on_scheduler()
async def test_ledger_goes_to_nothing(s: Scheduler) -> None:
    ledger = GroupLedger(s)
    ledger.announce("g", 3, None)
    prefix = s.task_prefixes["g"]
    ledger.forgotten("g", 2)
    assert counts(s, "g") == {"waiting": 1, "forgotten": 2}
    ledger.forgotten("g", 1)
    assert "g" not in s.task_groups
    assert not any(prefix.states.values())


@on_scheduler()
async def test_ledger_of_a_task_that_enters_before_it_was_announced(s: Scheduler) -> None:
    ledger = GroupLedger(s)
    ledger.enters(s.new_task("g-1", spec("g-1"), "released"))
    assert counts(s, "g") == {"released": 1}
    ledger.announce("g", 3, None)
    assert counts(s, "g") == {"waiting": 2, "released": 1}
    assert len(s.task_groups["g"]) == 3


@on_scheduler()
async def test_ledger_of_a_task_that_leaves_again(s: Scheduler) -> None:
    ledger = GroupLedger(s)
    ledger.announce("g", 2, None)
    ts = s.new_task("g-1", spec("g-1"), "released")
    ledger.enters(ts)
    for done, state in ((False, "waiting"),):
        ts.state = "forgotten"
        ledger.leaves(ts, done=done)
        assert counts(s, "g")[state] == 2
    assert len(s.task_groups["g"]) == 2


@on_scheduler()
async def test_links_of_groups(s: Scheduler) -> None:
    ledger = GroupLedger(s)
    ledger.announce("a", 1, None)
    ledger.announce("b", 1, None)
    ledger.link([("b", "a"), ("b", "no such group")])
    assert s.task_groups["b"].dependencies == {s.task_groups["a"]}


def test_states_of_a_group_are_plain_counts() -> None:
    source = inspect.getsource(Scheduler.new_task)
    assert "key_split_group" in source
    assert "computation.groups.add" in source
    assert "_size" in inspect.getsource(distributed.scheduler.TaskCollection)


# --------------------------------------------------------------------------------------------------------------- other


@on_scheduler(workers=2)
async def test_adaptive_target_counts_what_is_on_disk(s: Scheduler) -> None:
    stock = s.adaptive_target
    assert internals.adaptive_target(s, stock, 0, None) == stock()
    # Unknown tasks count half a second each, the target is five seconds, workers have one thread.
    assert internals.adaptive_target(s, stock, 1000, None) == 100
    assert internals.adaptive_target(s, stock, 3, None) <= 3
    assert internals.adaptive_target(s, stock, 1000, "50s") == 10


def test_progress_of_a_scheduler_without_adapter_is_stocks() -> None:
    """The classes are changed once a process: others in it must not notice."""
    internals.progress_asks_us()
    internals.progress_asks_us()

    async def main() -> None:
        async with scheduler(1) as s, Client(s.address, asynchronous=True) as client:
            future = client.submit(f.inc, 1)
            await future
            progress = Progress([future.key], s)
            await progress.setup()
            assert progress.all_keys == {future.key}

    asyncio.run(asyncio.wait_for(main(), 30))
