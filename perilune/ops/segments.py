"""Documents packed into a batch of token rows.

A batch of `[B, T]` tokens holds several documents end to end. Nothing may cross a document's start: the KDA state, the
short convolution's window and attention all restart there (curriculum packing, report §3.4). The boundaries are given
once, as cumulative lengths over the flattened `B*T` tokens, the form that variable-length kernels take.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from perilune.ops.kda.gpu.plan import Plan


@dataclass(frozen=True)
class Segments:
    """Boundaries of the documents in `[batch, length]` tokens.

    Attributes:
        cu_seqlens: int32 `[N+1]`, 0 = first, batch*length = last, rising; every row start is among them. The last boundary
            may be repeated: documents without tokens, which only fill up a fixed number.
        batch: rows B.
        length: tokens a row T.
        offsets: the same boundaries on the host, where they are known there: who needs them then waits for no device.
        plan: chunks of these documents for the KDA kernels of a GPU, in tensors that are refilled when the boundaries
            change; with it the boundaries need not be known on the host.
    """

    cu_seqlens: Tensor
    batch: int
    length: int
    offsets: tuple[int, ...] | None = None
    plan: Plan | None = None

    @staticmethod
    def from_starts(starts_BT: Tensor) -> Segments | None:
        """Build from a bool mask `[B, T]` that is True where a document starts; None if no row is split."""
        starts_BT = starts_BT.clone()
        starts_BT[:, 0] = True
        begins = starts_BT.flatten().nonzero().flatten()
        if len(begins) == starts_BT.shape[0]:
            return None
        end = begins.new_tensor([starts_BT.numel()])
        bounds = torch.cat([begins, end]).to(torch.int32)
        return Segments(bounds, *starts_BT.shape, tuple(bounds.tolist()))

    def to(self, device: torch.device) -> Segments:
        """The same on a device; on the host nothing is waited for."""
        if self.cu_seqlens.device == device:
            return self
        bounds = self.cu_seqlens.pin_memory() if device.type == "cuda" else self.cu_seqlens
        return Segments(bounds.to(device, non_blocking=True), self.batch, self.length, self.offsets, self.plan)

    @cached_property
    def segment_id_BT(self) -> Tensor:
        """int64 `[B, T]`: index of the document each token belongs to, unique over the whole batch."""
        token = torch.arange(self.batch * self.length, device=self.cu_seqlens.device, dtype=self.cu_seqlens.dtype)
        return (torch.searchsorted(self.cu_seqlens, token, right=True) - 1).view(self.batch, self.length)

    @cached_property
    def offset_BT(self) -> Tensor:
        """int64 `[B, T]`: tokens since the start of the token's own document."""
        begins = self.cu_seqlens[:-1].long()[self.segment_id_BT.flatten()]
        return (torch.arange(self.batch * self.length, device=begins.device) - begins).view(self.batch, self.length)
