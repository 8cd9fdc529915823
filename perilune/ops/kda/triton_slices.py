"""One token of a KDA mixer between its projections on a CUDA device: the form with several programs a head.

A program is one warp, or a few, and takes a slice of ROWS value channels of one sequence and head: it reads ROWS x K
numbers of state once, keeps them in registers, and writes them once. That traffic is all that counts from a few hundred
heads on, and many small programs that wait for nobody overlap reading and writing where a few large ones would do the
one after the other. What the slices of a head share is little: the norm of the output. Each leaves its outputs and their
sum of squares in a scratch buffer and takes a ticket; the program that takes the last one normalises the head's output
and shifts the window of q and k, which nobody reads any more by then. Which program that is does not change a bit.

In registers a slice is [ROWS, KO, KI] with k = ko * KI + ki: eight lanes share 128 bytes of a row and the pieces of a row
lie in one thread, so a sum over k takes three shuffles for four rows instead of five for one. Both sums over k that a
token needs are taken from the decayed state before the write: S' q = S q + u (k . q).
"""

# What stands in a kernel is Triton's language, whose loops and constants Python's types do not describe.
# pyright: reportGeneralTypeIssues=false, reportAssignmentType=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from perilune.ops.kda.arguments import L2_EPS
from perilune.ops.kda.triton_decode import INNER, decay, unit
from perilune.ops.triton.gates import sigmoid, silu
from perilune.ops.triton.sizes import blocks, power_of_two

ROWS = 16  # of a slice


@triton.jit
def load_weights(weight, channel, mask, W: tl.constexpr):
    """The convolution's W weights of some channels."""
    loaded = ()
    for j in tl.static_range(W):
        loaded = loaded + (tl.load(weight + channel * W + j, mask, 0.0),)
    return loaded


@triton.jit
def load_taps(x, window, channel, mask, W: tl.constexpr):
    """The W raw projections that the newest token's convolution sees: the window's, then the token's own."""
    raw = ()
    for j in tl.static_range(W - 1):
        raw = raw + (tl.load(window + channel * (W - 1) + j, mask, 0.0).to(tl.float32),)
    return raw + (tl.load(x + channel, mask, 0.0).to(tl.float32),)


@triton.jit
def convolve(raw, weights):
    """SiLU of the convolution over the taps."""
    total = raw[0] * weights[0]
    for j in tl.static_range(1, len(raw)):
        total = tl.fma(raw[j], weights[j], total)
    return silu(total)


@triton.jit
def store_window(raw, window, channel, mask):
    """Write all but the oldest tap back as the window."""
    W: tl.constexpr = len(raw)
    for j in tl.static_range(1, W):
        tl.store(window + channel * (W - 1) + (j - 1), raw[j].to(window.dtype.element_ty), mask)


@triton.jit
def shift_window(x, window, channel, mask, W: tl.constexpr):
    """Drop the oldest raw projection of some channels and append the token's."""
    raw = load_taps(x, window, channel, mask, W)
    tl.debug_barrier()  # of a small tile several threads hold the same element: all read before one writes
    store_window(raw, window, channel, mask)


@triton.jit
def write(S, v, beta, k):
    """S + beta (v - S k) k^T for a decayed S [ROWS, KO, KI]; also u = beta (v - S k)."""
    u = beta * (v - tl.sum(tl.sum(S * k[None, :, :], 1), 1))
    return tl.fma(tl.broadcast_to(u[:, None, None], S.shape), tl.broadcast_to(k[None, :, :], S.shape), S), u


@triton.jit
def advance(S, q, k, v, alpha, beta, scale):
    """One token: S decayed and corrected, and the outputs [ROWS] that q reads from it."""
    S = S * alpha[None, :, :]
    read = tl.sum(tl.sum(S * q[None, :, :], 1), 1)
    S, u = write(S, v, beta, k)
    return S, scale * (read + u * tl.sum(tl.sum(k * q, 0), 0))


