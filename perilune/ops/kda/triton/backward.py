"""The parallel part of the backward pass where the decay has no bound: every gradient of a chunk, once the serial part has
left E and dS. `backward_fast` is the same with one; ops/kda/cuda/backward.cu does both, for gates that are computed in it.

With dP = tril(dO U^T) and beta dL = -tril(E U^T, -1), both through the factors that `prepare` used (kernels §2.4):

    dQd = dO S^T + dP Kt      dKd = -E S^T + (beta dL) Kt      dKt = dP^T Qd + (beta dL)^T Kd      dKr = U dS^T
    dbeta = sum_v E U / beta^2
    dG = q dq + k (dk as a query - dk as a key),  dg = its sum from the chunk's end + sum Kr dKr + gamma sum S dS

The diagonal of P has decay 1: it joins dq and dk only, see `chunked`. The gate, the L2 norm and the sigmoid of beta are
differentiated on the spot; A_log and dt_bias get one partial sum a chunk, added up afterwards in a fixed order.
"""

from __future__ import annotations

import triton
import triton.language as tl

from perilune.ops.kda.triton.prepare import load_beta, load_decay, load_rows, tile_sums
from perilune.ops.kda.triton.tiles import (
    CHUNK,
    CLOSED,
    HALF,
    dot,
    dot_add,
    exp,
    level_factors,
    level_mask,
    log_decay,
    sigmoid,
)


@triton.jit
def load_operand(pointer, start, count, stride, D: tl.constexpr, T: tl.constexpr):
    """Rows of a token-major tensor as an operand; rows from `count` on are 0."""
    r = tl.arange(0, CHUNK)
    offsets = (start + r).to(tl.int64)[:, None] * stride + tl.arange(0, D)[None, :]
    return tl.load(pointer + offsets, mask=(r < count)[:, None], other=0.0).to(T)


@triton.jit
def inverse_norm(x_CK):
    """1 / |row|, with the epsilon of the L2 norm."""
    return tl.rsqrt(tl.sum(x_CK * x_CK, axis=1) + 1e-6)


@triton.jit
def channels_backward(
    q, k, g, a_log, dt_bias, S, dS, do_CV, e_CV, u_CV, dp, dl, q_rstd, k_rstd, start, count, head,
    scale, lower_bound, q_token, k_token, g_token,
    K: tl.constexpr, D: tl.constexpr, V: tl.constexpr, L2: tl.constexpr, GATE: tl.constexpr, HAS_A: tl.constexpr,
    HAS_BIAS: tl.constexpr,
):  # fmt: skip
    """D key channels of a chunk; all pointers stand at the first of them. Channels meet in dp and dl only.

    Returns the gradients of normalised q and k, without the diagonal of P, and of the log-decays, then normalised q and
    k, each `[64, D]`.
    """
    r = tl.arange(0, CHUNK)
    row, column = r[:, None], r[None, :]
    T = u_CV.dtype
    q_CK = load_rows(q, start, count, q_token, CHUNK, D)
    k_CK = load_rows(k, start, count, k_token, CHUNK, D)
    if L2:
        q_CK *= q_rstd[:, None]
        k_CK *= k_rstd[:, None]
    g_CK = load_decay(g, a_log, dt_bias, start, count, g_token, head, lower_bound, CHUNK, D, GATE, HAS_A, HAS_BIAS)
    running, first, last = tile_sums(g_CK, D)
    is_lower = (r >= HALF)[:, None]
    from_tile = exp(running)
    to_tile_end = exp(tl.where(is_lower, last[None, :], first[None, :]) - running)
    enter = tl.where(is_lower, exp(first)[None, :], 1.0)
    leave = tl.where(is_lower, 1.0, exp(last)[None, :])

    state = tl.arange(0, V)[:, None] * K + tl.arange(0, D)[None, :]
    s_VK = tl.load(S + state)
    ds_VK = tl.load(dS + state)
    whole = exp(first + last) * tl.sum(s_VK.to(tl.float32) * ds_VK.to(tl.float32), axis=0)
    d_q = dot(do_CV, s_VK) * (from_tile * enter)  # of scaled q
    d_query = -dot(e_CV, s_VK) * (from_tile * enter)  # of k where it reads
    d_key = dot(u_CV, ds_VK) * (to_tile_end * leave)  # of k where it writes: for later chunks, then for its own
    whole += tl.sum(d_key * k_CK, axis=0)

    # A pair of rows has to count the same on either side, or every earlier row's decay keeps the difference: by the operands
    # as they were rounded.
    G = running + tl.where(is_lower, first[None, :], 0.0)
    d_G = q_CK * (scale * d_q) + k_CK * (d_query - d_key)
    for level in tl.static_range(6):
        q_factor, k_factor = level_factors(G, 1 << level, D)  # pyright: ignore[reportGeneralTypeIssues]
        mask = level_mask(row, column, 1 << level)
        dp_T = tl.where(mask, dp, 0.0).to(T)
        dl_T = tl.where(mask, dl, 0.0).to(T)
        keys = (k_CK * k_factor).to(T)
        queries, corrections = (q_CK * (scale * q_factor)).to(T), (k_CK * q_factor).to(T)
        reads, read_corrections = dot(dp_T, keys), dot(dl_T, keys)
        writes = dot_add(tl.trans(dl_T), corrections, dot(tl.trans(dp_T), queries))
        d_q += reads * q_factor
        d_query += read_corrections * q_factor
        d_key += writes * k_factor
        d_G += queries.to(tl.float32) * reads + corrections.to(tl.float32) * read_corrections
        d_G -= keys.to(tl.float32) * writes
    d_q *= scale
    d_decay = tl.cumsum(d_G, axis=0, reverse=True) + whole[None, :]
    d_decay = tl.where((g_CK <= CLOSED) | (r >= count)[:, None], 0.0, d_decay)
    return d_q, d_query + d_key, d_decay, q_CK, k_CK


