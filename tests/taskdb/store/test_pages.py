"""Whole files pass, whatever was done to the store; damaged ones are found before LMDB reads them, and copies made while they changed."""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from struct import pack, unpack_from

import pytest

from taskdb.errors import NotFound, StoreCorrupt
from taskdb.model import Level
from taskdb.store.lmdb_store import LmdbSnapshot, LmdbStore
from taskdb.store.pages import DATA_FILE, Pages
from taskdb.store.schema import Table
from tests.support.stores import Stored, crowd

PAGE = os.sysconf("SC_PAGE_SIZE")


def problems(folder: Path) -> list[str]:
    pages = Pages(folder)
    try:
        return list(pages.problems())
    finally:
        pages.close()


def tables(folder: Path) -> dict[tuple[Table, bytes], bytes]:
    with LmdbSnapshot(folder) as snapshot:
        txn = snapshot.read()
        return {(table, key): value for table in Table for key, value in txn.scan(table)}


@pytest.mark.parametrize("seed", range(5))
def test_a_store_that_changed_much_is_whole(tmp_path: Path, seed: int) -> None:
    """Values of all sizes, so that there are pages of every kind, that are freed and used again."""
    chance = random.Random(seed)
    store = LmdbStore(tmp_path, sync=False)
    for _ in range(30):
        txn = store.write()
        for _ in range(chance.randint(1, 300)):
            key = chance.randrange(2_000).to_bytes(8)
            if chance.random() < 0.4:
                txn.delete(Table.SPECS, key)
            else:
                txn.put(Table.SPECS, key, chance.randbytes(chance.choice((0, 1, 50, 1_900, 2_100, 9_000, 40_000))))
        txn.commit()
        assert problems(tmp_path) == []
    store.close()


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    folder = tmp_path_factory.mktemp("whole") / "data"
    stored = Stored(folder)
    crowd(stored, 2_000)
    txn = stored.store.write()
    txn.put(Table.SPECS, bytes(8), bytes(50_000))
    txn.commit()
    stored.close()
    return (folder / DATA_FILE).read_bytes()


def write(folder: Path, data: bytes) -> Path:
    folder.mkdir()
    (folder / DATA_FILE).write_bytes(data)
    return folder


def used(data: bytes, folder: Path) -> list[int]:
    """Numbers of pages whose header says that they are in a tree, and that are."""
    found = []
    for number in range(2, len(data) // PAGE):
        broken = data[: number * PAGE] + bytes(PAGE) + data[(number + 1) * PAGE :]
        (folder / DATA_FILE).write_bytes(broken)
        if problems(folder):
            found.append(number)
    return found


def test_every_page_that_is_missing_is_missed(tmp_path: Path, whole: bytes) -> None:
    """Pages are zeroed one by one: as many are missed as the store has in use. (Of a value's own pages only the first has a header.)"""
    folder = write(tmp_path / "data", whole)
    pages = Pages(folder)
    assert list(pages.problems()) == []
    pages.close()
    tails = 50_000 // PAGE
    assert len(used(whole, folder)) == pages.walked - tails


def header(number: int, data: bytes) -> tuple[int, int, int]:
    """Its own number, its flags, and the end of its list of nodes."""
    own, _, flags, lower = unpack_from("=QHHH", data, number * PAGE)
    return own, flags, lower


def replaced(data: bytes, number: int, page: bytes) -> bytes:
    return data[: number * PAGE] + page + data[(number + 1) * PAGE :]


def leaves(data: bytes) -> list[int]:
    """Leaves of the table of keys, well filled."""
    return [number for number in range(2, len(data) // PAGE) if header(number, data)[1] == 2 and page_of(data, number).count(b"crowd") > 20]


def page_of(data: bytes, number: int) -> bytes:
    return data[number * PAGE : (number + 1) * PAGE]


def test_a_page_in_the_place_of_another(tmp_path: Path, whole: bytes) -> None:
    one, other = leaves(whole)[2:4]
    folder = write(tmp_path / "data", replaced(whole, one, page_of(whole, other)))
    assert f"page {one} is another page, or none" in " ".join(problems(folder))


def test_the_keys_of_another_page(tmp_path: Path, whole: bytes) -> None:
    """As left by a page that was freed, used again and written, while its number in the tree is the old one."""
    one, other = leaves(whole)[2:4]
    folder = write(tmp_path / "data", replaced(whole, one, pack("=Q", one) + page_of(whole, other)[8:]))
    assert f"page {one} holds the keys of another page" in " ".join(problems(folder))


def test_a_page_that_lacks_an_entry(tmp_path: Path, whole: bytes) -> None:
    one = leaves(whole)[2]
    page = page_of(whole, one)
    shorter = page[:12] + pack("=H", header(one, whole)[2] - 2) + page[14:]
    folder = write(tmp_path / "data", replaced(whole, one, shorter))
    (words,) = problems(folder)
    assert "entries are found" in words


@pytest.mark.parametrize("seed", range(20))
def test_a_file_cut_short_is_found(tmp_path: Path, whole: bytes, seed: int) -> None:
    size = random.Random(seed).randrange(2 * PAGE, len(whole) - 60_000)
    folder = write(tmp_path / "data", whole[:size])
    assert "beyond the end of the file" in " ".join(problems(folder))
    with pytest.raises(StoreCorrupt, match="beyond the end") as caught:
        LmdbStore(folder)
    assert "\n" not in str(caught.value)
    assert (folder / DATA_FILE).read_bytes() == whole[:size]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda data: b"", "0 bytes"),
        (lambda data: data[:100], "cut short"),
        (lambda data: data[:PAGE], "cut short"),
        (lambda data: b"not a database " * 1_000, "no LMDB file"),
        (lambda data: data[:20] + b"\7" + data[21:], "another version"),
        (lambda data: data[:33] + b"\xff" * 7 + data[40:], "makes no sense"),
    ],
)
def test_a_head_that_is_none(tmp_path: Path, whole: bytes, change: Callable[[bytes], bytes], words: str) -> None:
    folder = write(tmp_path / "data", change(whole))
    for opening in (Pages, LmdbStore, LmdbSnapshot):
        with pytest.raises(StoreCorrupt, match=words):
            opening(folder)
    assert (folder / DATA_FILE).read_bytes() == change(whole)


