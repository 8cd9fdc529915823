"""The backward kernels of `triton_attend`.

With p the softmax weights and delta[t] = <do[t], o[t]>:

    dv[s] = sum_t p[t,s] do[t]      ds[t,s] = p[t,s] (<do[t], v[s]> - delta[t])
    dq[t] = scale sum_s ds[t,s] k[s]      dk[s] = scale sum_t ds[t,s] q[t]
"""

# What stands in a kernel is Triton's language, whose loops and constants Python's types do not describe.
# pyright: reportGeneralTypeIssues=false, reportAssignmentType=false, reportAttributeAccessIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from perilune.ops.mla.documents import Layout
from perilune.ops.mla.triton_attend import LOG2E, NUMBERS, Tiles, backward_tiles, load_tile, store_tile, widths
from perilune.ops.triton.products import product, trips
from perilune.ops.triton.sizes import blocks

DELTA_ROWS = 16  # rows of a program that takes <do, o>


@triton.jit
def _delta_kernel(out, dout, narrow, delta, do_b, do_t, do_h, tokens, heads, V: tl.constexpr, BV: tl.constexpr, BM: tl.constexpr):  # fmt: skip
    head, batch = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    t = tl.program_id(0) * BM + tl.arange(0, BM)
    there = t < tokens
    dense = (batch * tokens * heads + head) * V
    do = load_tile(dout + batch * do_b + head * do_h, t, do_t, there, 0, V, BV)
    o = load_tile(out + dense, t, heads * V, there, 0, V, BV)
    tl.store(delta + (batch * heads + head) * tokens + t, tl.sum(do.to(tl.float32) * o.to(tl.float32), 1), there)
    if narrow is not None:
        store_tile(narrow + dense, t, heads * V, there, do, 0, V, BV)


