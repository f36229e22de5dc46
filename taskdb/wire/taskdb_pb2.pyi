from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class SessionRequest(_message.Message):
    __slots__ = ("attach", "batch", "resync", "done")
    ATTACH_FIELD_NUMBER: _ClassVar[int]
    BATCH_FIELD_NUMBER: _ClassVar[int]
    RESYNC_FIELD_NUMBER: _ClassVar[int]
    DONE_FIELD_NUMBER: _ClassVar[int]
    attach: Attach
    batch: Batch
    resync: Resync
    done: Done
    def __init__(self, attach: _Optional[_Union[Attach, _Mapping]] = ..., batch: _Optional[_Union[Batch, _Mapping]] = ..., resync: _Optional[_Union[Resync, _Mapping]] = ..., done: _Optional[_Union[Done, _Mapping]] = ...) -> None: ...

class Attach(_message.Message):
    __slots__ = ("scheduler_id", "epoch", "answered", "heard")
    SCHEDULER_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    ANSWERED_FIELD_NUMBER: _ClassVar[int]
    HEARD_FIELD_NUMBER: _ClassVar[int]
    scheduler_id: str
    epoch: int
    answered: int
    heard: int
    def __init__(self, scheduler_id: _Optional[str] = ..., epoch: _Optional[int] = ..., answered: _Optional[int] = ..., heard: _Optional[int] = ...) -> None: ...

class Resync(_message.Message):
    __slots__ = ("held", "leases_seen")
    HELD_FIELD_NUMBER: _ClassVar[int]
    LEASES_SEEN_FIELD_NUMBER: _ClassVar[int]
    held: _containers.RepeatedScalarFieldContainer[int]
    leases_seen: int
    def __init__(self, held: _Optional[_Iterable[int]] = ..., leases_seen: _Optional[int] = ...) -> None: ...

class Batch(_message.Message):
    __slots__ = ("seq", "commands", "heard")
    SEQ_FIELD_NUMBER: _ClassVar[int]
    COMMANDS_FIELD_NUMBER: _ClassVar[int]
    HEARD_FIELD_NUMBER: _ClassVar[int]
    seq: int
    commands: _containers.RepeatedCompositeFieldContainer[Command]
    heard: int
    def __init__(self, seq: _Optional[int] = ..., commands: _Optional[_Iterable[_Union[Command, _Mapping]]] = ..., heard: _Optional[int] = ...) -> None: ...

class SessionReply(_message.Message):
    __slots__ = ("attached", "result", "durable", "ask")
    ATTACHED_FIELD_NUMBER: _ClassVar[int]
    RESULT_FIELD_NUMBER: _ClassVar[int]
    DURABLE_FIELD_NUMBER: _ClassVar[int]
    ASK_FIELD_NUMBER: _ClassVar[int]
    attached: Attached
    result: Result
    durable: Durable
    ask: Ask
    def __init__(self, attached: _Optional[_Union[Attached, _Mapping]] = ..., result: _Optional[_Union[Result, _Mapping]] = ..., durable: _Optional[_Union[Durable, _Mapping]] = ..., ask: _Optional[_Union[Ask, _Mapping]] = ...) -> None: ...

class Ask(_message.Message):
    __slots__ = ("number", "action", "keys")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    ACTION_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    number: int
    action: str
    keys: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, number: _Optional[int] = ..., action: _Optional[str] = ..., keys: _Optional[_Iterable[bytes]] = ...) -> None: ...

class Done(_message.Message):
    __slots__ = ("number", "count", "error")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    number: int
    count: int
    error: str
    def __init__(self, number: _Optional[int] = ..., count: _Optional[int] = ..., error: _Optional[str] = ...) -> None: ...

class Attached(_message.Message):
    __slots__ = ("epoch", "store_uuid", "last_seq", "version", "orphans", "leases_lost", "history")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    STORE_UUID_FIELD_NUMBER: _ClassVar[int]
    LAST_SEQ_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    ORPHANS_FIELD_NUMBER: _ClassVar[int]
    LEASES_LOST_FIELD_NUMBER: _ClassVar[int]
    HISTORY_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    store_uuid: str
    last_seq: int
    version: str
    orphans: int
    leases_lost: bool
    history: bool
    def __init__(self, epoch: _Optional[int] = ..., store_uuid: _Optional[str] = ..., last_seq: _Optional[int] = ..., version: _Optional[str] = ..., orphans: _Optional[int] = ..., leases_lost: _Optional[bool] = ..., history: _Optional[bool] = ...) -> None: ...

class Durable(_message.Message):
    __slots__ = ("seq",)
    SEQ_FIELD_NUMBER: _ClassVar[int]
    seq: int
    def __init__(self, seq: _Optional[int] = ...) -> None: ...

class Command(_message.Message):
    __slots__ = ("begin_graph", "add_tasks", "seal_graph", "abort_graph", "want", "unwant", "drop_client", "report", "fail", "blame", "cancel", "retry", "credit", "adopt", "end_recovery", "keep", "take_whole", "add_rule")
    BEGIN_GRAPH_FIELD_NUMBER: _ClassVar[int]
    ADD_TASKS_FIELD_NUMBER: _ClassVar[int]
    SEAL_GRAPH_FIELD_NUMBER: _ClassVar[int]
    ABORT_GRAPH_FIELD_NUMBER: _ClassVar[int]
    WANT_FIELD_NUMBER: _ClassVar[int]
    UNWANT_FIELD_NUMBER: _ClassVar[int]
    DROP_CLIENT_FIELD_NUMBER: _ClassVar[int]
    REPORT_FIELD_NUMBER: _ClassVar[int]
    FAIL_FIELD_NUMBER: _ClassVar[int]
    BLAME_FIELD_NUMBER: _ClassVar[int]
    CANCEL_FIELD_NUMBER: _ClassVar[int]
    RETRY_FIELD_NUMBER: _ClassVar[int]
    CREDIT_FIELD_NUMBER: _ClassVar[int]
    ADOPT_FIELD_NUMBER: _ClassVar[int]
    END_RECOVERY_FIELD_NUMBER: _ClassVar[int]
    KEEP_FIELD_NUMBER: _ClassVar[int]
    TAKE_WHOLE_FIELD_NUMBER: _ClassVar[int]
    ADD_RULE_FIELD_NUMBER: _ClassVar[int]
    begin_graph: BeginGraph
    add_tasks: AddTasks
    seal_graph: SealGraph
    abort_graph: AbortGraph
    want: ClientKeys
    unwant: ClientKeys
    drop_client: str
    report: Report
    fail: Fail
    blame: Blame
    cancel: Cancel
    retry: Keys
    credit: Credit
    adopt: Adopt
    end_recovery: EndRecovery
    keep: Keep
    take_whole: str
    add_rule: AddRule
    def __init__(self, begin_graph: _Optional[_Union[BeginGraph, _Mapping]] = ..., add_tasks: _Optional[_Union[AddTasks, _Mapping]] = ..., seal_graph: _Optional[_Union[SealGraph, _Mapping]] = ..., abort_graph: _Optional[_Union[AbortGraph, _Mapping]] = ..., want: _Optional[_Union[ClientKeys, _Mapping]] = ..., unwant: _Optional[_Union[ClientKeys, _Mapping]] = ..., drop_client: _Optional[str] = ..., report: _Optional[_Union[Report, _Mapping]] = ..., fail: _Optional[_Union[Fail, _Mapping]] = ..., blame: _Optional[_Union[Blame, _Mapping]] = ..., cancel: _Optional[_Union[Cancel, _Mapping]] = ..., retry: _Optional[_Union[Keys, _Mapping]] = ..., credit: _Optional[_Union[Credit, _Mapping]] = ..., adopt: _Optional[_Union[Adopt, _Mapping]] = ..., end_recovery: _Optional[_Union[EndRecovery, _Mapping]] = ..., keep: _Optional[_Union[Keep, _Mapping]] = ..., take_whole: _Optional[str] = ..., add_rule: _Optional[_Union[AddRule, _Mapping]] = ...) -> None: ...

