"""Causal attention on a CUDA device with keys and values of different width, packed documents, and an output in fp32.

    o[t] = sum over first[t] <= s <= past + t of softmax_s(scale q[t].k[s]) v[s]

What the libraries' kernels lack for training: the output is stored as the accumulator holds it, in fp32 where asked
(report §2.1.2), and the backward pass takes <do, o> from that; a packed document costs what it costs alone, since a tile of
queries begins with the first key of its first document; nothing of size T x T exists, and lengths stay on the device.

Forward: a tile of queries through its keys, online softmax; saved are o and the logarithm of the denominator. Backward: a
pass over o for <do, o>; a tile of keys through its queries for dk and dv; a tile of queries through its keys for dq.
Scores are computed again in both; every sum has a fixed order, so gradients repeat bit for bit.

A key of K channels is two pieces, of KA and KB channels, powers of two around K: 192 is 128 and 64.
"""

# What stands in a kernel is Triton's language, whose loops and constants Python's types do not describe.
# pyright: reportGeneralTypeIssues=false, reportAssignmentType=false, reportAttributeAccessIssue=false

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from perilune.ops.mla.documents import Layout
from perilune.ops.triton.products import product, trips
from perilune.ops.triton.sizes import blocks, power_of_two

LOG2E = 1.4426950408889634
NUMBERS = ["tokens", "keys", "past"]  # vary from call to call: not worth a compilation each


