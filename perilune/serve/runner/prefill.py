"""What a recorded prefill pass reads: the description of chunks of several prompts in tensors of fixed sizes.

Chunks lie one behind the other, as in `rows.chunk_rows`; what is left of the tokens is one more chunk, which continues the
state of a spare page and writes there. Chunks, pages and marks that are not there do the same. So every number that depends
on what is asked for is data, and a pass of one size serves whatever fits into it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from perilune.model.packing import Packing
from perilune.model.paged import PagedRows
from perilune.ops.kda import Planned
from perilune.ops.kda.gpu.padded_plan import Room as Tables
from perilune.ops.kda.gpu.padded_plan import place_marks
from perilune.ops.mla.packed import CachedChunks
from perilune.ops.packed_conv import Chunks
from perilune.serve.cache import Chunk
from perilune.serve.runner.pages import Spare
from perilune.serve.runner.rows import marked

CHUNKS, MARKS = 16, 16  # of a pass, the one of what is left of the tokens included
ALIGNED = 8  # numbers: tables begin at multiples of 16 bytes at least, so that kernels are not compiled for others


@dataclass(frozen=True, order=True, slots=True)
class Room:
    """Size of a pass.

    Attributes:
        tokens: T, of all chunks, a multiple of 64.
        pages: P, of all their sequences.
    """

    tokens: int
    pages: int


class PrefillInputs:
    """The tensors of passes of one size.

    Args:
        room: that size.
        page_tokens, groups: of the pool.
        spare: its spare pages.
        device: where the tensors are.
        tables: of the recurrence, with room for `CHUNKS` sequences; None = its kernels are told by the host.
    """

    def __init__(
        self, room: Room, page_tokens: int, groups: int, spare: Spare, device: torch.device, tables: Tables | None
    ) -> None:
        self.room, self._size, self._groups, self._spare, self._tables = room, page_tokens, groups, spare, tables
        tokens, points = room.tokens, CHUNKS + MARKS
        wide = {
            "ids": tokens, "page": tokens, "slot": tokens, "chunk": tokens, "since": tokens, "table": room.pages,
            "begin": CHUNKS, "point_chunk": points, "point_tokens": points, "last": CHUNKS, "filled": CHUNKS, "length": CHUNKS,
            "state": groups * CHUNKS, "mark": groups * MARKS, "end": CHUNKS,
        }  # fmt: skip
        narrow = {"first_key": tokens, "last_key": tokens}
        if tables is not None:
            narrow |= {"plan": tables.numbers, "slots": tables.chunks}
        self._wide, self._narrow = _Fields(wide, np.int64, device), _Fields(narrow, np.int32, device)

    @property
    def ids_1T(self) -> Tensor:
        """Tokens, `[1, T]`."""
        return self._wide["ids"][None]

    @property
    def ends_N(self) -> Tensor:
        """Place of the last token of each chunk; 0 for those that are not there."""
        return self._wide["end"]

    def fill(self, chunks: Sequence[Chunk], ids: Sequence[Sequence[int]]) -> None:
        """Describe chunks and their tokens to the next pass; fewer than `CHUNKS`, and fewer marks than `MARKS`."""
        wide, narrow = self._wide.fresh(), self._narrow.fresh()
        lengths = [chunk.end - chunk.start for chunk in chunks]
        ends, exports = list(accumulate(lengths)), marked(chunks)
        count, whole = len(chunks), self.room.tokens
        marks = [(number, export.position - chunks[number].start) for number, export in exports]
        self._place_tokens(wide, narrow, chunks, ids)
        offsets = (0, *ends, *[whole] * (CHUNKS - count))
        wide["begin"][:], wide["end"][:count] = offsets[:-1], np.array(ends) - 1
        lengths += [whole - ends[-1], *[0] * (CHUNKS - count - 1)]
        points = [*enumerate(lengths), *marks, *[(0, 0)] * (MARKS - len(marks))]
        wide["point_chunk"][:], wide["point_tokens"][:] = np.array(points).T
        state, mark = wide["state"].reshape(-1, CHUNKS), wide["mark"].reshape(-1, MARKS)
        state[:], mark[:] = self._spare.states, self._spare.unread
        state[:, :count] = np.array([chunk.state for chunk in chunks]).T
        if exports:
            mark[:, : len(exports)] = np.array([export.targets for _, export in exports]).T
        if self._tables is not None:
            narrow["plan"][:] = self._tables.filled(offsets)
            narrow["slots"][:] = place_marks(offsets, marks, self._tables.chunks)
        self._wide.send()
        self._narrow.send()

    def _place_tokens(
        self, wide: dict[str, NDArray[Any]], narrow: dict[str, NDArray[Any]], chunks: Sequence[Chunk], ids: Sequence[Sequence[int]]
    ) -> None:  # fmt: skip
        """What there is of each token, and the pages of their sequences."""
        size, begin, first_page = self._size, 0, 0
        wide["page"][:], wide["table"][:] = self._spare.tokens, self._spare.tokens
        wide["slot"][:] = np.arange(self.room.tokens) % size
        wide["chunk"][:] = len(chunks)
        last = 0
        for number, (chunk, tokens) in enumerate(zip(chunks, ids, strict=True)):
            end, used = begin + chunk.end - chunk.start, -(-chunk.end // size)
            place_T, table_P = np.arange(chunk.start, chunk.end), np.array(chunk.pages[:used])
            part = slice(begin, end)
            wide["ids"][part], wide["page"][part], wide["slot"][part] = tokens, table_P[place_T // size], place_T % size
            wide["chunk"][part], wide["since"][part] = number, place_T - chunk.start
            wide["table"][first_page : first_page + used] = table_P
            wide["last"][number], wide["filled"][number] = first_page + used - 1, chunk.end - (used - 1) * size
            wide["length"][number] = chunk.end
            narrow["first_key"][part] = first_page * size
            narrow["last_key"][part] = first_page * size + place_T
            last = first_page * size + chunk.end - 1
            begin, first_page = end, first_page + used
        wide["since"][begin:] = np.arange(self.room.tokens - begin)
        wide["last"][len(chunks) :], wide["filled"][len(chunks) :] = wide["last"][0], wide["filled"][0]
        narrow["first_key"][begin:] = narrow["last_key"][begin:] = last  # what queries see may not go back

    def rows(self) -> PagedRows:
        """The description, to be read where it lies; the host knows nothing of it but how many chunks and marks there may be."""
        wide, narrow, size = self._wide, self._narrow, self._size
        planned = None
        if self._tables is not None:
            planned = Planned(self._tables.plan(narrow["plan"]), narrow["slots"], CHUNKS, MARKS)
        nowhere = (0,) * (CHUNKS + 1)
        of_tokens = (wide[name] for name in ("chunk", "since", "begin", "point_chunk", "point_tokens"))
        packing = Packing(
            Chunks(nowhere, ((0, 0),) * (CHUNKS + MARKS), *of_tokens),
            CachedChunks(nowhere, nowhere[1:], nowhere[1:], narrow["first_key"], narrow["last_key"]),
            wide["last"],
            torch.arange(size, device=wide.device) >= wide["filled"][:, None],
            planned,
        )
        return PagedRows(
            past=[0] * CHUNKS, page_N=wide["page"], slot_N=wide["slot"], table_BP=wide["table"][None], length_B=wide["length"],
            state_GB=wide["state"].view(self._groups, CHUNKS), mark_GM=wide["mark"].view(self._groups, MARKS), packing=packing,
        )  # fmt: skip


class _Fields:
    """Named tables in one buffer on the device, which one copy fills."""

    def __init__(self, sizes: dict[str, int], dtype: type[np.integer], device: torch.device) -> None:
        self._parts: dict[str, slice] = {}
        first = 0
        for name, size in sizes.items():
            self._parts[name] = slice(first, first + size)
            first += -(-size // ALIGNED) * ALIGNED
        self._here = np.zeros(first, dtype)
        self._there = torch.from_numpy(self._here).clone().to(device)

    def __getitem__(self, name: str) -> Tensor:
        return self._there[self._parts[name]]

    @property
    def device(self) -> torch.device:
        return self._there.device

    def fresh(self) -> dict[str, NDArray[Any]]:
        """The tables on the host, all zeros."""
        self._here[:] = 0
        return {name: self._here[part] for name, part in self._parts.items()}

    def send(self) -> None:
        """Copy them to the device, which does not wait, nor has to have read them when this returns."""
        here = torch.from_numpy(self._here)
        self._there.copy_(here.pin_memory() if self._there.is_cuda else here, non_blocking=True)