class BeginGraph(_message.Message):
    __slots__ = ("submission", "client", "generation", "submitted", "label", "flags")
    SUBMISSION_FIELD_NUMBER: _ClassVar[int]
    CLIENT_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    SUBMITTED_FIELD_NUMBER: _ClassVar[int]
    LABEL_FIELD_NUMBER: _ClassVar[int]
    FLAGS_FIELD_NUMBER: _ClassVar[int]
    submission: str
    client: str
    generation: float
    submitted: float
    label: str
    flags: int
    def __init__(self, submission: _Optional[str] = ..., client: _Optional[str] = ..., generation: _Optional[float] = ..., submitted: _Optional[float] = ..., label: _Optional[str] = ..., flags: _Optional[int] = ...) -> None: ...

class AddTasks(_message.Message):
    __slots__ = ("submission", "first_index", "keys", "specs", "flags", "dep_counts", "deps", "dependent_counts", "orders", "user_priorities", "groups", "new_groups", "shared", "new_shared", "told_ids")
    SUBMISSION_FIELD_NUMBER: _ClassVar[int]
    FIRST_INDEX_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    SPECS_FIELD_NUMBER: _ClassVar[int]
    FLAGS_FIELD_NUMBER: _ClassVar[int]
    DEP_COUNTS_FIELD_NUMBER: _ClassVar[int]
    DEPS_FIELD_NUMBER: _ClassVar[int]
    DEPENDENT_COUNTS_FIELD_NUMBER: _ClassVar[int]
    ORDERS_FIELD_NUMBER: _ClassVar[int]
    USER_PRIORITIES_FIELD_NUMBER: _ClassVar[int]
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    NEW_GROUPS_FIELD_NUMBER: _ClassVar[int]
    SHARED_FIELD_NUMBER: _ClassVar[int]
    NEW_SHARED_FIELD_NUMBER: _ClassVar[int]
    TOLD_IDS_FIELD_NUMBER: _ClassVar[int]
    submission: str
    first_index: int
    keys: _containers.RepeatedScalarFieldContainer[bytes]
    specs: _containers.RepeatedScalarFieldContainer[bytes]
    flags: _containers.RepeatedScalarFieldContainer[int]
    dep_counts: _containers.RepeatedScalarFieldContainer[int]
    deps: _containers.RepeatedScalarFieldContainer[int]
    dependent_counts: _containers.RepeatedScalarFieldContainer[int]
    orders: _containers.RepeatedScalarFieldContainer[float]
    user_priorities: _containers.RepeatedScalarFieldContainer[float]
    groups: _containers.RepeatedScalarFieldContainer[int]
    new_groups: _containers.RepeatedScalarFieldContainer[str]
    shared: _containers.RepeatedScalarFieldContainer[int]
    new_shared: _containers.RepeatedScalarFieldContainer[bytes]
    told_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, submission: _Optional[str] = ..., first_index: _Optional[int] = ..., keys: _Optional[_Iterable[bytes]] = ..., specs: _Optional[_Iterable[bytes]] = ..., flags: _Optional[_Iterable[int]] = ..., dep_counts: _Optional[_Iterable[int]] = ..., deps: _Optional[_Iterable[int]] = ..., dependent_counts: _Optional[_Iterable[int]] = ..., orders: _Optional[_Iterable[float]] = ..., user_priorities: _Optional[_Iterable[float]] = ..., groups: _Optional[_Iterable[int]] = ..., new_groups: _Optional[_Iterable[str]] = ..., shared: _Optional[_Iterable[int]] = ..., new_shared: _Optional[_Iterable[bytes]] = ..., told_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class AddRule(_message.Message):
    __slots__ = ("submission", "first_index", "rule", "new_groups", "new_shared", "layers", "elements", "flags", "dependent_counts")
    SUBMISSION_FIELD_NUMBER: _ClassVar[int]
    FIRST_INDEX_FIELD_NUMBER: _ClassVar[int]
    RULE_FIELD_NUMBER: _ClassVar[int]
    NEW_GROUPS_FIELD_NUMBER: _ClassVar[int]
    NEW_SHARED_FIELD_NUMBER: _ClassVar[int]
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    ELEMENTS_FIELD_NUMBER: _ClassVar[int]
    FLAGS_FIELD_NUMBER: _ClassVar[int]
    DEPENDENT_COUNTS_FIELD_NUMBER: _ClassVar[int]
    submission: str
    first_index: int
    rule: bytes
    new_groups: _containers.RepeatedScalarFieldContainer[str]
    new_shared: _containers.RepeatedScalarFieldContainer[bytes]
    layers: _containers.RepeatedScalarFieldContainer[int]
    elements: _containers.RepeatedScalarFieldContainer[int]
    flags: _containers.RepeatedScalarFieldContainer[int]
    dependent_counts: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, submission: _Optional[str] = ..., first_index: _Optional[int] = ..., rule: _Optional[bytes] = ..., new_groups: _Optional[_Iterable[str]] = ..., new_shared: _Optional[_Iterable[bytes]] = ..., layers: _Optional[_Iterable[int]] = ..., elements: _Optional[_Iterable[int]] = ..., flags: _Optional[_Iterable[int]] = ..., dependent_counts: _Optional[_Iterable[int]] = ...) -> None: ...

