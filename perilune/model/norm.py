"""RMSNorm module: the learned scale; the arithmetic is `ops.norm.rms_norm`."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from perilune.ops.norm import rms_norm


class RMSNorm(nn.Module):
    """x · rsqrt(mean(x²) + eps) · weight over the last dimension, fp32 inside."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Normalise `[..., size]`; same dtype out."""
        return rms_norm(x, self.weight, self.eps)
