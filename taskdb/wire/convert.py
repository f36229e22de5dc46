"""proto <-> `taskdb.commands`, both ways. Columns travel whole, as lists; nothing here decides anything.

What arrives is checked for what the messages cannot say (unknown command kinds and levels); the engine checks the rest.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from taskdb import commands as c
from taskdb.errors import InvalidRequest
from taskdb.limits import SHARED_BLOBS_KEPT
from taskdb.model import Level, Rank, TaskState
from taskdb.wire import taskdb_pb2 as pb

#: What `Engine.apply` says of a command it refused: (position in the batch, submission or "", kind, message).
Refused = tuple[int, str, str, str]

_LEVELS: dict[int, Level] = {int(level): level for level in Level}
_STATES: dict[int, TaskState] = {int(state): state for state in TaskState}


# ------------------------------------------------------------------------------------------------- commands to proto


def begin_graph_to_proto(command: c.BeginGraph) -> pb.BeginGraph:
    return pb.BeginGraph(
        submission=command.submission,
        client=command.client,
        generation=command.generation,
        submitted=command.submitted,
        label=command.label,
        flags=command.flags,
    )


def add_tasks_to_proto(command: c.AddTasks) -> pb.AddTasks:
    return pb.AddTasks(
        submission=command.submission,
        first_index=command.first_index,
        keys=command.keys,
        specs=command.specs,
        flags=command.flags,
        dep_counts=command.dep_counts,
        deps=command.deps,
        dependent_counts=command.dependent_counts,
        orders=command.orders,
        user_priorities=command.user_priorities,
        groups=command.groups,
        new_groups=command.new_groups,
        shared=command.shared,
        new_shared=command.new_shared,
        told_ids=command.told_ids,
    )


def add_rule_to_proto(command: c.AddRule) -> pb.AddRule:
    return pb.AddRule(
        submission=command.submission,
        first_index=command.first_index,
        rule=command.rule,
        new_groups=command.new_groups,
        new_shared=command.new_shared,
        layers=command.layers,
        elements=command.elements,
        flags=command.flags,
        dependent_counts=command.dependent_counts,
    )


def _report_to_proto(command: c.Report) -> pb.Command:
    return pb.Command(
        report=pb.Report(
            ids=command.ids,
            levels=command.levels,
            nbytes=command.nbytes,
            retries=command.retries,
            suspicious=command.suspicious,
            ran_on=command.ran_on,
            began=command.began,
            seconds=command.seconds,
            workers=command.workers,
        )
    )


_TO_PROTO: dict[type, Callable[[Any], pb.Command]] = {
    c.BeginGraph: lambda x: pb.Command(begin_graph=begin_graph_to_proto(x)),
    c.AddTasks: lambda x: pb.Command(add_tasks=add_tasks_to_proto(x)),
    c.AddRule: lambda x: pb.Command(add_rule=add_rule_to_proto(x)),
    c.SealGraph: lambda x: pb.Command(seal_graph=pb.SealGraph(submission=x.submission)),
    c.AbortGraph: lambda x: pb.Command(abort_graph=pb.AbortGraph(submission=x.submission)),
    c.Want: lambda x: pb.Command(want=pb.ClientKeys(client=x.client, keys=x.keys)),
    c.Unwant: lambda x: pb.Command(unwant=pb.ClientKeys(client=x.client, keys=x.keys)),
    c.DropClient: lambda x: pb.Command(drop_client=x.client),
    c.Report: _report_to_proto,
    c.Fail: lambda x: pb.Command(fail=pb.Fail(id=x.id, payload=x.payload, text=x.text, traceback=x.traceback)),
    c.Blame: lambda x: pb.Command(blame=pb.Blame(id=x.id, cause=x.cause)),
    c.Cancel: lambda x: pb.Command(cancel=pb.Cancel(client=x.client, keys=x.keys, force=x.force)),
    c.Retry: lambda x: pb.Command(retry=pb.Keys(keys=x.keys)),
    c.Adopt: lambda x: pb.Command(adopt=pb.Adopt(epoch=x.epoch, keys=x.keys, levels=x.levels, nbytes=x.nbytes)),
    c.TakeWhole: lambda x: pb.Command(take_whole=x.submission),
    c.EndRecovery: lambda x: pb.Command(end_recovery=pb.EndRecovery()),
    c.Keep: lambda x: pb.Command(keep=pb.Keep(names=x.names, values=x.values)),
    c.Credit: lambda x: pb.Command(credit=pb.Credit(ready=x.ready, total=x.total, leases_seen=x.leases_seen)),
}


def command_to_proto(command: c.Command) -> pb.Command:
    return _TO_PROTO[type(command)](command)


def batch_to_proto(seq: int, commands: Iterable[c.Command], heard: int = 0) -> pb.SessionRequest:
    return pb.SessionRequest(batch=pb.Batch(seq=seq, commands=[_TO_PROTO[type(x)](x) for x in commands], heard=heard))


# ------------------------------------------------------------------------------------------------- proto to commands


def begin_graph_from_proto(message: pb.BeginGraph) -> c.BeginGraph:
    return c.BeginGraph(message.submission, message.client, message.generation, message.submitted, message.label, message.flags)


def add_tasks_from_proto(message: pb.AddTasks) -> c.AddTasks:
    return c.AddTasks(
        message.submission,
        message.first_index,
        list(message.keys),
        list(message.specs),
        list(message.flags),
        list(message.dep_counts),
        list(message.deps),
        list(message.dependent_counts),
        list(message.orders),
        list(message.user_priorities),
        list(message.groups),
        list(message.new_groups),
        list(message.shared),
        list(message.new_shared),
        list(message.told_ids),
    )


def add_rule_from_proto(message: pb.AddRule) -> c.AddRule:
    return c.AddRule(
        message.submission,
        message.first_index,
        message.rule,
        list(message.new_groups),
        list(message.new_shared),
        list(message.layers),
        list(message.elements),
        list(message.flags),
        list(message.dependent_counts),
    )


def note_ids(batch: pb.Batch, result: pb.Result) -> None:
    """Write into a batch the ids its runs were answered with: should it be sent again, its tasks keep them."""
    if result.added:
        told = {(added.submission, added.first_index): added.ids for added in result.added}
        for command in batch.commands:
            if command.WhichOneof("kind") == "add_tasks":
                run = command.add_tasks
                run.told_ids[:] = told.get((run.submission, run.first_index), ())


def _levels(command: str, values: Iterable[int]) -> list[Level]:
    levels = _LEVELS
    try:
        return [levels[x] for x in values]
    except KeyError as error:
        raise InvalidRequest(f"{command}: unknown level {error.args[0]}") from None


def _report_from_proto(message: pb.Command) -> c.Report:
    report = message.report
    named = _levels("Report", report.levels)
    return c.Report(
        list(report.ids),
        named,
        list(report.nbytes),
        list(report.retries),
        list(report.suspicious),
        list(report.ran_on),
        list(report.began),
        list(report.seconds),
        list(report.workers),
    )


_FROM_PROTO: dict[str, Callable[[pb.Command], c.Command]] = {
    "begin_graph": lambda x: begin_graph_from_proto(x.begin_graph),
    "add_tasks": lambda x: add_tasks_from_proto(x.add_tasks),
    "add_rule": lambda x: add_rule_from_proto(x.add_rule),
    "seal_graph": lambda x: c.SealGraph(x.seal_graph.submission),
    "abort_graph": lambda x: c.AbortGraph(x.abort_graph.submission),
    "want": lambda x: c.Want(x.want.client, list(x.want.keys)),
    "unwant": lambda x: c.Unwant(x.unwant.client, list(x.unwant.keys)),
    "drop_client": lambda x: c.DropClient(x.drop_client),
    "report": _report_from_proto,
    "fail": lambda x: c.Fail(x.fail.id, x.fail.payload, x.fail.text, x.fail.traceback),
    "blame": lambda x: c.Blame(x.blame.id, x.blame.cause),
    "cancel": lambda x: c.Cancel(x.cancel.client, list(x.cancel.keys), x.cancel.force),
    "retry": lambda x: c.Retry(list(x.retry.keys)),
    "adopt": lambda x: c.Adopt(x.adopt.epoch, list(x.adopt.keys), _levels("Adopt", x.adopt.levels), list(x.adopt.nbytes)),
    "take_whole": lambda x: c.TakeWhole(x.take_whole),
    "end_recovery": lambda x: c.EndRecovery(),
    "keep": lambda x: c.Keep(list(x.keep.names), list(x.keep.values)),
    "credit": lambda x: c.Credit(x.credit.ready, x.credit.total, x.credit.leases_seen),
}


def command_from_proto(message: pb.Command) -> c.Command:
    """Raises InvalidRequest for a kind this version does not know."""
    kind = message.WhichOneof("kind")
    if kind is None:
        raise InvalidRequest("a command is empty, or of a kind this version does not know")
    return _FROM_PROTO[kind](message)


def commands_from_proto(messages: Iterable[pb.Command]) -> list[c.Command]:
    return [command_from_proto(x) for x in messages]


# -------------------------------------------------------------------------------------------------------- results


class SharedBlobs:
    """What one link has carried of tasks' shared bytes. Both ends keep the same blobs, since they see the same leases in the same order."""

    def __init__(self) -> None:
        self._kept: OrderedDict[int, bytes] = OrderedDict()

    def outgoing(self, lease: c.Lease) -> bytes:
        """What has to be sent: nothing, if the other end has it."""
        if not lease.shared_number:
            return b""
        if lease.shared_number in self._kept:
            self._kept.move_to_end(lease.shared_number)
            return b""
        self._keep(lease.shared_number, b"")
        return lease.shared

    def incoming(self, number: int, data: bytes) -> bytes:
        """The blob, sent now or before."""
        if not number:
            return b""
        kept = self._kept.get(number)
        if kept is None:
            self._keep(number, data)
            return data
        self._kept.move_to_end(number)
        return kept

    def _keep(self, number: int, data: bytes) -> None:
        self._kept[number] = data
        if len(self._kept) > SHARED_BLOBS_KEPT:
            self._kept.popitem(last=False)