class SealGraph(_message.Message):
    __slots__ = ("submission",)
    SUBMISSION_FIELD_NUMBER: _ClassVar[int]
    submission: str
    def __init__(self, submission: _Optional[str] = ...) -> None: ...

class AbortGraph(_message.Message):
    __slots__ = ("submission",)
    SUBMISSION_FIELD_NUMBER: _ClassVar[int]
    submission: str
    def __init__(self, submission: _Optional[str] = ...) -> None: ...

class ClientKeys(_message.Message):
    __slots__ = ("client", "keys")
    CLIENT_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    client: str
    keys: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, client: _Optional[str] = ..., keys: _Optional[_Iterable[bytes]] = ...) -> None: ...

class Keys(_message.Message):
    __slots__ = ("keys",)
    KEYS_FIELD_NUMBER: _ClassVar[int]
    keys: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, keys: _Optional[_Iterable[bytes]] = ...) -> None: ...

class Report(_message.Message):
    __slots__ = ("ids", "levels", "nbytes", "retries", "suspicious", "ran_on", "began", "seconds", "workers")
    IDS_FIELD_NUMBER: _ClassVar[int]
    LEVELS_FIELD_NUMBER: _ClassVar[int]
    NBYTES_FIELD_NUMBER: _ClassVar[int]
    RETRIES_FIELD_NUMBER: _ClassVar[int]
    SUSPICIOUS_FIELD_NUMBER: _ClassVar[int]
    RAN_ON_FIELD_NUMBER: _ClassVar[int]
    BEGAN_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    ids: _containers.RepeatedScalarFieldContainer[int]
    levels: _containers.RepeatedScalarFieldContainer[int]
    nbytes: _containers.RepeatedScalarFieldContainer[int]
    retries: _containers.RepeatedScalarFieldContainer[int]
    suspicious: _containers.RepeatedScalarFieldContainer[int]
    ran_on: _containers.RepeatedScalarFieldContainer[int]
    began: _containers.RepeatedScalarFieldContainer[float]
    seconds: _containers.RepeatedScalarFieldContainer[float]
    workers: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, ids: _Optional[_Iterable[int]] = ..., levels: _Optional[_Iterable[int]] = ..., nbytes: _Optional[_Iterable[int]] = ..., retries: _Optional[_Iterable[int]] = ..., suspicious: _Optional[_Iterable[int]] = ..., ran_on: _Optional[_Iterable[int]] = ..., began: _Optional[_Iterable[float]] = ..., seconds: _Optional[_Iterable[float]] = ..., workers: _Optional[_Iterable[str]] = ...) -> None: ...

class Fail(_message.Message):
    __slots__ = ("id", "payload", "text", "traceback")
    ID_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    TRACEBACK_FIELD_NUMBER: _ClassVar[int]
    id: int
    payload: bytes
    text: str
    traceback: str
    def __init__(self, id: _Optional[int] = ..., payload: _Optional[bytes] = ..., text: _Optional[str] = ..., traceback: _Optional[str] = ...) -> None: ...

class Blame(_message.Message):
    __slots__ = ("id", "cause")
    ID_FIELD_NUMBER: _ClassVar[int]
    CAUSE_FIELD_NUMBER: _ClassVar[int]
    id: int
    cause: int
    def __init__(self, id: _Optional[int] = ..., cause: _Optional[int] = ...) -> None: ...

class Cancel(_message.Message):
    __slots__ = ("client", "keys", "force")
    CLIENT_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    FORCE_FIELD_NUMBER: _ClassVar[int]
    client: str
    keys: _containers.RepeatedScalarFieldContainer[bytes]
    force: bool
    def __init__(self, client: _Optional[str] = ..., keys: _Optional[_Iterable[bytes]] = ..., force: _Optional[bool] = ...) -> None: ...

class Adopt(_message.Message):
    __slots__ = ("epoch", "keys", "levels", "nbytes")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    LEVELS_FIELD_NUMBER: _ClassVar[int]
    NBYTES_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    keys: _containers.RepeatedScalarFieldContainer[bytes]
    levels: _containers.RepeatedScalarFieldContainer[int]
    nbytes: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, epoch: _Optional[int] = ..., keys: _Optional[_Iterable[bytes]] = ..., levels: _Optional[_Iterable[int]] = ..., nbytes: _Optional[_Iterable[int]] = ...) -> None: ...

class EndRecovery(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Keep(_message.Message):
    __slots__ = ("names", "values")
    NAMES_FIELD_NUMBER: _ClassVar[int]
    VALUES_FIELD_NUMBER: _ClassVar[int]
    names: _containers.RepeatedScalarFieldContainer[bytes]
    values: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, names: _Optional[_Iterable[bytes]] = ..., values: _Optional[_Iterable[bytes]] = ...) -> None: ...

class Credit(_message.Message):
    __slots__ = ("ready", "total", "leases_seen")
    READY_FIELD_NUMBER: _ClassVar[int]
    TOTAL_FIELD_NUMBER: _ClassVar[int]
    LEASES_SEEN_FIELD_NUMBER: _ClassVar[int]
    ready: int
    total: int
    leases_seen: int
    def __init__(self, ready: _Optional[int] = ..., total: _Optional[int] = ..., leases_seen: _Optional[int] = ...) -> None: ...

