"""Queries of the engine, on a snapshot, as replies of the wire."""

from __future__ import annotations

import uuid
from dataclasses import dataclass

from taskdb.errors import StoreCorrupt
from taskdb.store.base import ReadTxn, Store
from taskdb.store.schema import FORMAT_VERSION, Meta, Table, meta_key
from taskdb.wire import taskdb_pb2 as pb


@dataclass(frozen=True, slots=True)
class StoreInfo:
    """What does not change while a store is open."""

    uuid: str
    format_version: int
    bytes_max: int


def store_info(store: Store, bytes_max: int) -> StoreInfo:
    with store.read() as txn:
        data = txn.get(Table.META, meta_key(Meta.STORE_UUID))
    if data is None or len(data) != 16:
        raise StoreCorrupt("the store has no uuid: move it away or restore a copy")
    return StoreInfo(str(uuid.UUID(bytes=data)), FORMAT_VERSION, bytes_max)


def status(txn: ReadTxn) -> pb.StatusReply:
    raise NotImplementedError


def list_tasks(txn: ReadTxn, request: pb.ListTasksRequest) -> pb.ListTasksReply:
    raise NotImplementedError


def explain(txn: ReadTxn, request: pb.ExplainRequest) -> pb.ExplainReply:
    raise NotImplementedError


def get_tasks(txn: ReadTxn, request: pb.GetTasksRequest) -> pb.GetTasksReply:
    raise NotImplementedError
