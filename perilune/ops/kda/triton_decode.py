"""One token of a KDA mixer between its projections on a CUDA device: one launch, one program a sequence and head.

The state of a head is read once, lives in registers, and is written once; that traffic is all that counts from a few
hundred heads on. What fills the registers is [V, KO, KI] with k = ko * KI + ki: eight lanes share the 128 bytes of a row
piece and the pieces of a row lie in one thread, so a sum over k takes three shuffles for four rows instead of five for
one. Both sums over k that a token needs are taken from the decayed state before the write: S' q = S q + u (k . q).

Every program reads what it will overwrite before a barrier and writes after it: where a tile is smaller than the threads,
several threads hold the same element, and none may overwrite what another has yet to read.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from perilune.ops.kda.arguments import L2_EPS
from perilune.ops.triton.gates import sigmoid, silu
from perilune.ops.triton.sizes import power_of_two

INNER = 32  # KI: numbers of a state row that lie side by side in a warp
FEW_HEADS = 132  # programs up to which a multiprocessor has no more than one of them


@triton.jit
def decay(z, rate, lower_bound, BOUNDED: tl.constexpr):
    """exp of the log-decay: bounded gate, or softplus gate without cancellation at either end."""
    if BOUNDED:
        return tl.exp(lower_bound * sigmoid(rate * z))
    return tl.exp(-rate * (tl.maximum(z, 0.0) + tl.log(1.0 + tl.exp(-tl.abs(z)))))


@triton.jit
def unit(x, eps):
    """x [KO, KI] at unit length."""
    return x * (1.0 / tl.sqrt(tl.sum(tl.sum(x * x, 0), 0) + eps))


@triton.jit
def advance(S, q, k, v, alpha, beta, scale):
    """One token: S [V, KO, KI] decayed and corrected, and the output [V] that q reads from it."""
    S = S * alpha[None, :, :]
    seen = tl.sum(tl.sum(S * k[None, :, :], 1), 1)
    read = tl.sum(tl.sum(S * q[None, :, :], 1), 1)
    u = beta * (v - seen)
    o = scale * (read + u * tl.sum(tl.sum(k * q, 0), 0))
    return write(S, u, k), o


@triton.jit
def write(S, u, k):
    """S + u k^T."""
    return tl.fma(tl.broadcast_to(u[:, None, None], S.shape), tl.broadcast_to(k[None, :, :], S.shape), S)


@triton.jit
def gated_norm(o, weight, gate, eps, V: tl.constexpr):
    """RMSNorm over V channels, its weight, then the sigmoid gate."""
    return o * (1.0 / tl.sqrt(tl.sum(o * o, 0) / V + eps)) * weight * sigmoid(gate)


@triton.jit
def load_taps(x, window, channel, mask, taps, W: tl.constexpr):
    """[..., taps] raw projections that the newest token's convolution sees: the window's, then the token's own."""
    last = mask & (taps == W - 1)
    seen = tl.load(window + channel * (W - 1) + taps, mask & (taps < W - 1), 0.0).to(tl.float32)
    return seen + tl.load(x + channel + taps * 0, last, 0.0).to(tl.float32)


@triton.jit
def store_window(raw, window, channel, mask, taps, W: tl.constexpr):
    """Write all but the oldest tap back as the window."""
    tl.store(window + channel * (W - 1) + taps - 1, raw.to(window.dtype.element_ty), mask & (taps >= 1) & (taps < W))


@triton.jit
def load_weight(weight, channel, mask, taps, W: tl.constexpr):
    """[..., taps] weights of the convolution."""
    return tl.load(weight + channel * W + taps, mask & (taps < W), 0.0)


