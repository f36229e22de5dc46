"""Writes a store of format 1, byte for byte as its code did, and imports none of today's code: layouts and names stand here once more.

Submission "g1" of client "c1": four loads, and four tasks that each need one of them and are wanted, in every state; and one that failed.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from struct import pack

import lmdb

EPOCH = 3
UUID = bytes(range(16))
WAITING, QUEUED, PROCESSING, MEMORY, RELEASED, ERRED = range(1, 7)
#: All tables, by number.
TABLES = """
    meta graphs graph_names runs tasks edges redges keys names specs blobs
    groups ready ahead leases client_names clients wants wanted_by errors todo sessions
"""

#: id -> (state, waiting_on, blocked_on, need, links, wants, nbytes, group)
TASKS = {
    1: (MEMORY, 0, 0, 1, 1, 0, 8, 0),
    2: (PROCESSING, 0, 0, 1, 1, 0, -1, 0),
    3: (QUEUED, 0, 0, 1, 1, 0, -1, 0),
    4: (RELEASED, 0, 0, 0, 1, 0, -1, 0),
    5: (PROCESSING, 0, 0, 0, 0, 1, -1, 1),
    6: (QUEUED, 1, 0, 0, 0, 1, -1, 1),
    7: (WAITING, 1, 1, 0, 0, 1, -1, 1),
    8: (MEMORY, 0, 0, 0, 0, 1, 8, 1),
    9: (ERRED, 0, 0, 0, 0, 1, -1, 1),
}
DEPS = {5: 1, 6: 2, 7: 3, 8: 4}


def u64(*numbers: int) -> bytes:
    return pack(f">{len(numbers)}Q", *numbers)


def digest(name: bytes) -> bytes:
    return hashlib.blake2b(name, digest_size=16).digest()


def rank(task_id: int) -> bytes:
    """Three numbers that are not below zero: their sign bit is set."""
    numbers = pack(">3d", 0.0, 1.0, float(task_id))
    return b"".join(bytes((numbers[at] ^ 0x80,)) + numbers[at + 1 : at + 8] for at in (0, 8, 16))


def key(task_id: int) -> bytes:
    return b"key-%d" % task_id


def strings(*texts: str) -> bytes:
    return b"".join(pack(">I", len(text)) + text.encode() for text in texts)


def records(leased_by: int) -> dict[str, dict[bytes, bytes]]:
    tables: dict[str, dict[bytes, bytes]] = {name: {} for name in TABLES.split()}
    tables["meta"] = {
        b"\1": u64(1),
        b"\2": UUID,
        b"\3": u64(EPOCH),
        b"\4": u64(10),
        b"\5": u64(2),
        b"\6": u64(2),
        b"\7": b"scheduler-3",
    }
    states = [0] * 6
    for task_id, (state, waiting_on, blocked_on, need, links, wants, nbytes, group) in TASKS.items():
        states[state - 1] += 1
        tables["tasks"][u64(task_id)] = (
            pack(">BBHh", state, wants, 0, -1)
            + pack(">IIIIII", waiting_on, blocked_on, need, links, 0, wants)
            + pack(">qQII", nbytes, 1, group, 0)
            + rank(task_id)
        )
        tables["names"][u64(task_id)] = key(task_id)
        tables["keys"][digest(key(task_id))] = u64(task_id)
        tables["specs"][u64(task_id)] = b"spec"
        if state == QUEUED:
            tables["ahead" if waiting_on else "ready"][rank(task_id) + u64(task_id)] = b""
        if state == PROCESSING:
            tables["leases"][u64(task_id)] = u64(leased_by)
        if wants:
            tables["wants"][u64(1, task_id)] = u64(1)
            tables["wanted_by"][u64(task_id, 1)] = b""
    for task_id, dep in DEPS.items():
        tables["edges"][u64(task_id)] = u64(dep)
        tables["redges"][u64(dep, task_id)] = u64(task_id)
    tables["errors"][u64(9)] = u64(0) + pack(">I", 2) + b"nopayload"
    graph = pack(">Bdd", 2, 1.0, 2.0) + u64(9, 0, 5) + u64(*states) + pack(">II", 2, 0)
    tables["graphs"][u64(1)] = graph + strings("g1", "c1", "a label")
    tables["graph_names"][digest(b"g1")] = u64(1)
    tables["runs"][u64(1, 8)] = u64(0, 1)
    tables["groups"] = {pack(">QI", 1, 0): u64(4) + b"load", pack(">QI", 1, 1): u64(5) + b"use"}
    tables["clients"][u64(1)] = pack(">BQ", 0, 5) + b"c1"
    tables["client_names"][digest(b"\0c1")] = u64(1)
    tables["sessions"][u64(EPOCH)] = u64(7)
    if leased_by != EPOCH:
        # Leases of an earlier epoch were given back by this item.
        tables["todo"][pack(">BQQ", 12, EPOCH, 0)] = u64(0)
    return tables


def write(folder: Path, leased_by: int = EPOCH) -> None:
    folder.mkdir(parents=True)
    with lmdb.open(str(folder), map_size=1 << 40, max_dbs=32) as env:
        for name, pairs in records(leased_by).items():
            db = env.open_db(name.encode())
            with env.begin(write=True, db=db) as txn:
                for pair in pairs.items():
                    assert txn.put(*pair)
