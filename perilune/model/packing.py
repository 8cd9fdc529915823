"""Chunks of several sequences, one behind the other in a single row: where each begins, for the layers that look back.

Everything that looks at one token at a time runs over the row as it is. The recurrence starts each chunk with its sequence's
state, the convolution with its window, attention sees its sequence's cache; each in one call for all chunks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from perilune.ops.kda import Planned
from perilune.ops.mla.packed import CachedChunks
from perilune.ops.packed_conv import Chunks


@dataclass(frozen=True, slots=True)
class Packing:
    """N chunks of together T tokens.

    Attributes:
        chunks: for the convolution; its points are the chunks' ends, then the marks.
        cached: for attention, over the sequences' pages in order.
        last_N: place of each sequence's last page among all of these pages.
        beyond_NS: bool `[N, tokens of a page]`, what in that page lies behind the sequence's end.
        planned: for the recurrence, if only the device knows where chunks and marks lie; what the others have of the host
            then means nothing but how many there are.
    """

    chunks: Chunks
    cached: CachedChunks
    last_N: Tensor
    beyond_NS: Tensor
    planned: Planned | None = None

    @staticmethod
    def of(
        lengths: Sequence[int], past: Sequence[int], page_tokens: int, marks: Sequence[tuple[int, int]],
        upload: Callable[[Tensor], Tensor],
    ) -> Packing:  # fmt: skip
        """From the chunks' lengths, the tokens before each, and pairs of a chunk and tokens of it where states are written.

        `upload` brings a tensor to the device of the pages.
        """
        sizes, before = torch.tensor(lengths), torch.tensor(past)
        pages = (sizes + before + page_tokens - 1) // page_tokens
        last_N = pages.cumsum(0) - 1
        filled_N = sizes + before - (pages - 1) * page_tokens
        last_N, filled_N = upload(torch.cat((last_N, filled_N))).chunk(2)
        slot_S = torch.arange(page_tokens, device=filled_N.device)
        return Packing(
            Chunks.of(lengths, [*enumerate(lengths), *marks], upload),
            CachedChunks.of(lengths, past, page_tokens, upload),
            last_N,
            slot_S >= filled_N[:, None],
        )

    @property
    def offsets(self) -> tuple[int, ...]:
        """N+1 boundaries of the chunks."""
        return self.chunks.offsets

    @property
    def marks(self) -> tuple[tuple[int, int], ...]:
        """Chunks and tokens of them at which states are written."""
        return self.chunks.points[len(self.offsets) - 1 :]