class Result(_message.Message):
    __slots__ = ("seq", "added", "leases", "release", "wants", "erred", "cancelled", "forgotten", "refused", "queued", "ready", "adopted", "whole", "number", "busy")
    SEQ_FIELD_NUMBER: _ClassVar[int]
    ADDED_FIELD_NUMBER: _ClassVar[int]
    LEASES_FIELD_NUMBER: _ClassVar[int]
    RELEASE_FIELD_NUMBER: _ClassVar[int]
    WANTS_FIELD_NUMBER: _ClassVar[int]
    ERRED_FIELD_NUMBER: _ClassVar[int]
    CANCELLED_FIELD_NUMBER: _ClassVar[int]
    FORGOTTEN_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    QUEUED_FIELD_NUMBER: _ClassVar[int]
    READY_FIELD_NUMBER: _ClassVar[int]
    ADOPTED_FIELD_NUMBER: _ClassVar[int]
    WHOLE_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    BUSY_FIELD_NUMBER: _ClassVar[int]
    seq: int
    added: _containers.RepeatedCompositeFieldContainer[Added]
    leases: _containers.RepeatedCompositeFieldContainer[Lease]
    release: _containers.RepeatedScalarFieldContainer[int]
    wants: _containers.RepeatedCompositeFieldContainer[WantState]
    erred: _containers.RepeatedCompositeFieldContainer[Erred]
    cancelled: _containers.RepeatedCompositeFieldContainer[Cancelled]
    forgotten: _containers.RepeatedCompositeFieldContainer[GroupCount]
    refused: _containers.RepeatedCompositeFieldContainer[Refused]
    queued: int
    ready: int
    adopted: _containers.RepeatedCompositeFieldContainer[Adopted]
    whole: _containers.RepeatedCompositeFieldContainer[TakenWhole]
    number: int
    busy: bool
    def __init__(self, seq: _Optional[int] = ..., added: _Optional[_Iterable[_Union[Added, _Mapping]]] = ..., leases: _Optional[_Iterable[_Union[Lease, _Mapping]]] = ..., release: _Optional[_Iterable[int]] = ..., wants: _Optional[_Iterable[_Union[WantState, _Mapping]]] = ..., erred: _Optional[_Iterable[_Union[Erred, _Mapping]]] = ..., cancelled: _Optional[_Iterable[_Union[Cancelled, _Mapping]]] = ..., forgotten: _Optional[_Iterable[_Union[GroupCount, _Mapping]]] = ..., refused: _Optional[_Iterable[_Union[Refused, _Mapping]]] = ..., queued: _Optional[int] = ..., ready: _Optional[int] = ..., adopted: _Optional[_Iterable[_Union[Adopted, _Mapping]]] = ..., whole: _Optional[_Iterable[_Union[TakenWhole, _Mapping]]] = ..., number: _Optional[int] = ..., busy: _Optional[bool] = ...) -> None: ...

class TakenWhole(_message.Message):
    __slots__ = ("submission", "leases")
    SUBMISSION_FIELD_NUMBER: _ClassVar[int]
    LEASES_FIELD_NUMBER: _ClassVar[int]
    submission: str
    leases: _containers.RepeatedCompositeFieldContainer[Lease]
    def __init__(self, submission: _Optional[str] = ..., leases: _Optional[_Iterable[_Union[Lease, _Mapping]]] = ...) -> None: ...

class Adopted(_message.Message):
    __slots__ = ("key", "level", "lease")
    KEY_FIELD_NUMBER: _ClassVar[int]
    LEVEL_FIELD_NUMBER: _ClassVar[int]
    LEASE_FIELD_NUMBER: _ClassVar[int]
    key: bytes
    level: int
    lease: Lease
    def __init__(self, key: _Optional[bytes] = ..., level: _Optional[int] = ..., lease: _Optional[_Union[Lease, _Mapping]] = ...) -> None: ...

class Added(_message.Message):
    __slots__ = ("submission", "first_index", "ids", "missing", "known")
    SUBMISSION_FIELD_NUMBER: _ClassVar[int]
    FIRST_INDEX_FIELD_NUMBER: _ClassVar[int]
    IDS_FIELD_NUMBER: _ClassVar[int]
    MISSING_FIELD_NUMBER: _ClassVar[int]
    KNOWN_FIELD_NUMBER: _ClassVar[int]
    submission: str
    first_index: int
    ids: _containers.RepeatedScalarFieldContainer[int]
    missing: _containers.RepeatedScalarFieldContainer[bytes]
    known: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, submission: _Optional[str] = ..., first_index: _Optional[int] = ..., ids: _Optional[_Iterable[int]] = ..., missing: _Optional[_Iterable[bytes]] = ..., known: _Optional[_Iterable[int]] = ...) -> None: ...

class Lease(_message.Message):
    __slots__ = ("id", "key", "spec", "flags", "user", "generation", "order", "deps", "group", "submission", "shared", "retries", "suspicious", "clients", "dependents", "shared_number")
    ID_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    SPEC_FIELD_NUMBER: _ClassVar[int]
    FLAGS_FIELD_NUMBER: _ClassVar[int]
    USER_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    ORDER_FIELD_NUMBER: _ClassVar[int]
    DEPS_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    SUBMISSION_FIELD_NUMBER: _ClassVar[int]
    SHARED_FIELD_NUMBER: _ClassVar[int]
    RETRIES_FIELD_NUMBER: _ClassVar[int]
    SUSPICIOUS_FIELD_NUMBER: _ClassVar[int]
    CLIENTS_FIELD_NUMBER: _ClassVar[int]
    DEPENDENTS_FIELD_NUMBER: _ClassVar[int]
    SHARED_NUMBER_FIELD_NUMBER: _ClassVar[int]
    id: int
    key: bytes
    spec: bytes
    flags: int
    user: float
    generation: float
    order: float
    deps: _containers.RepeatedScalarFieldContainer[int]
    group: str
    submission: str
    shared: bytes
    retries: int
    suspicious: int
    clients: _containers.RepeatedScalarFieldContainer[str]
    dependents: int
    shared_number: int
    def __init__(self, id: _Optional[int] = ..., key: _Optional[bytes] = ..., spec: _Optional[bytes] = ..., flags: _Optional[int] = ..., user: _Optional[float] = ..., generation: _Optional[float] = ..., order: _Optional[float] = ..., deps: _Optional[_Iterable[int]] = ..., group: _Optional[str] = ..., submission: _Optional[str] = ..., shared: _Optional[bytes] = ..., retries: _Optional[int] = ..., suspicious: _Optional[int] = ..., clients: _Optional[_Iterable[str]] = ..., dependents: _Optional[int] = ..., shared_number: _Optional[int] = ...) -> None: ...

class WantState(_message.Message):
    __slots__ = ("client", "key", "id", "state", "cause", "payload")
    CLIENT_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    ID_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    CAUSE_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    client: str
    key: bytes
    id: int
    state: int
    cause: bytes
    payload: bytes
    def __init__(self, client: _Optional[str] = ..., key: _Optional[bytes] = ..., id: _Optional[int] = ..., state: _Optional[int] = ..., cause: _Optional[bytes] = ..., payload: _Optional[bytes] = ...) -> None: ...

