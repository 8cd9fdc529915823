"""Fake quantisation: values as they come back from a block format, with the gradient of the identity (training, "QAT").

    forward   y = Q(x)          backward   dx = dy

The scale counts as a constant. Saturated values pass their gradient too: a block's scale follows its largest magnitude,
which is therefore at most 8/6 of the top of the MXFP4 grid away from it (and only under the rules floor and even), and a
weight without a gradient there could neither grow into the next scale nor come back.
"""

from __future__ import annotations

import torch
from torch import Tensor

from perilune.ops.mx.blocks import round_blocks
from perilune.ops.mx.element import Element, element_of


def fake_quantize(x: Tensor, block_format: str = "mxfp4", rule: str = "floor") -> Tensor:
    """Round `[..., I]` to a block format along the last dimension.

    Args:
        x: float32, bfloat16 or float64; I may be any number: the last block of a row counts as padded with zeros.
        block_format: "mxfp4" (E2M1) or "mxfp8" (E4M3).
        rule: how scales are chosen: "floor", "even" or "ceil" (`scale`).

    Returns:
        `[..., I]` in x's dtype. A block with NaN or infinity is all NaN.

    Raises:
        ConfigError: the format, the rule or the dtype is unknown.
    """
    element = element_of(block_format)
    if torch.is_grad_enabled() and x.requires_grad:
        return _StraightThrough.apply(x, element, rule)
    return round_blocks(x, element, rule)


class _StraightThrough(torch.autograd.Function):
    """Saves nothing."""

    @staticmethod
    def forward(ctx, x: Tensor, element: Element, rule: str) -> Tensor:
        return round_blocks(x, element, rule)

    @staticmethod
    def backward(ctx, dy: Tensor):
        return dy, None, None
