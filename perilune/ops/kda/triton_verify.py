"""Fold accepted drafts and score the next window, a head by several programs.

Programs are those of `triton_slices`: a slice of ROWS value channels of one sequence and head, the state in registers from
its single read to its single write. A token costs the arithmetic of a decode step. The raw projections that the
convolution sees move through registers, so each is read once; while a token is worked on, the inputs of the one after
it are on their way. The last program of a head normalises the outputs of all its tokens.
"""

# What stands in a kernel is Triton's language, whose loops and constants Python's types do not describe.
# pyright: reportGeneralTypeIssues=false, reportAssignmentType=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from perilune.ops.kda.arguments import L2_EPS
from perilune.ops.kda.triton_decode import decay, unit
from perilune.ops.kda.triton_slices import advance, convolve, load_weights, tickets, tile, write
from perilune.ops.kda.verify import Projections
from perilune.ops.triton.gates import sigmoid


@triton.jit
def _load_window(window, channel, mask, W: tl.constexpr):
    loaded = ()
    for j in tl.static_range(W - 1):
        loaded = loaded + (tl.load(window + channel * (W - 1) + j, mask, 0.0).to(tl.float32),)
    return loaded


@triton.jit
def _store_window(raw, window, channel, mask):
    W1: tl.constexpr = len(raw)
    for j in tl.static_range(W1):
        tl.store(window + channel * W1 + j, raw[j].to(window.dtype.element_ty), mask)


@triton.jit
def _load(x, at, mask):
    return tl.load(x + at, mask, 0.0).to(tl.float32)