class Erred(_message.Message):
    __slots__ = ("client", "key", "cause", "payload")
    CLIENT_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    CAUSE_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    client: str
    key: bytes
    cause: bytes
    payload: bytes
    def __init__(self, client: _Optional[str] = ..., key: _Optional[bytes] = ..., cause: _Optional[bytes] = ..., payload: _Optional[bytes] = ...) -> None: ...

class Cancelled(_message.Message):
    __slots__ = ("client", "key")
    CLIENT_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    client: str
    key: bytes
    def __init__(self, client: _Optional[str] = ..., key: _Optional[bytes] = ...) -> None: ...

class GroupCount(_message.Message):
    __slots__ = ("submission", "group", "count")
    SUBMISSION_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    submission: str
    group: str
    count: int
    def __init__(self, submission: _Optional[str] = ..., group: _Optional[str] = ..., count: _Optional[int] = ...) -> None: ...

class Refused(_message.Message):
    __slots__ = ("command", "submission", "kind", "message")
    COMMAND_FIELD_NUMBER: _ClassVar[int]
    SUBMISSION_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    command: int
    submission: str
    kind: str
    message: str
    def __init__(self, command: _Optional[int] = ..., submission: _Optional[str] = ..., kind: _Optional[str] = ..., message: _Optional[str] = ...) -> None: ...

class IngestRequest(_message.Message):
    __slots__ = ("epoch", "begin_graph", "add_tasks", "seal_graph", "add_rule")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    BEGIN_GRAPH_FIELD_NUMBER: _ClassVar[int]
    ADD_TASKS_FIELD_NUMBER: _ClassVar[int]
    SEAL_GRAPH_FIELD_NUMBER: _ClassVar[int]
    ADD_RULE_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    begin_graph: BeginGraph
    add_tasks: AddTasks
    seal_graph: SealGraph
    add_rule: AddRule
    def __init__(self, epoch: _Optional[int] = ..., begin_graph: _Optional[_Union[BeginGraph, _Mapping]] = ..., add_tasks: _Optional[_Union[AddTasks, _Mapping]] = ..., seal_graph: _Optional[_Union[SealGraph, _Mapping]] = ..., add_rule: _Optional[_Union[AddRule, _Mapping]] = ...) -> None: ...

class IngestReply(_message.Message):
    __slots__ = ("tasks", "missing", "durable", "known")
    TASKS_FIELD_NUMBER: _ClassVar[int]
    MISSING_FIELD_NUMBER: _ClassVar[int]
    DURABLE_FIELD_NUMBER: _ClassVar[int]
    KNOWN_FIELD_NUMBER: _ClassVar[int]
    tasks: int
    missing: _containers.RepeatedScalarFieldContainer[bytes]
    durable: bool
    known: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, tasks: _Optional[int] = ..., missing: _Optional[_Iterable[bytes]] = ..., durable: _Optional[bool] = ..., known: _Optional[_Iterable[int]] = ...) -> None: ...

class StatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StatusReply(_message.Message):
    __slots__ = ("version", "store_uuid", "format_version", "epoch", "scheduler_attached", "tasks", "states", "store_bytes", "store_bytes_max", "todo", "uptime_seconds", "graphs", "commits", "commit_seconds_last", "used_bytes", "history_bytes")
    class StatesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    VERSION_FIELD_NUMBER: _ClassVar[int]
    STORE_UUID_FIELD_NUMBER: _ClassVar[int]
    FORMAT_VERSION_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    SCHEDULER_ATTACHED_FIELD_NUMBER: _ClassVar[int]
    TASKS_FIELD_NUMBER: _ClassVar[int]
    STATES_FIELD_NUMBER: _ClassVar[int]
    STORE_BYTES_FIELD_NUMBER: _ClassVar[int]
    STORE_BYTES_MAX_FIELD_NUMBER: _ClassVar[int]
    TODO_FIELD_NUMBER: _ClassVar[int]
    UPTIME_SECONDS_FIELD_NUMBER: _ClassVar[int]
    GRAPHS_FIELD_NUMBER: _ClassVar[int]
    COMMITS_FIELD_NUMBER: _ClassVar[int]
    COMMIT_SECONDS_LAST_FIELD_NUMBER: _ClassVar[int]
    USED_BYTES_FIELD_NUMBER: _ClassVar[int]
    HISTORY_BYTES_FIELD_NUMBER: _ClassVar[int]
    version: str
    store_uuid: str
    format_version: int
    epoch: int
    scheduler_attached: bool
    tasks: int
    states: _containers.ScalarMap[str, int]
    store_bytes: int
    store_bytes_max: int
    todo: int
    uptime_seconds: float
    graphs: _containers.RepeatedCompositeFieldContainer[GraphStatus]
    commits: int
    commit_seconds_last: float
    used_bytes: int
    history_bytes: int
    def __init__(self, version: _Optional[str] = ..., store_uuid: _Optional[str] = ..., format_version: _Optional[int] = ..., epoch: _Optional[int] = ..., scheduler_attached: _Optional[bool] = ..., tasks: _Optional[int] = ..., states: _Optional[_Mapping[str, int]] = ..., store_bytes: _Optional[int] = ..., store_bytes_max: _Optional[int] = ..., todo: _Optional[int] = ..., uptime_seconds: _Optional[float] = ..., graphs: _Optional[_Iterable[_Union[GraphStatus, _Mapping]]] = ..., commits: _Optional[int] = ..., commit_seconds_last: _Optional[float] = ..., used_bytes: _Optional[int] = ..., history_bytes: _Optional[int] = ...) -> None: ...

class GraphStatus(_message.Message):
    __slots__ = ("submission", "client", "label", "submitted", "sealed", "tasks", "states", "wanted", "unmade", "total")
    class StatesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    SUBMISSION_FIELD_NUMBER: _ClassVar[int]
    CLIENT_FIELD_NUMBER: _ClassVar[int]
    LABEL_FIELD_NUMBER: _ClassVar[int]
    SUBMITTED_FIELD_NUMBER: _ClassVar[int]
    SEALED_FIELD_NUMBER: _ClassVar[int]
    TASKS_FIELD_NUMBER: _ClassVar[int]
    STATES_FIELD_NUMBER: _ClassVar[int]
    WANTED_FIELD_NUMBER: _ClassVar[int]
    UNMADE_FIELD_NUMBER: _ClassVar[int]
    TOTAL_FIELD_NUMBER: _ClassVar[int]
    submission: str
    client: str
    label: str
    submitted: float
    sealed: bool
    tasks: int
    states: _containers.ScalarMap[str, int]
    wanted: int
    unmade: int
    total: int
    def __init__(self, submission: _Optional[str] = ..., client: _Optional[str] = ..., label: _Optional[str] = ..., submitted: _Optional[float] = ..., sealed: _Optional[bool] = ..., tasks: _Optional[int] = ..., states: _Optional[_Mapping[str, int]] = ..., wanted: _Optional[int] = ..., unmade: _Optional[int] = ..., total: _Optional[int] = ...) -> None: ...

