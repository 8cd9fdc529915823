"""Everything about a chunk that does not need the state, one program a chunk and head.

From q, k, the decay logits and beta of 64 tokens (G = cumulative log-decay of the chunk, q scaled):

    Qd = q e^G      Kd = k e^G      Kr = k e^(G_last - G)      gamma = e^G_last
    P  = tril(q k^T with decay)     A = (I + L)^-1,  L = strictly lower beta k k^T with decay      beta in float32

A product of rows r >= c carries e^(G_r - G_c), split into two factors. With decays of at least e^-5 a step:

    rows of one tile of 32    e^(G_r + 5/2 r) e^(-G_c - 5/2 c) e^(-5/2 (r - c)), G and r counted from the tile's start:
                              both factors lie within e^(+-80), inside float32 and bfloat16 (not float16)
    the lower tile and the    e^(G_r - a) e^(a - G_c), a = G before the lower tile: both at most 1
    upper one

The shift does not depend on the data and a is from the past, so later tokens do not move earlier results by a bit
(traps T01). Without the bound (`BOUNDED` false: the softplus gate) the second rule is applied to blocks of 32, 16, ... 1
rows, so that no factor exceeds 1; the diagonal of P has no decay.
"""

from __future__ import annotations

import triton
import triton.language as tl

from perilune.ops.kda.triton.tiles import (
    CHUNK,
    CLOSED,
    HALF,
    LEAST_BETA,
    dot,
    exp,
    level_factors,
    level_mask,
    log_decay,
    sigmoid,
    unit_lower_inverse,
)


@triton.jit
def load_rows(pointer, start, count, stride, ROWS: tl.constexpr, D: tl.constexpr):
    """ROWS rows of a token-major tensor from `start` on as `[ROWS, D]` float32; rows from `count` on are 0."""
    r = tl.arange(0, ROWS)
    offsets = (start + r).to(tl.int64)[:, None] * stride + tl.arange(0, D)[None, :]
    return tl.load(pointer + offsets, mask=(r < count)[:, None], other=0.0).to(tl.float32)


@triton.jit
def load_beta(pointer, start, count, stride, beta_scale, ROWS: tl.constexpr, SIGMOID: tl.constexpr):
    """Write strengths of ROWS tokens; never exactly 0 except in rows that hold no token."""
    r = tl.arange(0, ROWS)
    beta = tl.load(pointer + (start + r).to(tl.int64) * stride, mask=r < count, other=0.0).to(tl.float32)
    if SIGMOID:
        beta = beta_scale * sigmoid(beta)
    beta = tl.where(tl.abs(beta) < LEAST_BETA, LEAST_BETA, beta)
    return tl.where(r < count, beta, 0.0)


@triton.jit
def load_decay(
    g, a_log, dt_bias, start, count, stride, head, lower_bound,
    ROWS: tl.constexpr, D: tl.constexpr, GATE: tl.constexpr, HAS_A: tl.constexpr, HAS_BIAS: tl.constexpr,
):  # fmt: skip
    """Log-decays `[ROWS, D]`, 0 in rows that hold no token; g and dt_bias point at their head's first channel."""
    z = load_rows(g, start, count, stride, ROWS, D)
    rate = 1.0
    if HAS_A:
        rate = exp(tl.load(a_log + head).to(tl.float32))
    bias = tl.zeros([D], tl.float32)
    if HAS_BIAS:
        bias = tl.load(dt_bias + tl.arange(0, D)).to(tl.float32)
    decay = log_decay(z, rate, bias, lower_bound, GATE)
    decay = tl.maximum(decay, CLOSED, propagate_nan=tl.PropagateNan.ALL)
    return tl.where((tl.arange(0, ROWS) < count)[:, None], decay, 0.0)


@triton.jit
def tile_sums(g_CK, D: tl.constexpr):
    """In tiles of 32 rows: the running sum `[64, D]`, and the totals of the first tile and of the last `[D]`."""
    running = tl.reshape(tl.cumsum(tl.reshape(g_CK, [2, HALF, D]), axis=1), [CHUNK, D])
    lower = (tl.arange(0, CHUNK) >= HALF)[:, None]
    first = tl.sum(tl.where(lower, 0.0, g_CK), axis=0)
    last = tl.sum(tl.where(lower, g_CK, 0.0), axis=0)
    return running, first, last


