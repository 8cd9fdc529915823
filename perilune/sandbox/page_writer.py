"""Storing a memory's pages: what is stored already is named, what is new goes into packs, written by one thread while another names."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from perilune.sandbox.page_names import PAGE, Pages, page_names
from perilune.sandbox.pages import EMPTY, PACK_PAGES, ZERO, Numbers, Packs, Table, compact, pack_head
from perilune.sandbox.protocol import Look, StoreDamaged

LEAST_USE = 0.5
"""Share of a pack that a table uses at least; of one that it uses less of, the pages are stored again, so that the old pack can go."""
NAMED_PAGES = 512
"""Pages that are named at once."""


def still_good(table: Table, changed: Numbers, packs: Packs, permanent: frozenset[str]) -> NDArray[np.bool_]:
    """Rows of a table that the next one can take over: of pages that are not among the changed ones, in packs that are still there and of
    which enough is used (`LEAST_USE`) or that are needed anyway."""
    kept = ~np.isin(table.number, changed, assume_unique=True)
    for index, name in enumerate(table.packs):
        rows = kept & (table.pack == index)
        if not os.path.exists(packs.path(name)) or (
            name not in permanent and rows.sum() < LEAST_USE * packs.size(name)
        ):
            kept &= ~rows
    return kept


class Keeps(Protocol):
    """Where packs are written: a store's batch, or a template's folder."""

    def put_named(self, name: str, *parts: bytes | memoryview) -> bool:
        """Keep a pack, given in parts, under its name; returns whether it was not there yet. Raises StoreFull."""
        ...


@dataclass(slots=True)
class Writer:
    """Stores one memory's pages in a batch; what equals the `last` table's page or is stored already is named, not written.

    Attributes:
        packs: of the store that `batch` belongs to.
        last: the table of the checkpoint before, or EMPTY.
        permanent: packs that are needed anyway.
    """

    packs: Packs
    batch: Keeps
    last: Table = EMPTY
    permanent: frozenset[str] = frozenset()
    _names: list[str] = field(default_factory=list)
    _index: dict[str, int] = field(default_factory=dict)
    _pending: dict[bytes, list[int]] = field(default_factory=dict)
    _mine: dict[bytes, tuple[int, int]] = field(default_factory=dict)

    def write(self, number: Numbers, pages: Pages, look: Look, what: str) -> Table:
        """Store pages; returns the table of exactly these.

        Args:
            number: [n] sorted page numbers.
            pages: [n, 4096] their content.
            look: is shown all that is not zero.
            what: to call them there.

        Raises:
            StoreFull, SecretInSnapshot: see `Batch.put` and `look`.
        """
        pack, place = np.full(len(number), ZERO, np.uint32), np.zeros(len(number), np.uint32)
        todo = pages.view(np.uint64).any(axis=1)
        if todo.any():
            look(what, _chunks(pages))
        self._keep(number, pages, todo, pack, place)
        rows = np.flatnonzero(todo)
        with ThreadPoolExecutor(max_workers=1) as writing:
            jobs: list[Future[None]] = []

            def store(least: int) -> None:
                while len(self._pending) >= least:
                    jobs.append(writing.submit(self._put, *self._packed(pages, pack, place)))

            for start in range(0, len(rows), NAMED_PAGES):
                self._place(rows[start : start + NAMED_PAGES], pages, pack, place, self.packs.find)
                store(PACK_PAGES)
            self._place(self._of_sparse_packs(pack), pages, pack, place, lambda names: [None] * len(names))
            store(1)
            for job in jobs:
                job.result()
        return compact(number, pack, place, self._names)

    def _place(
        self, rows: NDArray[np.int64], pages: Pages, pack: Numbers, place: Numbers, find: Callable[[Sequence[bytes]], Sequence[tuple[str, int] | None]]
    ) -> None:  # fmt: skip
        """Name pages; those that are stored already get their place, the others wait for a pack."""
        names = page_names(pages, rows)
        found, kinds = find(names), set(names)
        if (
            len(kinds) == len(names)
            and not any(found)
            and kinds.isdisjoint(self._mine)
            and kinds.isdisjoint(self._pending)
        ):
            # All of them are new, as mostly: no need to look at each, which would keep the writing thread from its work.
            self._pending.update(zip(names, ([row] for row in rows.tolist())))
            return
        for row, name, where in zip(rows.tolist(), names, found):
            if where is not None:
                pack[row], place[row] = self._number(where[0]), where[1]
            elif name in self._mine:
                pack[row], place[row] = self._mine[name]
            else:
                self._pending.setdefault(name, []).append(row)

    def _packed(self, pages: Pages, pack: Numbers, place: Numbers) -> tuple[str, bytes, list[memoryview], list[bytes]]:
        """The next pack of pages that wait: its name, head and content, and the names in it."""
        names = list(itertools.islice(self._pending, PACK_PAGES))
        rows = [self._pending.pop(name) for name in names]
        head = pack_head(names)
        name = hashlib.sha256(head).hexdigest()
        index = self._number(name)
        self._mine.update((one, (index, at)) for at, one in enumerate(names))
        # One assignment for a pack: one for each page would cost as much as naming it.
        where = np.array([(row, at) for at, some in enumerate(rows) for row in some], np.int64)
        pack[where[:, 0]], place[where[:, 0]] = index, where[:, 1]
        return name, head, list(_runs(pages, [some[0] for some in rows])), names

    def _put(self, name: str, head: bytes, content: list[memoryview], names: list[bytes]) -> None:
        """Store a pack; in the writing thread, while the next one is being named."""
        self.packs.note(name, names, whole=self.batch.put_named(name, head, *content))

    def _keep(self, number: Numbers, pages: Pages, todo: NDArray[np.bool_], pack: Numbers, place: Numbers) -> None:
        """Take over the places of pages that are as they were at the checkpoint before: comparing costs a tenth of naming."""
        if not len(self.last.number):
            return
        at = np.searchsorted(self.last.number, number)
        at[at == len(self.last.number)] = 0
        known = todo & (self.last.number[at] == number)
        words = pages.view(np.uint64)
        for index, name in enumerate(self.last.packs):
            rows = np.flatnonzero(known & (self.last.pack[at] == index))
            if not len(rows):
                continue
            with contextlib.suppress(StoreDamaged):  # It was removed: its pages are stored again.
                stored = self.packs.open(name)[1].view(np.uint64)
                places = self.last.place[at[rows]]
                # A few words of each tell most changed pages without reading all of them.
                alike = np.flatnonzero((stored[:, ::64][places] == words[:, ::64][rows]).all(axis=1))
                rows, places = rows[alike], places[alike]
                same = (stored[places] == words[rows]).all(axis=1)
                if same.any():
                    pack[rows[same]], place[rows[same]] = self._number(name), places[same]
                    todo[rows[same]] = False

    def _of_sparse_packs(self, pack: Numbers) -> NDArray[np.int64]:
        """Rows whose pages lie in packs that are mostly garbage by now."""
        rows = [np.zeros(0, np.int64)]
        for index, name in enumerate(self._names):
            used = np.flatnonzero(pack == index)
            if name not in self.permanent and len(used) < LEAST_USE * self.packs.size(name):
                rows.append(used)
        return np.concatenate(rows)

    def _number(self, name: str) -> int:
        if name not in self._index:
            self._index[name] = len(self._names)
            self._names.append(name)
        return self._index[name]


def _runs(pages: Pages, rows: list[int]) -> Iterator[memoryview]:
    """The content of some pages, in parts: neighbours are one."""
    view, start = memoryview(pages).cast("B"), 0
    for at in range(1, len(rows) + 1):
        if at == len(rows) or rows[at] != rows[at - 1] + 1:
            yield view[rows[start] * PAGE : (rows[at - 1] + 1) * PAGE]
            start = at


def _chunks(pages: Pages) -> Iterator[bytes]:
    for start in range(0, len(pages), PACK_PAGES):
        yield pages[start : start + PACK_PAGES].tobytes()
