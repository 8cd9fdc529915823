"""Memory in the snapshot store: 4 KiB pages named by their content, kept in packs; a table says which page of a guest lies where.

A pack is a blob: `MAGIC`, the count of pages, their names, the pages. The blob's name is the hash of everything before the pages, and that
holds their names, so a page is checked against its own name and never hashed twice. A table is a blob of three columns of 32-bit numbers:
page number of the guest, pack (an index into the list beside the table), place in it. Pages of zeros are in no pack (`ZERO`).
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import mmap
import os
import threading
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from perilune.sandbox.page_names import NAME, PAGE, Pages, page_names
from perilune.sandbox.protocol import StoreDamaged

MAGIC = b"PERILUNE PAGES 1"
PACK_PAGES = 256
ZERO = 0xFFFFFFFF
"""In a table's pack column: the page holds zeros."""
Numbers = NDArray[np.uint32]


def pack_head(names: Sequence[bytes]) -> bytes:
    """What a pack begins with, and what its name is the hash of."""
    return MAGIC + len(names).to_bytes(4, "little") + b"".join(names)


def pack_name(data: bytes | memoryview) -> str | None:
    """The name of a pack with this content, or None if it is no whole pack."""
    count = int.from_bytes(data[len(MAGIC) : len(MAGIC) + 4], "little")
    head = len(MAGIC) + 4 + count * NAME
    if data[: len(MAGIC)] != MAGIC or len(data) != head + count * PAGE:
        return None
    names = page_names(np.frombuffer(data, np.uint8, count * PAGE, head).reshape(-1, PAGE))
    return hashlib.sha256(data[:head]).hexdigest() if pack_head(names) == data[:head] else None


@dataclass(frozen=True, slots=True)
class Table:
    """Where each page of a memory lies; sorted by number.

    Attributes:
        number: [n] page numbers of the guest.
        pack: [n] indices into `packs`, or ZERO.
        place: [n] places in the pack.
        packs: names of blobs.
    """

    number: Numbers
    pack: Numbers
    place: Numbers
    packs: tuple[str, ...]

    def of(self, rows: NDArray[np.bool_]) -> Table:
        """The table of some of its pages, with the packs that these need."""
        number, pack, place = self.number[rows], self.pack[rows], self.place[rows]
        return compact(number, pack, place, self.packs)

    def encode(self) -> bytes:
        """As a blob; `packs` is kept beside it."""
        return np.stack([self.number, self.pack, self.place]).astype("<u4").tobytes()

    @staticmethod
    def decode(data: bytes, packs: Sequence[str]) -> Table:
        """The table of a blob. Raises ValueError for a malformed one."""
        if len(data) % 12:
            raise ValueError(f"a table of {len(data)} bytes")
        number, pack, place = np.frombuffer(data, "<u4").reshape(3, -1).astype(np.uint32)
        if (np.diff(number.astype(np.int64)) <= 0).any() or ((pack >= len(packs)) & (pack != ZERO)).any():
            raise ValueError("a table whose pages are not in order, or that names a pack beside its list")
        return Table(number, pack, place, tuple(packs))


def overlaid(under: Table, over: Table) -> Table:
    """A table with the pages of both; where both have one, that of `over`."""
    packs = list(dict.fromkeys((*under.packs, *over.packs)))
    place = {name: index for index, name in enumerate(packs)}
    kept = ~np.isin(under.number, over.number)
    columns = []
    for table, rows in ((under, kept), (over, np.ones(len(over.number), bool))):
        index = np.array([place[name] for name in table.packs], np.uint32)
        pack = table.pack[rows].copy()
        held = pack != ZERO
        pack[held] = index[pack[held]]
        columns.append((table.number[rows], pack, table.place[rows]))
    number, pack, where = (np.concatenate(pair) for pair in zip(*columns))
    order = np.argsort(number, kind="stable")
    return compact(number[order], pack[order], where[order], packs)


def compact(number: Numbers, pack: Numbers, place: Numbers, packs: Sequence[str]) -> Table:
    """A table with those of the packs that it uses."""
    used = np.unique(pack[pack != ZERO])
    back = np.zeros(len(packs) + 1, np.uint32)
    back[used] = np.arange(len(used), dtype=np.uint32)
    return Table(
        number.astype(np.uint32),
        np.where(pack == ZERO, pack, back[np.minimum(pack, len(packs))]),
        place,
        tuple(packs[index] for index in used),
    )


EMPTY = Table(*(np.zeros(0, np.uint32) for _ in range(3)), ())