class ListTasksRequest(_message.Message):
    __slots__ = ("submission", "state", "prefix", "cursor", "limit", "group", "pattern", "wanted", "worker", "sort", "descending", "after")
    SUBMISSION_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    PREFIX_FIELD_NUMBER: _ClassVar[int]
    CURSOR_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    PATTERN_FIELD_NUMBER: _ClassVar[int]
    WANTED_FIELD_NUMBER: _ClassVar[int]
    WORKER_FIELD_NUMBER: _ClassVar[int]
    SORT_FIELD_NUMBER: _ClassVar[int]
    DESCENDING_FIELD_NUMBER: _ClassVar[int]
    AFTER_FIELD_NUMBER: _ClassVar[int]
    submission: str
    state: str
    prefix: str
    cursor: bytes
    limit: int
    group: str
    pattern: str
    wanted: bool
    worker: str
    sort: str
    descending: bool
    after: bytes
    def __init__(self, submission: _Optional[str] = ..., state: _Optional[str] = ..., prefix: _Optional[str] = ..., cursor: _Optional[bytes] = ..., limit: _Optional[int] = ..., group: _Optional[str] = ..., pattern: _Optional[str] = ..., wanted: _Optional[bool] = ..., worker: _Optional[str] = ..., sort: _Optional[str] = ..., descending: _Optional[bool] = ..., after: _Optional[bytes] = ...) -> None: ...

class ListTasksReply(_message.Message):
    __slots__ = ("tasks", "cursor")
    TASKS_FIELD_NUMBER: _ClassVar[int]
    CURSOR_FIELD_NUMBER: _ClassVar[int]
    tasks: _containers.RepeatedCompositeFieldContainer[TaskInfo]
    cursor: bytes
    def __init__(self, tasks: _Optional[_Iterable[_Union[TaskInfo, _Mapping]]] = ..., cursor: _Optional[bytes] = ...) -> None: ...

class TaskInfo(_message.Message):
    __slots__ = ("id", "key", "state", "submission", "group", "waiting_on", "blocked_on", "need", "wants", "nbytes", "user", "generation", "order", "suspicious", "error", "token")
    ID_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    SUBMISSION_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    WAITING_ON_FIELD_NUMBER: _ClassVar[int]
    BLOCKED_ON_FIELD_NUMBER: _ClassVar[int]
    NEED_FIELD_NUMBER: _ClassVar[int]
    WANTS_FIELD_NUMBER: _ClassVar[int]
    NBYTES_FIELD_NUMBER: _ClassVar[int]
    USER_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    ORDER_FIELD_NUMBER: _ClassVar[int]
    SUSPICIOUS_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    id: int
    key: bytes
    state: str
    submission: str
    group: str
    waiting_on: int
    blocked_on: int
    need: int
    wants: int
    nbytes: int
    user: float
    generation: float
    order: float
    suspicious: int
    error: str
    token: bytes
    def __init__(self, id: _Optional[int] = ..., key: _Optional[bytes] = ..., state: _Optional[str] = ..., submission: _Optional[str] = ..., group: _Optional[str] = ..., waiting_on: _Optional[int] = ..., blocked_on: _Optional[int] = ..., need: _Optional[int] = ..., wants: _Optional[int] = ..., nbytes: _Optional[int] = ..., user: _Optional[float] = ..., generation: _Optional[float] = ..., order: _Optional[float] = ..., suspicious: _Optional[int] = ..., error: _Optional[str] = ..., token: _Optional[bytes] = ...) -> None: ...

class ExplainRequest(_message.Message):
    __slots__ = ("key", "limit")
    KEY_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    key: bytes
    limit: int
    def __init__(self, key: _Optional[bytes] = ..., limit: _Optional[int] = ...) -> None: ...

class ExplainReply(_message.Message):
    __slots__ = ("found", "task", "reason", "waits_for", "chain", "ahead_in_queue", "wanted_by", "cause", "path", "path_tasks", "path_whole")
    FOUND_FIELD_NUMBER: _ClassVar[int]
    TASK_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    WAITS_FOR_FIELD_NUMBER: _ClassVar[int]
    CHAIN_FIELD_NUMBER: _ClassVar[int]
    AHEAD_IN_QUEUE_FIELD_NUMBER: _ClassVar[int]
    WANTED_BY_FIELD_NUMBER: _ClassVar[int]
    CAUSE_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    PATH_TASKS_FIELD_NUMBER: _ClassVar[int]
    PATH_WHOLE_FIELD_NUMBER: _ClassVar[int]
    found: bool
    task: TaskInfo
    reason: str
    waits_for: _containers.RepeatedCompositeFieldContainer[TaskInfo]
    chain: _containers.RepeatedCompositeFieldContainer[TaskInfo]
    ahead_in_queue: int
    wanted_by: _containers.RepeatedScalarFieldContainer[str]
    cause: TaskInfo
    path: _containers.RepeatedCompositeFieldContainer[PathStep]
    path_tasks: int
    path_whole: bool
    def __init__(self, found: _Optional[bool] = ..., task: _Optional[_Union[TaskInfo, _Mapping]] = ..., reason: _Optional[str] = ..., waits_for: _Optional[_Iterable[_Union[TaskInfo, _Mapping]]] = ..., chain: _Optional[_Iterable[_Union[TaskInfo, _Mapping]]] = ..., ahead_in_queue: _Optional[int] = ..., wanted_by: _Optional[_Iterable[str]] = ..., cause: _Optional[_Union[TaskInfo, _Mapping]] = ..., path: _Optional[_Iterable[_Union[PathStep, _Mapping]]] = ..., path_tasks: _Optional[int] = ..., path_whole: _Optional[bool] = ...) -> None: ...

class PathStep(_message.Message):
    __slots__ = ("task", "seconds")
    TASK_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    task: TaskInfo
    seconds: float
    def __init__(self, task: _Optional[_Union[TaskInfo, _Mapping]] = ..., seconds: _Optional[float] = ...) -> None: ...

