"""Few heads and long sequences: a sequence is cut into segments that run side by side.

A segment acts on the state that enters it as S -> M S + N. One kernel finds M and N of all segments at once, a second
one folds them to the state at every cut, and the segments then run like sequences of their own. The backward pass folds
in reverse with the transposed M. (kernels §2.4; float32 composition in three products of tf32: traps T04.)
"""

from __future__ import annotations

import triton
import triton.language as tl

from perilune.ops.kda.triton.tiles import CHUNK, INTERPRET, dot, dot_add, trips


@triton.jit
def precise_dot(a, b, accumulator):
    """accumulator + a @ b to float32 accuracy."""
    if INTERPRET:
        return tl.dot(a, b, accumulator, input_precision="ieee")
    return tl.dot(a, b, accumulator, input_precision="tf32x3")


@triton.jit
def summary_kernel(
    v, Kd, Kr, A, gamma, beta, units, state_in, M, N,
    v_token, v_head, in_unit, in_head, in_v, in_k,
    heads,
    K: tl.constexpr, V: tl.constexpr, BV: tl.constexpr, HAS_STATE: tl.constexpr,
):  # fmt: skip
    """M^T `[units, heads, K, K]` and N^T `[units, heads, V, K]` (float32) of every unit but the last of its sequence.

    The columns of M are states that start from unit vectors and write no values: one program takes BV columns of M or
    of N. A sequence's first unit needs no M, its N starts from the sequence's own state.
    """
    v_blocks: tl.constexpr = V // BV
    blocks: tl.constexpr = v_blocks + K // BV
    block = tl.program_id(0) % blocks
    head = (tl.program_id(0) // blocks).to(tl.int64)
    unit = tl.program_id(1).to(tl.int64)
    first = tl.load(units + 6 * unit).to(tl.int64)
    count = tl.load(units + 6 * unit + 1)
    token = tl.load(units + 6 * unit + 2).to(tl.int64)
    end = tl.load(units + 6 * unit + 3)
    source = tl.load(units + 6 * unit + 4).to(tl.int64)
    is_last = tl.load(units + 6 * unit + 5) >= 0
    is_first = source >= 0
    writes = block < v_blocks
    if is_last:
        return
    if is_first & (block >= v_blocks):
        return
    r = tl.arange(0, CHUNK)
    channel = tl.arange(0, K)
    column = tl.where(writes, block, block - v_blocks) * BV + tl.arange(0, BV)
    T = Kd.dtype.element_ty
    state = tl.where(writes, 0.0, tl.where(column[:, None] == channel[None, :], 1.0, 0.0))
    if HAS_STATE:
        if is_first:
            state = tl.load(
                state_in + source * in_unit + head * in_head + column[:, None] * in_v + channel[None, :] * in_k
            ).to(tl.float32)
    rows = r[:, None] * K + channel[None, :]
    square = r[:, None] * CHUNK + r[None, :]
    for i in range(trips(count)):
        at = (first + i) * heads + head
        tokens = token + i * CHUNK + r
        there = (tokens < end)[:, None] & writes
        kd = tl.load(Kd + at * (CHUNK * K) + rows)
        kr = tl.load(Kr + at * (CHUNK * K) + rows)
        a = tl.load(A + at * (CHUNK * CHUNK) + square)
        decay = tl.load(gamma + at * K + channel)
        strength = tl.load(beta + at * CHUNK + r)
        v_CV = tl.load(v + tokens[:, None] * v_token + head * v_head + column[None, :], mask=there, other=0.0)
        error = tl.trans(v_CV).to(tl.float32) - dot(state.to(T), tl.trans(kd))
        u = dot((error * strength[None, :]).to(T), tl.trans(a)).to(T)
        state = dot_add(u, kr, state * decay[None, :])
    inside = column[:, None] * K + channel[None, :]
    if writes:
        tl.store(N + (unit * heads + head) * (V * K) + inside, state)
    else:
        tl.store(M + (unit * heads + head) * (K * K) + inside, state)


@triton.jit
def fold_kernel(
    M, N, state_in, sequences, entry,
    in_unit, in_head, in_v, in_k,
    heads,
    K: tl.constexpr, V: tl.constexpr, BV: tl.constexpr, HAS_STATE: tl.constexpr, REVERSE: tl.constexpr,
):  # fmt: skip
    """The state^T that enters every unit, `entry` `[units, heads, V, K]`. sequences: int32 `[N, 2]`, first unit, units.

    REVERSE: the cotangent of the state that leaves every unit, by the transposed M from the last unit to the first;
    state_in is then the cotangent of the final states.
    """
    blocks: tl.constexpr = V // BV
    block = tl.program_id(0) % blocks
    head = (tl.program_id(0) // blocks).to(tl.int64)
    sequence = tl.program_id(1).to(tl.int64)
    first = tl.load(sequences + 2 * sequence).to(tl.int64)
    count = tl.load(sequences + 2 * sequence + 1)
    value = block * BV + tl.arange(0, BV)
    channel = tl.arange(0, K)
    inside = value[:, None] * K + channel[None, :]
    state = tl.zeros([BV, K], tl.float32)
    if HAS_STATE:
        state = tl.load(
            state_in + sequence * in_unit + head * in_head + value[:, None] * in_v + channel[None, :] * in_k
        ).to(tl.float32)
    for i in range(trips(count)):
        if REVERSE:
            at = (first + count - 1 - i) * heads + head
            m_offsets = channel[None, :] * K + channel[:, None]
        else:
            at = (first + i) * heads + head
            m_offsets = channel[:, None] * K + channel[None, :]
        tl.store(entry + at * (V * K) + inside, state)
        if i + 1 < count:
            n = tl.load(N + at * (V * K) + inside)
            if i == 0:  # it began with the state itself
                state = n
            else:
                m = tl.load(M + at * (K * K) + m_offsets)
                state = precise_dot(state, m, n)
