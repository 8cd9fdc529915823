"""The serial part of the backward pass: walk the chunks in reverse with the cotangent of the state.

    dU = P^T dO + Kr dS'      E = beta A^T dU      dS = gamma dS' + Qd^T dO - Kd^T E

E is the gradient of V; with dR of kernels §2.4, E = beta dR. Transposed as in `scan_forward`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from perilune.ops.kda.triton.tiles import CHUNK, dot, dot_add, trips


@triton.jit
def scan_backward_kernel(
    do, Qd, Kd, Kr, P, A, gamma, beta, units, state_in, state_out, E, dS,
    do_token, do_head, in_unit, in_head, in_v, in_k, out_unit, out_head, out_v, out_k,
    heads,
    K: tl.constexpr, V: tl.constexpr, BV: tl.constexpr,
    HAS_STATE: tl.constexpr, SPLIT: tl.constexpr, FIRST: tl.constexpr, SUMMARY: tl.constexpr,
):  # fmt: skip
    """One program a unit, head and BV value channels; see `plan` for units.

    state_in: cotangent of the state that leaves the unit (SPLIT: a row a unit; else a row a sequence, of its last unit).
    Writes E `[tokens, heads, V]`, dS `[chunks, heads, V, K]` (the cotangent of the state that leaves each chunk), and
    with FIRST the cotangent of each sequence's entry state. SUMMARY instead writes, for every unit that does not begin
    a sequence, what it adds to the cotangent of its entry state, one row of state_out a unit.
    """
    blocks: tl.constexpr = V // BV
    block = tl.program_id(0) % blocks
    head = (tl.program_id(0) // blocks).to(tl.int64)
    unit = tl.program_id(1).to(tl.int64)
    first = tl.load(units + 6 * unit).to(tl.int64)
    count = tl.load(units + 6 * unit + 1)
    token = tl.load(units + 6 * unit + 2).to(tl.int64)
    end = tl.load(units + 6 * unit + 3)
    begins = tl.load(units + 6 * unit + 4).to(tl.int64)
    ends = tl.load(units + 6 * unit + 5).to(tl.int64)
    if SUMMARY:
        if begins >= 0:
            return

    r = tl.arange(0, CHUNK)
    channel = tl.arange(0, K)
    value = block * BV + tl.arange(0, BV)
    T = Qd.dtype.element_ty
    inside = value[:, None] * K + channel[None, :]
    state = tl.zeros([BV, K], tl.float32)
    if HAS_STATE:
        source = unit if SPLIT else ends
        if (source >= 0) & ((begins >= 0) | (token < end)):  # see `scan_forward`
            state = tl.load(
                state_in + source * in_unit + head * in_head + value[:, None] * in_v + channel[None, :] * in_k
            ).to(tl.float32)
    rows = r[:, None] * K + channel[None, :]
    square = r[:, None] * CHUNK + r[None, :]
    for step in range(trips(count)):
        i = count - 1 - step
        at = (first + i) * heads + head
        tokens = token + i * CHUNK + r
        there = (tokens < end)[:, None]
        kr = tl.load(Kr + at * (CHUNK * K) + rows)
        p = tl.load(P + at * (CHUNK * CHUNK) + square)
        a = tl.load(A + at * (CHUNK * CHUNK) + square)
        qd = tl.load(Qd + at * (CHUNK * K) + rows)
        kd = tl.load(Kd + at * (CHUNK * K) + rows)
        decay = tl.load(gamma + at * K + channel)
        strength = tl.load(beta + at * CHUNK + r)
        do_CV = tl.load(do + tokens[:, None] * do_token + head * do_head + value[None, :], mask=there, other=0.0)
        do_VC = tl.trans(do_CV.to(T))
        s = state.to(T)
        if not SUMMARY:
            tl.store(dS + at * (V * K) + inside, s)
        du = dot_add(do_VC, p, dot(s, tl.trans(kr)))
        e = dot(du.to(T), a) * strength[None, :]
        state = dot_add(do_VC, qd, state * decay[None, :])
        state = dot_add((-e).to(T), kd, state)
        if not SUMMARY:
            e_CV = tl.trans(e.to(T))
            tl.store(E + (tokens[:, None] * heads + head) * V + value[None, :], e_CV, mask=there)
    if SUMMARY:
        tl.store(state_out + (unit * heads + head) * (V * K) + inside, state)
    if FIRST:
        if begins >= 0:
            tl.store(
                state_out + begins * out_unit + head * out_head + value[:, None] * out_v + channel[None, :] * out_k,
                state,
            )
