"""Where the documents of a packed row begin and end, as the attention kernels read it."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from perilune.ops.segments import Segments


class Layout(NamedTuple):
    """Where documents begin and end, int32 `[tokens]` each: of each token its document's first token, and the first beyond."""

    first: Tensor
    end: Tensor

    @staticmethod
    def of(segments: Segments) -> Layout:
        """From the boundaries, without waiting for the device."""
        bounds = segments.cu_seqlens.to(torch.int32)
        token = torch.arange(segments.batch * segments.length, device=bounds.device, dtype=torch.int32)
        document = torch.searchsorted(bounds, token, right=True)
        return Layout(bounds[document - 1], bounds[document])
