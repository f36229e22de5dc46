"""Every bound: its unit, and why it is there. Relations between bounds are asserted at the end."""

from __future__ import annotations

KIB = 1024
MIB = 1024 * KIB

#: Bytes of one packed key. Dask's longest names are some hundred bytes; a key stands in every answer that names a task.
KEY_BYTES_MAX = 64 * KIB
#: Bytes of one spec. LMDB's values stop at 4 GiB and a gRPC message at 2 GiB; Dask warns about graphs over 10 MiB.
SPEC_BYTES_MAX = 512 * MIB
#: Bytes of one gRPC message: the largest spec with room around it.
MESSAGE_BYTES_MAX = 600 * MIB
#: Bytes of what a call carries besides its messages: the token, and what gRPC adds.
METADATA_BYTES_MAX = 8 * KIB
#: Connections at a time: a scheduler, its ingest processes and whoever looks in; each costs some 30 KiB and a file descriptor.
CONNECTIONS_MAX = 4_096
#: Calls of one connection at a time, and of all of them: Sessions, Ingests, reads.
CONNECTION_CALLS_MAX = 64
CALLS_MAX = 256
#: Calls at a time that ask for the daemon's health, which need no token.
PROBES_MAX = 32
#: How long a connection may take to say that it speaks the protocol, and may stand without a call.
HANDSHAKE_MS_MAX = 10_000
IDLE_MS_MAX = 300_000
#: Bytes (UTF-8) of a submission's name: it stands in every lease.
SUBMISSION_BYTES_MAX = 128
#: Bytes (UTF-8) of a client's name. Dask's are about 50.
CLIENT_BYTES_MAX = 256
#: Bytes (UTF-8) of a label: for display.
LABEL_BYTES_MAX = 4 * KIB

#: Ids left out when a daemon starts. One that died may have told ids it had not committed: they must never name another task. More
#: than can be added between two commits.
IDS_SKIPPED_AT_START = 2**24

#: Tasks of one AddTasks a sender should not exceed: a few milliseconds of the only writer's time.
CHUNK_TASKS = 512
#: Tasks of one AddTasks: above, the writer would be busy for seconds. Refused.
CHUNK_TASKS_MAX = 100_000
#: Dependencies of one AddTasks. Refused above; 8 bytes each, twice.
CHUNK_EDGES_MAX = 10_000_000
#: Ids or keys in one Report, Want, Unwant, Cancel or Retry. Refused above.
COMMAND_ITEMS_MAX = 1_000_000
#: Commands of one batch.
BATCH_COMMANDS_MAX = 100_000
#: Stored counters are 32 bits wide: dependents of one task, and what a submission may declare.
COUNT_MAX = 2**32 - 1

#: Items of background work handled in one step: some 10 ms, so that a waiting batch is not held up.
STEP_ITEMS = 500
#: Items handled with any batch, whatever is in it: a few milliseconds, as its answer waits.
STEP_ITEMS_BATCH = 100
#: Items handled after a batch, for each id or task in it: enough that ordinary results (a release, a forget) go out with the batch.
STEP_ITEMS_PER_COMMAND_ITEM = 4
#: Items of background work done before an AddTasks that names known keys: one of them may only wait to be forgotten.
STEP_ITEMS_BEFORE_ADD = 50_000
#: Tasks set aside in one go while leasing, because a scheduler that is gone holds what they need: some 10 ms.
LEASE_PARKED_MAX = 1_000
#: Tasks passed over in one go while leasing, because their graph is being taken back. They are met again: that goes on meanwhile.
LEASE_PASSED_MAX = 64
#: Decoded task records one transaction keeps in memory (about 300 bytes each).
CACHE_TASKS_MAX = 200_000

