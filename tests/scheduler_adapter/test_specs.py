"""Run specs that are pickled once and passed through."""

from __future__ import annotations

import asyncio
import pickle
from typing import Any

import pytest
from dask._task_spec import Alias, DataNode, List, Task, TaskRef
from distributed.comm import connect, listen
from distributed.protocol.serialize import Serialized, ToPickle

from scheduler_adapter.specs import StoredSpec, is_p2p, keeps_object, pickle_spec
from tests.e2e.functions import add


def make() -> Task:
    return Task("c", add, TaskRef("a"), 2)


def test_bytes_are_the_spec() -> None:
    spec = pickle.loads(pickle_spec(make()))
    assert spec == make()
    assert spec({"a": 1}) == 3


def test_lambdas_and_local_classes_can_be_stored() -> None:
    class Local:
        value = 5

    spec = pickle.loads(pickle_spec(Task("x", lambda y: Local.value + y, 1)))
    assert spec() == 6


def test_stored_spec_is_true_and_has_what_the_scheduler_looks_at() -> None:
    stored = StoredSpec(pickle_spec(make()), frozenset({"a"}), data_producer=True)
    assert stored
    assert stored.dependencies == {"a"}
    assert stored.data_producer is True
    assert StoredSpec(b"").data_producer is False
    assert bool(StoredSpec(b"")), "stock takes a task without a run spec for scattered data"


def test_pickling_a_stored_spec_gives_the_object() -> None:
    """The receiver needs nothing of ours."""
    stored = StoredSpec(pickle_spec(make()))
    data = pickle.dumps(stored)
    assert b"scheduler_adapter" not in data
    assert pickle.loads(data) == make()
    assert pickle.loads(pickle.dumps(ToPickle(stored).data)) == make()


def test_other_attributes_come_from_the_object() -> None:
    stored = StoredSpec(pickle_spec(make()))
    assert stored.key == "c"
    assert stored.func is add
    with pytest.raises(AttributeError):
        stored.no_such_attribute  # noqa: B018
    assert "bytes" in repr(stored)
    assert not hasattr(stored, "__dask_graph__")


@pytest.mark.parametrize(
    "spec", [make(), Alias("a", "b"), DataNode("d", [1, 2]), List(TaskRef("a"), TaskRef("b"))], ids=lambda s: type(s).__name__
)
def test_every_kind_of_node(spec: Any) -> None:
    back = pickle.loads(pickle_spec(spec))
    assert type(back) is type(spec)
    assert back.dependencies == spec.dependencies


@pytest.mark.parametrize("protocol", ["tcp://127.0.0.1:0", "inproc://"])
def test_frames_pass_through(protocol: str) -> None:
    """As `send_stored_specs` puts them into a message: the other side finds the object."""
    stored = StoredSpec(pickle_spec(make()))
    frames = Serialized({"serializer": "pickle", "writeable": (), "compression": (None,)}, [stored.data])

    async def there_and_back() -> Any:
        received: list[Any] = []

        async def handle(comm: Any) -> None:
            received.append(await comm.read())
            await comm.write("ok")
            await comm.close()

        async with listen(protocol, handle, deserialize=True) as listener:
            comm = await connect(listener.contact_address)
            await comm.write({"op": "compute-task", "run_spec": frames})
            assert await comm.read() == "ok"
            await comm.close()
        return received[0]["run_spec"]

    got = asyncio.run(asyncio.wait_for(there_and_back(), 20))
    assert got == make()
    assert got({"a": 1}) == 3


def test_p2p_barrier_keeps_its_object() -> None:
    """Stock asks `isinstance(spec, P2PBarrierTask)` and reads its `spec`."""
    shuffle = pytest.importorskip("distributed.shuffle._core")
    # Only its class matters here.
    barrier = object.__new__(shuffle.P2PBarrierTask)
    assert keeps_object(barrier)
    assert is_p2p(barrier)
    assert not keeps_object(make())
    assert not is_p2p(make())


def test_p2p_graph_has_a_barrier() -> None:
    """The name that is looked for is the one Dask makes."""
    import dask.array as da

    from scheduler_adapter.graph import materialise

    expr = da.ones((4, 4), chunks=(4, 1)).rechunk((1, 4), method="p2p").__dask_graph__()
    from dask._expr import HLGExpr

    dsk, _ = materialise(HLGExpr(expr))
    assert sum(is_p2p(spec) for spec in dsk.values()) == 1
