"""Records with wrong bytes: what reads them says so, or gets a value of the right kind. Nothing else comes of them."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import NamedTuple

import pytest

from taskdb.cli.progress import Progress
from taskdb.cli.verifying import verify_store
from taskdb.engine import listing, queries, records
from taskdb.engine.engine import Engine
from taskdb.engine.recovery import clients, graphs, kept
from taskdb.errors import InvariantBroken, StoreCorrupt, TaskDBError
from taskdb.model import Rank
from taskdb.rules import Rule
from taskdb.store import codec
from taskdb.store.base import ReadTxn
from taskdb.store.lmdb_store import LmdbStore
from taskdb.store.schema import Table
from tests.fuzz.mutations import mutate
from tests.support.cluster import run
from tests.support.grown_world import Grown, grid
from tests.support.stores import abandoned

SEED = int(os.environ.get("TASKDB_FUZZ_SEED", "6"))
ROUNDS = int(os.environ.get("TASKDB_FUZZ_ROUNDS", "1"))

Pair = tuple[bytes, bytes]


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("fuzz") / "data"
    abandoned(folder)
    return folder


@pytest.fixture(scope="module")
def corpus(store: Path) -> dict[Table, list[Pair]]:
    """Records of every table that has some."""
    found: dict[Table, list[Pair]] = {table: [] for table in Table}
    opened = LmdbStore(store)
    grown = Grown()
    grown.submit("grown", grid(4), [(1, 0), (1, 1)])
    grown.take(4)
    for each in (opened, grown.store):
        with each.read() as txn:
            for table in Table:
                found[table] += [(bytes(key), bytes(data)) for key, data in txn.scan(table)]
    opened.close()
    assert len([table for table, pairs in found.items() if pairs]) > 20
    return {table: pairs for table, pairs in found.items() if pairs}


def rule_of(data: bytes) -> Rule:
    return codec.decode_rule(data).rule


#: What reads a record, and what it makes of it.
DECODERS: dict[Table, tuple[Callable[[bytes], object], type]] = {
    Table.TASKS: (lambda data: codec.decode_task(1, data), codec.TaskRecord),
    Table.GRAPHS: (lambda data: codec.decode_graph(1, data), codec.GraphRecord),
    Table.CLIENTS: (lambda data: codec.decode_client(1, data), codec.ClientRecord),
    Table.ERRORS: (codec.decode_error, codec.ErrorRecord),
    Table.KEPT: (codec.decode_kept, tuple),
    Table.GROUPS: (codec.decode_group, tuple),
    Table.EDGES: (codec.decode_ids, tuple),
    Table.RULES: (codec.decode_rule, codec.StoredRule),
    Table.GROWTH: (codec.decode_growth, codec.Growth),
}


@pytest.mark.parametrize("table", DECODERS, ids=lambda table: table.name)
def test_what_cannot_be_read_is_said_and_what_can_is_of_its_kind(corpus: dict[Table, list[Pair]], table: Table) -> None:
    random = Random(f"{SEED}-{table.name}")
    decode, kind = DECODERS[table]
    pairs = corpus.get(table) or [(b"", bytes(16))]
    values = [data for found in corpus.values() for _, data in found]
    refused = 0
    for _ in range(2_000 * ROUNDS):
        data = mutate(random, random.choice(pairs)[1], values)
        try:
            assert isinstance(decode(data), kind), data
        except StoreCorrupt:
            refused += 1
    assert refused


def test_fields_have_their_types(corpus: dict[Table, list[Pair]]) -> None:
    """Not only the record: what is in it."""
    random = Random(f"{SEED}-fields")
    values = [data for found in corpus.values() for _, data in found]
    for _ in range(2_000 * ROUNDS):
        for table, check in FIELDS.items():
            data = mutate(random, random.choice(corpus[table])[1], values)
            try:
                value = DECODERS[table][0](data)
            except StoreCorrupt:
                continue
            check(value)


def _graph(graph: codec.GraphRecord) -> None:
    assert all(isinstance(x, str) for x in (graph.submission, graph.client, graph.label))
    assert all(isinstance(x, int) for x in (graph.status, graph.added, graph.wanted, *graph.counts))


def _task(task: codec.TaskRecord) -> None:
    assert isinstance(task.state, int)
    assert isinstance(codec.decode_rank(task.rank), Rank)


def _rule(stored: codec.StoredRule) -> None:
    assert isinstance(stored.first_id, int)
    assert all(isinstance(x, int) for x in (stored.first_group, *stored.counts))
    assert all(isinstance(x, int) for ids in stored.outputs for x in ids)


def _kept(kept: tuple[bytes, bytes]) -> None:
    name, value = kept
    assert isinstance(name, bytes)
    assert isinstance(value, bytes)


FIELDS: dict[Table, Callable[..., None]] = {Table.GRAPHS: _graph, Table.TASKS: _task, Table.RULES: _rule, Table.KEPT: _kept}


# ----------------------------------------------------------------------------------------------------- a whole store


class Damage(NamedTuple):
    table: Table
    key: bytes
    right: bytes
    wrong: bytes


def damages(store: LmdbStore, part: str, count: int) -> Iterator[Damage]:
    """So many records of the store, and what may stand in their place."""
    random = Random(f"{SEED}-{part}")
    with store.read() as txn:
        pairs = [(table, bytes(key), bytes(data)) for table in Table for key, data in txn.scan(table)]
    values = [data for _, _, data in pairs]
    for _ in range(count * ROUNDS):
        table, key, data = random.choice(pairs)
        yield Damage(table, key, data, mutate(random, data, values))


@contextmanager
def damaged(store: LmdbStore, damage: Damage) -> Iterator[None]:
    """Wrong, and right again. What goes wrong meanwhile is said with it."""
    _put(store, damage, damage.wrong)
    try:
        yield
    except Exception as error:
        raise AssertionError(f"{damage.table.name} {damage.key.hex()} {damage.wrong.hex()}") from error
    finally:
        _put(store, damage, damage.right)


def _put(store: LmdbStore, damage: Damage, value: bytes) -> None:
    txn = store.write()
    txn.put(damage.table, damage.key, value)
    txn.commit()


@pytest.fixture
def opened(store: Path) -> Iterator[LmdbStore]:
    found = LmdbStore(store, sync=False)
    yield found
    found.close()


def everything_is_asked(txn: ReadTxn) -> None:
    for ask in (
        lambda: list(records.unreadable(txn)),
        lambda: queries.status(txn),
        lambda: [queries.explain(txn, task.key, 10) for task in listing.list_tasks(txn).tasks],
        lambda: queries.get_tasks(txn, [bytes(data) for _, data in txn.scan(Table.NAMES)], True),
        lambda: list(graphs(txn)),
        lambda: list(clients(txn)),
        lambda: list(kept(txn)),
    ):
        try:
            ask()
        except Exception as error:
            if not isinstance(codec.explained(error), TaskDBError):
                raise


def test_a_store_with_a_wrong_record_answers_or_says_so(opened: LmdbStore) -> None:
    for damage in damages(opened, "asked", 300):
        with damaged(opened, damage), opened.read() as txn:
            everything_is_asked(txn)


def test_the_engine_stops_or_goes_on(opened: LmdbStore) -> None:
    """A scheduler that comes to a damaged store: what is written is a whole transaction, or none."""
    for damage in damages(opened, "engine", 100):
        with damaged(opened, damage):
            engine, txn = Engine(), opened.write()
            try:
                engine.begin_epoch(txn, "scheduler-2")
                engine.step(txn)
                engine.lease(txn, 10, 10)
            except Exception as error:
                if not isinstance(codec.explained(error), TaskDBError | InvariantBroken):
                    raise
            finally:
                txn.abort()


def test_verify_never_fails_itself(store: Path) -> None:
    """LMDB opens a store once in a process, so it is closed meanwhile."""
    found = 0
    opened = LmdbStore(store, sync=False)
    # A store that says another format is not opened again; `tests/taskdb/cli/test_offline.py` has that.
    todo = [damage for damage in damages(opened, "verified", 40) if damage.table is not Table.META]
    for damage in todo:
        _put(opened, damage, damage.wrong)
        opened.close()
        report = verify_store(store, Progress())
        found += not report["ok"]
        opened = LmdbStore(store, sync=False)
        _put(opened, damage, damage.right)
    opened.close()
    assert found > len(todo) / 2
    assert verify_store(store, Progress())["ok"]


@pytest.mark.e2e
def test_a_file_with_wrong_bytes_ends_no_process(store: Path, tmp_path: Path) -> None:
    shutil.copytree(store, tmp_path / "data")
    count = 60 * ROUNDS
    done = run(["-m", "tests.fuzz.files", str(tmp_path / "data"), f"{SEED}-files", str(count)], timeout=60.0 * ROUNDS)
    assert done.returncode == 0, done.stdout[-100:] + done.stderr
    assert int(done.stdout.split()[-1]) > count / 4
