"""Gated MLP: the dense layer 0 and the fused shared experts (architecture §6.2: SiTU-GLU in both)."""

from __future__ import annotations

from torch import Tensor, nn

from perilune.config import ModelConfig
from perilune.model.linear import Linear
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
        return self.down_proj(gated_unit(self.gate_proj(x), self.up_proj(x), self.cfg))
