"""A block of the vision tower: attention over whole items in both directions, then an MLP (architecture §8.4, §8.5)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from perilune.config import VisionConfig
from perilune.model.linear import Linear
from perilune.model.vision.positions import rotate
from perilune.ops.norm import rms_norm
from perilune.ops.packed_attention import packed_attention


class VisionNorm(nn.Module):
    """RMSNorm whose eps follows the dtype of its input, unless one is given."""

    def __init__(self, size: int, eps: float | None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Normalise `[..., size]`; same dtype out."""
        return rms_norm(x, self.weight, torch.finfo(x.dtype).eps if self.eps is None else self.eps)


class VisionMLP(nn.Module):
    """Two maps around the tanh form of GELU."""

    def __init__(self, vision: VisionConfig) -> None:
        super().__init__()
        self.fc0 = Linear(vision.hidden_size, vision.mlp_size)
        self.fc1 = Linear(vision.mlp_size, vision.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        """`[..., D]` to `[..., D]`."""
        return self.fc1(F.gelu(self.fc0(x), approximate="tanh"))


class VisionBlock(nn.Module):
    """x += W_o Attn(Norm(x)); x += MLP(Norm(x)).

    `wqkv` gives queries, keys and values, in that order of rows; the softmax scale is K^-1/2; no gate, no bias. The report
    calls the attention factorised into passes over space and over time, but the checkpoint has the weights of one pass:
    every patch of an item sees all patches of all its frames.
    """

    def __init__(self, vision: VisionConfig) -> None:
        super().__init__()
        self.num_heads, self.head_dim = vision.num_heads, vision.head_dim
        self.norm0 = VisionNorm(vision.hidden_size, vision.norm_eps)
        self.wqkv = Linear(vision.hidden_size, 3 * vision.num_heads * vision.head_dim)
        self.wo = Linear(vision.num_heads * vision.head_dim, vision.hidden_size)
        self.norm1 = VisionNorm(vision.hidden_size, vision.norm_eps)
        self.mlp = VisionMLP(vision)

    def attend(self, x_PD: Tensor, rotation: tuple[Tensor, Tensor], lengths: Sequence[int]) -> Tensor:
        """Attention of normalised rows; see `forward`."""
        q, k, v = self.wqkv(x_PD).unflatten(-1, (3, self.num_heads, self.head_dim)).unbind(1)
        o_PHK = packed_attention(rotate(q, *rotation), rotate(k, *rotation), v, lengths, self.head_dim**-0.5)
        return self.wo(o_PHK.flatten(1))

    def forward(self, x_PD: Tensor, rotation: tuple[Tensor, Tensor], lengths: Sequence[int]) -> Tensor:
        """Map `[P, D]` to `[P, D]`.

        Args:
            x_PD: rows of the packed items.
            rotation: cosine and sine of the angles, `[P, K/2]` each.
            lengths: rows of each item.
        """
        x_PD = x_PD + self.attend(self.norm0(x_PD), rotation, lengths)
        return x_PD + self.mlp(self.norm1(x_PD))