@triton.jit(do_not_specialize=["slots"])
def _decode_kernel(
    qkv, conv_weight, window, decay_logit, A_log, dt_bias, beta_logit, gate, norm_weight, state, index, out,
    qkv_stride, decay_stride, beta_stride, gate_stride, slots, heads, scale, lower_bound, norm_eps, l2_eps,
    K: tl.constexpr, V: tl.constexpr, W: tl.constexpr, KO: tl.constexpr, KI: tl.constexpr, BV: tl.constexpr, WP: tl.constexpr,
    BOUNDED: tl.constexpr,
):  # fmt: skip
    FULL: tl.constexpr = K == KO * KI and V == BV  # then the state needs no mask
    head, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    slot, wild = row, False
    if index is not None:
        slot = tl.load(index + row).to(tl.int64)
        wild = slot >= slots
    vs = tl.arange(0, BV)
    has_v = vs < V
    ks = tl.arange(0, KO)[:, None] * KI + tl.arange(0, KI)[None, :]
    has_k = ks < K
    out += (row * heads + head) * V + vs
    if (slot < 0) | wild:  # padding gives zeros; a slot outside the pool gives NaN and touches nothing
        tl.store(out, tl.where(wild, float("nan"), tl.zeros([BV], tl.float32)).to(out.dtype.element_ty), has_v)
        return
    cells = vs[:, None, None] * K + ks[None, :, :]
    inside = has_v[:, None, None] & has_k[None, :, :]
    state += (slot * heads + head) * (K * V)
    if FULL:
        S = tl.load(state + cells)
    else:
        S = tl.load(state + cells, inside, 0.0)

    channels = heads * (2 * K + V)
    qkv += row * qkv_stride
    window += slot * channels * (W - 1)
    # Taps are an axis of these tiles. They are small, and with fewer numbers than threads the compiler would load and
    # compute them again in every layout that they are wanted in.
    k_taps, v_taps = tl.arange(0, WP)[None, None, :], tl.arange(0, WP)[None, :]
    has_k3, has_v2 = has_k[:, :, None], has_v[:, None]
    q_channel = (head * K + ks)[:, :, None]
    k_channel = q_channel + heads * K
    v_channel = 2 * heads * K + head * V + vs[:, None]
    q_raw = load_taps(qkv, window, q_channel, has_k3, k_taps, W)
    k_raw = load_taps(qkv, window, k_channel, has_k3, k_taps, W)
    v_raw = load_taps(qkv, window, v_channel, has_v2, v_taps, W)
    q_weight = load_weight(conv_weight, q_channel, has_k3, k_taps, W)
    k_weight = load_weight(conv_weight, k_channel, has_k3, k_taps, W)
    v_weight = load_weight(conv_weight, v_channel, has_v2, v_taps, W)
    first = has_k3 & (k_taps == 0)
    z = tl.load(decay_logit + row * decay_stride + q_channel + k_taps * 0, first, 0.0).to(tl.float32)
    if dt_bias is not None:
        z += tl.load(dt_bias + q_channel + k_taps * 0, first, 0.0)
    rate = 1.0
    if A_log is not None:
        rate = tl.exp(tl.load(A_log + head))
    beta = sigmoid(tl.load(beta_logit + row * beta_stride + head).to(tl.float32))
    opened = tl.load(gate + row * gate_stride + head * V + vs, has_v, 0.0).to(tl.float32)
    weight = tl.load(norm_weight + vs, has_v, 0.0)
    tl.debug_barrier()

    alpha = tl.sum(tl.where(k_taps == 0, decay(z, rate, lower_bound, BOUNDED), 0.0), 2)
    q = unit(silu(tl.sum(q_raw * q_weight, 2)), l2_eps)
    k = unit(silu(tl.sum(k_raw * k_weight, 2)), l2_eps)
    v = silu(tl.sum(v_raw * v_weight, 1))
    S, o = advance(S, q, k, v, alpha, beta, scale)
    if FULL:
        tl.store(state + cells, S)
    else:
        tl.store(state + cells, S, inside)
    tl.store(out, gated_norm(o, weight, opened, norm_eps, V).to(out.dtype.element_ty), has_v)
    store_window(q_raw, window, q_channel, has_k3, k_taps, W)
    store_window(k_raw, window, k_channel, has_k3, k_taps, W)
    store_window(v_raw, window, v_channel, has_v2, v_taps, W)


def tile(key_dim: int, value_dim: int, taps: int) -> dict[str, int]:
    """Sizes of the tiles: powers of two around K, V and W."""
    inner = min(INNER, power_of_two(key_dim))
    rows, columns = power_of_two(value_dim), power_of_two(key_dim)
    return {"KO": columns // inner, "KI": inner, "BV": rows, "WP": max(4, power_of_two(taps))}


def settings(programs: int, key_dim: int, value_dim: int) -> dict[str, int]:
    """Launch options, the fastest of those measured on one H200 at K = V = 128: where a multiprocessor has but one program,
    many warps to fetch for it; else registers for two programs, so that one reads while the other computes."""
    numbers = power_of_two(key_dim) * power_of_two(value_dim)
    warps = max(1, min(16 if programs <= FEW_HEADS else 8, numbers // (32 * 32)))
    return {"num_warps": warps, "maxnreg": 128} if warps == 8 else {"num_warps": warps}


def decode_step(
    qkv: Tensor, conv_weight: Tensor, window: Tensor, decay_logit: Tensor, A_log: Tensor | None, dt_bias: Tensor | None,
    beta_logit: Tensor, gate: Tensor, norm_weight: Tensor, state: Tensor, index: Tensor | None, heads: int, key_dim: int,
    lower_bound: float | None, scale: float, norm_eps: float, options: dict[str, int] | None = None,
) -> Tensor:  # fmt: skip
    """Launch the kernel; arguments as `kda_decode_step`, in the layout that it has checked; options: see `settings`."""
    batch, value_dim = qkv.shape[0], norm_weight.shape[0]
    out = torch.empty(batch, heads * value_dim, dtype=qkv.dtype, device=qkv.device)
    if batch == 0:
        return out
    strides = [x.numel() // batch if x.is_contiguous() else x.stride(0) for x in (qkv, decay_logit, beta_logit, gate)]
    _decode_kernel[(heads, batch)](
        qkv, conv_weight, window, decay_logit, A_log, dt_bias, beta_logit, gate, norm_weight, state, index, out, *strides,
        state.shape[0], heads, scale, lower_bound or 0.0, norm_eps, L2_EPS, K=key_dim, V=value_dim, W=conv_weight.shape[1],
        **tile(key_dim, value_dim, conv_weight.shape[1]), BOUNDED=lower_bound is not None,
        **(options or settings(batch * heads, key_dim, value_dim)),
    )  # fmt: skip
    return out
