"""Everything that can be asked of the engine in one batch, and everything it answers. Frozen data, no logic.

A batch is an ordered list of commands; the engine applies it in one write transaction, in order, and answers with one
`Result`. Keys, specs and what tasks share are bytes to the database: it never unpickles.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from taskdb.model import Level, Rank, TaskState


@dataclass(frozen=True, slots=True)
class BeginGraph:
    """Open a submission. Idempotent: a second Begin of a sealed submission makes its AddTasks and SealGraph no-ops."""

    #: Unique name of the submission (chosen by the adapter; also the graph's public id). At most 128 bytes.
    submission: str
    client: str
    generation: float
    #: Seconds since the epoch, for display only.
    submitted: float
    #: For display only.
    label: str = ""
    #: GraphFlag bits.
    flags: int = 0


@dataclass(frozen=True, slots=True)
class AddTasks:
    """A run of tasks of an open submission, in an order in which dependencies come first.

    Tasks are live at once: a root can be leased before the next run arrives. A task's index is its position in the
    whole submission. A key the database already knows keeps its id, spec and links, and is only needed once more.
    """

    submission: str
    #: Index in the submission of the first task here; must equal the number of tasks added so far.
    first_index: int
    #: Packed keys (msgpack), 1 to KEY_BYTES_MAX bytes each. The other columns have this length or are empty (all default).
    keys: Sequence[bytes]
    #: b"" for EXTERNAL and DATA tasks.
    specs: Sequence[bytes] = ()
    #: TaskFlag bits.
    flags: Sequence[int] = ()
    #: Number of dependencies of each task; `deps` holds them one after another.
    dep_counts: Sequence[int] = ()
    #: Submission indices, each smaller than the index of the task that depends on it (so there is no cycle).
    deps: Sequence[int] = ()
    #: Number of tasks of this submission, here or still to come, that depend on each task.
    dependent_counts: Sequence[int] = ()
    #: Rank.order (default: the index) and Rank.user (default: 0).
    orders: Sequence[float] = ()
    user_priorities: Sequence[float] = ()
    #: Index into all group names this submission has introduced so far (default 0).
    groups: Sequence[int] = ()
    #: Group names this run introduces.
    new_groups: Sequence[str] = ()
    #: What tasks have in common (for Dask: annotations, and the dictionary their specs are compressed with), stored once.
    #: 0: nothing; n: the n-th blob this submission has introduced.
    shared: Sequence[int] = ()
    new_shared: Sequence[bytes] = ()
    #: The ids this run was answered with before (0: none), if it is said again after a crash undid it: what was told of them since
    #: stays true.
    told_ids: Sequence[int] = ()


@dataclass(frozen=True, slots=True)
class AddRule:
    """Tasks of an open submission, as a rule: they are made as they are needed, once the submission is sealed.

    Only outputs exist from now on: tasks that somebody wants, or that tasks of the submission outside the rule depend on. They take the
    next indices of the submission. Answered like AddTasks. A key of the rule that is known when its turn comes keeps its task.
    """

    submission: str
    #: Index in the submission of the first output; must equal the number of tasks added so far.
    first_index: int
    #: `taskdb.rules.Rule.write()`.
    rule: bytes
    #: A group a layer.
    new_groups: Sequence[str]
    #: As in AddTasks. Layers name them by number.
    new_shared: Sequence[bytes]
    #: The outputs, each once, in an order in which dependencies come first.
    layers: Sequence[int]
    elements: Sequence[int]
    #: TaskFlag.WANTED or 0.
    flags: Sequence[int]
    #: Tasks of the submission outside the rule that depend on each.
    dependent_counts: Sequence[int]


@dataclass(frozen=True, slots=True)
class SealGraph:
    """The submission is complete."""

    submission: str


@dataclass(frozen=True, slots=True)
class AbortGraph:
    """Forget a submission (open or sealed) as if it never came, in bounded steps."""

    submission: str


@dataclass(frozen=True, slots=True)
class Want:
    """A client needs these keys. Answered with one WantState a key."""

    client: str
    keys: Sequence[bytes]


@dataclass(frozen=True, slots=True)
class Unwant:
    """A client needs these no more. Unknown keys and wants that are not there are ignored."""

    client: str
    keys: Sequence[bytes]


@dataclass(frozen=True, slots=True)
class DropClient:
    """A client needs nothing any more. In bounded steps."""

    client: str


@dataclass(frozen=True, slots=True)
class Report:
    """What the scheduler says of tasks now, column by column. Unknown ids that it holds are named in Result.release."""

    ids: Sequence[int]
    levels: Sequence[Level]
    #: Bytes of the result (MEMORY), else -1. Same length as ids, or empty.
    nbytes: Sequence[int] = ()
    #: Retries left (-1: as the annotations say) and suspicious count, to be handed back with the next lease. Or empty.
    retries: Sequence[int] = ()
    suspicious: Sequence[int] = ()
    #: For the history, of tasks that were computed: where (place in `workers`, from 1; 0: not known), when that began, and how long it
    #: took. Or empty.
    ran_on: Sequence[int] = ()
    began: Sequence[float] = ()
    seconds: Sequence[float] = ()
    workers: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class Fail:
    """The task failed itself: the scheduler's report ERRED with its payload (opaque bytes) and text for people."""

    id: int
    payload: bytes
    text: str
    #: For people, too; empty if it is not known.
    traceback: str = ""