@triton.jit(do_not_specialize=["slots"])
def _decode_kernel(
    qkv, conv_weight, window, decay_logit, A_log, dt_bias, beta_logit, gate, norm_weight, state, index, out, scratch,
    squares, tickets, qkv_stride, decay_stride, beta_stride, gate_stride, slots, heads, scale, lower_bound, norm_eps,
    l2_eps, K: tl.constexpr, V: tl.constexpr, W: tl.constexpr, KO: tl.constexpr, KI: tl.constexpr, ROWS: tl.constexpr,
    SLICES: tl.constexpr, SP: tl.constexpr, BV: tl.constexpr, BOUNDED: tl.constexpr,
):  # fmt: skip
    FULL: tl.constexpr = K == KO * KI and V == ROWS * SLICES  # then the state needs no mask
    head, part = tl.program_id(0) // SLICES, tl.program_id(0) % SLICES
    row = tl.program_id(1).to(tl.int64)
    slot, wild = row, False
    if index is not None:
        slot = tl.load(index + row).to(tl.int64)
        wild = slot >= slots
    vs = part * ROWS + tl.arange(0, ROWS)
    has_v = vs < V
    ks = tl.arange(0, KO)[:, None] * KI + tl.arange(0, KI)[None, :]
    has_k = ks < K
    out += (row * heads + head) * V
    if (slot < 0) | wild:  # padding gives zeros; a slot outside the pool gives NaN and touches nothing
        blank = tl.where(wild, float("nan"), tl.zeros([ROWS], tl.float32))
        tl.store(out + vs, blank.to(out.dtype.element_ty), has_v)
        return
    cells = vs[:, None, None] * K + ks[None, :, :]
    inside = has_v[:, None, None] & has_k[None, :, :]
    state += (slot * heads + head) * (K * V)
    if FULL:
        S = tl.load(state + cells)
    else:
        S = tl.load(state + cells, inside, 0.0)

    qkv += row * qkv_stride
    window += slot * heads * (2 * K + V) * (W - 1)
    q_channel = head * K + ks
    k_channel = heads * K + q_channel
    v_first = 2 * heads * K + head * V
    q_raw = load_taps(qkv, window, q_channel, has_k, W)
    k_raw = load_taps(qkv, window, k_channel, has_k, W)
    v_raw = load_taps(qkv, window, v_first + vs, has_v, W)
    q_weights = load_weights(conv_weight, q_channel, has_k, W)
    k_weights = load_weights(conv_weight, k_channel, has_k, W)
    v_weights = load_weights(conv_weight, v_first + vs, has_v, W)
    z = tl.load(decay_logit + row * decay_stride + q_channel, has_k, 0.0).to(tl.float32)
    if dt_bias is not None:
        z += tl.load(dt_bias + q_channel, has_k, 0.0)
    rate = 1.0
    if A_log is not None:
        rate = tl.exp(tl.load(A_log + head))
    beta = sigmoid(tl.load(beta_logit + row * beta_stride + head).to(tl.float32))
    opened = sigmoid(tl.load(gate + row * gate_stride + head * V + vs, has_v, 0.0).to(tl.float32))
    opened *= tl.load(norm_weight + vs, has_v, 0.0)
    tl.debug_barrier()  # of a small tile several threads hold the same element: all read before one writes

    alpha = decay(z, rate, lower_bound, BOUNDED)
    q = unit(convolve(q_raw, q_weights), l2_eps)
    k = unit(convolve(k_raw, k_weights), l2_eps)
    v = convolve(v_raw, v_weights)
    S, o = advance(S, q, k, v, alpha, beta, scale)
    square = tl.sum(o * o, 0)
    if SLICES == 1:
        tl.store(state + cells, S, inside)
        o = o * (1.0 / tl.sqrt(square / V + norm_eps)) * opened
        tl.store(out + vs, o.to(out.dtype.element_ty), has_v)
        store_window(q_raw, window, q_channel, has_k)
        store_window(k_raw, window, k_channel, has_k)
        store_window(v_raw, window, v_first + vs, has_v)
    else:
        unit_of_work = row * heads + head
        scratch += unit_of_work * V
        squares += unit_of_work * SLICES
        tl.store(scratch + vs, o * opened, has_v)
        tl.store(squares + part, square)
        tl.debug_barrier()
        ticket = tl.atomic_add(tickets + unit_of_work, 1, sem="acq_rel", scope="gpu")
        if FULL:
            tl.store(state + cells, S)
        else:
            tl.store(state + cells, S, inside)
        store_window(v_raw, window, v_first + vs, has_v)
        if ticket == SLICES - 1:
            tl.store(tickets + unit_of_work, 0)  # as the next launch wants it
            every, parts = tl.arange(0, BV), tl.arange(0, SP)
            total = tl.sum(tl.load(squares + parts, parts < SLICES, 0.0, cache_modifier=".cg"), 0)
            whole = tl.load(scratch + every, every < V, 0.0, cache_modifier=".cg")
            whole = whole * (1.0 / tl.sqrt(total / V + norm_eps))
            tl.store(out + every, whole.to(out.dtype.element_ty), every < V)
            shift_window(qkv, window, q_channel, has_k, W)
            shift_window(qkv, window, k_channel, has_k, W)