@triton.jit
def store_decay(
    d_decay, g, a_log, dt_bias, dz, dbias_part, start, count, head, lower_bound, g_token, dz_token,
    D: tl.constexpr, GATE: tl.constexpr, HAS_A: tl.constexpr, HAS_BIAS: tl.constexpr,
):  # fmt: skip
    """Through the gate: write dz and a partial sum for dt_bias; returns the partial sum for A_log."""
    r = tl.arange(0, CHUNK)
    channel = tl.arange(0, D)
    d_A = 0.0
    if GATE != 0:
        rate = 1.0
        if HAS_A:
            rate = exp(tl.load(a_log + head).to(tl.float32))
        x = load_rows(g, start, count, g_token, CHUNK, D)
        if HAS_BIAS:
            x += tl.load(dt_bias + channel).to(tl.float32)[None, :]
        if GATE == 1:
            s = sigmoid(rate * x)
            d_decay *= lower_bound * rate * s * (1.0 - s)
            d_rate = d_decay * x
        else:
            d_rate = d_decay * log_decay(
                x, rate, tl.zeros([D], tl.float32), lower_bound, GATE
            )  # dg / dA_log is g itself
            d_decay *= -rate * sigmoid(x)
        if HAS_A:
            d_A = tl.sum(tl.sum(d_rate, axis=1), axis=0)
        if HAS_BIAS:
            tl.store(dbias_part + channel, tl.sum(d_decay, axis=0))
    out = (start + r).to(tl.int64)[:, None] * dz_token + channel[None, :]
    tl.store(dz + out, d_decay.to(dz.dtype.element_ty), mask=(r < count)[:, None])
    return d_A