@dataclass(frozen=True, slots=True)
class Blame:
    """The task is ERRED in the scheduler because `cause` failed."""

    id: int
    cause: int


@dataclass(frozen=True, slots=True)
class Cancel:
    """Dask's cancel: a key is cancelled if `force`, or nobody but `client` wants it; with it, all that depends on it.

    Cancelled tasks lose the client's want (with `force`, every want) and are reported in Result.cancelled, once each.
    Runs in bounded steps. Unknown keys are ignored.
    """

    client: str
    keys: Sequence[bytes]
    force: bool


@dataclass(frozen=True, slots=True)
class Retry:
    """Run again the failed tasks under these keys (those that failed themselves, found by walking up), and below them."""

    keys: Sequence[bytes]


@dataclass(frozen=True, slots=True)
class Adopt:
    """A worker that was there before this scheduler says what it holds. Answered with one Adopted a key, results first.

    A key is believed if the task under it was there when the worker's scheduler was replaced (or its graph is RESENT): else it may be
    another task of the same name.
    """

    #: Epoch of the scheduler the worker was registered with last.
    epoch: int
    keys: Sequence[bytes]
    #: MEMORY: it holds the result; HELD: it is running it. Same length as keys.
    levels: Sequence[Level]
    #: Bytes of the result (MEMORY), else -1. Same length as keys, or empty.
    nbytes: Sequence[int] = ()


@dataclass(frozen=True, slots=True)
class TakeWhole:
    """A new scheduler takes in what is left to do of a WHOLE submission, as one unit: nothing an earlier scheduler held of it counts.

    Answered with one TakenWhole. In one step, however large the submission is. An unknown submission has nothing left to do.
    """

    submission: str


@dataclass(frozen=True, slots=True)
class EndRecovery:
    """No more workers of earlier schedulers are waited for: what nobody has claimed by Adopt is lost, or not begun. In bounded steps."""


@dataclass(frozen=True, slots=True)
class Keep:
    """Set or remove what the scheduler keeps here besides tasks. Opaque, but for the section `durations` (see DURATIONS)."""

    #: 1 to KEY_BYTES_MAX bytes each.
    names: Sequence[bytes]
    #: b"" removes. Same length as names.
    values: Sequence[bytes]


#: Section of kept items (`section NUL name`) the database reads: average seconds of a task, big-endian f64, by the prefix of its group.
DURATIONS = b"durations\0"


@dataclass(frozen=True, slots=True)
class Credit:
    """How many more tasks the scheduler takes. Stands until replaced; leases made in the meantime are subtracted.

    `ready`: so many whose dependencies are all in memory, if there are; `total`: these included, so many in all, in rank order, the rest
    being look-ahead (dependencies in memory or leased). `leases_seen`: leases this scheduler has received in
    this epoch; the database subtracts those still under way.
    """

    ready: int
    total: int
    leases_seen: int


