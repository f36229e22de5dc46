from __future__ import annotations

import dataclasses
from typing import get_args

import pytest

from taskdb import commands as c
from taskdb.errors import InvalidRequest
from taskdb.model import Level, Rank, TaskState
from taskdb.wire import convert
from taskdb.wire import taskdb_pb2 as pb

COMMANDS: list[c.Command] = [
    c.BeginGraph("s", "client", 2.5, 17.25, "label", 3),
    c.AddTasks(
        "s", 3, [b"a", b"b"], [b"x", b""], [1, 2], [0, 1], [3], [1, 0], [0.5, 1.5], [1.0, 0.0], [0, 1], ["g", "h"], [0, 1], [b"n"], [7, 0]
    ),
    c.AddTasks("s", 0, [b"a"], [], [], [], [], [], [], [], [], [], [], [], []),
    c.AddRule("s", 2, b"rule", ["x", "y"], [b"shared"], [1, 0], [0, 7], [1, 0], [0, 3]),
    c.SealGraph("s"),
    c.AbortGraph("s"),
    c.Want("client", [b"a"]),
    c.Unwant("client", [b"a", b"b"]),
    c.DropClient("client"),
    c.Report([1, 2**63], [Level.HELD, Level.OUT], [-1, 2**40], [-1, 3], [0, 2], [0, 1], [0.0, 1.5], [0.0, 0.25], ["tcp://w:1"]),
    c.Report([1], [Level.MEMORY], *[[]] * 7),
    c.Fail(7, b"payload", "text", "traceback"),
    c.Blame(8, 7),
    c.Cancel("client", [b"a"], True),
    c.Retry([b"a"]),
    c.Adopt(4, [b"a", b"b"], [Level.MEMORY, Level.HELD], [2**40, -1]),
    c.Adopt(4, [b"a"], [Level.HELD], []),
    c.TakeWhole("s"),
    c.EndRecovery(),
    c.Keep([b"datasets\0a", b"datasets\0b"], [b"x", b""]),
    c.Credit(0, 2, 3),
]

RESULT = c.Result(
    [c.Added("s", 3, [4, 0, 6], [b"m"], [2])],
    [c.Lease(4, b"a", b"x", 1, Rank(-1.0, 2.0, 3.5), [1, 2], "g", "s", b"n", -1, 2, ["client"], 3, 1)],
    [9, 2**40],
    [c.WantState("client", b"a", 4, TaskState.ERRED, b"c", b"p"), c.WantState("client", b"z", 0, None)],
    [c.Erred("client", b"a", b"c", b"p")],
    [c.Cancelled("", b"a")],
    [c.GroupCount("s", "g", 3)],
    [
        c.Adopted(b"a", Level.MEMORY, c.Lease(4, b"a", b"x", 1, Rank(-1.0, 2.0, 3.5), [1, 2], "g", "s", b"n", -1, 2, ["client"], 3, 1)),
        c.Adopted(b"b", Level.HELD, None),
    ],
    [c.TakenWhole("s", [c.Lease(4, b"a", b"x", 1, Rank(-1.0, 2.0, 3.5), [1, 2], "g", "s", b"n", -1, 2, ["client"], 3, 1)])],
    number=7,
    queued=5,
    ready=2,
    busy=True,
)


@pytest.mark.parametrize("command", COMMANDS, ids=lambda x: type(x).__name__)
def test_a_command_comes_back_as_it_went(command: c.Command) -> None:
    data = convert.command_to_proto(command).SerializeToString()
    assert convert.command_from_proto(pb.Command.FromString(data)) == command


def test_every_command_is_tried() -> None:
    assert {type(x) for x in COMMANDS} == set(get_args(c.Command))


def test_columns_arrive_as_lists() -> None:
    command = convert.command_from_proto(convert.command_to_proto(COMMANDS[1]))
    columns = [getattr(command, x.name) for x in dataclasses.fields(command) if x.name not in ("submission", "first_index")]
    assert {type(x) for x in columns} == {list}


def test_a_result_comes_back_as_it_went() -> None:
    refused = [(2, "s", "store_full", "no space")]
    data = convert.result_to_proto(RESULT, 5, convert.SharedBlobs(), refused).SerializeToString()
    message = pb.Result.FromString(data)
    assert message.seq == 5
    assert convert.result_from_proto(message, convert.SharedBlobs()) == (RESULT, refused)
    assert {type(x) for x in convert.result_from_proto(message, convert.SharedBlobs())[0].leases[0].deps} == {int}


def test_every_part_of_a_result_is_tried() -> None:
    assert all(getattr(RESULT, x.name) for x in dataclasses.fields(RESULT))


def test_an_empty_command_is_refused() -> None:
    with pytest.raises(InvalidRequest):
        convert.command_from_proto(pb.Command())


def test_an_unknown_level_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="level 9"):
        convert.command_from_proto(pb.Command(report=pb.Report(ids=[1], levels=[9])))


def test_shared_bytes_travel_once_a_link() -> None:
    here, there = convert.SharedBlobs(), convert.SharedBlobs()

    def lease(number: int, shared: bytes) -> c.Lease:
        return c.Lease(1, b"k", b"s", 0, Rank(0.0, 0.0, 0.0), [], "g", "sub", shared, -1, 0, [], 0, number)

    sizes = []
    for i in (1, 2, 1, 0, 2):
        sent = convert.result_to_proto(c.Result(leases=[lease(i, b"x" * 100 * i)]), 0, here)
        sizes.append(len(sent.leases[0].shared))
        received, _ = convert.result_from_proto(sent, there)
        assert received.leases[0].shared == b"x" * 100 * i
    assert sizes == [100, 200, 0, 0, 0]


def test_both_ends_forget_the_same_shared_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(convert, "SHARED_BLOBS_KEPT", 2)
    here, there = convert.SharedBlobs(), convert.SharedBlobs()
    for i in (1, 2, 3, 1, 2, 2, 3, 1, 3, 2):
        lease = c.Lease(1, b"k", b"s", 0, Rank(0.0, 0.0, 0.0), [], "g", "sub", bytes([i]), -1, 0, [], 0, i)
        sent = convert.result_to_proto(c.Result(leases=[lease]), 0, here)
        assert convert.result_from_proto(sent, there)[0].leases[0].shared == bytes([i])
