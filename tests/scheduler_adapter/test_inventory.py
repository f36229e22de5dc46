"""What a worker says of itself comes back as it was, and a preload of another release is refused in one line."""

from __future__ import annotations

import msgpack
import pytest
from distributed.worker_state_machine import TaskErredMsg

from scheduler_adapter.inventory import PROTOCOL, Inventory


def test_an_inventory_comes_back() -> None:
    inventory = Inventory(3, (b"a", b"b"), (10, 20), ("int", "str"), (b"c",), (2**33,), (), (0,), ((b"e", None, "e", ""),), (5, -1))
    assert Inventory.read(msgpack.unpackb(msgpack.packb(inventory.write()))) == inventory


def test_what_failed_is_said_as_dask_says_it() -> None:
    inventory = Inventory(3, running=(b"a", b"b"), run_ids=(7, 8), failed=(1,), errors=((b"e", None, "E()", "tb"),))
    failures = Inventory.read(inventory.write()).failures()
    assert set(failures) == {1}
    expected = {"run_id": 8, "exception": b"e", "traceback": None, "exception_text": "E()", "traceback_text": "tb"}
    assert expected.items() <= failures[1].items()
    names = {field for field in TaskErredMsg.__annotations__ if field != "key"} | {"stimulus_id", "status"}
    assert failures[1].keys() == names


def test_a_new_worker_has_nothing() -> None:
    assert Inventory.read(Inventory().write()) == Inventory()


@pytest.mark.parametrize("protocol", [None, PROTOCOL + 1])
def test_another_protocol_is_refused(protocol: int | None) -> None:
    message = {**Inventory(1, (b"a",), (1,), ("int",)).write(), "protocol": protocol}
    with pytest.raises(ValueError, match=f"speaks protocol {protocol}, this scheduler {PROTOCOL}: install the same dask-taskdb on both"):
        Inventory.read(message)