@triton.jit
def prepare_kernel(
    q, k, g, beta, a_log, dt_bias, chunks,
    Qd, Kd, Kr, P, A, gamma, betas,
    scale, lower_bound, shift, beta_scale,
    q_token, q_head, k_token, k_head, g_token, g_head, beta_token, beta_head,
    heads, group,
    K: tl.constexpr, L2: tl.constexpr, GATE: tl.constexpr, HAS_A: tl.constexpr, HAS_BIAS: tl.constexpr,
    SIGMOID: tl.constexpr, BOUNDED: tl.constexpr,
):  # fmt: skip
    """chunks: int32 `[chunks, 2]`, first token and tokens. Outputs `[chunks, heads, ...]`, rows of no token are 0, of A those of the unit
    matrix."""
    program = tl.program_id(0).to(tl.int64)
    chunk = program // heads
    head = program % heads
    start = tl.load(chunks + 2 * chunk)
    count = tl.load(chunks + 2 * chunk + 1)
    r = tl.arange(0, CHUNK)
    channel = tl.arange(0, K)
    if HAS_BIAS:
        dt_bias += head * K

    q_CK = load_rows(q + (head // group) * q_head, start, count, q_token, CHUNK, K)
    k_CK = load_rows(k + (head // group) * k_head, start, count, k_token, CHUNK, K)
    beta_C = load_beta(beta + head * beta_head, start, count, beta_token, beta_scale, CHUNK, SIGMOID)
    g_CK = load_decay(
        g + head * g_head, a_log, dt_bias, start, count, g_token, head, lower_bound, CHUNK, K, GATE, HAS_A, HAS_BIAS
    )
    if L2:
        q_CK *= tl.rsqrt(tl.sum(q_CK * q_CK, axis=1) + 1e-6)[:, None]
        k_CK *= tl.rsqrt(tl.sum(k_CK * k_CK, axis=1) + 1e-6)[:, None]
    q_CK *= scale

    T = Qd.dtype.element_ty
    row, column = r[:, None], r[None, :]
    running, first, last = tile_sums(g_CK, K)
    is_lower = (r >= HALF)[:, None]
    from_tile = exp(running)
    to_tile_end = exp(tl.where(is_lower, last[None, :], first[None, :]) - running)
    q_from, k_from, k_to = q_CK * from_tile, k_CK * from_tile, k_CK * to_tile_end

    square = program * CHUNK * CHUNK + row * CHUNK + column
    rows = program * CHUNK * K + row * K + channel[None, :]
    enter = tl.where(is_lower, exp(first)[None, :], 1.0)
    leave = tl.where(is_lower, 1.0, exp(last)[None, :])
    tl.store(Qd + rows, (q_from * enter).to(T))
    tl.store(Kd + rows, (k_from * enter).to(T))
    tl.store(Kr + rows, (k_to * leave).to(T))
    tl.store(gamma + program * K + channel, exp(first + last))

    if BOUNDED:
        steps = shift * ((r % HALF) + 1)[:, None].to(tl.float32)
        up = exp(running + steps)
        keys = tl.trans((k_CK * exp(-(running + steps))).to(T))
        unshift = exp(tl.minimum(shift * (column - row).to(tl.float32), 0.0))
        inside = (row // HALF) == (column // HALF)
        p = tl.where(inside, dot((q_CK * up).to(T), keys) * unshift, 0.0)
        l = tl.where(inside, dot((k_CK * up).to(T), keys) * unshift, 0.0)
        keys = tl.trans(k_to.to(T))
        p = tl.where(inside, p, dot(q_from.to(T), keys))
        l = tl.where(inside, l, dot(k_from.to(T), keys))
    else:
        G = running + tl.where(is_lower, first[None, :], 0.0)
        p = tl.where(row == column, tl.sum(q_CK * k_CK, axis=1)[:, None], 0.0)
        l = tl.zeros([CHUNK, CHUNK], tl.float32)
        for level in tl.static_range(6):
            q_factor, k_factor = level_factors(G, 1 << level, K)
            mask = level_mask(row, column, 1 << level)
            keys = tl.trans((k_CK * k_factor).to(T))
            p = tl.where(mask, dot((q_CK * q_factor).to(T), keys), p)
            l = tl.where(mask, dot((k_CK * q_factor).to(T), keys), l)
    tl.store(P + square, tl.where(row >= column, p, 0.0).to(T))
    inverse = unit_lower_inverse(tl.where(row > column, l, 0.0) * beta_C[:, None])
    tl.store(A + square, inverse.to(T))
    tl.store(betas + program * CHUNK + r, beta_C)
