"""Documents packed into a batch of token rows.

A batch of `[B, T]` tokens holds several documents end to end. Nothing may cross a document's start: the KDA state, the
short convolution's window and attention all restart there (curriculum packing, report §3.4). The boundaries are given
once, as cumulative lengths over the flattened `B*T` tokens, the form that variable-length kernels take.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor


@dataclass(frozen=True)
class Segments:
    """Boundaries of the documents in `[batch, length]` tokens.

    Attributes:
        cu_seqlens: int32 `[N+1]`, 0 = first, batch*length = last, strictly increasing; every row start is among them.
        batch: rows B.
        length: tokens a row T.
    """

    cu_seqlens: Tensor
    batch: int
    length: int

    @staticmethod
    def from_starts(starts_BT: Tensor) -> Segments | None:
        """Build from a bool mask `[B, T]` that is True where a document starts; None if no row is split."""
        starts_BT = starts_BT.clone()
        starts_BT[:, 0] = True
        if int(starts_BT.sum()) == starts_BT.shape[0]:
            return None
        begins = starts_BT.flatten().nonzero().flatten()
        end = begins.new_tensor([starts_BT.numel()])
        return Segments(torch.cat([begins, end]).to(torch.int32), *starts_BT.shape)

    @cached_property
    def segment_id_BT(self) -> Tensor:
        """int64 `[B, T]`: index of the document each token belongs to, unique over the whole batch."""
        lengths = self.cu_seqlens.diff().long()
        ids = torch.arange(len(lengths), device=lengths.device).repeat_interleave(lengths)
        return ids.view(self.batch, self.length)

    @cached_property
    def offset_BT(self) -> Tensor:
        """int64 `[B, T]`: tokens since the start of the token's own document."""
        begins = self.cu_seqlens[:-1].long()[self.segment_id_BT.flatten()]
        return (torch.arange(self.batch * self.length, device=begins.device) - begins).view(self.batch, self.length)
