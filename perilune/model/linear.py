"""Bias-free linear map whose parameter stays in fp32 while the product runs in the activations' dtype."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from perilune.ops.linear import linear


class Linear(nn.Module):
    """y = x Wᵀ with weight `[out, in]`; no layer of K3's text model has a bias (architecture, §2)."""

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out_features, in_features))

    def forward(self, x: Tensor) -> Tensor:
        """Map `[..., in]` to `[..., out]` in the dtype of `x`."""
        return linear(x, self.weight)

    def extra_repr(self) -> str:
        """Sizes, for printing a model."""
        return f"{self.weight.shape[1]} -> {self.weight.shape[0]}"
