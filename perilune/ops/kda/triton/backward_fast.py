"""`backward` for the bounded gate in three kernels; the formulas are there.

`pairs_kernel` does what needs no key channels, `products_kernel` the other matrix products. What they give lies
in registers as the tensor cores leave it, and bringing a factor of the decay to that order costs more than the product: so
each gradient leaves as two pieces in the operands' type, one for each factor, and `gradients_kernel` multiplies, adds, and
goes through gate and norm in the order of memory.

    d_q     = up N_q + from F_q        N_q = dP k/up,                     F_q = dP (k to) + enter dO S^T
    d_query = up N_k + from F_k        N_k = beta dL k/up,                F_k = beta dL (k to) - enter E S^T
    d_key   = W / up + to (Z + leave R)   W = dP^T (q up) + beta dL^T (k up),  Z = dP^T (q from) + beta dL^T (k from),  R = U dS^T

N and W within tiles of 32 rows, Z and half of F between the two tiles, the rest with the other chunks. The decay's gradient
takes sums of R k over all rows and over the later ones, whose difference must vanish: R is a piece of its own. up = 2^(running sum +
shift), from = 2^(running sum), to = 2^(to the tile's end); enter and leave: from the chunk's start, to its end.

up reaches 2^+-115, so N and W hold numbers of about 1 only; gradients of a loss averaged over many tokens are far smaller
and would vanish beside a gate that stays open. So dP and beta dL within tiles are multiplied by `unit`, the power of two that
brings the largest cotangent near 1, and N and W are divided by it after `up`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from perilune.ops.kda.triton.backward import load_operand
from perilune.ops.kda.triton.fast import exp2, load_fours, log2_decay, reciprocal, row_of, running_after, tile_sums
from perilune.ops.kda.triton.prepare import load_beta
from perilune.ops.kda.triton.tiles import CHUNK, HALF, LOG2E, dot

PIECES = tl.constexpr(7)


@triton.jit
def load_log2_decay(
    g, a_log, dt_bias, start, count, stride, head, lower_bound,
    D: tl.constexpr, GATE: tl.constexpr, HAS_A: tl.constexpr, HAS_BIAS: tl.constexpr,
):  # fmt: skip
    """Log-decays to base 2 `[16, 4, D]`, 0 in rows that hold no token; g and dt_bias point at their first channel."""
    rate = 1.0
    if HAS_A:
        rate = tl.exp(tl.load(a_log + head).to(tl.float32))
    bias = tl.zeros([D], tl.float32)
    if HAS_BIAS:
        bias = tl.load(dt_bias + tl.arange(0, D)).to(tl.float32)
    decay = log2_decay(load_fours(g, start, count, stride, D), bias[None, None, :], rate, lower_bound, GATE)
    return tl.where((row_of() < count)[:, :, None], decay, 0.0)


@triton.jit
def operand(x, D: tl.constexpr, T: tl.constexpr):
    """`[16, 4, D]` as an operand `[64, D]`."""
    return tl.reshape(x.to(T), [CHUNK, D])


@triton.jit(do_not_specialize=["base"])
def pairs_kernel(
    beta, do, U, E, chunks, unit, pairs, diagonal, dbeta,
    base, shift, beta_scale, beta_token, beta_head, do_token, do_head, heads,
    V: tl.constexpr, SIGMOID: tl.constexpr,
):  # fmt: skip
    """What needs no key channels; one program a chunk and head, `base` of which belong to earlier launches.

    pairs: `[programs, 2, 64, 64]` in the operands' type, dP and beta dL below the diagonal, within tiles of 32 rows
    times `unit` and 2^(-shift) a row between; unit: float32, one number; diagonal: float32 `[chunks, heads, 64]`, that of dP; dbeta `[tokens, heads]`.
    """
    local = tl.program_id(0).to(tl.int64)
    program = local + base
    chunk = program // heads
    head = program % heads
    start = tl.load(chunks + 2 * chunk)
    count = tl.load(chunks + 2 * chunk + 1)
    r = tl.arange(0, CHUNK)
    row, column = r[:, None], r[None, :]
    T = U.dtype.element_ty
    u_VC = tl.trans(tl.load(U + program * (CHUNK * V) + row * V + tl.arange(0, V)[None, :]))
    dp = dot(load_operand(do + head * do_head, start, count, do_token, V, T), u_VC)
    eu = dot(load_operand(E + head * V, start, count, heads * V, V, T), u_VC)
    same = row // HALF == column // HALF
    factor = tl.where(same, exp2((shift * LOG2E) * tl.minimum(column - row, 0).to(tl.float32)), 1.0)
    small = tl.load(unit)
    factor = tl.where(row > column, factor, 0.0)
    square = pairs + local * (2 * CHUNK * CHUNK) + row * CHUNK + column
    # the unit first: dp * factor may lie below what a float holds
    tl.store(square, (tl.where(same, dp * small, dp) * factor).to(T))
    tl.store(square + CHUNK * CHUNK, (tl.where(same, eu * small, eu) * -factor).to(T))
    tl.store(diagonal + program * CHUNK + r, tl.sum(tl.where(row == column, dp, 0.0), axis=1))
    d_beta = tl.sum(tl.where(row == column, eu, 0.0), axis=1)
    beta_C = load_beta(beta + head * beta_head, start, count, beta_token, beta_scale, CHUNK, SIGMOID)
    divisor = tl.where(r < count, beta_C, 1.0)
    if SIGMOID:  # of the logit: the derivative of beta is beta (1 - beta / beta_scale)
        d_beta = d_beta / divisor * (1.0 - beta_C / beta_scale)
    else:
        d_beta = d_beta / divisor / divisor
    tl.store(dbeta + (start + r).to(tl.int64) * heads + head, d_beta.to(dbeta.dtype.element_ty), mask=r < count)


@triton.jit(do_not_specialize=["base"])
def products_kernel(
    q, k, g, a_log, dt_bias, do, U, S, E, dS, chunks, pairs, pieces, through,
    base, scale, lower_bound, shift,
    q_token, q_head, k_token, k_head, g_token, g_head, do_token, do_head,
    heads, group,
    K: tl.constexpr, V: tl.constexpr, L2: tl.constexpr, GATE: tl.constexpr, HAS_A: tl.constexpr, HAS_BIAS: tl.constexpr,
):  # fmt: skip
    """One program a chunk and head.

    pieces: `[programs, 7, 64, K]` in the operands' type, in the order N_q, F_q, N_k, F_k, W, Z, R; through: float32
    `[chunks, heads, K]`, gamma sum_v S dS.
    """
    local = tl.program_id(0).to(tl.int64)
    program = local + base
    chunk = program // heads
    head = program % heads
    start = tl.load(chunks + 2 * chunk)
    count = tl.load(chunks + 2 * chunk + 1)
    row, column = tl.arange(0, CHUNK)[:, None], tl.arange(0, CHUNK)[None, :]
    channel = tl.arange(0, K)
    T = U.dtype.element_ty
    if HAS_BIAS:
        dt_bias += head * K
    states = program * (V * K) + tl.arange(0, V)[:, None] * K + channel[None, :]
    out = pieces + local * (PIECES * CHUNK * K) + row * K + channel[None, :]

    decay = load_log2_decay(
        g + head * g_head, a_log, dt_bias, start, count, g_token, head, lower_bound, K, GATE, HAS_A, HAS_BIAS
    )
    running, first, last = tile_sums(decay, K)
    r = row_of()[:, :, None]
    shifted = (shift * LOG2E) * ((r % HALF) + 1).to(tl.float32)
    up = exp2(running + shifted)
    unstep = exp2(-shifted)
    k_FRK = load_fours(k + (head // group) * k_head, start, count, k_token, K)
    if L2:
        k_FRK *= tl.rsqrt(tl.sum(k_FRK * k_FRK, axis=2) + 1e-6)[:, :, None]
    near = operand(k_FRK * exp2(-(running + shifted)), K, T)
    far = operand(k_FRK * exp2(tl.where(r >= HALF, last[None, None, :], first[None, None, :]) - running), K, T)
    k_FRK *= up
    k_near, k_far = operand(k_FRK, K, T), operand(k_FRK * unstep, K, T)
    q_FRK = load_fours(q + (head // group) * q_head, start, count, q_token, K)
    if L2:
        q_FRK *= (tl.rsqrt(tl.sum(q_FRK * q_FRK, axis=2) + 1e-6) * scale)[:, :, None]
    else:
        q_FRK *= scale
    q_FRK *= up
    q_near, q_far = operand(q_FRK, K, T), operand(q_FRK * unstep, K, T)

    square = pairs + local * (2 * CHUNK * CHUNK) + row * CHUNK + column
    same = row // HALF == column // HALF
    lower = row >= HALF
    p, l = tl.load(square), tl.load(square + CHUNK * CHUNK)
    # sums of products, not products added to a sum: Triton would give the first of two in a row to half the warps twice
    p_same, l_same = tl.where(same, p, 0.0).to(T), tl.where(same, l, 0.0).to(T)
    tl.store(out, dot(p_same, near).to(T))
    tl.store(out + 2 * CHUNK * K, dot(l_same, near).to(T))
    tl.store(out + 4 * CHUNK * K, (dot(tl.trans(p_same), q_near) + dot(tl.trans(l_same), k_near)).to(T))
    p, l = tl.where(same, 0.0, p).to(T), tl.where(same, 0.0, l).to(T)
    s_VK = tl.load(S + states)
    enter = tl.where(lower, exp2(first)[None, :], 1.0)
    do_CV = load_operand(do + head * do_head, start, count, do_token, V, T)
    tl.store(out + CHUNK * K, (dot(p, far) + dot(do_CV, s_VK) * enter).to(T))
    e_CV = load_operand(E + head * V, start, count, heads * V, V, T)
    tl.store(out + 3 * CHUNK * K, (dot(l, far) - dot(e_CV, s_VK) * enter).to(T))
    ds_VK = tl.load(dS + states)
    u_CV = tl.load(U + program * (CHUNK * V) + row * V + tl.arange(0, V)[None, :])
    tl.store(out + 5 * CHUNK * K, (dot(tl.trans(p), q_far) + dot(tl.trans(l), k_far)).to(T), mask=row < HALF)
    tl.store(out + 6 * CHUNK * K, dot(u_CV, ds_VK).to(T))
    kept = exp2(first + last) * tl.sum(s_VK.to(tl.float32) * ds_VK.to(tl.float32), axis=0)
    tl.store(through + program * K + channel, kept)


@triton.jit
def load_piece(pieces, INDEX: tl.constexpr, K: tl.constexpr):
    """A piece of a chunk and head as `[16, 4, K]` float32."""
    at = INDEX * (CHUNK * K) + row_of()[:, :, None] * K + tl.arange(0, K)[None, None, :]
    return tl.load(pieces + at).to(tl.float32)


@triton.jit(do_not_specialize=["base"])
def gradients_kernel(
    q, k, g, a_log, dt_bias, chunks, unit, pieces, through, diagonal,
    dq, dk, dz, dA_part, dbias_part,
    base, scale, lower_bound, shift,
    q_token, q_head, k_token, k_head, g_token, g_head,
    heads, group,
    K: tl.constexpr, L2: tl.constexpr, GATE: tl.constexpr, HAS_A: tl.constexpr, HAS_BIAS: tl.constexpr,
):  # fmt: skip
    """One program a chunk and head; outputs as in `backward_kernel`."""
    large = 1.0 / tl.load(unit)
    local = tl.program_id(0).to(tl.int64)
    program = local + base
    chunk = program // heads
    head = program % heads
    start = tl.load(chunks + 2 * chunk)
    count = tl.load(chunks + 2 * chunk + 1)
    channel = tl.arange(0, K)
    r = row_of()[:, :, None]
    there = r < count
    out = ((start + r).to(tl.int64) * heads + head) * K + channel[None, None, :]
    pieces += local * (PIECES * CHUNK * K)
    g += head * g_head
    if HAS_BIAS:
        dt_bias += head * K

    decay = load_log2_decay(g, a_log, dt_bias, start, count, g_token, head, lower_bound, K, GATE, HAS_A, HAS_BIAS)
    running, first, last = tile_sums(decay, K)
    shifted = (shift * LOG2E) * ((r % HALF) + 1).to(tl.float32)
    up = exp2(running + shifted)
    unstep = exp2(-shifted)
    k_unit = load_fours(k + (head // group) * k_head, start, count, k_token, K)
    q_unit = load_fours(q + (head // group) * q_head, start, count, q_token, K)
    if L2:
        k_rstd = tl.rsqrt(tl.sum(k_unit * k_unit, axis=2) + 1e-6)[:, :, None]
        q_rstd = tl.rsqrt(tl.sum(q_unit * q_unit, axis=2) + 1e-6)[:, :, None]
        k_unit *= k_rstd
        q_unit *= q_rstd
    p_diagonal = scale * tl.load(diagonal + program * CHUNK + row_of())[:, :, None]

    d_q = (load_piece(pieces, 0, K) * up * large + load_piece(pieces, 1, K) * (up * unstep)) * scale
    d_G = q_unit * d_q
    d_q += p_diagonal * k_unit
    if L2:
        d_q = (d_q - q_unit * tl.sum(d_q * q_unit, axis=2)[:, :, None]) * q_rstd
    tl.store(dq + out, d_q.to(dq.dtype.element_ty), mask=there)

    d_k = load_piece(pieces, 2, K) * up * large + load_piece(pieces, 3, K) * (up * unstep)
    d_G += k_unit * d_k
    to_end = exp2(tl.where(r >= HALF, last[None, None, :], first[None, None, :]) - running)
    tail = load_piece(pieces, 6, K) * (to_end * tl.where(r >= HALF, 1.0, exp2(last)[None, None, :]))
    whole = tl.load(through + program * K + channel) + tl.sum(tl.sum(tail * k_unit, axis=1), axis=0)
    between = tl.load(pieces + 5 * CHUNK * K + r * K + channel[None, None, :], mask=r < HALF, other=0.0).to(tl.float32)
    d_key = load_piece(pieces, 4, K) * reciprocal(up) * large + tail + between * to_end
    d_G -= k_unit * d_key
    d_k += d_key + p_diagonal * q_unit
    if L2:
        d_k = (d_k - k_unit * tl.sum(d_k * k_unit, axis=2)[:, :, None]) * k_rstd
    tl.store(dk + out, d_k.to(dk.dtype.element_ty), mask=there)

    d_z = tl.where(there, running_after(d_G, K) + whole[None, None, :], 0.0)
    if GATE == 1:
        rate = 1.0
        if HAS_A:
            rate = tl.exp(tl.load(a_log + head).to(tl.float32))
        x = load_fours(g, start, count, g_token, K)
        if HAS_BIAS:
            x += tl.load(dt_bias + channel).to(tl.float32)[None, None, :]
        s = reciprocal(1.0 + exp2(x * (-LOG2E * rate)))
        d_z *= (lower_bound * rate) * s * (1.0 - s)
        if HAS_A:
            tl.store(dA_part + program, tl.sum(tl.sum(tl.sum(d_z * x, axis=2), axis=1), axis=0))
        if HAS_BIAS:
            tl.store(dbias_part + program * K + channel, tl.sum(tl.sum(d_z, axis=1), axis=0))
    tl.store(dz + out, d_z.to(dz.dtype.element_ty), mask=there)
