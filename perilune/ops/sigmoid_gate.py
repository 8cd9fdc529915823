"""y = x · sigmoid(gate) in the gate's dtype: the output gate of latent attention, whose x may be kept in float32.

dx = dy sigmoid(gate),   dgate = dy x sigmoid(gate) (1 - sigmoid(gate))
"""

from __future__ import annotations

import torch
from torch import Tensor

from perilune.errors import ConfigError
from perilune.ops.choice import Choice
from perilune.ops.triton.available import choose as choose_triton


def select(gate: Tensor) -> Choice:
    """Say which implementation gates, and why."""
    return choose_triton(gate) or Choice("torch", "the formula, in the wider of the two types")


def sigmoid_gate(x: Tensor, gate: Tensor) -> Tensor:
    """Gate x.

    Args:
        x: [...].
        gate: [...] logits of the same shape, in x's dtype or a narrower one.

    Returns:
        [...] in the gate's dtype.

    Raises:
        ConfigError: shapes disagree.
    """
    if x.shape != gate.shape:
        raise ConfigError(f"sigmoid_gate got x {list(x.shape)} and gate {list(gate.shape)}; they must have one shape")
    if x.dtype in (torch.float32, gate.dtype) and x.device == gate.device and select(gate).implementation == "triton":
        from perilune.ops.triton.sigmoid_gate import gated

        return gated(x, gate)
    return (x * torch.sigmoid(gate.to(x.dtype))).to(gate.dtype)