Command = (
    BeginGraph
    | AddTasks
    | AddRule
    | SealGraph
    | AbortGraph
    | Want
    | Unwant
    | DropClient
    | Report
    | Fail
    | Blame
    | Cancel
    | Retry
    | Adopt
    | TakeWhole
    | EndRecovery
    | Keep
    | Credit
)


# ---------------------------------------------------------------------------------------------------------- answers


@dataclass(frozen=True, slots=True)
class Added:
    """Answer to AddTasks: the ids, in order; and the EXTERNAL keys the database does not know: then nothing was added (ids are 0), and the
    submission has been aborted."""

    submission: str
    first_index: int
    ids: list[int]
    missing: list[bytes]
    #: Positions in the run of tasks that were there already (they are not new, and belong to another submission).
    known: list[int] = field(default_factory=list)


#: Of Lease.dependents.
DEPENDENTS_UNKNOWN = 2**32 - 1


@dataclass(slots=True)  # not frozen: one is made for each task, on both sides, and that takes three times as long
class Lease:
    """A task handed to the scheduler. All its dependencies are in memory or leased."""

    id: int
    key: bytes
    spec: bytes
    flags: int
    rank: Rank
    deps: list[int]
    group: str
    submission: str
    #: The task's shared blob, and its number (0: none). No two graphs have the same, also not those of one name.
    shared: bytes
    retries: int
    suspicious: int
    #: Clients that want the result.
    clients: list[str]
    #: Dependents that still need the result, those still to arrive among them; DEPENDENTS_UNKNOWN while more may come to need it again.
    dependents: int = 0
    shared_number: int = 0


@dataclass(frozen=True, slots=True)
class Adopted:
    """Answer to Adopt. `lease` is the task as the scheduler now has it, at the level told; None: nobody needs it, let go of it, or (level
    OUT) nobody knows it."""

    key: bytes
    level: Level
    lease: Lease | None


@dataclass(frozen=True, slots=True)
class TakenWhole:
    """Answer to TakeWhole: its tasks that are to be done, all leased, dependencies first."""

    submission: str
    leases: list[Lease]


@dataclass(frozen=True, slots=True)
class WantState:
    """Answer to Want. `state` is None if the key is unknown; `cause` is the key that failed, if ERRED, with its payload."""

    client: str
    key: bytes
    id: int
    state: TaskState | None
    cause: bytes = b""
    payload: bytes = b""


@dataclass(frozen=True, slots=True)
class Erred:
    """A wanted task failed without being held by the scheduler: tell this client."""

    client: str
    key: bytes
    cause: bytes
    payload: bytes


@dataclass(frozen=True, slots=True)
class Cancelled:
    """Tell this client that its want of the key has ended. `client` "" means all clients (Dask tells all)."""

    client: str
    key: bytes


@dataclass(frozen=True, slots=True)
class GroupCount:
    """So many tasks of a group of a submission were forgotten."""

    submission: str
    group: str
    count: int


@dataclass(slots=True)
class Result:
    """What a batch, or a step of background work, brought about, for the scheduler of the current epoch."""

    added: list[Added] = field(default_factory=list)
    leases: list[Lease] = field(default_factory=list)
    #: Ids the scheduler holds and need not hold any more: nobody needs the result, or the task.
    release: list[int] = field(default_factory=list)
    wants: list[WantState] = field(default_factory=list)
    erred: list[Erred] = field(default_factory=list)
    cancelled: list[Cancelled] = field(default_factory=list)
    forgotten: list[GroupCount] = field(default_factory=list)
    adopted: list[Adopted] = field(default_factory=list)
    whole: list[TakenWhole] = field(default_factory=list)
    #: Its number, if it is kept until the scheduler has heard it; else 0.
    number: int = 0
    #: Tasks in the queues after this, and those of them whose dependencies are all in memory.
    queued: int = 0
    ready: int = 0
    #: In the answer to a batch: some of what it gave rise to has yet to be carried out.
    busy: bool = False

    def __bool__(self) -> bool:
        return bool(
            self.added
            or self.leases
            or self.release
            or self.wants
            or self.erred
            or self.cancelled
            or self.forgotten
            or self.adopted
            or self.whole
        )
