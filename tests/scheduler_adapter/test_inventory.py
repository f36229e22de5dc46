"""What a worker says of itself comes back as it was, and a preload of another release is refused in one line."""

from __future__ import annotations

import msgpack
import pytest

from scheduler_adapter.inventory import PROTOCOL, Inventory


def test_an_inventory_comes_back() -> None:
    inventory = Inventory(3, (b"a", b"b"), (10, 20), ("int", "str"), (b"c",), (2**33,), (0,))
    assert Inventory.read(msgpack.unpackb(msgpack.packb(inventory.write()))) == inventory


def test_a_new_worker_has_nothing() -> None:
    assert Inventory.read(Inventory().write()) == Inventory()


@pytest.mark.parametrize("protocol", [None, PROTOCOL + 1])
def test_another_protocol_is_refused(protocol: int | None) -> None:
    message = {**Inventory(1, (b"a",), (1,), ("int",)).write(), "protocol": protocol}
    with pytest.raises(ValueError, match=f"speaks protocol {protocol}, this scheduler {PROTOCOL}: install the same dask-taskdb on both"):
        Inventory.read(message)
