"""Kimi Delta Attention (report §2.1.1): a fixed-size memory a head, decayed by channel, corrected by the delta rule.

    q, k, v = SiLU(conv4(W x)),  q and k L2-normalised, q scaled by K^-1/2
    g = lower_bound · sigmoid(e^A (W_fb W_fa x + b))            one decay for each key channel
    S ← Diag(e^g) S;  S ← S + β k (v − Sᵀk)ᵀ;  o = Sᵀq          β = sigmoid(W_b x)
    y = W_o [ RMSNorm(o) · sigmoid(W_g x) ]

`GatedDeltaNet` is the same layer with one decay a head.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from perilune.config import KDAConfig, ModelConfig
from perilune.model.linear import Linear
from perilune.model.paged import PagedRecurrent
from perilune.model.state import RecurrentState
from perilune.ops.kda import (
    chunk_kda,
    chunk_kda_states,
    fused_kda_gate,
    kda_decode_step,
    packed_kda_states,
    planned_kda_states,
)
from perilune.ops.kda.decode_pages import kda_decode_pages
from perilune.ops.linear import linears
from perilune.ops.norm import gated_rms_norm
from perilune.ops.packed_conv import packed_conv
from perilune.ops.segments import Segments
from perilune.ops.short_conv import short_conv


class KDA(nn.Module):
    """One KDA layer. Rows of `qkv_proj` and `qkv_conv` are q heads, k heads, v heads."""

    fused_decode = True  # a single token without gradients takes `kda_decode_step`

    def __init__(self, cfg: ModelConfig) -> None:
        super().__init__()
        kda = cfg.kda
        assert kda is not None, "the layer pattern names kda but the config has none"
        self.kda: KDAConfig = kda
        self.norm_eps = cfg.norm_eps
        width = cfg.hidden_size
        self.qkv_proj = Linear(width, kda.conv_width)
        self.qkv_conv = nn.Parameter(torch.empty(kda.conv_width, kda.conv_kernel))
        self._init_decay(width)
        self.b_proj = Linear(width, kda.num_heads)
        if kda.output_gate_rank is None:
            self.g_proj = Linear(width, kda.value_width)
        else:
            self.g_a_proj = Linear(width, kda.output_gate_rank)
            self.g_b_proj = Linear(kda.output_gate_rank, kda.value_width)
        self.o_norm = nn.Parameter(torch.ones(kda.value_dim))
        self.o_proj = Linear(kda.value_width, width)

    def _init_decay(self, width: int) -> None:
        self.f_a_proj = Linear(width, self.kda.rank)
        self.f_b_proj = Linear(self.kda.rank, self.kda.key_width)
        self.A_log = nn.Parameter(torch.zeros(self.kda.stored_heads or self.kda.num_heads))
        self.dt_bias = nn.Parameter(torch.zeros(self.kda.key_width))

    def decay_logit(self, x_BTD: Tensor) -> Tensor:
        """Raw decay logits `[B, T, H, K]`, before dt_bias and A."""
        return self.f_b_proj(self.f_a_proj(x_BTD)).unflatten(-1, (self.kda.num_heads, self.kda.head_dim))

    def log_decay(self, x_BTD: Tensor) -> Tensor:
        """Log-decays g `[B, T, H, K]`, the form that the probes read."""
        return fused_kda_gate(
            self.decay_logit(x_BTD), self.A_log[: self.kda.num_heads], self.dt_bias, self.kda.gate_lower_bound
        )

    def _read(self, x: Tensor, first_of_decay: Linear) -> tuple[Tensor, ...]:
        """What is projected from x at once: q, k and v, the decay's first factor, write logits, the output gate or its first
        factor."""
        gate_proj = self.g_proj if self.kda.output_gate_rank is None else self.g_a_proj
        return linears(x, self.qkv_proj.weight, first_of_decay.weight, self.b_proj.weight, gate_proj.weight)

    def _projections(self, x_BTD: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """q, k and v `[B, T, X]`, decay logits `[B, T, H, K]`, write logits `[B, T, H]`, the output gate or its first factor."""
        raw, decay, beta, gate = self._read(x_BTD, self.f_a_proj)
        return raw, self.f_b_proj(decay).unflatten(-1, (self.kda.num_heads, self.kda.head_dim)), beta, gate

    def _memory(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        decay: Tensor,
        beta: Tensor,
        state: RecurrentState | PagedRecurrent | None,
        segments: Segments | None,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        return self._chunk(
            q, k, v, decay, beta, state, segments,
            use_gate_in_kernel=True, lower_bound=self.kda.gate_lower_bound, safe_gate=self.kda.gate_lower_bound is not None,
            A_log=self.A_log[: self.kda.num_heads], dt_bias=self.dt_bias,
        )  # fmt: skip

    def _chunk(self, q, k, v, g, beta, state, segments, **gate):
        """Call the op on the rows as they are, or flattened with document boundaries: the outputs, and with a state the
        final memory and those at the state's marks."""
        shape, initial, marked = beta.shape[:2], None if state is None else state.memory_BHVK, None
        gate |= {"use_qk_l2norm_in_kernel": True, "use_beta_sigmoid_in_kernel": True, "state_v_first": True}
        packing = state.packing if isinstance(state, PagedRecurrent) else None
        if packing is not None and packing.planned is not None:
            out, memory, marked = planned_kda_states(q, k, v, g, beta, packing.planned, initial, **gate)
        elif packing is not None:
            sequences = (packing.offsets, packing.marks)
            out, memory, marked = packed_kda_states(q, k, v, g, beta, *sequences, initial_state=initial, **gate)
        elif state is not None and state.marks:
            out, memory, marked = chunk_kda_states(q, k, v, g, beta, state.marks, initial_state=initial, **gate)
            marked = marked.flatten(0, 1)
        else:
            packed = {}
            if segments is not None:
                packed = {"cu_seqlens": segments.cu_seqlens, "cu_seqlens_cpu": segments.offsets, "plan": segments.plan}
                q, k, v, g, beta = (t.flatten(0, 1).unsqueeze(0) for t in (q, k, v, g, beta))
            out, memory = chunk_kda(
                q,
                k,
                v,
                g,
                beta,
                initial_state=initial,
                output_final_state=state is not None,
                **packed,
                **gate,
            )
        return out.view(*shape, self.kda.num_heads, self.kda.value_dim), memory, marked

    def _recur(
        self,
        raw: Tensor,
        decay: Tensor,
        beta: Tensor,
        state: RecurrentState | PagedRecurrent | None,
        segments: Segments | None,
    ) -> Tensor:
        """Convolution and memory over raw projections `[B, T, X]`, decay and write logits `[B, T, H, ...]`: the outputs
        `[B, T, H, V]`; `state` is updated in place."""
        kda, before = self.kda, None if state is None else state.window_BXW
        packing = state.packing if isinstance(state, PagedRecurrent) else None
        at_marks = None
        if packing is not None:
            qkv, windows = packed_conv(raw[0], self.qkv_conv, before, packing.chunks)
            window, at_marks = windows.tensor_split([len(packing.offsets) - 1])
            qkv = qkv[None]
        else:
            qkv, window = short_conv(raw, self.qkv_conv, before, segments)
        q, k, v = qkv.split((kda.key_width, kda.key_width, kda.value_width), dim=-1)
        q, k = (t.unflatten(-1, (kda.num_heads, kda.head_dim)) for t in (q, k))
        v = v.unflatten(-1, (kda.num_heads, kda.value_dim))
        out, memory, marked = self._memory(q, k, v, decay, beta, state, segments)
        if state is not None:
            assert memory is not None, "a call with a state asks for the final memory"
            if marked is not None and len(marked):
                assert isinstance(state, PagedRecurrent), "only states in pages have marks"
                if at_marks is None:
                    line_BTX, taps = torch.cat((before.mT, raw), dim=1), kda.conv_kernel - 1
                    at_marks = torch.cat([line_BTX[:, mark : mark + taps].mT for mark in state.marks])
                state.export(at_marks, marked)
            state.window_BXW, state.memory_BHVK = window, memory
        return out

    def forward(
        self,
        x_BTD: Tensor,
        state: RecurrentState | PagedRecurrent | None = None,
        segments: Segments | None = None,
        past: list[int] | None = None,
    ) -> tuple[Tensor, RecurrentState | PagedRecurrent | None]:
        """Mix `[B, T, D]` along the sequence; `state` is updated in place. `past` is not used: there are no positions."""
        if state is not None and self.fused_decode and x_BTD.shape[1] == 1 and not torch.is_grad_enabled():
            return self._decode(x_BTD, state), state
        raw, decay, beta, gate = self._projections(x_BTD)
        if self.kda.output_gate_rank is not None:
            gate = self.g_b_proj(gate)
        out = self._recur(raw, decay, beta, state, segments)
        gate = gate.view_as(out)
        return self.o_proj(gated_rms_norm(out, gate, self.o_norm, self.norm_eps).flatten(-2)), state

    def _decode(self, x_BTD: Tensor, state: RecurrentState | PagedRecurrent) -> Tensor:
        """One token: the projections of x together, then convolution, gate, recurrence, norm and output gate in one call."""
        kda = self.kda
        qkv, decay, beta, gate = self._read(x_BTD[:, 0], self.f_a_proj)
        parameters = (self.A_log[: kda.num_heads], self.dt_bias, beta)
        gate = gate if kda.output_gate_rank is None else self.g_b_proj(gate)
        numbers = {
            "num_heads": kda.num_heads, "key_dim": kda.head_dim, "lower_bound": kda.gate_lower_bound,
            "scale": kda.head_dim**-0.5, "norm_eps": self.norm_eps,
        }  # fmt: skip
        out = None
        if isinstance(state, PagedRecurrent):
            out = kda_decode_pages(
                qkv,
                self.qkv_conv,
                state.window_PHw,
                decay,
                *parameters,
                gate,
                self.o_norm,
                state.memory_PHVK,
                state.page_B,
                **numbers,
                decay_up_OR=self.f_b_proj.weight,
            )
        if out is None:
            window, memory = state.window_BXW, state.memory_BHVK
            logits = self.f_b_proj(decay), *parameters
            out = kda_decode_step(qkv, self.qkv_conv, window, *logits, gate, self.o_norm, memory, **numbers)
            state.window_BXW, state.memory_BHVK = window, memory  # changed in place; a paged state gave copies
        return self.o_proj(out)[:, None]