@triton.jit
def load_tile(base, row, stride, there, START: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """[rows, BLOCK] of channels START to START + BLOCK, zeros beyond WIDTH and where a row is not there."""
    channel = START + tl.arange(0, BLOCK)
    at = base + row[:, None].to(tl.int64) * stride + channel[None, :]
    if START + BLOCK <= WIDTH:
        return tl.load(at, there[:, None], 0.0)
    return tl.load(at, there[:, None] & (channel < WIDTH)[None, :], 0.0)


@triton.jit
def store_tile(base, row, stride, there, tile, START: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    channel = START + tl.arange(0, BLOCK)
    at = base + row[:, None].to(tl.int64) * stride + channel[None, :]
    tl.store(at, tile.to(base.dtype.element_ty), there[:, None] & (channel < WIDTH)[None, :])


@triton.jit
def _forward_step(
    start, qa, qb, k, v, k_s, v_s, keys, limit, first, acc, top, denominator, factor, K: tl.constexpr, KA: tl.constexpr,
    KB: tl.constexpr, V: tl.constexpr, BV: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, MASKED: tl.constexpr,
    PACKED: tl.constexpr,
):  # fmt: skip
    key = start + tl.arange(0, BN)
    there = key < keys
    score = product(qa, tl.trans(load_tile(k, key, k_s, there, 0, K, KA)), tl.zeros([BM, BN], tl.float32))
    if KB > 0:
        score = product(qb, tl.trans(load_tile(k, key, k_s, there, KA, K, KB)), score)
    score = score * factor
    if MASKED:
        seen = key[None, :] <= limit[:, None]
        if PACKED:
            seen = seen & (key[None, :] >= first[:, None])
        score = tl.where(seen, score, float("-inf"))
    higher = tl.maximum(top, tl.max(score, 1))
    safe = higher
    if PACKED:  # a row whose document has not begun
        safe = tl.where(higher == float("-inf"), 0.0, higher)
    kept, weight = tl.exp2(top - safe), tl.exp2(score - safe[:, None])
    denominator = denominator * kept + tl.sum(weight, 1)
    tile = load_tile(v, key, v_s, there, 0, V, BV)
    return product(weight.to(tile.dtype), tile, acc * kept[:, None]), higher, denominator


@triton.jit(do_not_specialize=NUMBERS)
def _forward_kernel(
    q, k, v, firsts, out, logs, q_b, q_t, q_h, k_b, k_s, k_h, v_b, v_s, v_h, tokens, keys, past, heads, factor,
    K: tl.constexpr, KA: tl.constexpr, KB: tl.constexpr, V: tl.constexpr, BV: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, PACKED: tl.constexpr, lasts=None,
):  # fmt: skip
    tile = tl.num_programs(0) - 1 - tl.program_id(0)  # the longest rows first
    head, batch = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    t = tile * BM + tl.arange(0, BM)
    there = t < tokens
    q += batch * q_b + head * q_h
    k += batch * k_b + head * k_h
    v += batch * v_b + head * v_h
    qa = load_tile(q, t, q_t, there, 0, K, KA)
    qb = qa
    if KB > 0:
        qb = load_tile(q, t, q_t, there, KA, K, KB)
    limit, first, begin = past + t, t, 0
    whole = (past + tile * BM) // BN * BN  # keys up to here are seen by every row
    end = tl.minimum(past + (tile + 1) * BM, keys)
    if PACKED:
        first = tl.load(firsts + t, there, 0)
        begin = tl.load(firsts + tile * BM) // BN * BN
        whole = begin
        if (
            lasts is not None
        ):  # documents that go on behind caches of their own: keys are others than the queries' tokens
            final = tl.minimum((tile + 1) * BM, tokens) - 1
            limit, end = tl.load(lasts + t, there, 0), tl.load(lasts + final) + 1
            if (tl.load(firsts + final) == tl.load(firsts + tile * BM)) & (tl.load(firsts + tile * BM) == begin):
                whole = (tl.load(lasts + tile * BM) + 1) // BN * BN  # all rows are of one document
    acc = tl.zeros([BM, BV], tl.float32)
    top = tl.full([BM], float("-inf"), tl.float32)
    denominator = tl.zeros([BM], tl.float32)
    if not PACKED or lasts is not None:
        for start in range(trips(begin) if PACKED else 0, trips(whole), BN):
            acc, top, denominator = _forward_step(
                start, qa, qb, k, v, k_s, v_s, keys, limit, first, acc, top, denominator, factor, K, KA, KB, V, BV, BM, BN,
                False, PACKED,
            )  # fmt: skip
    for start in range(trips(whole), trips(end), BN):
        acc, top, denominator = _forward_step(
            start, qa, qb, k, v, k_s, v_s, keys, limit, first, acc, top, denominator, factor, K, KA, KB, V, BV, BM, BN,
            True, PACKED,
        )  # fmt: skip
    out += (batch * tokens * heads + head) * V
    store_tile(out, t, heads * V, there, acc * (1.0 / denominator)[:, None], 0, V, BV)
    if logs is not None:
        tl.store(logs + (batch * heads + head) * tokens + t, top + tl.log2(denominator), there)


class Tiles(NamedTuple):
    """Queries and keys of a tile, warps, stages of the pipeline."""

    queries: int
    keys: int
    warps: int
    stages: int


FORWARD_TILES = Tiles(128, 64, 8, 3)  # the fastest of those measured on one H200 at 192 and 128 channels, as are these:
BACKWARD_TILES = Tiles(64, 128, 8, 2), Tiles(128, 64, 8, 3)  # of the kernel of dk and dv, and of that of dq
EXACT = Tiles(32, 32, 4, 1)  # float32 is multiplied without tensor cores


def forward_tiles(dtype: torch.dtype) -> Tiles:
    """Tiles of the forward kernel."""
    return EXACT if dtype == torch.float32 else FORWARD_TILES


def backward_tiles(dtype: torch.dtype) -> tuple[Tiles, Tiles]:
    """Tiles of the kernel of dk and dv, and of that of dq."""
    return (EXACT, EXACT) if dtype == torch.float32 else BACKWARD_TILES


def widths(key_width: int, value_width: int) -> dict[str, int]:
    """The kernels' constants of these widths."""
    first = max(16, 1 << (key_width.bit_length() - 1))
    rest = key_width - first
    padded = max(16, power_of_two(value_width))
    return {
        "K": key_width,
        "KA": first,
        "KB": max(16, power_of_two(rest)) if rest > 0 else 0,
        "V": value_width,
        "BV": padded,
    }


def forward(
    q: Tensor, k: Tensor, v: Tensor, scale: float, layout: Layout | None, past: int, out_dtype: torch.dtype,
    training: bool, tiles: Tiles | None = None,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Launch the forward kernel. Returns o `[B, T, H, V]` and for training log2 of the denominators `[B, H, T]`."""
    batch, tokens, heads, _ = q.shape
    out = torch.empty(batch, tokens, heads, v.shape[3], dtype=out_dtype, device=q.device)
    logs = torch.empty(batch, heads, tokens, device=q.device) if training else None
    if out.numel():
        tile = tiles or forward_tiles(q.dtype)
        _forward_kernel[(blocks(tokens, tile.queries), heads, batch)](
            q, k, v, None if layout is None else layout.first, out, logs, *q.stride()[:3], *k.stride()[:3], *v.stride()[:3],
            tokens, k.shape[1], past, heads, scale * LOG2E, **widths(q.shape[3], v.shape[3]), BM=tile.queries, BN=tile.keys,
            PACKED=layout is not None, lasts=None, num_warps=tile.warps, num_stages=tile.stages,
        )  # fmt: skip
    return out, logs


def forward_chunks(
    q: Tensor, k: Tensor, v: Tensor, scale: float, first: Tensor, last: Tensor, out: Tensor, tiles: Tiles | None = None
) -> None:
    """Launch the forward kernel on a row of chunks behind caches of their own.

    Args:
        q, k, v: `[1, T, H, K]`, `[1, S, H, K]`, `[1, S, H, V]`.
        first, last: int32 `[T]`, the first and the last key that a query sees, not falling.
        out: `[1, T, H, V]`, dense.
    """
    _, tokens, heads, _ = q.shape
    tile = tiles or forward_tiles(q.dtype)
    _forward_kernel[(blocks(tokens, tile.queries), heads, 1)](
        q, k, v, first, out, None, *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], tokens, k.shape[1], 0, heads,
        scale * LOG2E, **widths(q.shape[3], v.shape[3]), BM=tile.queries, BN=tile.keys, PACKED=True, lasts=last,
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