class Packs:
    """Packs of one store, mapped as they are needed, with the names of the pages that this process has seen there.

    Args:
        blobs: the store's blob folder.
    """

    _shared: ClassVar[weakref.WeakValueDictionary[Path, Packs]] = weakref.WeakValueDictionary()

    @classmethod
    def of(cls, blobs: Path) -> Packs:
        """The one that all stores of this folder share in this process: what one has written the other need not check."""
        blobs = blobs.resolve()
        found = cls._shared.get(blobs)
        if found is None:
            found = cls._shared[blobs] = Packs(blobs)
        return found

    def __init__(self, blobs: Path) -> None:
        self.blobs = blobs
        self._where: dict[bytes, tuple[str, int]] = {}
        self._sizes: dict[str, int] = {}
        self._whole: dict[str, tuple[int, int, int]] = {}
        """Packs that were read or written whole by this process, with what their files would not keep if they were changed."""
        self._lock = threading.Lock()

    def path(self, name: str) -> Path:
        """Where a pack lies."""
        return self.blobs / name[:2] / name[2:]

    def open(self, name: str) -> tuple[bytes, Pages]:
        """Names (16 bytes each, one after another) and pages of a pack, mapped. Raises StoreDamaged."""
        try:
            with open(self.path(name), "rb") as file:
                data = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
        except (OSError, ValueError):
            raise StoreDamaged(f"blob {name} is missing") from None
        count = int.from_bytes(data[len(MAGIC) : len(MAGIC) + 4], "little")
        head = len(MAGIC) + 4 + count * NAME
        if len(data) != head + count * PAGE:
            raise StoreDamaged(f"blob {name} is truncated: {len(data)} bytes are no whole pack")
        if hashlib.sha256(data[:head]).hexdigest() != name:
            raise StoreDamaged(f"blob {name} is corrupt: its content has another hash")
        return data[len(MAGIC) + 4 : head], np.frombuffer(data, np.uint8, count * PAGE, head).reshape(-1, PAGE)

    def learn(self, names: Sequence[str]) -> None:
        """Note which pages these packs hold, so that equal ones are not stored again."""
        for name in names:
            if name not in self._sizes:
                with contextlib.suppress(StoreDamaged):
                    held = self.open(name)[0]
                    self.note(name, [held[at : at + NAME] for at in range(0, len(held), NAME)])

    def note(self, name: str, names: Sequence[bytes], *, whole: bool = False) -> None:
        """Note the pages of one pack; `whole`: they were written just now."""
        with self._lock, contextlib.suppress(FileNotFoundError):
            if whole:
                self._whole[name] = self._mark(name)
        with self._lock:
            self._sizes[name] = len(names)
            self._where.update(zip(names, zip(itertools.repeat(name), range(len(names)))))

    def size(self, name: str) -> int:
        """Pages of a pack that was learned or noted, else 0."""
        return self._sizes.get(name, 0)

    def find(self, names: Sequence[bytes]) -> list[tuple[str, int] | None]:
        """Where pages of these names lie, None where that is not known or the pack was removed."""
        with self._lock:
            found = [self._where.get(name) for name in names]
        gone = {pack for pack in {place[0] for place in found if place} if not os.path.exists(self.path(pack))}
        if gone:
            with self._lock:
                self._where = {name: place for name, place in self._where.items() if place[0] not in gone}
                self._sizes = {name: size for name, size in self._sizes.items() if name not in gone}
        return [None if place is None or place[0] in gone else place for place in found]

    def _check(self, name: str, names: bytes, pages: Pages) -> None:
        """Check every page against its name, once for a file. Raises StoreDamaged."""
        mark = self._mark(name)
        if self._whole.get(name) == mark:
            return
        for place, found in enumerate(page_names(pages)):
            if names[place * NAME : (place + 1) * NAME] != found:
                raise StoreDamaged(f"blob {name} is corrupt: page {place} has another hash")
        self._whole[name] = mark

    def _mark(self, name: str) -> tuple[int, int, int]:
        info = os.stat(self.path(name))
        return info.st_ino, info.st_mtime_ns, info.st_ctime_ns

    def pieces(self, table: Table) -> Iterator[tuple[Numbers, Pages]]:
        """The pages of a table, pack by pack, each checked against its name; zeros as one piece.

        Raises:
            StoreDamaged: a pack is missing, truncated or corrupt (which one is said).
        """
        for number, name in enumerate(table.packs):
            chosen = table.pack == number
            if not chosen.any():
                continue
            names, pages = self.open(name)
            places = table.place[chosen]
            if places.max() >= len(pages):
                raise StoreDamaged(f"blob {name} is truncated: it has {len(pages)} pages, place {places.max()} is used")
            self._check(name, names, pages)
            taken = pages[places]
            yield table.number[chosen], taken
        chosen = table.pack == ZERO
        if chosen.any():
            yield table.number[chosen], np.zeros((int(chosen.sum()), PAGE), np.uint8)
