"""Where the rows of a forward pass lie, as tensors: built once a pass, and as little of it anew as possible.

Page tables only grow at their ends. Those of decoding rows stay from one step to the next, so that a step of decoding
writes a few numbers a row and, now and then, a page.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from perilune.model.paged import Mark, PagedRows
from perilune.serve.cache import Chunk


class _Known(NamedTuple):
    """What a row of the table holds: how many pages of which list, which only grows."""

    pages: Sequence[int]
    count: int


class DecodeRows:
    """Descriptions of one group of decoding rows, step after step.

    Args:
        page_tokens: of the pool.
        device: where the tensors go.
    """

    def __init__(self, page_tokens: int, device: torch.device) -> None:
        self._size, self._device = page_tokens, device
        self._known: list[_Known] = []
        self._table_BP = torch.zeros(0, 0, dtype=torch.int64)
        self._there = self._table_BP  # on the device

    def of(self, chunks: Sequence[Chunk]) -> PagedRows:
        """Rows of one token each. The table is overwritten by later calls."""
        size = self._size
        numbers = [
            (chunk.pages[chunk.start // size], chunk.start % size, chunk.end, *chunk.state) for chunk in chunks
        ]  # fmt: skip
        numbers_FB = torch.tensor(numbers, device=self._device).T.contiguous()
        return PagedRows(
            past=[chunk.start for chunk in chunks], page_N=numbers_FB[0], slot_N=numbers_FB[1],
            table_BP=self._table(chunks), length_B=numbers_FB[2], state_GB=numbers_FB[3:],
        )  # fmt: skip

    def _table(self, chunks: Sequence[Chunk]) -> Tensor:
        """Page tables `[B, P]`; where a row has fewer pages than another one, what follows means nothing."""
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
            self._there = self._table_BP.to(self._device)
        return self._there


def chunk_rows(chunks: Sequence[Chunk], page_tokens: int, device: torch.device) -> PagedRows:
    """Chunks of prompts, one behind the other if there are several, with the points at which states are exported."""
    positions = [torch.arange(chunk.start, chunk.end) for chunk in chunks]
    tables = [torch.tensor(chunk.pages[: -(-chunk.end // page_tokens)]) for chunk in chunks]
    ends = torch.tensor([(chunk.end, *chunk.state) for chunk in chunks])
    pieces = [
        *(table[place // page_tokens] for table, place in zip(tables, positions)),
        *(place % page_tokens for place in positions),
        *tables,
        ends.flatten(),
    ]
    there = torch.cat(pieces).to(device)  # in one copy: on a GPU each costs as much as a kernel
    tokens = sum(len(place) for place in positions)
    page_N, slot_N, rest = there.split((tokens, tokens, len(there) - 2 * tokens))
    sizes = [len(place) for place in positions]
    *table_P, numbers = rest.split((*(len(table) for table in tables), ends.numel()))
    parts = [
        PagedRows(
            past=[chunk.start], page_N=pages, slot_N=slots, table_BP=table[None], length_B=number[:1],
            state_GB=number[1:, None],
            marks=tuple(Mark(e.position - chunk.start, e.targets) for e in chunk.exports if e.position < chunk.end),
        )
        for chunk, pages, slots, table, number in zip(
            chunks, page_N.split(sizes), slot_N.split(sizes), table_P, numbers.view_as(ends)
        )
    ]  # fmt: skip
    if len(parts) == 1:
        return parts[0]
    none = numbers[:0]
    return PagedRows(
        past=[chunk.start for chunk in chunks], page_N=page_N, slot_N=slot_N, table_BP=none[None], length_B=none,
        state_GB=none.expand(ends.shape[1] - 1, 0), parts=tuple(parts),
    )  # fmt: skip