def _lease_to_proto(lease: c.Lease, blobs: SharedBlobs) -> pb.Lease:
    user, generation, order = lease.rank
    return pb.Lease(
        id=lease.id,
        key=lease.key,
        spec=lease.spec,
        flags=lease.flags,
        user=user,
        generation=generation,
        order=order,
        deps=lease.deps,
        group=lease.group,
        submission=lease.submission,
        shared=blobs.outgoing(lease),
        shared_number=lease.shared_number,
        retries=lease.retries,
        suspicious=lease.suspicious,
        clients=lease.clients,
        dependents=lease.dependents,
    )


def result_to_proto(result: c.Result, seq: int, blobs: SharedBlobs, refused: Sequence[Refused] = ()) -> pb.Result:
    message = pb.Result(seq=seq, number=result.number, queued=result.queued, ready=result.ready, busy=result.busy)
    if result.added:
        message.added.extend(
            [
                pb.Added(submission=x.submission, first_index=x.first_index, ids=x.ids, missing=x.missing, known=x.known)
                for x in result.added
            ]
        )
    if result.leases:
        message.leases.extend([_lease_to_proto(x, blobs) for x in result.leases])
    if result.release:
        message.release.extend(result.release)
    if result.wants:
        message.wants.extend(
            [pb.WantState(client=x.client, key=x.key, id=x.id, state=x.state or 0, cause=x.cause, payload=x.payload) for x in result.wants]
        )
    if result.erred:
        message.erred.extend([pb.Erred(client=x.client, key=x.key, cause=x.cause, payload=x.payload) for x in result.erred])
    if result.cancelled:
        message.cancelled.extend([pb.Cancelled(client=x.client, key=x.key) for x in result.cancelled])
    if result.forgotten:
        message.forgotten.extend([pb.GroupCount(submission=x.submission, group=x.group, count=x.count) for x in result.forgotten])
    if result.adopted:
        message.adopted.extend(
            [
                pb.Adopted(key=x.key, level=x.level, lease=None if x.lease is None else _lease_to_proto(x.lease, blobs))
                for x in result.adopted
            ]
        )
    for whole in result.whole:
        message.whole.add(submission=whole.submission, leases=[_lease_to_proto(x, blobs) for x in whole.leases])
    if refused:
        message.refused.extend([pb.Refused(command=at, submission=name, kind=kind, message=text) for at, name, kind, text in refused])
    return message