def test_no_store(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for folder in (tmp_path, tmp_path / "nowhere", tmp_path / "file"):
        with pytest.raises(NotFound, match="no store"):
            Pages(folder)


def test_a_short_file_whose_end_is_not_in_use_is_whole(tmp_path: Path, whole: bytes) -> None:
    """LMDB itself leaves away last pages that were given back before they were written."""
    folder = write(tmp_path / "data", whole)
    store = LmdbStore(folder, sync=False)
    for value in (bytes(200_000), b""):
        txn = store.write()
        txn.put(Table.SPECS, bytes(8), value)
        txn.commit()
    store.close()
    before = tables(folder)
    size = os.path.getsize(folder / DATA_FILE)
    os.truncate(folder / DATA_FILE, size - 100_000)
    pages = Pages(folder)
    assert pages.is_short
    assert list(pages.problems()) == []
    pages.close()
    assert tables(folder) == before
    LmdbStore(folder).close()


@pytest.mark.parametrize("seed", range(10))
def test_a_copy_made_while_the_store_changed_is_whole_or_found(tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    stored = Stored(tmp_path / "data")
    crowd(stored, chance.choice((300, 3_000)))

    def change() -> None:
        keys = stored.lease(chance.randint(1, 200))
        stored.report(Level.MEMORY, *keys[::2])

    for _ in range(chance.randint(2, 10)):
        change()
    before = tables_of(stored)
    file = tmp_path / "data" / DATA_FILE
    half = chance.randrange(2, file.stat().st_size // PAGE) * PAGE
    head = file.read_bytes()[:half]
    for _ in range(chance.randint(2, 10)):
        change()
    folder = write(tmp_path / "copy", head + file.read_bytes()[half:])
    stored.close()
    assert problems(folder) or tables(folder) == before


def tables_of(stored: Stored) -> dict[tuple[Table, bytes], bytes]:
    with stored.store.read() as txn:
        return {(table, key): value for table in Table for key, value in txn.scan(table)}


def torn(folder: Path, copy: Path) -> None:
    """Copy a store and its lock file as cp would that is overtaken half-way."""
    stored = Stored(folder)
    crowd(stored, 3_000)
    file = folder / DATA_FILE
    half = file.stat().st_size // 2
    head = file.read_bytes()[:half]
    for _ in range(10):
        stored.report(Level.MEMORY, *stored.lease(200))
    shutil.copytree(folder, copy)
    (copy / DATA_FILE).write_bytes(head + file.read_bytes()[half:])
    stored.close()


def test_a_torn_copy_is_not_opened(tmp_path: Path) -> None:
    torn(tmp_path / "data", tmp_path / "copy")
    for _ in range(2):
        with pytest.raises(StoreCorrupt, match="it was copied while it was in use") as caught:
            LmdbStore(tmp_path / "copy")
        assert "\n" not in str(caught.value)
    # The lock file alone tells: without it only the tools look at each page.
    assert problems(tmp_path / "copy")


def test_whole_copies_are_opened(tmp_path: Path) -> None:
    stored = Stored(tmp_path / "data")
    crowd(stored, 100)
    shutil.copytree(tmp_path / "data", tmp_path / "copy while in use, and at rest")
    before = tables_of(stored)
    stored.close()
    shutil.copytree(tmp_path / "data", tmp_path / "copy after it was closed")
    for folder in tmp_path.iterdir():
        for _ in range(2):
            LmdbStore(folder).close()
        assert tables(folder) == before