@triton.jit
def backward_kernel(
    q, k, g, beta, a_log, dt_bias, do, U, S, E, dS, chunks,
    dq, dk, dz, dbeta, dA_part, dbias_part,
    scale, lower_bound, beta_scale,
    q_token, q_head, k_token, k_head, g_token, g_head, beta_token, beta_head, do_token, do_head,
    heads, group,
    K: tl.constexpr, V: tl.constexpr, L2: tl.constexpr, GATE: tl.constexpr, HAS_A: tl.constexpr, HAS_BIAS: tl.constexpr,
    SIGMOID: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """One program a chunk and head. dq, dk, dz `[tokens, heads, K]` and dbeta `[tokens, heads]` are contiguous.

    The key channels are done BLOCK_K at a time, so that their arrays stay in registers. The L2 norm joins them: dq and
    dk are written before it, and once more after it.
    """
    D: tl.constexpr = BLOCK_K
    program = tl.program_id(0).to(tl.int64)
    chunk = program // heads
    head = program % heads
    start = tl.load(chunks + 2 * chunk)
    count = tl.load(chunks + 2 * chunk + 1)
    r = tl.arange(0, CHUNK)
    value = tl.arange(0, V)
    there = r < count
    row, column = r[:, None], r[None, :]
    T = U.dtype.element_ty

    do_CV = load_operand(do + head * do_head, start, count, do_token, V, T)
    e_CV = load_operand(E + head * V, start, count, heads * V, V, T)
    u_CV = tl.load(U + program * (CHUNK * V) + r[:, None] * V + value[None, :])
    u_VC = tl.trans(u_CV)
    dp = dot(do_CV, u_VC)
    dl = -dot(e_CV, u_VC)
    diagonal = scale * tl.sum(tl.where(row == column, dp, 0.0), axis=1)[:, None]
    eu = tl.sum(e_CV.to(tl.float32) * u_CV.to(tl.float32), axis=1)
    beta_C = load_beta(beta + head * beta_head, start, count, beta_token, beta_scale, CHUNK, SIGMOID)
    divisor = tl.where(there, beta_C, 1.0)
    if SIGMOID:  # of the logit: the derivative of beta is beta (1 - beta / beta_scale)
        d_beta = eu / divisor * (1.0 - beta_C / beta_scale)
    else:
        d_beta = eu / divisor / divisor
    at_beta = (start + r).to(tl.int64) * heads + head
    tl.store(dbeta + at_beta, d_beta.to(dbeta.dtype.element_ty), mask=there)

    q += (head // group) * q_head
    k += (head // group) * k_head
    g += head * g_head
    S += program * (V * K)
    dS += program * (V * K)
    q_rstd = inverse_norm(load_rows(q, start, count, q_token, CHUNK, K))
    k_rstd = inverse_norm(load_rows(k, start, count, k_token, CHUNK, K))
    out = ((start + r).to(tl.int64)[:, None] * heads + head) * K + tl.arange(0, D)[None, :]
    along_q, along_k = tl.zeros([CHUNK], tl.float32), tl.zeros([CHUNK], tl.float32)
    d_A = 0.0
    for j in range(K // D):
        at = j * D
        d_q, d_k, d_decay, q_CK, k_CK = channels_backward(
            q + at, k + at, g + at, a_log, dt_bias + head * K + at if HAS_BIAS else dt_bias, S + at, dS + at,
            do_CV, e_CV, u_CV, dp, dl, q_rstd, k_rstd, start, count, head,
            scale, lower_bound, q_token, k_token, g_token, K, D, V, L2, GATE, HAS_A, HAS_BIAS,
        )  # fmt: skip
        d_q += diagonal * k_CK
        d_k += diagonal * q_CK
        tl.store(dq + at + out, d_q.to(dq.dtype.element_ty), mask=there[:, None])
        tl.store(dk + at + out, d_k.to(dk.dtype.element_ty), mask=there[:, None])
        along_q += tl.sum(d_q * q_CK, axis=1)
        along_k += tl.sum(d_k * k_CK, axis=1)
        d_A += store_decay(
            d_decay, g + at, a_log, dt_bias + head * K + at if HAS_BIAS else dt_bias, dz + head * K + at,
            dbias_part + program * K + at if HAS_BIAS else dbias_part, start, count, head, lower_bound, g_token, heads * K,
            D, GATE, HAS_A, HAS_BIAS,
        )  # fmt: skip
    if HAS_A:
        tl.store(dA_part + program, d_A)
    if L2:
        tl.debug_barrier()
        for j in range(K // D):
            at = j * D
            q_unit = load_rows(q + at, start, count, q_token, CHUNK, D) * q_rstd[:, None]
            k_unit = load_rows(k + at, start, count, k_token, CHUNK, D) * k_rstd[:, None]
            q_raw = tl.load(dq + at + out, mask=there[:, None], other=0.0).to(tl.float32)
            k_raw = tl.load(dk + at + out, mask=there[:, None], other=0.0).to(tl.float32)
            q_raw = (q_raw - q_unit * along_q[:, None]) * q_rstd[:, None]
            k_raw = (k_raw - k_unit * along_k[:, None]) * k_rstd[:, None]
            tl.store(dq + at + out, q_raw.to(dq.dtype.element_ty), mask=there[:, None])
            tl.store(dk + at + out, k_raw.to(dk.dtype.element_ty), mask=there[:, None])