class ErrorsRequest(_message.Message):
    __slots__ = ("submission", "cursor")
    SUBMISSION_FIELD_NUMBER: _ClassVar[int]
    CURSOR_FIELD_NUMBER: _ClassVar[int]
    submission: str
    cursor: bytes
    def __init__(self, submission: _Optional[str] = ..., cursor: _Optional[bytes] = ...) -> None: ...

class ErrorsReply(_message.Message):
    __slots__ = ("groups", "cursor")
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    CURSOR_FIELD_NUMBER: _ClassVar[int]
    groups: _containers.RepeatedCompositeFieldContainer[ErrorGroup]
    cursor: bytes
    def __init__(self, groups: _Optional[_Iterable[_Union[ErrorGroup, _Mapping]]] = ..., cursor: _Optional[bytes] = ...) -> None: ...

class ErrorGroup(_message.Message):
    __slots__ = ("exception", "prefix", "failed", "key", "submission", "text", "traceback", "blamed")
    EXCEPTION_FIELD_NUMBER: _ClassVar[int]
    PREFIX_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    SUBMISSION_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    TRACEBACK_FIELD_NUMBER: _ClassVar[int]
    BLAMED_FIELD_NUMBER: _ClassVar[int]
    exception: str
    prefix: str
    failed: int
    key: bytes
    submission: str
    text: str
    traceback: str
    blamed: int
    def __init__(self, exception: _Optional[str] = ..., prefix: _Optional[str] = ..., failed: _Optional[int] = ..., key: _Optional[bytes] = ..., submission: _Optional[str] = ..., text: _Optional[str] = ..., traceback: _Optional[str] = ..., blamed: _Optional[int] = ...) -> None: ...

class StoryRequest(_message.Message):
    __slots__ = ("key", "limit")
    KEY_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    key: bytes
    limit: int
    def __init__(self, key: _Optional[bytes] = ..., limit: _Optional[int] = ...) -> None: ...

class StoryReply(_message.Message):
    __slots__ = ("id", "events", "since", "more")
    ID_FIELD_NUMBER: _ClassVar[int]
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    SINCE_FIELD_NUMBER: _ClassVar[int]
    MORE_FIELD_NUMBER: _ClassVar[int]
    id: int
    events: _containers.RepeatedCompositeFieldContainer[StoryEvent]
    since: float
    more: bool
    def __init__(self, id: _Optional[int] = ..., events: _Optional[_Iterable[_Union[StoryEvent, _Mapping]]] = ..., since: _Optional[float] = ..., more: _Optional[bool] = ...) -> None: ...

class StoryEvent(_message.Message):
    __slots__ = ("time", "id", "what", "submission", "worker", "seconds", "text")
    TIME_FIELD_NUMBER: _ClassVar[int]
    ID_FIELD_NUMBER: _ClassVar[int]
    WHAT_FIELD_NUMBER: _ClassVar[int]
    SUBMISSION_FIELD_NUMBER: _ClassVar[int]
    WORKER_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    time: float
    id: int
    what: str
    submission: str
    worker: str
    seconds: float
    text: str
    def __init__(self, time: _Optional[float] = ..., id: _Optional[int] = ..., what: _Optional[str] = ..., submission: _Optional[str] = ..., worker: _Optional[str] = ..., seconds: _Optional[float] = ..., text: _Optional[str] = ...) -> None: ...

class HistoryRequest(_message.Message):
    __slots__ = ("submission", "names")
    SUBMISSION_FIELD_NUMBER: _ClassVar[int]
    NAMES_FIELD_NUMBER: _ClassVar[int]
    submission: str
    names: bool
    def __init__(self, submission: _Optional[str] = ..., names: _Optional[bool] = ...) -> None: ...

class HistoryReply(_message.Message):
    __slots__ = ("graphs", "times", "ids", "states", "of_graph", "of_group", "groups", "key_ids", "keys", "ran_ids", "ran_on", "began", "seconds", "workers", "failed_ids", "failed_texts")
    GRAPHS_FIELD_NUMBER: _ClassVar[int]
    TIMES_FIELD_NUMBER: _ClassVar[int]
    IDS_FIELD_NUMBER: _ClassVar[int]
    STATES_FIELD_NUMBER: _ClassVar[int]
    OF_GRAPH_FIELD_NUMBER: _ClassVar[int]
    OF_GROUP_FIELD_NUMBER: _ClassVar[int]
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    KEY_IDS_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    RAN_IDS_FIELD_NUMBER: _ClassVar[int]
    RAN_ON_FIELD_NUMBER: _ClassVar[int]
    BEGAN_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    FAILED_IDS_FIELD_NUMBER: _ClassVar[int]
    FAILED_TEXTS_FIELD_NUMBER: _ClassVar[int]
    graphs: _containers.RepeatedCompositeFieldContainer[HistoryGraph]
    times: _containers.RepeatedScalarFieldContainer[float]
    ids: _containers.RepeatedScalarFieldContainer[int]
    states: _containers.RepeatedScalarFieldContainer[int]
    of_graph: _containers.RepeatedScalarFieldContainer[int]
    of_group: _containers.RepeatedScalarFieldContainer[int]
    groups: _containers.RepeatedScalarFieldContainer[str]
    key_ids: _containers.RepeatedScalarFieldContainer[int]
    keys: _containers.RepeatedScalarFieldContainer[bytes]
    ran_ids: _containers.RepeatedScalarFieldContainer[int]
    ran_on: _containers.RepeatedScalarFieldContainer[int]
    began: _containers.RepeatedScalarFieldContainer[float]
    seconds: _containers.RepeatedScalarFieldContainer[float]
    workers: _containers.RepeatedScalarFieldContainer[str]
    failed_ids: _containers.RepeatedScalarFieldContainer[int]
    failed_texts: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, graphs: _Optional[_Iterable[_Union[HistoryGraph, _Mapping]]] = ..., times: _Optional[_Iterable[float]] = ..., ids: _Optional[_Iterable[int]] = ..., states: _Optional[_Iterable[int]] = ..., of_graph: _Optional[_Iterable[int]] = ..., of_group: _Optional[_Iterable[int]] = ..., groups: _Optional[_Iterable[str]] = ..., key_ids: _Optional[_Iterable[int]] = ..., keys: _Optional[_Iterable[bytes]] = ..., ran_ids: _Optional[_Iterable[int]] = ..., ran_on: _Optional[_Iterable[int]] = ..., began: _Optional[_Iterable[float]] = ..., seconds: _Optional[_Iterable[float]] = ..., workers: _Optional[_Iterable[str]] = ..., failed_ids: _Optional[_Iterable[int]] = ..., failed_texts: _Optional[_Iterable[str]] = ...) -> None: ...