#: Layers and axes of a rule: its order is found by looking at all of them.
RULE_LAYERS_MAX = 512
RULE_AXES_MAX = 32
#: Product of the sizes of a rule's axes: a position in its loop stays a machine integer.
RULE_POSITIONS_MAX = 2**62
#: Dependencies of one task of a rule: making it takes some 5 µs for each, in one go.
RULE_DEPS_MAX = 10_000
#: Tasks of a rule that exist from the start, because somebody wants them or depends on them: making them takes some 60 µs each, in one go.
RULE_OUTPUTS_MAX = 20_000
#: Rules kept decoded.
RULES_CACHE_MAX = 64
#: Queued tasks of a graph below which more of its rule is made: more than a scheduler asks for at a time.
GROW_QUEUED = 1_024
#: Waiting tasks of a graph above which no more of its rule is made while any is queued or leased: some 50 MB of store.
GROW_WAITING = 200_000
#: Tasks of a rule made in one step: some 10 ms.
GROW_TASKS = 64

#: Tasks of runs that are stored as they came, in all: finding their keys takes some 150 bytes of memory each, and carrying them out at once
#: (when they are cancelled, say) some 40 µs each. Above, the oldest run is carried out for each that comes.
SPOOL_TASKS_MAX = 200_000

#: Milliseconds a commit may be put off to gather more commands: what a power cut may lose, and the cost of fsync shared.
COMMIT_INTERVAL_MS = 50
#: Commands after which a commit is made at once.
COMMIT_COMMANDS_MAX = 10_000

#: Bytes kept free for reports. Below it AddTasks is refused with store_full, so that graphs already there can finish.
STORE_RESERVE_BYTES = 64 * MIB
#: Bytes a task takes in the store besides its key, spec and edges (records and B-tree overhead; measured 350), to judge an AddTasks.
TASK_BYTES_ESTIMATE = 400
#: Bytes a store may grow to, if nobody says otherwise.
STORE_BYTES_MAX = 64 * 1024 * MIB
#: Bytes of address space LMDB maps. Sparse: costs nothing. Growing a map would kill its readers, so it never grows.
STORE_MAP_BYTES = 1024 * 1024 * MIB
#: Snapshot readers at a time (LMDB's reader slots).
READERS_MAX = 256
#: Write transactions between two looks for reader slots whose process is gone (some microseconds each).
READERS_CHECKED_WRITES = 1_000
#: Items of background work in one transaction of `taskdb recover`: some seconds, some tens of MiB.
RECOVER_STEP_ITEMS = 20_000

#: Bytes of the history, if nobody says otherwise: 15 to 60 for each task that came, ran and went.
HISTORY_BYTES_MAX = 64 * MIB
#: Events of a story, and rows of the history in one message.
STORY_EVENTS_MAX = 1_000
HISTORY_ROWS_SLICE = 20_000

#: Tasks on one page of a listing.
LIST_TASKS_MAX = 1_000
#: Records, and keys, a listing may look at for one page, some 10 ms each: a filter that matches nothing must not hold a snapshot for long.
LIST_SCAN_MAX = 10_000
LIST_NAMES_MAX = 1_000
#: Shared blobs both ends of a link keep, so that each travels once. A blob is some KiB.
SHARED_BLOBS_KEPT = 1_000

#: Groups of a graph that a new scheduler is told of. Where there are so many, none is large.
GROUPS_RESTORED_MAX = 10_000
#: Bytes of kept items, and graphs, in one message of Restore.
RESTORE_BYTES_SLICE = 1 * MIB
RESTORE_GRAPHS_SLICE = 100

#: Records `errors` looks at for one page: some 20 ms.
ERRORS_SCAN_MAX = 5_000
#: Characters of a failed task's message, and of its traceback (its end), that are kept for people.
ERROR_TEXT_MAX = 4_096
TRACEBACK_TEXT_MAX = 16_384

#: Tasks in a blocking chain or a list of `explain`.
EXPLAIN_TASKS_MAX = 100
#: Queue entries counted by `explain` before it says "at least": some 10 ms.
EXPLAIN_QUEUE_MAX = 20_000
#: Links `explain` follows for the critical path: some 10 ms.
EXPLAIN_PATH_LINKS_MAX = 2_000

assert SPEC_BYTES_MAX + KEY_BYTES_MAX < MESSAGE_BYTES_MAX < 2**31
assert CHUNK_TASKS <= CHUNK_TASKS_MAX
assert SUBMISSION_BYTES_MAX < 511 and CLIENT_BYTES_MAX < 511
assert STORE_RESERVE_BYTES < STORE_BYTES_MAX < STORE_MAP_BYTES