def _lease_from_proto(x: pb.Lease, blobs: SharedBlobs) -> c.Lease:
    return c.Lease(
        x.id,
        x.key,
        x.spec,
        x.flags,
        Rank(x.user, x.generation, x.order),
        list(x.deps),
        x.group,
        x.submission,
        blobs.incoming(x.shared_number, x.shared),
        x.retries,
        x.suspicious,
        list(x.clients),
        x.dependents,
        x.shared_number,
    )


def result_from_proto(message: pb.Result, blobs: SharedBlobs) -> tuple[c.Result, list[Refused]]:
    result = c.Result(number=message.number, queued=message.queued, ready=message.ready, busy=message.busy)
    if message.added:
        result.added = [c.Added(x.submission, x.first_index, list(x.ids), list(x.missing), list(x.known)) for x in message.added]
    if message.leases:
        result.leases = [_lease_from_proto(x, blobs) for x in message.leases]
    if message.release:
        result.release = list(message.release)
    if message.wants:
        states = _STATES
        result.wants = [c.WantState(x.client, x.key, x.id, states.get(x.state), x.cause, x.payload) for x in message.wants]
    if message.erred:
        result.erred = [c.Erred(x.client, x.key, x.cause, x.payload) for x in message.erred]
    if message.cancelled:
        result.cancelled = [c.Cancelled(x.client, x.key) for x in message.cancelled]
    if message.forgotten:
        result.forgotten = [c.GroupCount(x.submission, x.group, x.count) for x in message.forgotten]
    if message.adopted:
        result.adopted = [
            c.Adopted(x.key, _LEVELS[x.level], _lease_from_proto(x.lease, blobs) if x.HasField("lease") else None) for x in message.adopted
        ]
    if message.whole:
        result.whole = [c.TakenWhole(x.submission, [_lease_from_proto(y, blobs) for y in x.leases]) for x in message.whole]
    refused = [(x.command, x.submission, x.kind, x.message) for x in message.refused] if message.refused else []
    return result, refused
