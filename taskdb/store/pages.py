"""The pages of an LMDB file, read as a file: whether all that is reachable is there, and of one piece.

LMDB itself trusts its pages: it reads them through a map, and one that is missing or wrong kills the process (SIGBUS) instead of raising.
So a file that may be cut short, overwritten, or copied while it was written is walked here before it is mapped. The layout is that of
LMDB 0.9 on 64 bits, in the machine's byte order.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from struct import Struct, error

import numpy as np

from taskdb.errors import NotFound, StoreCorrupt, StoreError

DATA_FILE = "data.mdb"

_MAGIC = 0xBEEFC0DE
#: Page number, pad, flags, end of the node offsets, begin of the nodes. In an overflow page the last two are its number of pages.
_PAGE = Struct("=QHHHH")
_OVERFLOW = Struct("=QHHI")
#: After the page header: magic, version, address, map size, two trees, last page, transaction.
_META = Struct("=IIQQ48s48sQQ")
#: Pad (page size), flags, depth, branch pages, leaf pages, overflow pages, entries, root page.
_TREE = Struct("=IHHQQQQQ")
#: Two halves of the data's size (or of a child's number, with the flags), flags, bytes of the key.
_NODE = Struct("=HHHH")
_NUMBER = Struct("=Q")
_NO_PAGE = 2**64 - 1
_BRANCH, _LEAF, _OVERFLOWS = 1, 2, 4
_KINDS = 15
_BIG_DATA, _SUB_TREE = 1, 2
_PAGE_SIZES = frozenset(2**n for n in range(8, 17))
#: Address space of a process.
_MAP_BYTES_MAX = 2**47
#: Pages between two calls of `tick`.
_TICK_PAGES = 1024


def damaged(folder: Path, what: str) -> StoreCorrupt:
    return StoreCorrupt(f"the store in {folder} is damaged ({what}): restore a backup, or move it away to begin anew")


def unreadable(folder: Path, why: str) -> StoreError:
    return StoreError(f"the store in {folder} cannot be opened: {why}; check the owner and the rights of the folder and its files")


@dataclass(frozen=True, slots=True)
class _Tree:
    depth: int
    branch_pages: int
    leaf_pages: int
    overflow_pages: int
    entries: int
    root: int


@dataclass(frozen=True, slots=True)
class _Meta:
    page_bytes: int
    free: _Tree
    main: _Tree
    last_page: int
    txn_id: int


def _tree(data: bytes) -> _Tree:
    return _Tree(*_TREE.unpack(data)[2:])


class Pages:
    """The file of the store in `folder`, as of its last transaction or of `txn_id` (which a reader must keep open meanwhile).

    Raises NotFound, StoreCorrupt (no head that makes sense), StoreError (it may not be read), LookupError (that transaction has been
    replaced in the head: take a later one).
    """

    def __init__(self, folder: Path, txn_id: int | None = None) -> None:
        self._folder = folder
        try:
            self._fd = os.open(folder / DATA_FILE, os.O_RDONLY | os.O_CLOEXEC)
        except (FileNotFoundError, NotADirectoryError):
            raise NotFound(f"there is no store in {folder}: it has no {DATA_FILE}") from None
        except OSError as exc:
            raise unreadable(folder, exc.strerror or "") from exc
        try:
            self.size_bytes = os.fstat(self._fd).st_size
            metas = self._metas()
            if txn_id is not None:
                metas = [meta for meta in metas if meta.txn_id == txn_id]
                if not metas:
                    raise LookupError(txn_id)
        except BaseException:
            self.close()
            raise
        self._meta = max(metas, key=lambda meta: meta.txn_id)
        self._page_bytes = self._meta.page_bytes
        #: Pages met by `problems`, and pages there should be.
        self.walked = 0
        self.total = self._meta.last_page + 1

    def close(self) -> None:
        os.close(self._fd)

    def _metas(self) -> list[_Meta]:
        if not self.size_bytes:
            raise damaged(self._folder, f"{DATA_FILE} has 0 bytes")
        metas = []
        page_bytes = 0
        for at in (0, 1):
            data = os.pread(self._fd, _PAGE.size + _META.size, at * page_bytes)
            if len(data) < _PAGE.size + _META.size:
                break
            magic, version, _, map_bytes, free, main, last_page, txn_id = _META.unpack_from(data, _PAGE.size)
            page_bytes = _TREE.unpack(free)[0]
            if magic != _MAGIC or page_bytes not in _PAGE_SIZES:
                raise damaged(self._folder, f"{DATA_FILE} is no LMDB file")
            if version != 1:
                raise damaged(self._folder, f"{DATA_FILE} was written by another version of LMDB")
            if not (last_page + 1) * page_bytes <= map_bytes <= _MAP_BYTES_MAX:
                raise damaged(self._folder, f"the head of {DATA_FILE} makes no sense")
            metas.append(_Meta(page_bytes, _tree(free), _tree(main), last_page, txn_id))
        if len(metas) < 2:
            raise damaged(self._folder, f"{DATA_FILE} is cut short: it has {self.size_bytes} bytes")
        return metas

    @property
    def is_short(self) -> bool:
        """The file does not reach as far as it has pages. Not damage as such: the last ones may never have been used."""
        return self.size_bytes < self.total * self._page_bytes

    def problems(self, tick: Callable[[int], None] = lambda pages: None) -> Iterator[str]:
        """What is wrong, in words; nothing below a wrong page is looked at. Reads the whole file; a bit of memory a page.

        `tick` is told now and then how many pages were met.
        """
        self._seen = bytearray(self.total)
        self._seen[:2] = b"\1\1"
        self._tick = tick
        free: list[bytes] = []
        yield from self._walk("free pages", self._meta.free, False, lambda key, value: free.append(value))
        tables: list[tuple[bytes, bytes]] = []
        yield from self._walk("tables", self._meta.main, True, lambda key, value: tables.append((key, value)))
        for name, data in tables:
            try:
                tree = _tree(data)
            except error:
                yield f"table {_text(name)}: its head has {len(data)} bytes"
                continue
            yield from self._walk(f"table {_text(name)}", tree, True)
        for data in free:
            for page in memoryview(data[8 : len(data) // 8 * 8]).cast("Q"):
                if not 1 < page < self.total:
                    yield f"page {page} is free, and there is no such page"
                elif self._seen[page] == 1:
                    yield f"page {page} is free and in use"
        tick(self.walked)

    def _walk(self, name: str, tree: _Tree, ordered: bool, each: Callable[[bytes, bytes], None] | None = None) -> Iterator[str]:
        """One tree; `each` is given its pairs. `ordered`: its keys compare as bytes."""
        counted = {_BRANCH: 0, _LEAF: 0, _OVERFLOWS: 0}
        entries = 0
        #: (page, depth, its keys are not below, its keys are below)
        todo: list[tuple[int, int, bytes, bytes | None]] = []
        if tree.root != _NO_PAGE:
            todo.append((tree.root, 1, b"", None))
        elif tree.entries:
            yield f"{name}: it has {tree.entries} entries and no pages"
        while todo:
            number, depth, low, high = todo.pop()
            kind = _LEAF if depth == tree.depth else _BRANCH
            page, words = self._page(number, kind)
            if words:
                yield f"{name}: page {number} {words}"
                continue
            counted[kind] += 1
            try:
                first, last, nodes = _branch(page) if kind == _BRANCH else _leaf(page, every=each is not None)
            except (error, ValueError, IndexError):
                yield f"{name}: page {number} cannot be read"
                continue
            if ordered and (first < low or (high is not None and last >= high)):
                yield f"{name}: page {number} holds the keys of another page"
            if kind == _BRANCH:
                bounds: list[bytes | None] = [low, *(key for key, _, _, _ in nodes[1:]), high]
                todo += ((size | flags << 32, depth + 1, bounds[at] or b"", bounds[at + 1]) for at, (_, size, flags, _) in enumerate(nodes))
                continue
            entries += _count(page)
            for key, size, flags, at in nodes:
                value = page[at : at + size]
                if flags & _BIG_DATA:
                    (own,) = _NUMBER.unpack_from(page, at)
                    count, words = self._overflow(own, size)
                    if words:
                        yield f"{name}: page {own} {words}"
                        continue
                    counted[_OVERFLOWS] += count
                    value = os.pread(self._fd, size, own * self._page_bytes + _PAGE.size) if each is not None else b""
                if each is not None and (flags & _SUB_TREE or not ordered):
                    each(key, value)
        pages = (counted[_BRANCH], counted[_LEAF], counted[_OVERFLOWS])
        right = (tree.branch_pages, tree.leaf_pages, tree.overflow_pages)
        if (pages, entries) != (right, tree.entries):
            yield f"{name}: {sum(pages)} pages and {entries} entries are found, {sum(right)} and {tree.entries} are counted"

    def _page(self, number: int, kind: int) -> tuple[bytes, str]:
        """The page, and what is wrong with it ("" if nothing)."""
        words = self._take(number, 1)
        if words:
            return b"", words
        page = os.pread(self._fd, self._page_bytes, number * self._page_bytes)
        if len(page) < self._page_bytes:
            return page, f"is beyond the end of the file, which has {self.size_bytes} bytes"
        own, _, flags, _, _ = _PAGE.unpack_from(page)
        if own != number or flags & _KINDS != kind:
            return page, "is another page, or none"
        return page, ""

    def _overflow(self, number: int, size: int) -> tuple[int, str]:
        """Number of pages of a value that has pages of its own, and what is wrong with them."""
        count = (_PAGE.size - 1 + size) // self._page_bytes + 1
        words = self._take(number, count)
        if words:
            return count, words
        if (number + count) * self._page_bytes > self.size_bytes:
            # The last page's unused end need not be there, but LMDB writes whole pages.
            return count, f"is beyond the end of the file, which has {self.size_bytes} bytes"
        own, _, flags, pages = _OVERFLOW.unpack(os.pread(self._fd, _OVERFLOW.size, number * self._page_bytes))
        # A value that became shorter keeps its pages.
        if own != number or flags & _KINDS != _OVERFLOWS or pages < count:
            return count, "is another page, or none"
        for page in range(number + count, min(number + pages, self.total)):
            self._seen[page] = 1
        return pages, ""

    def _take(self, number: int, count: int) -> str:
        self.walked += count
        if self.walked % _TICK_PAGES < count:
            self._tick(self.walked)
        if not 1 < number <= number + count <= self.total:
            return "is named, and there is no such page"
        if any(self._seen[number : number + count]):
            return "is used twice"
        self._seen[number : number + count] = b"\1" * count
        return ""


#: Key, size of the data, flags, where the data begins. In a branch, size and flags are the child's number.
_Node = tuple[bytes, int, int, int]


def _count(page: bytes) -> int:
    return int(_PAGE.unpack_from(page)[3] - _PAGE.size) // 2


def _node(page: bytes, at: int) -> _Node:
    low, high, flags, key_bytes = _NODE.unpack_from(page, at)
    at += _NODE.size
    return page[at : at + key_bytes], low | high << 16, flags, at + key_bytes


def _branch(page: bytes) -> tuple[bytes, bytes, list[_Node]]:
    """Its second key (the first stands for all that is lower), its last, and its nodes. Raises ValueError, struct.error, IndexError."""
    nodes = [_node(page, at) for at in memoryview(page)[_PAGE.size : _PAGE.size + 2 * _count(page)].cast("H")]
    if len(nodes) < 2 or any(at > len(page) for _, _, _, at in nodes):
        raise ValueError(page)
    return nodes[1][0], nodes[-1][0], nodes


def _leaf(page: bytes, every: bool) -> tuple[bytes, bytes, list[_Node]]:
    """Its first key, its last, and its nodes: `every` one, or those with pages of their own. Raises as `_branch`."""
    words = np.frombuffer(page, np.uint16)
    # Nodes begin at even places.
    offsets = words[_PAGE.size // 2 : _PAGE.size // 2 + _count(page)] // 2
    if not len(offsets):
        raise ValueError(page)
    flags, key_bytes = words[offsets + 2], words[offsets + 3]
    sizes = words[offsets] + (words[offsets + 1].astype(np.int64) << 16)
    big = flags & _BIG_DATA > 0
    ends = offsets * 2 + (_NODE.size + key_bytes.astype(np.int64)) + np.where(big, _NUMBER.size, sizes)
    if int(ends.max()) > len(page):
        raise ValueError(page)
    chosen = offsets if every else offsets[big]
    return (
        _node(page, int(offsets[0]) * 2)[0],
        _node(page, int(offsets[-1]) * 2)[0],
        [_node(page, int(at) * 2) for at in chosen] if len(chosen) else [],
    )


def _text(name: bytes) -> str:
    return name.decode(errors="backslashreplace")
