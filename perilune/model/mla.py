"""Gated multi-head latent attention without positions (report §2.1.2, architecture §4).

    c_q = RMSNorm(W_qa x),  q = W_qb c_q  (or q = W_q x)             [q_n | q_r] a head
    [c | r] = W_kva x,  c' = RMSNorm(c)                              r is shared by all heads and not normalised
    [k_n | v] = W_kvb c',  k = [k_n | r]
    y = W_o ( softmax(q kᵀ (n + r)^-1/2, causal) v · sigmoid(W_g x) )

Only [c' | r] is cached. Decode uses the absorbed form: q_n is carried into the latent space, so the cache is read as it
is. With `rope_theta` set, q_r and r are rotated (the K2-style baseline).
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from perilune.config import MLAConfig, ModelConfig
from perilune.model.linear import Linear
from perilune.model.norm import RMSNorm
from perilune.model.paged import PagedCache
from perilune.model.state import LatentCache
from perilune.ops.linear import gated_linear, linear, linears, normed_linear
from perilune.ops.mla import attend, attend_latent
from perilune.ops.mla.append import append_latents
from perilune.ops.mla.keys import keys_and_values
from perilune.ops.mla.packed import CachedChunks, attend_packed
from perilune.ops.mla.pages import attend_latent_pages
from perilune.ops.rope import rope
from perilune.ops.segments import Segments
from perilune.ops.sigmoid_gate import sigmoid_gate

# Up to this many new tokens the absorbed form reads less than rebuilding all keys and values from the latents.
ABSORBED_TOKENS = 8
# Keys and values that are rebuilt at once; with longer caches heads take turns. 400K tokens of 16 heads of 96 and 64: 2.9 GB.
EXPANDED_BYTES = 2**32
JOINT_TOKENS = 16384  # of caches whose keys and values are rebuilt by `expand_joint`, on a GPU


class GatedMLA(nn.Module):
    """One MLA layer.

    Attributes:
        fp32_output: keep the attention output in fp32 up to the gate (training, report §2.1.2).
        track_max_logit: record the largest pre-softmax logit of each head in `max_logit_H` while training (QK-clip).
    """

    def __init__(self, cfg: ModelConfig) -> None:
        super().__init__()
        mla = cfg.mla
        assert mla is not None, "the layer pattern names mla but the config has none"
        self.mla: MLAConfig = mla
        width, heads = cfg.hidden_size, mla.num_heads
        if mla.q_lora_rank is None:
            self.q_proj = Linear(width, heads * mla.qk_head_dim)
        else:
            self.q_a_proj = Linear(width, mla.q_lora_rank)
            self.q_a_norm = RMSNorm(mla.q_lora_rank, mla.lora_norm_eps)
            self.q_b_proj = Linear(mla.q_lora_rank, heads * mla.qk_head_dim)
        self.kv_a_proj = Linear(width, mla.cache_width)
        self.kv_a_norm = RMSNorm(mla.kv_lora_rank, mla.lora_norm_eps)
        self.kv_b_proj = Linear(mla.kv_lora_rank, heads * (mla.qk_nope_head_dim + mla.v_head_dim))
        if mla.output_gate:
            self.g_proj = Linear(width, heads * mla.v_head_dim)
        self.o_proj = Linear(heads * mla.v_head_dim, width)
        self.scale = mla.qk_head_dim**-0.5
        self.fp32_output = True
        self.track_max_logit = False
        self.register_buffer("max_logit_H", torch.zeros(heads), persistent=False)

    def _positions(self, batch: int, tokens: int, past: list[int] | None, device: torch.device) -> Tensor:
        index = torch.arange(tokens, device=device)
        return index.expand(batch, -1) if past is None else torch.tensor(past, device=device)[:, None] + index

    def queries(self, x_BTD: Tensor, past: list[int] | None = None) -> tuple[Tensor, Tensor]:
        """Query parts `[B, T, H, nope]` and `[B, T, H, shared]`."""
        mla = self.mla
        q_nope, q_shared = self._unrotated(x_BTD).split((mla.qk_nope_head_dim, mla.qk_rope_head_dim), dim=-1)
        if mla.rope_theta is not None:
            q_shared = rope(q_shared, self._positions(*x_BTD.shape[:2], past, x_BTD.device), mla.rope_theta)
        return q_nope, q_shared

    def _unrotated(self, x_BTD: Tensor) -> Tensor:
        """Queries `[B, T, H, nope + shared]` before a rotation."""
        mla = self.mla
        q = self.q_proj(x_BTD) if mla.q_lora_rank is None else self.q_b_proj(self.q_a_norm(self.q_a_proj(x_BTD)))
        return q.unflatten(-1, (mla.num_heads, mla.qk_head_dim))

    def latents(self, x_BTD: Tensor, past: list[int] | None = None) -> tuple[Tensor, Tensor]:
        """Normalised latent `[B, T, L]` and shared key channels `[B, T, r]`: what the cache holds."""
        latent, shared = self.kv_a_proj(x_BTD).split((self.mla.kv_lora_rank, self.mla.qk_rope_head_dim), dim=-1)
        if self.mla.rope_theta is not None:
            positions = self._positions(*x_BTD.shape[:2], past, x_BTD.device)
            shared = rope(shared[..., None, :], positions, self.mla.rope_theta)[..., 0, :]
        return self.kv_a_norm(latent), shared

    def expand(self, latent_BSL: Tensor, shared_BSr: Tensor, heads: slice | None = None) -> tuple[Tensor, Tensor]:
        """Rebuild keys `[B, S, H, nope+r]` and values `[B, S, H, V]` from the latents, of some heads only if told so."""
        mla = self.mla
        if heads is None:
            kv = self.kv_b_proj(latent_BSL)
        else:
            kv = linear(latent_BSL, self.kv_b_proj.weight.unflatten(0, (mla.num_heads, -1))[heads].flatten(0, 1))
        kv = kv.unflatten(-1, (-1, mla.qk_nope_head_dim + mla.v_head_dim))
        return keys_and_values(kv, shared_BSr, mla.qk_nope_head_dim)

    def _expanded(self, entries_BSC: Tensor) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """Keys and values of all heads, as many at once as `EXPANDED_BYTES` hold: (heads, keys, values)."""
        mla = self.mla
        latent_and_shared = entries_BSC.split((mla.kv_lora_rank, mla.qk_rope_head_dim), dim=-1)
        width = mla.qk_nope_head_dim + mla.v_head_dim + mla.qk_head_dim
        each = entries_BSC.shape[:2].numel() * width * entries_BSC.element_size()
        at_once = max(1, min(mla.num_heads, EXPANDED_BYTES // max(1, each)))
        joint = entries_BSC.is_cuda and entries_BSC.shape[1] >= JOINT_TOKENS and type(self.kv_b_proj) is Linear
        for first in range(0, mla.num_heads, at_once):
            heads = slice(first, first + at_once)
            if joint:
                yield heads, *self.expand_joint(entries_BSC, heads)
            else:
                yield heads, *self.expand(*latent_and_shared, None if at_once == mla.num_heads else heads)

    def expand_joint(self, entries_BSC: Tensor, heads: slice) -> tuple[Tensor, Tensor]:
        """`expand` of some heads as one product: its matrix hands each head a copy of the shared channels, so that keys are
        written once, where they are read. More arithmetic, but less memory traffic: of long caches it takes half the time."""
        mla = self.mla
        up_k, up_v = (up[heads] for up in self._up_projections(entries_BSC.dtype))
        keys, wide = mla.qk_head_dim, mla.cache_width
        joint_HoC = up_k.new_zeros(len(up_k), keys + mla.v_head_dim, wide)
        joint_HoC[:, : mla.qk_nope_head_dim, : mla.kv_lora_rank] = up_k
        joint_HoC[:, mla.qk_nope_head_dim : keys, mla.kv_lora_rank :] = torch.eye(
            mla.qk_rope_head_dim, dtype=up_k.dtype, device=up_k.device
        )
        joint_HoC[:, keys:, : mla.kv_lora_rank] = up_v
        both = linear(entries_BSC, joint_HoC.flatten(0, 1)).unflatten(-1, (len(up_k), -1))
        return both[..., :keys], both[..., keys:]

    def _up_projections(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Key and value up-projections `[H, n, L]` and `[H, V, L]`."""
        mla = self.mla
        weight = self.kv_b_proj.weight.to(dtype).view(mla.num_heads, -1, mla.kv_lora_rank)
        up_k, up_v = weight.split((mla.qk_nope_head_dim, mla.v_head_dim), dim=1)
        return up_k, up_v

    def _absorbed(self, q_nope: Tensor, q_shared: Tensor, entries_BSC: Tensor, past: int) -> Tensor:
        mla = self.mla
        up_k, up_v = self._up_projections(q_nope.dtype)
        latent, shared = entries_BSC.split((mla.kv_lora_rank, mla.qk_rope_head_dim), dim=-1)
        return attend_latent(q_nope, q_shared, latent, shared, up_k, up_v, self.scale, past)

    def _attend_cached(self, q_nope: Tensor, q_shared: Tensor, entries_BSC: Tensor, past: int) -> Tensor:
        """Attention of T new tokens over `past + T` cached ones; all rows have the same length."""
        if q_nope.shape[1] <= ABSORBED_TOKENS:
            return self._absorbed(q_nope, q_shared, entries_BSC, past)
        q, out = torch.cat((q_nope, q_shared), dim=-1), []
        for heads, keys, values in self._expanded(entries_BSC):
            out.append(attend(q[:, :, heads], keys, values, self.scale, past=past, fp32_output=False))
        return out[0] if len(out) == 1 else torch.cat(out, 2)

    def _attend_packed(self, q_nope: Tensor, q_shared: Tensor, cache: PagedCache, chunks: CachedChunks) -> Tensor:
        """Attention of the chunks of several rows."""
        q, out = torch.cat((q_nope, q_shared), dim=-1)[0], []
        for heads, keys, values in self._expanded(cache.all_entries()):
            out.append(attend_packed(q[:, heads], keys[0], values[0], self.scale, chunks))
        return torch.cat(out, 1)[None]

    def _attend_pages(self, q_nope: Tensor, q_shared: Tensor, cache: PagedCache) -> Tensor:
        """Attention of a chunk of one row, of chunks of several, or of one token of each of several rows of any lengths."""
        rows = cache.rows
        if rows.packing is not None:
            return self._attend_packed(q_nope, q_shared, cache, rows.packing.cached)
        if q_nope.shape[1] > 1:
            return self._attend_cached(q_nope, q_shared, cache.entries(0), rows.past[0])
        up_k, up_v = self._up_projections(q_nope.dtype)
        out_BHV = attend_latent_pages(
            q_nope[:, 0],
            q_shared[:, 0],
            cache.entry_PSC,
            rows.table_BP,
            rows.length_B,
            up_k,
            up_v,
            self.scale,
            cache.tables,
        )
        return out_BHV[:, None]

    def _decode(self, x_BD: Tensor, cache: PagedCache) -> Tensor:
        """One token of each row: the projections of x together, norms and gate within the products behind them."""
        mla, rows = self.mla, cache.rows
        first = self.q_proj if mla.q_lora_rank is None else self.q_a_proj
        gates = [self.g_proj.weight] if mla.output_gate else []
        q, kv, *gate = linears(x_BD, first.weight, self.kv_a_proj.weight, *gates)
        if mla.q_lora_rank is not None:
            q = normed_linear(q, self.q_a_norm.weight, self.q_a_norm.eps, self.q_b_proj.weight)
        append_latents(kv, self.kv_a_norm.weight, self.kv_a_norm.eps, cache.entry_PSC, rows.page_N, rows.slot_N)
        q_nope, q_shared = q.unflatten(-1, (mla.num_heads, mla.qk_head_dim)).split(
            (mla.qk_nope_head_dim, mla.qk_rope_head_dim), dim=-1
        )
        up_k, up_v = self._up_projections(q.dtype)
        out = attend_latent_pages(
            q_nope, q_shared, cache.entry_PSC, rows.table_BP, rows.length_B, up_k, up_v, self.scale, cache.tables
        ).flatten(1)
        return gated_linear(out, gate[0], self.o_proj.weight) if gate else self.o_proj(out)

    def forward(
        self,
        x_BTD: Tensor,
        state: LatentCache | PagedCache | None = None,
        segments: Segments | None = None,
        past: list[int] | None = None,
    ) -> tuple[Tensor, LatentCache | PagedCache | None]:
        """Mix `[B, T, D]`; with a state, `past` gives the tokens that each row has cached, and new entries are appended."""
        tokens = x_BTD.shape[1]
        if (
            isinstance(state, PagedCache)
            and state.decodes
            and self.mla.rope_theta is None
            and not torch.is_grad_enabled()
        ):
            return self._decode(x_BTD[:, 0], state)[:, None], state
        if state is None:
            whole = self.mla.rope_theta is None
            q = self._unrotated(x_BTD) if whole else torch.cat(self.queries(x_BTD), dim=-1)
            keys, values = self.expand(*self.latents(x_BTD))
            largest_H = self.max_logit_H if self.training and self.track_max_logit else None
            out = attend(q, keys, values, self.scale, segments, fp32_output=self.fp32_output, largest_H=largest_H)
        else:
            assert past is not None and segments is None, "a cached call needs past lengths and no packed documents"
            q_nope, q_shared = self.queries(x_BTD, past)
            entries = torch.cat(self.latents(x_BTD, past), dim=-1)
            lengths = sorted(set(past))
            if isinstance(state, PagedCache):
                state.append(entries)
                out = self._attend_pages(q_nope, q_shared, state)
            elif len(lengths) == 1:
                start = lengths[0]
                state.entries_BSC[:, start : start + tokens] = entries
                out = self._attend_cached(q_nope, q_shared, state.entries_BSC[:, : start + tokens], start)
            else:  # rows of different length: one call for each length
                out = q_nope.new_empty(*q_nope.shape[:3], self.mla.v_head_dim)
                for start in lengths:
                    rows = [row for row, length in enumerate(past) if length == start]
                    state.entries_BSC[rows, start : start + tokens] = entries[rows]
                    cached = state.entries_BSC[rows, : start + tokens]
                    out[rows] = self._attend_cached(q_nope[rows], q_shared[rows], cached, start)
        out = out.flatten(-2)
        if self.mla.output_gate:
            out = sigmoid_gate(out, self.g_proj(x_BTD))
        return self.o_proj(out.to(x_BTD.dtype)), state
