"""The serial part of the forward pass: walk the chunks of a unit (a sequence or a segment of one) with the state.

    R = beta (V - Kd S)      U = A R      O = Qd S + P U      S' = gamma S + Kr^T U

Everything is held transposed, S^T `[V, K]` with V on the rows of the tensor cores: S, R and U then go from one product's
accumulator straight into the next product's registers, and only what `prepare` wrote comes from shared memory.
"""

from __future__ import annotations

import triton
import triton.language as tl

from perilune.ops.kda.triton.tiles import CHUNK, dot, dot_add, trips


@triton.jit
def scan_forward_kernel(
    v, Qd, Kd, Kr, P, A, gamma, beta, units, state_in, state_out, o, U, S, slots, exported,
    v_token, v_head, in_unit, in_head, in_v, in_k, out_unit, out_head, out_v, out_k,
    heads,
    K: tl.constexpr, V: tl.constexpr, BV: tl.constexpr,
    HAS_STATE: tl.constexpr, SPLIT: tl.constexpr, FINAL: tl.constexpr, KEEP: tl.constexpr,
):  # fmt: skip
    """One program a unit, head and BV value channels.

    units: see `plan`. state_in has a row a unit with SPLIT, else a row a sequence. o is `[tokens, heads, V]`. With KEEP, U `[chunks, heads, 64, V]` and the state S that enters each chunk
    `[chunks, heads, V, K]` are kept for the backward pass. slots, exported: see `states.Exports`.
    """
    blocks: tl.constexpr = V // BV
    block = tl.program_id(0) % blocks
    head = (tl.program_id(0) // blocks).to(tl.int64)
    unit = tl.program_id(1)
    first = tl.load(units + 6 * unit).to(tl.int64)
    count = tl.load(units + 6 * unit + 1)
    token = tl.load(units + 6 * unit + 2).to(tl.int64)
    end = tl.load(units + 6 * unit + 3)
    begins = tl.load(units + 6 * unit + 4).to(tl.int64)
    target = tl.load(units + 6 * unit + 5).to(tl.int64)

    r = tl.arange(0, CHUNK)
    channel = tl.arange(0, K)
    value = block * BV + tl.arange(0, BV)
    T = Qd.dtype.element_ty
    state = tl.zeros([BV, K], tl.float32)
    if HAS_STATE:
        source = unit.to(tl.int64) if SPLIT else begins
        if (begins >= 0) | (token < end):  # else of a chunk without tokens, in tables with room for others
            state = tl.load(
                state_in + source * in_unit + head * in_head + value[:, None] * in_v + channel[None, :] * in_k
            ).to(tl.float32)
    rows = r[:, None] * K + channel[None, :]
    square = r[:, None] * CHUNK + r[None, :]
    for i in range(trips(count)):
        at = (first + i) * heads + head
        tokens = token + i * CHUNK + r
        there = (tokens < end)[:, None]
        kd = tl.load(Kd + at * (CHUNK * K) + rows)
        qd = tl.load(Qd + at * (CHUNK * K) + rows)
        kr = tl.load(Kr + at * (CHUNK * K) + rows)
        a = tl.load(A + at * (CHUNK * CHUNK) + square)
        p = tl.load(P + at * (CHUNK * CHUNK) + square)
        decay = tl.load(gamma + at * K + channel)
        strength = tl.load(beta + at * CHUNK + r)
        v_CV = tl.load(v + tokens[:, None] * v_token + head * v_head + value[None, :], mask=there, other=0.0)
        s = state.to(T)
        if KEEP:
            tl.store(S + at * (V * K) + value[:, None] * K + channel[None, :], s)
        error = tl.trans(v_CV).to(tl.float32) - dot(s, tl.trans(kd))
        u = dot((error * strength[None, :]).to(T), tl.trans(a)).to(T)
        out = dot_add(u, tl.trans(p), dot(s, tl.trans(qd)))
        state = dot_add(u, kr, state * decay[None, :])
        if slots is not None:
            slot = tl.load(slots + first + i).to(tl.int64)
            if slot >= 0:
                cells = value[:, None] * K + channel[None, :]
                tl.store(exported + (slot * heads + head) * (V * K) + cells, state)
        out_CV = tl.trans(out).to(o.dtype.element_ty)
        tl.store(o + (tokens[:, None] * heads + head) * V + value[None, :], out_CV, mask=there)
        if KEEP:
            tl.store(U + at * (CHUNK * V) + r[:, None] * V + value[None, :], tl.trans(u))
    if FINAL:
        if target >= 0:
            tl.store(
                state_out + target * out_unit + head * out_head + value[:, None] * out_v + channel[None, :] * out_k,
                state,
            )
