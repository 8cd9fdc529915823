"""Chunk-major order: all first chunks of the sequences, then all second chunks, and so on.

The chunked form walks the chunks of a sequence one after another and handles many sequences side by side. With the
sequences sorted by length, those that still have a chunk `j` are a prefix, so step `j` is one contiguous slice, every
chunk is computed once and none is computed for nothing, whatever the lengths are. The last chunk of a sequence is
filled up with zero rows (beta = 0, g = 0), which leave the state as it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor


@dataclass(frozen=True)
class ChunkLayout:
    """Where each token lies in chunk-major order.

    Attributes:
        chunk: rows C of a chunk.
        steps: `(begin, end)` of each step's slice of chunks; end - begin sequences are active.
        order: sequence numbers, longest first; row i of a state in chunk-major order belongs to sequence order[i].
        rank: the inverse of `order`.
        token: int64 `[chunks * C]`, the token of each chunk row; padding rows point at token 0.
        row: int64 `[tokens]`, the chunk row of each token.
        padding: int64, the chunk rows that hold no token; None if there is none.
    """

    chunk: int
    steps: tuple[tuple[int, int], ...]
    order: Tensor
    rank: Tensor
    token: Tensor
    row: Tensor
    padding: Tensor | None

    @staticmethod
    def build(offsets: Sequence[int], chunk: int, device: torch.device) -> ChunkLayout:
        """Lay out the sequences with boundaries `offsets` in chunks of `chunk` rows."""
        lengths = torch.tensor([end - begin for begin, end in pairwise(offsets)], dtype=torch.int64)
        order = torch.sort(lengths, descending=True, stable=True).indices
        sorted_lengths, begins = lengths[order], torch.tensor(offsets[:-1], dtype=torch.int64)[order]
        chunks = (sorted_lengths + chunk - 1) // chunk
        steps, first, sequence, index = [], 0, [], []
        for j in range(int(chunks[0]) if len(chunks) else 0):
            active = int((chunks > j).sum())
            steps.append((first, first + active))
            first += active
            sequence.append(torch.arange(active))
            index.append(torch.full((active,), j * chunk))
        if not steps:
            empty = torch.zeros(0, dtype=torch.int64, device=device)
            return ChunkLayout(chunk, (), order.to(device), torch.argsort(order).to(device), empty, empty, None)
        sequences = torch.cat(sequence)
        within = torch.cat(index).unsqueeze(1) + torch.arange(chunk)  # [chunks, C]
        real = within < sorted_lengths[sequences].unsqueeze(1)
        token = torch.where(real, begins[sequences].unsqueeze(1) + within, 0).flatten()
        flat_real = real.flatten()
        row = torch.empty(int(lengths.sum()), dtype=torch.int64)
        row[token[flat_real]] = flat_real.nonzero().flatten()
        padding = (~flat_real).nonzero().flatten()
        return ChunkLayout(
            chunk=chunk,
            steps=tuple(steps),
            order=order.to(device),
            rank=torch.argsort(order).to(device),
            token=token.to(device),
            row=row.to(device),
            padding=padding.to(device) if len(padding) else None,
        )

    def gather(self, x_BTHD: Tensor) -> Tensor:
        """`[B, T, H, D]` to `[chunks, H, C, D]`, zeros in padding rows."""
        heads, dim = x_BTHD.shape[2:]
        rows = x_BTHD.reshape(-1, heads, dim).index_select(0, self.token)
        if self.padding is not None:
            rows[self.padding] = 0  # by assignment: a NaN in token 0 must not reach another sequence
        return rows.view(-1, self.chunk, heads, dim).transpose(1, 2).contiguous()

    def scatter(self, x_NHCD: Tensor, batch: int) -> Tensor:
        """The inverse of `gather`: `[chunks, H, C, D]` to `[batch, T, H, D]`."""
        chunks, heads, chunk, dim = x_NHCD.shape
        rows = x_NHCD.transpose(1, 2).reshape(chunks * chunk, heads, dim)
        return rows.index_select(0, self.row).view(batch, len(self.row) // batch, heads, dim)
