"""Attention over depth as the report writes it (§2.2, Eq. 8-10); the definition that the fast paths must equal."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def mix_weights_reference(sources: Sequence[Tensor], score_weight_D: Tensor, eps: float) -> Tensor:
    """Softmax over M sources of <v_i, c> * rsqrt(mean(v_i^2) + eps).

    Args:
        sources: M tensors [..., D].
        score_weight_D: c = norm weight * query, [D].
        eps: added to the mean of squares.

    Returns:
        [..., M] in float32, or float64 for float64 sources.
    """
    exact = torch.promote_types(sources[0].dtype, torch.float32)
    stacked = torch.stack([source.to(exact) for source in sources], dim=-2)
    normed = stacked * (stacked.square().mean(-1, keepdim=True) + eps).rsqrt()
    return (normed @ score_weight_D.to(exact)).softmax(-1)


def mix_reference(sources: Sequence[Tensor], score_weight_D: Tensor, eps: float) -> Tensor:
    """Sum of the sources, not normalised, under `mix_weights_reference`. [..., D] in the sources' dtype."""
    weights = mix_weights_reference(sources, score_weight_D, eps)
    stacked = torch.stack([source.to(weights.dtype) for source in sources], dim=-2)
    return (weights[..., None] * stacked).sum(-2).to(sources[0].dtype)
