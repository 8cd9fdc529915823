"""Where the rows of a forward pass lie, as tensors: built once a pass, and as little of it anew as possible.

Page tables only grow at their ends. Those of decoding rows stay from one step to the next, so that a step of decoding
writes a few numbers a row, in one copy, and, now and then, a page.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from perilune.model.packing import Packing
from perilune.model.paged import Mark, PagedRows
from perilune.serve.cache import Chunk
from perilune.serve.cache.plans import ExportState
from perilune.serve.runner.inputs import LENGTH, PAGE, SLOT, STATE, DecodeInputs
from perilune.serve.schedule import Row
from perilune.serve.staging import to_device


class _Known(NamedTuple):
    """What a row of the table holds: how many pages of which list, which only grows."""

    pages: Sequence[int]
    count: int


def exactly(rows: int, pages: int) -> tuple[int, int]:
    """Rows of a pass, and the width of its tables: no more rows than there are, a power of two of pages."""
    return rows, 1 << (pages - 1).bit_length()


class DecodeRows:
    """Descriptions of one group of decoding rows, step after step.

    Args:
        page_tokens: of the pool.
        inputs: what the passes read.
        spare: a page of tokens for rows that only fill a pass up; they advance no state.
        room: rows of a pass and width of its tables, for so many rows with at most so many pages.
    """

    def __init__(
        self, page_tokens: int, inputs: DecodeInputs, spare: int, room: Callable[[int, int], tuple[int, int]] = exactly
    ) -> None:
        self._size, self._inputs, self._room = page_tokens, inputs, room
        self._filling = Chunk("", 0, 0, 1, (spare,), (-1,) * inputs.groups, (), ())
        self._known: list[_Known] = []
        self._table_BP = torch.zeros(0, 0, dtype=torch.int64)
        self._there = self._table_BP  # on the device

    def of(self, rows: Sequence[Row]) -> PagedRows:
        """Describe rows of one token each to the next pass, and as many more as it is to have. All but the table is
        overwritten by the next call."""
        return self._described(rows, *self._room(len(rows), max(len(row.chunk.pages) for row in rows)))

    def filling(self, count: int, width: int) -> PagedRows:
        """So many rows that nobody asked for, with tables of this width."""
        return self._described((), count, width)

    def _described(self, rows: Sequence[Row], count: int, width: int) -> PagedRows:
        size, source, numbers = self._size, self._inputs.source, []
        for at, (sequence, chunk, _, awaits) in enumerate(rows):
            start = chunk.start
            token, awaited = (0, sequence.name) if awaits else (sequence.ids[start], None)
            page, slot = chunk.pages[start // size], start % size
            numbers.append((token, source(at, awaited), page, slot, chunk.end, *chunk.state))
        chunks = [row.chunk for row in rows] + [self._filling] * (count - len(rows))
        for at in range(len(rows), count):
            numbers.append((0, source(at, None), *self._filling.pages, 0, 1, *self._filling.state))
        numbers_FB = self._inputs.fill(numbers)
        return PagedRows(
            past=[chunk.start for chunk in chunks], page_N=numbers_FB[PAGE], slot_N=numbers_FB[SLOT],
            table_BP=self._table(chunks, width), length_B=numbers_FB[LENGTH], state_GB=numbers_FB[STATE:],
        )  # fmt: skip

    def _table(self, chunks: Sequence[Chunk], width: int) -> Tensor:
        """Page tables `[B, P]`; where a row has fewer pages, what follows means nothing. As long as nothing has changed, the
        tensor of the last call."""
        if len(chunks) != len(self._known) or width > self._table_BP.shape[1]:
            self._table_BP = torch.zeros(len(chunks), width, dtype=torch.int64)
            self._known = [_Known((), 0)] * len(chunks)
        changed = False
        for row, chunk in enumerate(chunks):
            pages, count = self._known[row]
            if pages is not chunk.pages or count != len(chunk.pages):
                first = count if pages is chunk.pages else 0
                self._table_BP[row, first : len(chunk.pages)] = torch.tensor(chunk.pages[first:])
                self._known[row] = _Known(chunk.pages, len(chunk.pages))
                changed = True
        if changed:
            self._there = to_device(self._table_BP.clone(), self._inputs.device)
        return self._there


def chunk_rows(chunks: Sequence[Chunk], page_tokens: int, device: torch.device) -> PagedRows:
    """Chunks of prompts, one behind the other if there are several, with the points at which states are exported."""
    exports, groups = marked(chunks), len(chunks[0].state)
    positions = [torch.arange(chunk.start, chunk.end) for chunk in chunks]
    tables = [torch.tensor(chunk.pages[: -(-chunk.end // page_tokens)]) for chunk in chunks]
    pieces = [
        torch.cat([table[place // page_tokens] for table, place in zip(tables, positions)]),
        torch.cat([place % page_tokens for place in positions]),
        torch.cat(tables),
        torch.tensor([(chunk.end, *chunk.state) for chunk in chunks]).T.flatten(),
        torch.tensor([export.targets for _, export in exports], dtype=torch.int64)
        .view(len(exports), groups)
        .T.flatten(),
    ]
    there = to_device(torch.cat(pieces), device)  # in one copy: on a GPU each costs as much as a kernel
    page_N, slot_N, table_P, numbers, targets = there.split([len(piece) for piece in pieces])
    numbers_FB = numbers.unflatten(0, (-1, len(chunks)))
    marks = tuple(Mark(number, export.position - chunks[number].start) for number, export in exports)
    past, packing = [chunk.start for chunk in chunks], None
    if len(chunks) > 1:
        lengths = [chunk.end - chunk.start for chunk in chunks]
        at = [(mark.chunk, mark.offset) for mark in marks]
        packing = Packing.of(lengths, past, page_tokens, at, lambda tensor: to_device(tensor, device))
    return PagedRows(
        past=past, page_N=page_N, slot_N=slot_N, table_BP=table_P[None], length_B=numbers_FB[0], state_GB=numbers_FB[1:],
        marks=marks, mark_GM=targets.unflatten(0, (-1, len(marks))) if marks else None, packing=packing,
    )  # fmt: skip


def marked(chunks: Sequence[Chunk]) -> list[tuple[int, ExportState]]:
    """States to be written inside chunks, not at their ends: numbers of the chunks, and what."""
    return [(n, export) for n, chunk in enumerate(chunks) for export in chunk.exports if export.position < chunk.end]