class HistoryGraph(_message.Message):
    __slots__ = ("id", "submission", "client", "label", "submitted")
    ID_FIELD_NUMBER: _ClassVar[int]
    SUBMISSION_FIELD_NUMBER: _ClassVar[int]
    CLIENT_FIELD_NUMBER: _ClassVar[int]
    LABEL_FIELD_NUMBER: _ClassVar[int]
    SUBMITTED_FIELD_NUMBER: _ClassVar[int]
    id: int
    submission: str
    client: str
    label: str
    submitted: float
    def __init__(self, id: _Optional[int] = ..., submission: _Optional[str] = ..., client: _Optional[str] = ..., label: _Optional[str] = ..., submitted: _Optional[float] = ...) -> None: ...

class PruneRequest(_message.Message):
    __slots__ = ("submissions", "submitted_before", "history_before", "dry_run")
    SUBMISSIONS_FIELD_NUMBER: _ClassVar[int]
    SUBMITTED_BEFORE_FIELD_NUMBER: _ClassVar[int]
    HISTORY_BEFORE_FIELD_NUMBER: _ClassVar[int]
    DRY_RUN_FIELD_NUMBER: _ClassVar[int]
    submissions: _containers.RepeatedScalarFieldContainer[str]
    submitted_before: float
    history_before: float
    dry_run: bool
    def __init__(self, submissions: _Optional[_Iterable[str]] = ..., submitted_before: _Optional[float] = ..., history_before: _Optional[float] = ..., dry_run: _Optional[bool] = ...) -> None: ...

class PruneReply(_message.Message):
    __slots__ = ("graphs",)
    GRAPHS_FIELD_NUMBER: _ClassVar[int]
    graphs: _containers.RepeatedCompositeFieldContainer[GraphStatus]
    def __init__(self, graphs: _Optional[_Iterable[_Union[GraphStatus, _Mapping]]] = ...) -> None: ...

class ActRequest(_message.Message):
    __slots__ = ("action", "keys")
    ACTION_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    action: str
    keys: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, action: _Optional[str] = ..., keys: _Optional[_Iterable[bytes]] = ...) -> None: ...

class ActReply(_message.Message):
    __slots__ = ("count",)
    COUNT_FIELD_NUMBER: _ClassVar[int]
    count: int
    def __init__(self, count: _Optional[int] = ...) -> None: ...

class RestoreRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class RestoreReply(_message.Message):
    __slots__ = ("kept", "graphs", "clients")
    KEPT_FIELD_NUMBER: _ClassVar[int]
    GRAPHS_FIELD_NUMBER: _ClassVar[int]
    CLIENTS_FIELD_NUMBER: _ClassVar[int]
    kept: _containers.RepeatedCompositeFieldContainer[KeptItem]
    graphs: _containers.RepeatedCompositeFieldContainer[StoredGraph]
    clients: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, kept: _Optional[_Iterable[_Union[KeptItem, _Mapping]]] = ..., graphs: _Optional[_Iterable[_Union[StoredGraph, _Mapping]]] = ..., clients: _Optional[_Iterable[str]] = ...) -> None: ...

class KeptItem(_message.Message):
    __slots__ = ("name", "value")
    NAME_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    name: bytes
    value: bytes
    def __init__(self, name: _Optional[bytes] = ..., value: _Optional[bytes] = ...) -> None: ...

class StoredGraph(_message.Message):
    __slots__ = ("submission", "client", "flags", "generation", "tasks", "unfinished", "groups", "aborted")
    class GroupsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    SUBMISSION_FIELD_NUMBER: _ClassVar[int]
    CLIENT_FIELD_NUMBER: _ClassVar[int]
    FLAGS_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    TASKS_FIELD_NUMBER: _ClassVar[int]
    UNFINISHED_FIELD_NUMBER: _ClassVar[int]
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    ABORTED_FIELD_NUMBER: _ClassVar[int]
    submission: str
    client: str
    flags: int
    generation: float
    tasks: int
    unfinished: int
    groups: _containers.ScalarMap[str, int]
    aborted: bool
    def __init__(self, submission: _Optional[str] = ..., client: _Optional[str] = ..., flags: _Optional[int] = ..., generation: _Optional[float] = ..., tasks: _Optional[int] = ..., unfinished: _Optional[int] = ..., groups: _Optional[_Mapping[str, int]] = ..., aborted: _Optional[bool] = ...) -> None: ...

class GetTasksRequest(_message.Message):
    __slots__ = ("keys", "with_spec")
    KEYS_FIELD_NUMBER: _ClassVar[int]
    WITH_SPEC_FIELD_NUMBER: _ClassVar[int]
    keys: _containers.RepeatedScalarFieldContainer[bytes]
    with_spec: bool
    def __init__(self, keys: _Optional[_Iterable[bytes]] = ..., with_spec: _Optional[bool] = ...) -> None: ...

class GetTasksReply(_message.Message):
    __slots__ = ("tasks",)
    TASKS_FIELD_NUMBER: _ClassVar[int]
    tasks: _containers.RepeatedCompositeFieldContainer[StoredTask]
    def __init__(self, tasks: _Optional[_Iterable[_Union[StoredTask, _Mapping]]] = ...) -> None: ...

class StoredTask(_message.Message):
    __slots__ = ("found", "shared", "info", "spec", "deps", "cause", "payload")
    FOUND_FIELD_NUMBER: _ClassVar[int]
    SHARED_FIELD_NUMBER: _ClassVar[int]
    INFO_FIELD_NUMBER: _ClassVar[int]
    SPEC_FIELD_NUMBER: _ClassVar[int]
    DEPS_FIELD_NUMBER: _ClassVar[int]
    CAUSE_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    found: bool
    shared: bytes
    info: TaskInfo
    spec: bytes
    deps: _containers.RepeatedScalarFieldContainer[bytes]
    cause: bytes
    payload: bytes
    def __init__(self, found: _Optional[bool] = ..., shared: _Optional[bytes] = ..., info: _Optional[_Union[TaskInfo, _Mapping]] = ..., spec: _Optional[bytes] = ..., deps: _Optional[_Iterable[bytes]] = ..., cause: _Optional[bytes] = ..., payload: _Optional[bytes] = ...) -> None: ...
