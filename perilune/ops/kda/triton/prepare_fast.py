"""`prepare` for the bounded gate in two kernels: this one leaves L, `solve` makes A of it.

The same numbers as in `prepare`, in fewer and cheaper instructions, and with k finished before q is loaded: half the
registers, so that two programs share a multiprocessor and wait for each other's memory.
"""

from __future__ import annotations

import triton
import triton.language as tl

from perilune.ops.kda.triton.fast import exp2, load_fours, log2_decay, row_of, tile_sums
from perilune.ops.kda.triton.prepare import load_beta
from perilune.ops.kda.triton.tiles import BLOCK, CHUNK, HALF, LOG2E, dot


@triton.jit
def prepare_fast_kernel(
    q, k, g, beta, a_log, dt_bias, chunks,
    Qd, Kd, Kr, P, gamma, L,
    scale, lower_bound, shift, beta_scale,
    q_token, q_head, k_token, k_head, g_token, g_head, beta_token, beta_head,
    heads, group,
    K: tl.constexpr, L2: tl.constexpr, GATE: tl.constexpr, HAS_A: tl.constexpr, HAS_BIAS: tl.constexpr,
    SIGMOID: tl.constexpr,
):  # fmt: skip
    """As `prepare_kernel`, with L float32 `[chunks, heads, 64, 64]` in place of A."""
    program = tl.program_id(0).to(tl.int64)
    chunk = program // heads
    head = program % heads
    start = tl.load(chunks + 2 * chunk)
    count = tl.load(chunks + 2 * chunk + 1)
    channel = tl.arange(0, K)
    T = Qd.dtype.element_ty
    r = row_of()[:, :, None]
    rows = program * (CHUNK * K) + r * K + channel[None, None, :]
    is_lower = r >= HALF

    rate = 1.0
    if HAS_A:
        rate = tl.exp(tl.load(a_log + head).to(tl.float32))
    bias = tl.zeros([K], tl.float32)
    if HAS_BIAS:
        bias = tl.load(dt_bias + head * K + channel).to(tl.float32)
    z = load_fours(g + head * g_head, start, count, g_token, K)
    decay = log2_decay(z, bias[None, None, :], rate, lower_bound, GATE)
    running, first, last = tile_sums(tl.where(r < count, decay, 0.0), K)
    tl.store(gamma + program * K + channel, exp2(first + last))
    steps = (shift * LOG2E) * ((r % HALF) + 1).to(tl.float32)
    up = exp2(running + steps)
    unstep = exp2(-steps)
    enter = tl.where(is_lower, exp2(first)[None, None, :], 1.0)
    row, column = tl.arange(0, CHUNK)[:, None], tl.arange(0, CHUNK)[None, :]
    square = program * (CHUNK * CHUNK) + row * CHUNK + column
    unshift = exp2((shift * LOG2E) * tl.minimum(column - row, 0).to(tl.float32))
    inside = (row // HALF) == (column // HALF)

    k_FRK = load_fours(k + (head // group) * k_head, start, count, k_token, K)
    if L2:
        k_FRK *= tl.rsqrt(tl.sum(k_FRK * k_FRK, axis=2) + 1e-6)[:, :, None]
    near_keys = tl.trans(tl.reshape((k_FRK * exp2(-(running + steps))).to(T), [CHUNK, K]))
    k_to = k_FRK * exp2(tl.where(is_lower, last[None, None, :], first[None, None, :]) - running)
    far_keys = tl.trans(tl.reshape(k_to.to(T), [CHUNK, K]))
    tl.store(Kr + rows, (k_to * tl.where(is_lower, 1.0, exp2(last)[None, None, :])).to(T))
    k_FRK *= up
    l = dot(tl.reshape(k_FRK.to(T), [CHUNK, K]), near_keys) * unshift
    k_FRK *= unstep
    l = tl.where(inside, l, dot(tl.reshape(k_FRK.to(T), [CHUNK, K]), far_keys))
    tl.store(Kd + rows, (k_FRK * enter).to(T))
    beta_C = load_beta(beta + head * beta_head, start, count, beta_token, beta_scale, CHUNK, SIGMOID)
    tl.store(L + square, tl.where(row > column, l, 0.0) * beta_C[:, None])

    q_FRK = load_fours(q + (head // group) * q_head, start, count, q_token, K)
    if L2:
        q_FRK *= (tl.rsqrt(tl.sum(q_FRK * q_FRK, axis=2) + 1e-6) * scale)[:, :, None]
    else:
        q_FRK *= scale
    q_FRK *= up
    p = dot(tl.reshape(q_FRK.to(T), [CHUNK, K]), near_keys) * unshift
    q_FRK *= unstep
    p = tl.where(inside, p, dot(tl.reshape(q_FRK.to(T), [CHUNK, K]), far_keys))
    tl.store(Qd + rows, (q_FRK * enter).to(T))
    tl.store(P + square, tl.where(row >= column, p, 0.0).to(T))


@triton.jit
def solve_kernel(
    L, A, beta, chunks, beta_scale, beta_token, beta_head, heads,
    SIGMOID: tl.constexpr,
):  # fmt: skip
    """A = (I + L)^-1 diag(beta), as `unit_lower_inverse`. L is overwritten: its diagonal blocks come back inverted."""
    program = tl.program_id(0).to(tl.int64)
    chunk = program // heads
    head = program % heads
    start = tl.load(chunks + 2 * chunk)
    count = tl.load(chunks + 2 * chunk + 1)
    L += program * (CHUNK * CHUNK)
    block = tl.arange(0, CHUNK // BLOCK)[:, None, None]
    r = tl.arange(0, BLOCK)[None, :, None]
    c = tl.arange(0, BLOCK)[None, None, :]
    at = (block * BLOCK + r) * CHUNK + block * BLOCK + c
    tiles = tl.load(L + at)
    inverse = tl.where(r == c, 1.0, 0.0) + tl.zeros_like(tiles)
    for j in tl.static_range(BLOCK - 1):
        row = tl.sum(tl.where(r == j, inverse, 0.0), axis=1)
        column = tl.sum(tl.where(c == j, tiles, 0.0), axis=2)
        inverse -= column[:, :, None] * row[:, None, :]
    tl.store(L + at, inverse)
    tl.debug_barrier()

    row, column = tl.arange(0, CHUNK)[:, None], tl.arange(0, CHUNK)[None, :]
    square = row * CHUNK + column
    x = tl.load(L + square)
    Z = tl.where(row // BLOCK == column // BLOCK, x, 0.0)
    X = dot(Z, tl.where(row // BLOCK > column // BLOCK, x, 0.0))
    W = Z - dot(X, Z)
    solved = W + dot(dot(X, X), W)
    beta_C = load_beta(beta + head * beta_head, start, count, beta_token, beta_scale, CHUNK, SIGMOID)
    tl.store(A + program * (CHUNK * CHUNK) + square, (solved * beta_C[None, :]).to(A.dtype.element_ty))