def tile(key_dim: int, value_dim: int, rows: int | None = None, num_warps: int | None = None) -> dict[str, int]:
    """Sizes of a program's tiles: powers of two around K and V, and the slices of V."""
    columns, whole = power_of_two(key_dim), power_of_two(value_dim)
    inner = min(INNER, columns)
    rows = min(rows or ROWS, whole)
    slices = blocks(value_dim, rows)
    return {
        "KO": columns // inner,
        "KI": inner,
        "ROWS": rows,
        "SLICES": slices,
        "SP": power_of_two(slices),
        "BV": whole,
        "num_warps": num_warps or 1,
    }


_tickets: dict[tuple[int, int], Tensor] = {}


def tickets(device: torch.device, count: int) -> Tensor:
    """`count` zeros that every launch leaves as zeros. Kept for each stream: launches that overlap must not share them;
    so graphs that were captured on one stream must not be replayed side by side."""
    on_gpu = device.type == "cuda"
    key = (device.index or 0, torch.cuda.current_stream(device).cuda_stream) if on_gpu else (-1, 0)
    kept = _tickets.get(key)
    if kept is None or kept.numel() < count:
        kept = torch.zeros(max(count, 1 << 16), dtype=torch.int32, device=device)
        if not (on_gpu and torch.cuda.is_current_stream_capturing()):  # else it is the graph's, zeroed at each replay
            _tickets[key] = kept
    return kept


def decode_step(
    qkv: Tensor, conv_weight: Tensor, window: Tensor, decay_logit: Tensor, A_log: Tensor | None, dt_bias: Tensor | None,
    beta_logit: Tensor, gate: Tensor, norm_weight: Tensor, state: Tensor, index: Tensor | None, heads: int, key_dim: int,
    lower_bound: float | None, scale: float, norm_eps: float, rows: int | None = None, num_warps: int | None = None,
) -> Tensor:  # fmt: skip
    """Launch the kernel; arguments as `kda_decode_step`, in the layout that it has checked."""
    batch, value_dim = qkv.shape[0], norm_weight.shape[0]
    out = torch.empty(batch, heads * value_dim, dtype=qkv.dtype, device=qkv.device)
    if batch == 0:
        return out
    strides = [x.numel() // batch if x.is_contiguous() else x.stride(0) for x in (qkv, decay_logit, beta_logit, gate)]
    sizes = tile(key_dim, value_dim, rows, num_warps)
    slices, scratch, squares, taken = sizes["SLICES"], None, None, None
    if slices > 1:
        buffer = torch.empty(batch * heads * (value_dim + slices), device=qkv.device)
        scratch, squares = buffer, buffer[batch * heads * value_dim :]
        taken = tickets(qkv.device, batch * heads)
    _decode_kernel[(heads * slices, batch)](
        qkv, conv_weight, window, decay_logit, A_log, dt_bias, beta_logit, gate, norm_weight, state, index, out, scratch,
        squares, taken, *strides, state.shape[0], heads, scale, lower_bound or 0.0, norm_eps, L2_EPS, K=key_dim,
        V=value_dim, W=conv_weight.shape[1], BOUNDED=lower_bound is not None, **sizes,
    )  # fmt: skip
    return out
