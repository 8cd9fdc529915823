"""Where the rows of a forward pass lie, as tensors: built once a pass, and as little of it anew as possible.

Page tables only grow at their ends. Those of decoding rows stay from one step to the next, so that a step of decoding
writes a few numbers a row and, now and then, a page.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from perilune.model.paged import Mark, PagedRows
from perilune.serve.cache import Chunk


class DecodeRows:
    """Descriptions of one group of decoding rows, step after step.

    Args:
        page_tokens: of the pool.
        device: where the tensors go.
    """

    def __init__(self, page_tokens: int, device: torch.device) -> None:
        self._size, self._device = page_tokens, device
        self._known: list[
            tuple[Sequence[int], int]
        ] = []  # of each row its list of pages, and how many are in the table
        self._table_BP = torch.zeros(0, 0, dtype=torch.int64)
        self._there = self._table_BP  # the table on the device

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
            self._known = [((), 0)] * len(chunks)
        changed = False
        for row, chunk in enumerate(chunks):
            pages, count = self._known[row]
            if pages is not chunk.pages or count != len(chunk.pages):
                first = count if pages is chunk.pages else 0
                self._table_BP[row, first : len(chunk.pages)] = torch.tensor(chunk.pages[first:])
                self._known[row] = (chunk.pages, len(chunk.pages))
                changed = True
        if changed:
            self._there = self._table_BP.to(self._device)
        return self._there


def chunk_rows(chunk: Chunk, page_tokens: int, device: torch.device) -> PagedRows:
    """A chunk of one sequence, with the points inside it at which its states are exported."""
    positions = torch.arange(chunk.start, chunk.end)
    table_P = torch.tensor(chunk.pages[: -(-chunk.end // page_tokens)])
    return PagedRows(
        past=[chunk.start],
        page_N=table_P[positions // page_tokens].to(device),
        slot_N=(positions % page_tokens).to(device),
        table_BP=table_P[None].to(device),
        length_B=torch.tensor([chunk.end], device=device),
        state_GB=torch.tensor(chunk.state, dtype=torch.int64, device=device)[:, None],
        marks=tuple(Mark(e.position - chunk.start, e.targets) for e in chunk.exports if e.position < chunk.end),
    )


def packed_rows(parts: Sequence[PagedRows]) -> PagedRows:
    """Chunks of several sequences, one behind the other."""
    none = parts[0].length_B[:0]
    return PagedRows(
        past=[part.past[0] for part in parts], page_N=torch.cat([part.page_N for part in parts]),
        slot_N=torch.cat([part.slot_N for part in parts]), table_BP=none[None], length_B=none, state_GB=none[None].expand(
            parts[0].state_GB.shape[0], 0
        ), parts=tuple(parts),
    )  # fmt: skip
