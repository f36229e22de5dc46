"""All tables on one page: what stands under which key. Numbers and names are stored and never change.

Every key is made of fixed-width big-endian integers or 16-byte digests, so that byte order is number order and LMDB's limit of
511 bytes a key is never met. A digest is a hint: what it finds is confirmed against the full name. Values: `codec.py`.
"""

from __future__ import annotations

import hashlib
from enum import IntEnum
from struct import Struct

#: Of the tables as a whole. A newer one is refused; an older one would be migrated.
FORMAT_VERSION = 5


class Table(IntEnum):
    """Numbers are stable. The name of an LMDB database is the lower-case name here."""

    #: Meta (1 byte) -> fixed value, see Meta.
    META = 1
    #: graph u64 -> GraphRecord.
    GRAPHS = 2
    #: digest of the submission's name -> graph u64s. Only open and sealed ones: an aborted submission has lost its name.
    GRAPH_NAMES = 3
    #: graph u64, last index u64 -> first index u64, first id u64: a run of indices whose ids follow each other (0: all missing).
    RUNS = 4
    #: id u64 -> TaskRecord.
    TASKS = 5
    #: id u64 -> ids of its dependencies, u64 each. Absent if there are none.
    EDGES = 6
    #: id u64, first dependent u64 -> ids of dependents, ascending, u64 each. One record an AddTasks; may name forgotten tasks.
    REDGES = 7
    #: digest of the packed key -> ids u64.
    KEYS = 8
    #: id u64 -> packed key.
    NAMES = 9
    #: id u64 -> spec; of a task made from a rule its place there (RULE_PLACE). Absent if empty.
    SPECS = 10
    #: graph u64, number u32 (from 1) -> annotations.
    BLOBS = 11
    #: graph u64, index u32 -> live tasks u64, name (UTF-8).
    GROUPS = 12
    #: rank 24 bytes, id u64 -> nothing. QUEUED, dependencies all in memory.
    READY = 13
    #: rank 24 bytes, id u64 -> nothing. QUEUED, some dependency leased.
    AHEAD = 14
    #: id u64 -> epoch u64 of the scheduler that holds it. All and only PROCESSING and MEMORY tasks.
    HOLDS = 15
    #: digest of the client's name -> client u64s. A dropped client has lost its name.
    CLIENT_NAMES = 16
    #: client u64 -> ClientRecord.
    CLIENTS = 17
    #: client u64, id u64 -> graph u64 whose submission brought the want (0: it stands on its own).
    WANTS = 18
    #: id u64, client u64 -> nothing.
    WANTED_BY = 19
    #: id u64 -> ErrorRecord. Exactly the ERRED tasks.
    ERRORS = 20
    #: kind u8, a u64, b u64 -> cursor u64. Background work, in the order in which it is done.
    TODO = 21
    #: epoch u64 -> last applied seq u64.
    SESSIONS = 22
    #: epoch u64 -> the first task id that was free when it began, u64.
    EPOCHS = 23
    #: digest of a name -> KeptRecord: what schedulers keep here besides tasks.
    KEPT = 24
    #: number u64 -> Result (wire): answers the scheduler of this epoch has not said it has heard.
    ANSWERS = 25
    #: graph u64 -> StoredRule: tasks that are made as they are needed. As long as the graph.
    RULES = 26
    #: graph u64 -> Growth: how far that has come. Until all of them are made, or not needed.
    GROWTH = 27
    #: graph u64 -> i64 a layer of its rule: tasks that were dropped, and can be made again. As long as the graph; absent: none.
    DROPPED = 28
    #: number u64 -> Block (history.py): what became of tasks, oldest first. Bounded; no rule depends on it.
    HISTORY = 29
    #: graph u64, first index u64 -> SpooledRun: a run of tasks that has yet to be carried out.
    SPOOL = 30


class Meta(IntEnum):
    """Keys of Table.META."""

    FORMAT_VERSION = 1
    #: 16 random bytes, given when the store was made.
    STORE_UUID = 2
    EPOCH = 3
    NEXT_TASK = 4
    NEXT_GRAPH = 5
    NEXT_CLIENT = 6
    #: Name of the scheduler of the current epoch (UTF-8).
    SCHEDULER = 7
    #: Epoch u64 whose scheduler has yet to hear what workers of earlier ones hold. Absent: HOLDS names no earlier epoch.
    RECOVERING = 8
    #: Number of the next record of ANSWERS, when the store was opened.
    NEXT_ANSWER = 9
    #: Bytes of all values in HISTORY.
    HISTORY_BYTES = 10
    #: How often SPOOL has changed: what is known of it in memory stands for one of these numbers.
    SPOOL_CHANGES = 11


U64 = Struct(">Q")
U64_PAIR = Struct(">QQ")
GRAPH_PART = Struct(">QI")
TODO_KEY = Struct(">BQQ")
#: (layer, element) of a task in its rule.
RULE_PLACE = Struct(">HQ")

DIGEST_BYTES = 16
RANK_BYTES = 24


def digest(name: bytes) -> bytes:
    """Sixteen bytes that stand for a name of any length."""
    return hashlib.blake2b(name, digest_size=DIGEST_BYTES).digest()


def meta_key(meta: Meta) -> bytes:
    return bytes((meta,))
