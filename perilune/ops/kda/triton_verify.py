"""Fold the accepted drafts of one window into the state and score the next window, in one launch: a program a sequence
and head, the state in registers from its single read to its single write.

A token costs the arithmetic of a decode step. While one is worked on, the inputs of the one after it are on their way.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from perilune.ops.kda.arguments import L2_EPS
from perilune.ops.kda.triton_decode import (
    advance,
    decay,
    gated_norm,
    load_weight,
    tile,
    unit,
    write,
)
from perilune.ops.kda.verify import Projections
from perilune.ops.triton.gates import sigmoid, silu


@triton.jit
def _taps_at(
    tau, accepted, count, pending, pending_token, new, new_token, window, channel, mask, taps, W: tl.constexpr
):
    """[..., taps] raw projections that the convolution sees at token tau: counted from the first pending token, past the
    accepted ones they are those of the new window, before zero those of the stored window."""
    at = tau - (W - 1) + taps
    mask = mask & (taps < W)
    raw = tl.load(window + channel * (W - 1) + (at + W - 1), mask & (at < 0), 0.0).to(tl.float32)
    if pending is not None:
        raw += tl.load(pending + at * pending_token + channel, mask & (at >= 0) & (at < accepted), 0.0).to(tl.float32)
    at = at - accepted
    return raw + tl.load(new + at * new_token + channel, mask & (at >= 0) & (at < count), 0.0).to(tl.float32)


@triton.jit
def _decay_at(
    t, logits, token, beta_logits, beta_token, bias, rate, lower_bound, channel, mask, alive, BOUNDED: tl.constexpr
):
    """Decay factors, still with the axis of taps, and write strength of token t."""
    z = tl.load(logits + t * token + channel, mask & alive, 0.0).to(tl.float32) + bias
    return decay(z, rate, lower_bound, BOUNDED), sigmoid(
        tl.load(beta_logits + t * beta_token, alive, 0.0).to(tl.float32)
    )


@triton.jit(do_not_specialize=["slots"])
def _verify_kernel(
    qkv, qkv_row, qkv_token, decay_logit, decay_row, decay_token, beta_logit, beta_row, beta_token, gate, gate_row,
    gate_token, old_qkv, old_qkv_row, old_qkv_token, old_decay, old_decay_row, old_decay_token, old_beta, old_beta_row,
    old_beta_token, accepted, conv_weight, A_log, dt_bias, norm_weight, window, state, index, out, count, pending_count,
    slots, heads, scale, lower_bound, norm_eps, l2_eps, K: tl.constexpr, V: tl.constexpr, W: tl.constexpr,
    KO: tl.constexpr, KI: tl.constexpr, BV: tl.constexpr, WP: tl.constexpr, BOUNDED: tl.constexpr,
):  # fmt: skip
    FULL: tl.constexpr = K == KO * KI and V == BV
    head, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    slot, wild = row, False
    if index is not None:
        slot = tl.load(index + row).to(tl.int64)
        wild = slot >= slots
    stands = 0
    if accepted is not None:
        stands = tl.load(accepted + row).to(tl.int32)
        wild = wild | (stands < 0) | (stands > pending_count)
    vs = tl.arange(0, BV)
    has_v = vs < V
    ks = tl.arange(0, KO)[:, None] * KI + tl.arange(0, KI)[None, :]
    has_k = ks < K
    out += (row * count * heads + head) * V + vs
    if (slot < 0) | wild:  # padding gives zeros; a number out of range gives NaN; both touch nothing
        blank = tl.where(wild & (slot >= 0), float("nan"), tl.zeros([BV], tl.float32)).to(out.dtype.element_ty)
        t = 0
        while t < count:
            tl.store(out + t * heads * V, blank, has_v)
            t += 1
        return
    cells = vs[:, None, None] * K + ks[None, :, :]
    inside = has_v[:, None, None] & has_k[None, :, :]
    state += (slot * heads + head) * (K * V)
    if FULL:
        S = tl.load(state + cells)
    else:
        S = tl.load(state + cells, inside, 0.0)

    k_taps, v_taps = tl.arange(0, WP)[None, None, :], tl.arange(0, WP)[None, :]
    has_k3, has_v2 = has_k[:, :, None], has_v[:, None]
    first = has_k3 & (k_taps == 0)
    q_channel = (head * K + ks)[:, :, None]
    k_channel = q_channel + heads * K
    v_channel = 2 * heads * K + head * V + vs[:, None]
    z_channel = q_channel + k_taps * 0
    window += slot * heads * (2 * K + V) * (W - 1)
    qkv += row * qkv_row
    decay_logit += row * decay_row
    beta_logit += row * beta_row + head
    gate += row * gate_row + head * V + vs
    if accepted is not None:
        old_qkv += row * old_qkv_row
        old_decay += row * old_decay_row
        old_beta += row * old_beta_row + head
    q_weight = load_weight(conv_weight, q_channel, has_k3, k_taps, W)
    k_weight = load_weight(conv_weight, k_channel, has_k3, k_taps, W)
    v_weight = load_weight(conv_weight, v_channel, has_v2, v_taps, W)
    weight = tl.load(norm_weight + vs, has_v, 0.0)
    bias = 0.0
    if dt_bias is not None:
        bias = tl.load(dt_bias + z_channel, first, 0.0)
    rate = 1.0
    if A_log is not None:
        rate = tl.exp(tl.load(A_log + head))

    if accepted is not None:
        tau = 0
        k_raw = _taps_at(0, stands, count, old_qkv, old_qkv_token, qkv, qkv_token, window, k_channel, has_k3, k_taps, W)
        v_raw = _taps_at(0, stands, count, old_qkv, old_qkv_token, qkv, qkv_token, window, v_channel, has_v2, v_taps, W)
        alpha, beta = _decay_at(
            0,
            old_decay,
            old_decay_token,
            old_beta,
            old_beta_token,
            bias,
            rate,
            lower_bound,
            z_channel,
            first,
            stands > 0,
            BOUNDED,
        )
        while tau < stands:
            k_next = _taps_at(
                tau + 1, stands, count, old_qkv, old_qkv_token, qkv, qkv_token, window, k_channel, has_k3, k_taps, W
            )
            v_next = _taps_at(
                tau + 1, stands, count, old_qkv, old_qkv_token, qkv, qkv_token, window, v_channel, has_v2, v_taps, W
            )
            alpha_next, beta_next = _decay_at(
                tau + 1,
                old_decay,
                old_decay_token,
                old_beta,
                old_beta_token,
                bias,
                rate,
                lower_bound,
                z_channel,
                first,
                tau + 1 < stands,
                BOUNDED,
            )
            k = unit(silu(tl.sum(k_raw * k_weight, 2)), l2_eps)
            v = silu(tl.sum(v_raw * v_weight, 1))
            S = S * tl.sum(tl.where(k_taps == 0, alpha, 0.0), 2)[None, :, :]
            S = write(S, beta * (v - tl.sum(tl.sum(S * k[None, :, :], 1), 1)), k)
            k_raw, v_raw, alpha, beta = k_next, v_next, alpha_next, beta_next
            tau += 1
        tl.debug_barrier()  # of a small tile several threads hold, and have read, the same element
        if FULL:
            tl.store(state + cells, S, mask=stands > 0)
        else:
            tl.store(state + cells, S, inside & (stands > 0))

    q_raw = _taps_at(
        stands, stands, count, old_qkv, old_qkv_token, qkv, qkv_token, window, q_channel, has_k3, k_taps, W
    )
    k_raw = _taps_at(
        stands, stands, count, old_qkv, old_qkv_token, qkv, qkv_token, window, k_channel, has_k3, k_taps, W
    )
    v_raw = _taps_at(
        stands, stands, count, old_qkv, old_qkv_token, qkv, qkv_token, window, v_channel, has_v2, v_taps, W
    )
    q_kept, k_kept, v_kept = q_raw, k_raw, v_raw  # all but their last tap are the window to be stored
    alpha, beta = _decay_at(
        0,
        decay_logit,
        decay_token,
        beta_logit,
        beta_token,
        bias,
        rate,
        lower_bound,
        z_channel,
        first,
        count > 0,
        BOUNDED,
    )
    opened = tl.load(gate, has_v, 0.0).to(tl.float32)
    t = 0
    while t < count:
        tau = stands + t + 1
        q_next = _taps_at(
            tau, stands, count, old_qkv, old_qkv_token, qkv, qkv_token, window, q_channel, has_k3, k_taps, W
        )
        k_next = _taps_at(
            tau, stands, count, old_qkv, old_qkv_token, qkv, qkv_token, window, k_channel, has_k3, k_taps, W
        )
        v_next = _taps_at(
            tau, stands, count, old_qkv, old_qkv_token, qkv, qkv_token, window, v_channel, has_v2, v_taps, W
        )
        alpha_next, beta_next = _decay_at(
            t + 1,
            decay_logit,
            decay_token,
            beta_logit,
            beta_token,
            bias,
            rate,
            lower_bound,
            z_channel,
            first,
            t + 1 < count,
            BOUNDED,
        )
        opened_next = tl.load(gate + (t + 1) * gate_token, has_v & (t + 1 < count), 0.0).to(tl.float32)
        q = unit(silu(tl.sum(q_raw * q_weight, 2)), l2_eps)
        k = unit(silu(tl.sum(k_raw * k_weight, 2)), l2_eps)
        v = silu(tl.sum(v_raw * v_weight, 1))
        S, o = advance(S, q, k, v, tl.sum(tl.where(k_taps == 0, alpha, 0.0), 2), beta, scale)
        tl.store(out + t * heads * V, gated_norm(o, weight, opened, norm_eps, V).to(out.dtype.element_ty), has_v)
        q_raw, k_raw, v_raw, alpha, beta, opened = q_next, k_next, v_next, alpha_next, beta_next, opened_next
        t += 1
    if accepted is not None:
        tl.debug_barrier()
        _store_window(q_kept, window, q_channel, has_k3 & (stands > 0), k_taps, W)
        _store_window(k_kept, window, k_channel, has_k3 & (stands > 0), k_taps, W)
        _store_window(v_kept, window, v_channel, has_v2 & (stands > 0), v_taps, W)


@triton.jit
def _store_window(raw, window, channel, mask, taps, W: tl.constexpr):
    tl.store(window + channel * (W - 1) + taps, raw.to(window.dtype.element_ty), mask & (taps < W - 1))


def verify_step(
    new: Projections, gate: Tensor, pending: Projections | None, accepted: Tensor | None, conv_weight: Tensor,
    A_log: Tensor | None, dt_bias: Tensor | None, norm_weight: Tensor, window: Tensor, state: Tensor, index: Tensor | None,
    heads: int, key_dim: int, lower_bound: float | None, scale: float, norm_eps: float, num_warps: int = 4,
) -> Tensor:  # fmt: skip
    """Launch the kernel; arguments as `kda_verify_step`, in the layout that it has checked."""
    batch, count, _ = new.qkv_BTX.shape
    value_dim = norm_weight.shape[0]
    out = torch.empty(batch, count, heads * value_dim, dtype=new.qkv_BTX.dtype, device=new.qkv_BTX.device)
    if batch == 0:
        return out
    old = [None] * 3 if pending is None else list(pending)
    spaced = [
        part for x in (*new, gate, *old) for part in ((None, 0, 0) if x is None else (x, x.stride(0), x.stride(1)))
    ]
    _verify_kernel[(heads, batch)](
        *spaced, accepted, conv_weight, A_log, dt_bias, norm_weight, window, state, index, out, count,
        0 if pending is None else pending.qkv_BTX.shape[1], state.shape[0], heads, scale, lower_bound or 0.0, norm_eps,
        L2_EPS, K=key_dim, V=value_dim, W=conv_weight.shape[1], **tile(key_dim, value_dim, conv_weight.shape[1]),
        BOUNDED=lower_bound is not None, num_warps=num_warps,
    )  # fmt: skip
    return out
