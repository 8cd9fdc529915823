"""Gated MLP: the dense layer 0 and the fused shared experts (architecture §6.2: SiTU-GLU in both)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from perilune.config import ModelConfig
from perilune.model.linear import Linear
from perilune.ops.linear import linears
from perilune.ops.moe import mlp_decode
from perilune.ops.moe.decode import MAX_TOKENS
from perilune.ops.situ_glu import situ_glu, swiglu


def gated_unit(gate: Tensor, up: Tensor, cfg: ModelConfig) -> Tensor:
    """Apply the config's activation to the two halves of a gated MLP."""
    if cfg.activation == "situ":
        return situ_glu(gate, up, cfg.situ_beta, cfg.situ_linear_beta)
    return swiglu(gate, up)


class GatedMLP(nn.Module):
    """W_down · act(W_gate x, W_up x)."""

    def __init__(self, cfg: ModelConfig, hidden: int) -> None:
        super().__init__()
        self.cfg = cfg
        self.gate_proj = Linear(cfg.hidden_size, hidden)
        self.up_proj = Linear(cfg.hidden_size, hidden)
        self.down_proj = Linear(hidden, cfg.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        """Map `[..., D]` to `[..., D]`."""
        if not torch.is_grad_enabled() and x.numel() <= MAX_TOKENS * x.shape[-1]:
            few = mlp_decode(
                x.flatten(0, -2), self.gate_proj.weight, self.up_proj.weight, self.down_proj.weight, self.cfg.activation,
                beta=self.cfg.situ_beta, linear_beta=self.cfg.situ_linear_beta,
            )  # fmt: skip
            if few is not None:
                return few.view_as(x)
        return self.down_proj(gated_unit(*linears(x, self.gate_proj.weight, self.up_proj.weight), self.cfg))
