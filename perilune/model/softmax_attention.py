"""Plain multi-head softmax attention with rotary positions: the baseline mixer of ablations, not part of K3."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from perilune.config import ModelConfig, SoftmaxConfig
from perilune.model.linear import Linear
from perilune.model.paged import PagedCache
from perilune.model.state import KeyValueCache
from perilune.ops.mla import attend
from perilune.ops.rope import rope
from perilune.ops.segments import Segments


class SoftmaxAttention(nn.Module):
    """q, k, v of `num_heads × head_dim`, rotary positions on q and k, causal softmax, output projection."""

    def __init__(self, cfg: ModelConfig) -> None:
        super().__init__()
        softmax = cfg.softmax
        assert softmax is not None, "the layer pattern names softmax but the config has none"
        self.softmax: SoftmaxConfig = softmax
        width = softmax.num_heads * softmax.head_dim
        self.q_proj = Linear(cfg.hidden_size, width)
        self.k_proj = Linear(cfg.hidden_size, width)
        self.v_proj = Linear(cfg.hidden_size, width)
        self.o_proj = Linear(width, cfg.hidden_size)
        self.scale = softmax.head_dim**-0.5

    def forward(
        self,
        x_BTD: Tensor,
        state: KeyValueCache | PagedCache | None = None,
        segments: Segments | None = None,
        past: list[int] | None = None,
    ) -> tuple[Tensor, KeyValueCache | PagedCache | None]:
        """Mix `[B, T, D]`; with a state, new keys and values are appended at each row's `past`."""
        batch, tokens = x_BTD.shape[:2]
        split = (self.softmax.num_heads, self.softmax.head_dim)
        q, k, v = (proj(x_BTD).unflatten(-1, split) for proj in (self.q_proj, self.k_proj, self.v_proj))
        positions = torch.arange(tokens, device=x_BTD.device).expand(batch, -1)
        if past is not None:
            positions = positions + torch.tensor(past, device=x_BTD.device)[:, None]
        q, k = (rope(t, positions, self.softmax.rope_theta) for t in (q, k))
        if state is None:
            out = attend(q, k, v, self.scale, segments)
        elif isinstance(state, PagedCache):
            state.append(torch.cat((k.flatten(-2), v.flatten(-2)), dim=-1))
            outs = []
            for row, length in enumerate(state.rows.past):
                keys, values = (t.unflatten(-1, split) for t in state.entries(row).chunk(2, dim=-1))
                outs.append(attend(q[row : row + 1], keys, values, self.scale, past=length))
            out = torch.cat(outs).to(v.dtype)
        else:
            assert past is not None and segments is None, "a cached call needs past lengths and no packed documents"
            out = torch.empty_like(v)
            for length in sorted(set(past)):
                rows = [row for row, n in enumerate(past) if n == length]
                end = length + tokens
                state.keys_BSHK[rows, length:end], state.values_BSHV[rows, length:end] = k[rows], v[rows]
                keys, values = state.keys_BSHK[rows, :end], state.values_BSHV[rows, :end]
                out[rows] = attend(q[rows], keys, values, self.scale, past=length).to(v.dtype)
        return self.o_proj(out.to(x_BTD.dtype).flatten(-2)), state
