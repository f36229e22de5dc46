from __future__ import annotations

import math
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from taskdb.errors import StoreCorrupt
from taskdb.model import Rank
from taskdb.store import codec

numbers = st.floats(allow_nan=False)
u32 = st.integers(0, 2**32 - 1)


@given(st.tuples(numbers, numbers, numbers), st.tuples(numbers, numbers, numbers))
def test_ranks_compare_as_their_bytes(a: tuple[float, ...], b: tuple[float, ...]) -> None:
    assert (a < b) == (codec.encode_rank(*a) < codec.encode_rank(*b))
    assert (a == b) == (codec.encode_rank(*a) == codec.encode_rank(*b))
    assert codec.decode_rank(codec.encode_rank(*a)) == Rank(*a)


def test_zero_has_one_rank() -> None:
    assert codec.encode_rank(-0.0, 0.0, -0.0) == codec.encode_rank(0.0, -0.0, 0.0)
    assert codec.encode_rank(-math.inf, 0.0, 0.0) < codec.encode_rank(-1e308, 0.0, 0.0)


@given(st.lists(u32, min_size=8, max_size=8), st.integers(1, 6), st.integers(-1, 2**63 - 1), st.integers(-1, 2**15 - 1))
def test_tasks_come_back(numbers32: list[int], state: int, nbytes: int, retries: int) -> None:
    task = codec.TaskRecord()
    task.id, task.state, task.flags, task.suspicious, task.retries = 7, state, 3, 65535, retries
    task.waiting_on, task.blocked_on, task.need, task.links, task.expected, task.wants, task.group, task.annotation = numbers32
    task.nbytes, task.graph, task.rank = nbytes, 2**40, b"r" * 24
    again = codec.decode_task(7, codec.encode_task(task))
    names = [
        name
        for name in codec.TaskRecord.__slots__
        if name not in ("deps", "dirty", "stored_queue", "stored_state", "stored_held", "reclaim")
    ]
    assert [getattr(again, name) for name in names] == [getattr(task, name) for name in names]
    assert again.stored_queue == codec.queue_of(task)
    assert again.stored_held == (state in (3, 4))
    assert not again.reclaim


@given(st.text(), st.text(), st.text(), st.lists(u32, min_size=6, max_size=6))
def test_graphs_come_back(submission: str, client: str, label: str, counts: list[int]) -> None:
    graph = codec.GraphRecord(9, 2, 1.5, 2.5, 3, 4, 5, counts, 6, 7, submission, client, label)
    assert codec.decode_graph(9, codec.encode_graph(graph)) == graph


@given(st.text(), st.booleans(), st.booleans())
def test_clients_come_back(name: str, internal: bool, dropped: bool) -> None:
    client = codec.ClientRecord(3, name, internal, dropped, 12)
    assert codec.decode_client(3, codec.encode_client(client)) == client


@given(st.text(), st.binary())
def test_errors_come_back(text: str, payload: bytes) -> None:
    record = codec.ErrorRecord(0, text, payload, text[::-1])
    assert codec.decode_error(codec.encode_error(record)) == record


@given(st.binary(min_size=1), st.binary())
def test_kept_items_come_back(name: bytes, value: bytes) -> None:
    assert codec.decode_kept(codec.encode_kept(name, value)) == (name, value)


def test_a_parked_task_stands_in_no_queue() -> None:
    task = codec.TaskRecord()
    for name in ("suspicious", "retries", "blocked_on", "need", "links", "expected", "wants", "group", "annotation", "nbytes", "graph"):
        setattr(task, name, 0)
    task.id, task.state, task.rank = 7, 2, bytes(24)
    queues = []
    for task.waiting_on, task.flags in ((0, 0), (1, 0), (0, codec.PARKED), (1, codec.PARKED)):
        queues.append((codec.queue_of(task), codec.decode_task(7, codec.encode_task(task)).stored_queue))
    assert queues == [(1, 1), (2, 2), (0, 0), (0, 0)]


@given(st.lists(st.integers(0, 2**64 - 1)))
def test_ids_come_back(ids: list[int]) -> None:
    assert codec.decode_ids(codec.encode_ids(ids)) == tuple(ids)


def test_damaged_records_are_corrupt() -> None:
    for decode in (
        lambda: codec.decode_task(1, b"short"),
        lambda: codec.decode_graph(1, b"short"),
        lambda: codec.decode_client(1, b"s"),
        lambda: codec.decode_error(b"s"),
        lambda: codec.decode_kept(b"s"),
        lambda: codec.decode_kept(struct.pack(">I", 9) + b"cut"),
        lambda: codec.decode_ids(b"short"),
        lambda: codec.decode_group(b"s"),
        lambda: codec.decode_strings(struct.pack(">I", 1) + b"\xff"),
    ):
        with pytest.raises(StoreCorrupt):
            decode()
