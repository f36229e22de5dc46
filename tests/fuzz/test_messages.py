"""Messages with wrong bytes and wrong fields: refused in words, or done; and all rules hold afterwards."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from contextlib import suppress
from random import Random
from typing import Any

import grpc
import pytest
from google.protobuf.message import DecodeError

from taskdb import commands as c
from taskdb.engine.engine import Engine
from taskdb.engine.invariants import violations
from taskdb.errors import TaskDBError
from taskdb.model import Level, TaskFlag
from taskdb.server import reads
from taskdb.store.memory_store import MemoryStore
from taskdb.wire import convert
from taskdb.wire import taskdb_pb2 as pb
from tests.fuzz.mutations import disturb, mutate
from tests.support.grown_world import grid
from tests.taskdb.server.procs import PATIENCE_SECONDS, Daemon, Recorder, graph, key, run

SEED = int(os.environ.get("TASKDB_FUZZ_SEED", "6"))
ROUNDS = int(os.environ.get("TASKDB_FUZZ_ROUNDS", "1"))

#: A fault of the daemon; an answer that never came.
UNCLEAR = (grpc.StatusCode.UNKNOWN, grpc.StatusCode.DEADLINE_EXCEEDED)
WANTED = int(TaskFlag.WANTED)


def batches(name: str) -> Iterator[list[c.Command]]:
    """Of every kind of command some, as a scheduler would send them; ids are guessed."""
    keys = [key(name, i) for i in range(6)]
    yield [
        c.BeginGraph(name, f"client-{name}", 1.0, 1.0, "label"),
        c.AddTasks(
            name,
            0,
            keys[:4],
            [b"spec"] * 4,
            [0, 0, 0, WANTED],
            [0, 0, 1, 3],
            [0, 0, 1, 2],
            [2, 1, 1, 0],
            [0.0, 1.0, 2.0, 3.0],
            groups=[0, 0, 1, 1],
            new_groups=[f"{name}-a", f"{name}-b"],
            shared=[0, 1, 1, 0],
            new_shared=[b"shared"],
        ),
        c.AddTasks(name, 4, keys[4:], [b"", b"spec"], [int(TaskFlag.DATA | TaskFlag.HELD), WANTED], [0, 1], [4], [1, 0]),
        c.SealGraph(name),
        c.Credit(4, 8, 0),
    ]
    rule = grid(3)
    yield [
        c.BeginGraph(f"{name}-rule", "client", 2.0, 1.0),
        c.AddRule(f"{name}-rule", 0, rule.write(), ["x", "y", "z"], [], [2], [0], [WANTED], [0]),
        c.SealGraph(f"{name}-rule"),
    ]
    yield [c.Report([1, 2, 3], [Level.HELD, Level.MEMORY, Level.ERRED], [0, 8, 0]), c.Fail(3, b"payload", "text"), c.Blame(4, 3)]
    yield [c.Want("other", keys[:2]), c.Unwant("other", keys[:1]), c.Retry(keys[3:4]), c.Cancel("other", keys[1:2], True)]
    yield [c.Keep([b"a", c.DURATIONS + b"x"], [b"value", bytes(8)]), c.Adopt(1, keys[:2], [Level.MEMORY, Level.HELD], [8, 0])]
    yield [c.TakeWhole(name), c.EndRecovery(), c.DropClient("other"), c.AbortGraph(name)]


def corpus() -> list[bytes]:
    found = [convert.batch_to_proto(seq, commands).SerializeToString() for seq, commands in enumerate(batches("a"), 1)]
    found.append(pb.SessionRequest(attach=pb.Attach(scheduler_id="s", epoch=1)).SerializeToString())
    found.append(pb.SessionRequest(resync=pb.Resync(held=[1, 2, 3], leases_seen=1)).SerializeToString())
    return found


def wrong(random: Random, data: bytes, others: list[bytes]) -> bytes:
    """Half of them wrong in their bytes, half in their fields."""
    if random.random() < 0.5:
        return mutate(random, data, others)
    message = pb.SessionRequest.FromString(data)
    disturb(random, message)
    found: bytes = message.SerializeToString()
    return found


class World:
    """What `server/service.py` and `writer.py` do with a message, without them."""

    def __init__(self) -> None:
        self.store = MemoryStore()
        self.engine = Engine()
        self.seq = 0
        txn = self.store.write()
        self.epoch = self.engine.begin_epoch(txn, "scheduler")
        txn.commit()
        self.done = self.refused = 0

    def take(self, data: bytes) -> None:
        try:
            message = pb.SessionRequest.FromString(data)
            commands = convert.commands_from_proto(message.batch.commands)
        except (DecodeError, TaskDBError):
            self.refused += 1
            return
        txn = self.store.write()
        try:
            if message.WhichOneof("kind") == "resync":
                self.engine.resync(txn, self.epoch, list(message.resync.held))
            else:
                self.engine.apply(txn, self.epoch, self.seq + 1, commands)
                self.seq += 1
            self.engine.lease(txn, 4, 8)
            self.engine.step(txn)
            self.engine.grow(txn)
        except TaskDBError:
            self.refused += 1
            txn.abort()
        except BaseException:
            txn.abort()
            raise
        else:
            self.done += 1
            txn.commit()

    def check(self) -> None:
        with self.store.read() as txn:
            assert list(violations(txn)) == []


def rounds(seed: str, count: int) -> World:
    random = Random(seed)
    world = World()
    others = corpus()
    for number in range(count):
        sent = [convert.batch_to_proto(1, x).SerializeToString() for x in batches(f"g{number}")]
        for data in sent:
            if random.random() < 0.6:
                data = wrong(random, data, others)
            try:
                world.take(data)
                if random.random() < 0.3:
                    world.check()
            except Exception as error:
                raise AssertionError(f"seed {seed}, round {number}: {data.hex()}") from error
    world.check()
    return world


@pytest.mark.parametrize("part", range(3))
def test_the_engine_does_or_refuses(part: int) -> None:
    world = rounds(f"{SEED}-{part}", 25 * ROUNDS)
    assert world.done > 20
    assert world.refused > 20


READS = {
    pb.ListTasksRequest: pb.ListTasksRequest(submission="g0", state="waiting", prefix="a", limit=10),
    pb.ExplainRequest: pb.ExplainRequest(key=key("g0", 1), limit=5),
    pb.GetTasksRequest: pb.GetTasksRequest(keys=[key("g0", 1), key("g0", 2)], with_spec=True),
}


def test_reads_answer_or_refuse() -> None:
    random = Random(f"{SEED}-reads")
    world = World()
    for commands in batches("g0"):
        world.take(convert.batch_to_proto(1, commands).SerializeToString())
    ask: dict[Any, Any] = {pb.ListTasksRequest: reads.list_tasks, pb.ExplainRequest: reads.explain, pb.GetTasksRequest: reads.get_tasks}
    for _ in range(500 * ROUNDS):
        for kind, example in READS.items():
            request = kind.FromString(example.SerializeToString())
            disturb(random, request)
            with world.store.read() as txn:
                try:
                    ask[kind](txn, request)
                except TaskDBError:
                    pass


@pytest.mark.e2e
def test_a_daemon_outlives_what_is_sent_to_it(tmp_path: Any) -> None:
    """Every method of the service, raw bytes, over connections as they are; then it serves a scheduler, and its store is whole."""
    random = Random(f"{SEED}-daemon")
    others = corpus()
    methods = pb.DESCRIPTOR.services_by_name["TaskDB"].methods
    with Daemon(tmp_path) as daemon:
        with grpc.insecure_channel(daemon.address) as channel:
            for number in range(25 * ROUNDS):
                for method in methods:
                    path = f"/taskdb.v1.TaskDB/{method.name}"
                    if method.client_streaming:
                        call = channel.stream_stream(path)(iter(_stream(random, method.name, others)), timeout=PATIENCE_SECONDS)
                    else:
                        call = channel.unary_stream(path)(mutate(random, random.choice(others), others), timeout=PATIENCE_SECONDS)
                    with suppress(grpc.RpcError):
                        list(call)
                    assert call.code() not in UNCLEAR, (number, method.name, call.details())
                    assert not daemon.ended, daemon.words()
        assert "Traceback" not in daemon.words()
        _serves(daemon)
        done = run("verify", "--data", str(daemon.data))
        assert done.returncode == 0, done.stdout + done.stderr


def _stream(random: Random, method: str, others: list[bytes]) -> list[bytes]:
    """A call that begins well, mostly."""
    if method == "Session":
        attach = pb.SessionRequest(attach=pb.Attach(scheduler_id="fuzz")).SerializeToString()
        first = attach if random.random() < 0.9 else wrong(random, attach, others)
        return [first, *(wrong(random, random.choice(others), others) for _ in range(random.randint(0, 3)))]
    begin, add, *_, seal, _ = next(batches("i"))
    messages = []
    for command in (begin, add, seal):
        whole = convert.command_to_proto(command)
        kind = whole.WhichOneof("kind")
        assert kind is not None
        message = pb.IngestRequest(epoch=1, **{kind: getattr(whole, kind)})
        if random.random() < 0.5:
            disturb(random, message)
        messages.append(message.SerializeToString())
    return messages


def _serves(daemon: Daemon) -> None:
    async def story() -> None:
        async with Recorder(daemon.address) as scheduler:
            await scheduler.ask(*graph("after", [key("after")]))
            await scheduler.durable()

    asyncio.run(story())