class GatedDeltaNet(KDA):
    """KDA with a single softplus decay a head (Gated DeltaNet), for ablations."""

    fused_decode = False

    def _init_decay(self, width: int) -> None:
        self.a_proj = Linear(width, self.kda.num_heads)
        self.A_log = nn.Parameter(torch.zeros(self.kda.num_heads))
        self.dt_bias = nn.Parameter(torch.zeros(self.kda.num_heads))

    def decay_logit(self, x_BTD: Tensor) -> Tensor:
        """Raw decay logits `[B, T, H, 1]`."""
        return self.a_proj(x_BTD)[..., None]

    def log_decay(self, x_BTD: Tensor) -> Tensor:
        """Log-decays g broadcast over the key channels, `[B, T, H, K]`."""
        return self._spread(self.decay_logit(x_BTD))

    def _spread(self, decay: Tensor) -> Tensor:
        g = fused_kda_gate(decay, self.A_log, self.dt_bias)
        return g.expand(*g.shape[:-1], self.kda.head_dim)

    def _projections(self, x_BTD: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        raw, decay, beta, gate = self._read(x_BTD, self.a_proj)
        return raw, decay[..., None], beta, gate

    def _memory(self, q, k, v, decay, beta, state, segments):
        return self._chunk(q, k, v, self._spread(decay), beta, state, segments)