@triton.jit
def _keys_step(
    start, ka, kb, v, q, dout, logs, delta, firsts, q_t, do_t, tokens, past, key, dka, dkb, dv, factor, K: tl.constexpr,
    KA: tl.constexpr, KB: tl.constexpr, V: tl.constexpr, BV: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    PACKED: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    t = start + tl.arange(0, BM)
    there = t < tokens
    qa = load_tile(q, t, q_t, there, 0, K, KA)
    score = product(ka, tl.trans(qa), tl.zeros([BN, BM], tl.float32))
    qb = qa
    if KB > 0:
        qb = load_tile(q, t, q_t, there, KA, K, KB)
        score = product(kb, tl.trans(qb), score)
    log = tl.load(logs + t, there, float("inf"))  # a row that is not there weighs nothing
    weight = tl.exp2(score * factor - log[None, :])
    if MASKED:
        seen = key[:, None] <= (past + t)[None, :]
        if PACKED:
            seen = seen & (key[:, None] >= tl.load(firsts + t, there, 0)[None, :])
        weight = tl.where(seen, weight, 0.0)
    do = load_tile(dout, t, do_t, there, 0, V, BV)
    dv = product(weight.to(do.dtype), do, dv)
    pull = product(v, tl.trans(do), tl.zeros([BN, BM], tl.float32))
    ds = (weight * (pull - tl.load(delta + t, there, 0.0)[None, :])).to(qa.dtype)
    dka = product(ds, qa, dka)
    if KB > 0:
        dkb = product(ds, qb, dkb)
    return dka, dkb, dv


@triton.jit(do_not_specialize=NUMBERS)
def _keys_kernel(
    q, k, v, dout, logs, delta, firsts, ends, dk, dv, q_b, q_t, q_h, k_b, k_s, k_h, v_b, v_s, v_h, do_b, do_t, do_h, tokens,
    keys, past, heads, factor, scale, K: tl.constexpr, KA: tl.constexpr, KB: tl.constexpr, V: tl.constexpr, BV: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)  # early keys have the most queries
    head, batch = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    key = tile * BN + tl.arange(0, BN)
    there = key < keys
    q += batch * q_b + head * q_h
    dout += batch * do_b + head * do_h
    logs += (batch * heads + head) * tokens
    delta += (batch * heads + head) * tokens
    ka = load_tile(k + batch * k_b + head * k_h, key, k_s, there, 0, K, KA)
    kb = ka
    dkb = tl.zeros([BN, KA], tl.float32)
    if KB > 0:
        kb = load_tile(k + batch * k_b + head * k_h, key, k_s, there, KA, K, KB)
        dkb = tl.zeros([BN, KB], tl.float32)
    values = load_tile(v + batch * v_b + head * v_h, key, v_s, there, 0, V, BV)
    dka = tl.zeros([BN, KA], tl.float32)
    dvalues = tl.zeros([BN, BV], tl.float32)
    begin = tl.maximum(tile * BN - past, 0) // BM * BM
    end = tokens
    if PACKED:
        end = tl.load(ends + tl.minimum(tile * BN + BN, keys) - 1)
        whole = end
    else:  # from here on every query sees every key of the tile
        whole = tl.minimum(tl.cdiv(tl.maximum(tile * BN + BN - 1 - past, 0), BM) * BM, end)
    for start in range(trips(begin), trips(whole), BM):
        dka, dkb, dvalues = _keys_step(
            start, ka, kb, values, q, dout, logs, delta, firsts, q_t, do_t, tokens, past, key, dka, dkb, dvalues, factor, K, KA,
            KB, V, BV, BM, BN, PACKED, True,
        )  # fmt: skip
    if not PACKED:
        for start in range(trips(whole), trips(end), BM):
            dka, dkb, dvalues = _keys_step(
                start, ka, kb, values, q, dout, logs, delta, firsts, q_t, do_t, tokens, past, key, dka, dkb, dvalues, factor, K,
                KA, KB, V, BV, BM, BN, PACKED, False,
            )  # fmt: skip
    dense = batch * keys * heads + head
    store_tile(dk + dense * K, key, heads * K, there, dka * scale, 0, K, KA)
    if KB > 0:
        store_tile(dk + dense * K, key, heads * K, there, dkb * scale, KA, K, KB)
    store_tile(dv + dense * V, key, heads * V, there, dvalues, 0, V, BV)


@triton.jit
def _queries_step(
    start, qa, qb, do, k, v, k_s, v_s, keys, limit, first, log, delta, dqa, dqb, factor, K: tl.constexpr, KA: tl.constexpr,
    KB: tl.constexpr, V: tl.constexpr, BV: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, PACKED: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    key = start + tl.arange(0, BN)
    there = key < keys
    ka = load_tile(k, key, k_s, there, 0, K, KA)
    score = product(qa, tl.trans(ka), tl.zeros([BM, BN], tl.float32))
    kb = ka
    if KB > 0:
        kb = load_tile(k, key, k_s, there, KA, K, KB)
        score = product(qb, tl.trans(kb), score)
    weight = tl.exp2(score * factor - log[:, None])
    if MASKED:
        seen = key[None, :] <= limit[:, None]
        if PACKED:
            seen = seen & (key[None, :] >= first[:, None])
        weight = tl.where(seen, weight, 0.0)
    pull = product(do, tl.trans(load_tile(v, key, v_s, there, 0, V, BV)), tl.zeros([BM, BN], tl.float32))
    ds = (weight * (pull - delta[:, None])).to(ka.dtype)
    dqa = product(ds, ka, dqa)
    if KB > 0:
        dqb = product(ds, kb, dqb)
    return dqa, dqb


@triton.jit(do_not_specialize=NUMBERS)
def _queries_kernel(
    q, k, v, dout, logs, deltas, firsts, dq, q_b, q_t, q_h, k_b, k_s, k_h, v_b, v_s, v_h, do_b, do_t, do_h, tokens, keys, past,
    heads, factor, scale, K: tl.constexpr, KA: tl.constexpr, KB: tl.constexpr, V: tl.constexpr, BV: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    head, batch = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    t = tile * BM + tl.arange(0, BM)
    there = t < tokens
    q += batch * q_b + head * q_h
    k += batch * k_b + head * k_h
    v += batch * v_b + head * v_h
    qa = load_tile(q, t, q_t, there, 0, K, KA)
    qb = qa
    dqb = tl.zeros([BM, KA], tl.float32)
    if KB > 0:
        qb = load_tile(q, t, q_t, there, KA, K, KB)
        dqb = tl.zeros([BM, KB], tl.float32)
    do = load_tile(dout + batch * do_b + head * do_h, t, do_t, there, 0, V, BV)
    log = tl.load(logs + (batch * heads + head) * tokens + t, there, float("inf"))
    delta = tl.load(deltas + (batch * heads + head) * tokens + t, there, 0.0)
    limit, first, begin = past + t, t, 0
    whole = (past + tile * BM) // BN * BN
    if PACKED:
        first = tl.load(firsts + t, there, 0)
        begin = tl.load(firsts + tile * BM) // BN * BN
        whole = begin
    end = tl.minimum(past + (tile + 1) * BM, keys)
    dqa = tl.zeros([BM, KA], tl.float32)
    if not PACKED:
        for start in range(0, trips(whole), BN):
            dqa, dqb = _queries_step(
                start, qa, qb, do, k, v, k_s, v_s, keys, limit, first, log, delta, dqa, dqb, factor, K, KA, KB, V, BV, BM, BN,
                PACKED, False,
            )  # fmt: skip
    for start in range(trips(whole), trips(end), BN):
        dqa, dqb = _queries_step(
            start, qa, qb, do, k, v, k_s, v_s, keys, limit, first, log, delta, dqa, dqb, factor, K, KA, KB, V, BV, BM, BN,
            PACKED, True,
        )  # fmt: skip
    dense = (batch * tokens * heads + head) * K
    store_tile(dq + dense, t, heads * K, there, dqa * scale, 0, K, KA)
    if KB > 0:
        store_tile(dq + dense, t, heads * K, there, dqb * scale, KA, K, KB)


def backward(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, logs: Tensor, dout: Tensor, scale: float, layout: Layout | None, past: int,
    tiles: tuple[Tiles, Tiles] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Launch the backward kernels. Returns the gradients of q, k and v in their dtype."""
    batch, tokens, heads, _ = q.shape
    dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    if not out.numel():
        return dq, dk, dv
    dout = dout if dout.stride(-1) == 1 else dout.contiguous()
    width = widths(q.shape[3], v.shape[3])
    delta = torch.empty_like(logs)
    narrow = None if dout.dtype == q.dtype else torch.empty(out.shape, dtype=q.dtype, device=q.device)
    _delta_kernel[(blocks(tokens, DELTA_ROWS), heads, batch)](
        out, dout, narrow, delta, *dout.stride()[:3], tokens, heads, V=width["V"], BV=width["BV"], BM=DELTA_ROWS
    )
    dout = dout if narrow is None else narrow
    first, end = (None, None) if layout is None else layout
    strides = [step for x in (q, k, v, dout) for step in x.stride()[:3]]
    keys_tile, queries_tile = tiles or backward_tiles(q.dtype)
    numbers = (tokens, k.shape[1], past, heads, scale * LOG2E, scale)
    _keys_kernel[(blocks(k.shape[1], keys_tile.keys), heads, batch)](
        q, k, v, dout, logs, delta, first, end, dk, dv, *strides, *numbers, **width, **_launch(keys_tile, layout)
    )
    _queries_kernel[(blocks(tokens, queries_tile.queries), heads, batch)](
        q, k, v, dout, logs, delta, first, dq, *strides, *numbers, **width, **_launch(queries_tile, layout)
    )
    return dq, dk, dv


def _launch(tile: Tiles, layout: Layout | None) -> dict[str, int | bool]:
    sizes = {"BM": tile.queries, "BN": tile.keys, "PACKED": layout is not None}
    return {**sizes, "num_warps": tile.warps, "num_stages": tile.stages}
