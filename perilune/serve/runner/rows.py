"""Where the rows of a forward pass lie, as tensors: built once a pass, and as little of it anew as possible.

Page tables only grow at their ends. Those of decoding rows stay from one step to the next, so that a step of decoding
writes a few numbers a row, in one copy, and, now and then, a page.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from perilune.model.packing import Packing
from perilune.model.paged import Mark, PagedRows
from perilune.serve.cache import Chunk
from perilune.serve.runner.inputs import LENGTH, PAGE, SLOT, STATE, DecodeInputs
from perilune.serve.schedule import Row
from perilune.serve.staging import to_device


class _Known(NamedTuple):
    """What a row of the table holds: how many pages of which list, which only grows."""

    pages: Sequence[int]
    count: int


class DecodeRows:
    """Descriptions of one group of decoding rows, step after step.

    Args:
        page_tokens: of the pool.
        inputs: what the passes read.
    """

    def __init__(self, page_tokens: int, inputs: DecodeInputs) -> None:
        self._size, self._inputs = page_tokens, inputs
        self._known: list[_Known] = []
        self._table_BP = torch.zeros(0, 0, dtype=torch.int64)
        self._there = self._table_BP  # on the device

    def of(self, rows: Sequence[Row]) -> PagedRows:
        """Describe rows of one token each to the next pass. All but the table is overwritten by the next call."""
        size, source = self._size, self._inputs.source
        numbers = []
        for at, (sequence, chunk, _, awaits) in enumerate(rows):
            start = chunk.start
            token, awaited = (0, sequence.name) if awaits else (sequence.ids[start], None)
            page, slot = chunk.pages[start // size], start % size
            numbers.append((token, source(at, awaited), page, slot, chunk.end, *chunk.state))
        numbers_FB = self._inputs.fill(numbers)
        return PagedRows(
            past=[row.chunk.start for row in rows], page_N=numbers_FB[PAGE], slot_N=numbers_FB[SLOT],
            table_BP=self._table([row.chunk for row in rows]), length_B=numbers_FB[LENGTH], state_GB=numbers_FB[STATE:],
        )  # fmt: skip

    def _table(self, chunks: Sequence[Chunk]) -> Tensor:
        """Page tables `[B, P]`, P a power of two; where a row has fewer pages, what follows means nothing. As long as nothing
        has changed, the tensor of the last call."""
        most = max(len(chunk.pages) for chunk in chunks)
        if len(chunks) != len(self._known) or most > self._table_BP.shape[1]:
            width = 1 << (most - 1).bit_length()
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
    positions = [torch.arange(chunk.start, chunk.end) for chunk in chunks]
    tables = [torch.tensor(chunk.pages[: -(-chunk.end // page_tokens)]) for chunk in chunks]
    pieces = [
        torch.cat([table[place // page_tokens] for table, place in zip(tables, positions)]),
        torch.cat([place % page_tokens for place in positions]),
        torch.cat(tables),
        torch.tensor([(chunk.end, *chunk.state) for chunk in chunks]).T.flatten(),
    ]
    there = to_device(torch.cat(pieces), device)  # in one copy: on a GPU each costs as much as a kernel
    page_N, slot_N, table_P, numbers = there.split([len(piece) for piece in pieces])
    numbers_FB = numbers.unflatten(0, (-1, len(chunks)))
    marks = tuple(
        Mark(number, export.position - chunk.start, export.targets)
        for number, chunk in enumerate(chunks)
        for export in chunk.exports
        if export.position < chunk.end
    )
    past, packing = [chunk.start for chunk in chunks], None
    if len(chunks) > 1:
        lengths = [chunk.end - chunk.start for chunk in chunks]
        at = [(mark.chunk, mark.offset) for mark in marks]
        packing = Packing.of(lengths, past, page_tokens, at, lambda tensor: to_device(tensor, device))
    return PagedRows(
        past=past, page_N=page_N, slot_N=slot_N, table_BP=table_P[None], length_B=numbers_FB[0], state_GB=numbers_FB[1:],
        marks=marks, packing=packing,
    )  # fmt: skip