@triton.jit(do_not_specialize=["slots", "count", "pending_count"])
def _verify_kernel(
    qkv, qkv_row, qkv_token, decay_logit, decay_row, decay_token, beta_logit, beta_row, beta_token, gate, gate_row,
    gate_token, old_qkv, old_qkv_row, old_qkv_token, old_decay, old_decay_row, old_decay_token, old_beta, old_beta_row,
    old_beta_token, accepted, conv_weight, A_log, dt_bias, norm_weight, window, state, index, out, scratch, squares,
    tickets, count, pending_count, slots, heads, scale, lower_bound, norm_eps, l2_eps, K: tl.constexpr, V: tl.constexpr,
    W: tl.constexpr, KO: tl.constexpr, KI: tl.constexpr, ROWS: tl.constexpr, SLICES: tl.constexpr, SP: tl.constexpr,
    BV: tl.constexpr, BOUNDED: tl.constexpr,
):  # fmt: skip
    FULL: tl.constexpr = K == KO * KI and V == ROWS * SLICES
    head, part = tl.program_id(0) // SLICES, tl.program_id(0) % SLICES
    row = tl.program_id(1).to(tl.int64)
    slot, wild = row, False
    if index is not None:
        slot = tl.load(index + row).to(tl.int64)
        wild = slot >= slots
    stands = 0
    if accepted is not None:
        stands = tl.load(accepted + row).to(tl.int32)
        wild = wild | (stands < 0) | (stands > pending_count)
    vs = part * ROWS + tl.arange(0, ROWS)
    has_v = vs < V
    ks = tl.arange(0, KO)[:, None] * KI + tl.arange(0, KI)[None, :]
    has_k = ks < K
    out += (row * count * heads + head) * V
    if (slot < 0) | wild:  # padding gives zeros; a number out of range gives NaN; both touch nothing
        blank = tl.where(wild & (slot >= 0), float("nan"), tl.zeros([ROWS], tl.float32)).to(out.dtype.element_ty)
        t = 0
        while t < count:
            tl.store(out + t * heads * V + vs, blank, has_v)
            t += 1
        return
    cells = vs[:, None, None] * K + ks[None, :, :]
    inside = has_v[:, None, None] & has_k[None, :, :]
    state += (slot * heads + head) * (K * V)
    if FULL:
        S = tl.load(state + cells)
    else:
        S = tl.load(state + cells, inside, 0.0)

    q_channel = head * K + ks
    k_channel = heads * K + q_channel
    v_channel = 2 * heads * K + head * V + vs
    window += slot * heads * (2 * K + V) * (W - 1)
    q_past = _load_window(window, q_channel, has_k, W)
    k_past = _load_window(window, k_channel, has_k, W)
    v_past = _load_window(window, v_channel, has_v, W)
    q_weights = load_weights(conv_weight, q_channel, has_k, W)
    k_weights = load_weights(conv_weight, k_channel, has_k, W)
    v_weights = load_weights(conv_weight, v_channel, has_v, W)
    qkv += row * qkv_row
    decay_logit += row * decay_row
    beta_logit += row * beta_row + head
    gate += row * gate_row + head * V + vs
    weight = tl.load(norm_weight + vs, has_v, 0.0)
    bias = tl.zeros([KO, KI], tl.float32)
    if dt_bias is not None:
        bias = tl.load(dt_bias + q_channel, has_k, 0.0)
    rate = 1.0
    if A_log is not None:
        rate = tl.exp(tl.load(A_log + head))

    if accepted is not None:
        old_qkv += row * old_qkv_row
        old_decay += row * old_decay_row
        old_beta += row * old_beta_row + head
        some = stands > 0
        reach = stands - (W - 1)  # of the q of a folded token only the window is wanted
        q = _load(old_qkv, q_channel, has_k & some & (reach <= 0))
        k = _load(old_qkv, k_channel, has_k & some)
        v = _load(old_qkv, v_channel, has_v & some)
        z = _load(old_decay, q_channel, has_k & some)
        b = tl.load(old_beta, some, 0.0).to(tl.float32)
        t = 0
        while t < stands:
            more = t + 1 < stands
            at = (t + 1) * old_qkv_token
            q_next = _load(old_qkv, at + q_channel, has_k & more & (t + 1 >= reach))
            k_next = _load(old_qkv, at + k_channel, has_k & more)
            v_next = _load(old_qkv, at + v_channel, has_v & more)
            z_next = _load(old_decay, (t + 1) * old_decay_token + q_channel, has_k & more)
            b_next = tl.load(old_beta + (t + 1) * old_beta_token, more, 0.0).to(tl.float32)
            q_taps, k_taps, v_taps = q_past + (q,), k_past + (k,), v_past + (v,)
            S = S * decay(z + bias, rate, lower_bound, BOUNDED)[None, :, :]
            S, _ = write(S, convolve(v_taps, v_weights), sigmoid(b), unit(convolve(k_taps, k_weights), l2_eps))
            q_past, k_past, v_past = q_taps[1:], k_taps[1:], v_taps[1:]
            q, k, v, z, b = q_next, k_next, v_next, z_next, b_next
            t += 1
        tl.debug_barrier()  # of a small tile several threads hold, and have read, the same element
        if FULL:
            tl.store(state + cells, S, mask=some)
        else:
            tl.store(state + cells, S, inside & some)
        _store_window(v_past, window, v_channel, has_v & some)
    q_kept, k_kept = q_past, k_past

    unit_of_work = row * heads + head
    scratch += unit_of_work * count * V
    squares += unit_of_work * count * SLICES
    q = _load(qkv, q_channel, has_k)
    k = _load(qkv, k_channel, has_k)
    v = _load(qkv, v_channel, has_v)
    z = _load(decay_logit, q_channel, has_k)
    b = tl.load(beta_logit).to(tl.float32)
    opened = _load(gate, 0, has_v)
    t = 0
    while t < count:
        more = t + 1 < count
        at = (t + 1) * qkv_token
        q_next = _load(qkv, at + q_channel, has_k & more)
        k_next = _load(qkv, at + k_channel, has_k & more)
        v_next = _load(qkv, at + v_channel, has_v & more)
        z_next = _load(decay_logit, (t + 1) * decay_token + q_channel, has_k & more)
        b_next = tl.load(beta_logit + (t + 1) * beta_token, more, 0.0).to(tl.float32)
        opened_next = _load(gate, (t + 1) * gate_token, has_v & more)
        q_taps, k_taps, v_taps = q_past + (q,), k_past + (k,), v_past + (v,)
        S, o = advance(
            S, unit(convolve(q_taps, q_weights), l2_eps), unit(convolve(k_taps, k_weights), l2_eps),
            convolve(v_taps, v_weights), decay(z + bias, rate, lower_bound, BOUNDED), sigmoid(b), scale,
        )  # fmt: skip
        tl.store(scratch + t * V + vs, o * (sigmoid(opened) * weight), has_v)
        tl.store(squares + t * SLICES + part, tl.sum(o * o, 0))
        q_past, k_past, v_past = q_taps[1:], k_taps[1:], v_taps[1:]
        q, k, v, z, b, opened = q_next, k_next, v_next, z_next, b_next, opened_next
        t += 1
    tl.debug_barrier()
    ticket = tl.atomic_add(tickets + unit_of_work, 1, sem="acq_rel", scope="gpu")
    if ticket == SLICES - 1:
        tl.store(tickets + unit_of_work, 0)  # as the next launch wants it
        every, parts = tl.arange(0, BV), tl.arange(0, SP)
        t = 0
        while t < count:
            total = tl.sum(tl.load(squares + t * SLICES + parts, parts < SLICES, 0.0, cache_modifier=".cg"), 0)
            whole = tl.load(scratch + t * V + every, every < V, 0.0, cache_modifier=".cg")
            whole = whole * (1.0 / tl.sqrt(total / V + norm_eps))
            tl.store(out + t * heads * V + every, whole.to(out.dtype.element_ty), every < V)
            t += 1
        if accepted is not None:
            _store_window(q_kept, window, q_channel, has_k & (stands > 0))
            _store_window(k_kept, window, k_channel, has_k & (stands > 0))


def verify_step(
    new: Projections, gate: Tensor, pending: Projections | None, accepted: Tensor | None, conv_weight: Tensor,
    A_log: Tensor | None, dt_bias: Tensor | None, norm_weight: Tensor, window: Tensor, state: Tensor, index: Tensor | None,
    heads: int, key_dim: int, lower_bound: float | None, scale: float, norm_eps: float, rows: int | None = None,
    num_warps: int | None = None,
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
    sizes = tile(key_dim, value_dim, rows, num_warps)
    tokens = batch * heads * count
    buffer = torch.empty(tokens * (value_dim + sizes["SLICES"]), device=out.device)
    _verify_kernel[(heads * sizes["SLICES"], batch)](
        *spaced, accepted, conv_weight, A_log, dt_bias, norm_weight, window, state, index, out, buffer,
        buffer[tokens * value_dim :], tickets(out.device, batch * heads), count,
        0 if pending is None else pending.qkv_BTX.shape[1], state.shape[0], heads, scale, lower_bound or 0.0, norm_eps,
        L2_EPS, K=key_dim, V=value_dim, W=conv_weight.shape[1], BOUNDED=lower_bound is not None, **sizes,
    )  # fmt: skip
    return out
