"""Absorbed attention against cached latents in Triton, for what the CUDA kernels do not take: other sizes and types.

A program takes a tile of rows (a row is a new token and a head) through one piece of a sequence's cache with an online
softmax and leaves the piece's normalised sum and the logarithm of its denominator; a second kernel weighs the pieces against
each other (see `device`).
"""

# What stands in a kernel is Triton's language, whose loops and constants Python's types do not describe.
# pyright: reportGeneralTypeIssues=false, reportAssignmentType=false, reportAttributeAccessIssue=false

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from perilune.ops.mla.device import LOG2E
from perilune.ops.triton.available import units
from perilune.ops.triton.products import product, trips
from perilune.ops.triton.sizes import blocks, power_of_two

NUMBERS = ["table_b", "cached", "tokens"]  # vary from call to call: not worth a compilation each
MERGE_NUMBERS = 4096  # of a tile of the merge: all pieces of some channels


@triton.jit
def _piece(lengths, batch, cached, split, splits, STEP: tl.constexpr):
    """(cached tokens of the sequence, first and last + 1 of this piece)."""
    length = cached
    if lengths is not None:
        length = tl.load(lengths + batch)
    size = tl.cdiv(tl.cdiv(length, STEP), splits) * STEP
    begin = tl.minimum(split * size, length)
    return length, begin, tl.minimum(begin + size, length)


@triton.jit
def _rows_of(tile, heads, count, length, tokens, end, BM: tl.constexpr):
    """Rows of a tile: their numbers, which exist, and the first cached token that each does not see."""
    row = tile * BM + tl.arange(0, BM)
    return row, row < count, tl.minimum(length - tokens + row // heads + 1, end)


@triton.jit
def _cache_rows(table, table_row, start, key, stride_b, stride_s, batch, PAGED: tl.constexpr, PAGE: tl.constexpr):
    """Offsets of cached tokens from the cache's start; a tile of a paged cache lies in one page."""
    if PAGED:
        page = tl.load(table + table_row + start // PAGE).to(tl.int64)
        return page * stride_b + (key % PAGE).to(tl.int64) * stride_s
    return batch * stride_b + key.to(tl.int64) * stride_s


@triton.jit(do_not_specialize=NUMBERS)
def _split_kernel(
    query, query_shared, latent, shared, lengths, table, sums, logs, shared_b, shared_t, shared_h, latent_b, latent_s, key_b,
    key_s, table_b, cached, tokens, heads, factor, L: tl.constexpr, R: tl.constexpr, BL: tl.constexpr, BR: tl.constexpr,
    BM: tl.constexpr, BS: tl.constexpr, PAGE: tl.constexpr, PAGED: tl.constexpr,
):  # fmt: skip
    tile, split, batch = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    splits, count = tl.num_programs(1), tokens * heads
    length, begin, end = _piece(lengths, batch, cached, split, splits, BS)
    row, there, limit = _rows_of(tile, heads, count, length, tokens, end, BM)
    channel, extra, step = tl.arange(0, BL), tl.arange(0, BR), tl.arange(0, BS)
    q = tl.load(
        query + (batch * count + row)[:, None] * L + channel[None, :], there[:, None] & (channel < L)[None, :], 0.0
    )
    if R > 0:
        at = batch * shared_b + (row // heads) * shared_t + (row % heads) * shared_h
        q_shared = tl.load(query_shared + at[:, None] + extra[None, :], there[:, None] & (extra < R)[None, :], 0.0)
    top = tl.full([BM], float("-inf"), tl.float32)
    denominators = tl.zeros([BM, BS], tl.float32)  # summed once at the end: a sum over threads is a barrier
    acc = tl.zeros([BM, BL], tl.float32)
    for start in range(trips(begin), trips(end), BS):
        key = start + step
        inside = (key < end)[:, None]
        place = _cache_rows(table, batch * table_b, start, key, latent_b, latent_s, batch, PAGED, PAGE)
        k = tl.load(latent + place[:, None] + channel[None, :], inside & (channel < L)[None, :], 0.0)
        score = product(q, tl.trans(k), tl.zeros([BM, BS], tl.float32))
        if R > 0:
            place = _cache_rows(table, batch * table_b, start, key, key_b, key_s, batch, PAGED, PAGE)
            k_shared = tl.load(shared + place[:, None] + extra[None, :], inside & (extra < R)[None, :], 0.0)
            score += product(q_shared, tl.trans(k_shared), tl.zeros([BM, BS], tl.float32))
        score = tl.where(key[None, :] < limit[:, None], score * factor, float("-inf"))
        higher = tl.maximum(top, tl.max(score, 1))
        safe = tl.where(higher == float("-inf"), 0.0, higher)  # a row that sees nothing yet
        kept, weight = tl.exp2(top - safe), tl.exp2(score - safe[:, None])
        denominators = denominators * kept[:, None] + weight
        acc = product(weight.to(q.dtype), k, acc * kept[:, None])
        top = higher
    at = (batch * splits + split) * count + row
    denominator = tl.sum(denominators, 1)
    inverse = tl.where(denominator == 0.0, 0.0, 1.0 / denominator)
    out = (acc * inverse[:, None]).to(sums.dtype.element_ty)
    tl.store(sums + at[:, None] * L + channel[None, :], out, there[:, None] & (channel < L)[None, :])
    if logs is not None:
        tl.store(logs + at, top + tl.log2(denominator), there)


@triton.jit(do_not_specialize=["splits"])
def _merge_kernel(sums, logs, out, splits, count, L: tl.constexpr, BL: tl.constexpr, BN: tl.constexpr):
    row, batch = tl.program_id(0), tl.program_id(2).to(tl.int64)
    channel, piece = tl.program_id(1) * BL + tl.arange(0, BL), tl.arange(0, BN)
    at = (batch * splits + piece) * count + row
    log = tl.load(logs + at, piece < splits, float("-inf"))
    there = log != float("-inf")  # a piece without cached tokens left no sum
    part = tl.load(sums + at[:, None] * L + channel[None, :], there[:, None] & (channel < L)[None, :], 0.0)
    highest = tl.max(log, 0)
    weight = tl.exp2(log - tl.where(highest == float("-inf"), 0.0, highest))
    total = tl.sum(weight, 0)
    mixed = tl.sum(part * weight[:, None], 0) * tl.where(total == 0.0, 0.0, 1.0 / total)
    tl.store(out + (batch * count + row) * L + channel, mixed.to(out.dtype.element_ty), channel < L)


class Tiling(NamedTuple):
    """How the split kernel is launched: rows and cached tokens of a tile, warps, stages of the pipeline."""

    rows: int
    keys: int
    warps: int
    stages: int


TILINGS = (Tiling(16, 64, 8, 3), Tiling(32, 64, 8, 3), Tiling(64, 64, 8, 2))  # by rows; the fastest of those measured
EXACT = Tiling(16, 16, 4, 2)  # float32 is multiplied without tensor cores: small tiles, for what must be exact


def tiling(rows: int, element_size: int) -> Tiling:
    """The tiles for `rows` rows of each sequence."""
    if element_size > 2:
        return EXACT
    return next((tile for tile in TILINGS if rows <= tile.rows), TILINGS[-1])


def pieces(batch: int, tiles: int, steps: int, programs: int) -> int:
    """Pieces that a sequence's cache is cut into: the fewest whose work is spread over `programs` within 5 % of evenly.

    Args:
        batch, tiles: sequences, and tiles of rows of each.
        steps: tiles of cached tokens of the longest sequence.
        programs: programs that the device runs at once.
    """
    most = max(1, min(steps, programs))
    rounds = [-(-batch * tiles * n // programs) / n for n in range(1, most + 1)]
    least = min(rounds)
    return next(n for n, time in enumerate(rounds, 1) if time <= 1.05 * least)


def context(
    query_BQL: Tensor, query_shared_BTHr: Tensor, latent_BSL: Tensor, shared_BSr: Tensor, scale: float,
    length_B: Tensor | None = None, table_BP: Tensor | None = None, options: Tiling | None = None, splits: int | None = None,
) -> Tensor:  # fmt: skip
    """`device.context` for floats of any type, latents of at most 512 channels and any number of shared ones.

    Args:
        options, splits: overrule the choices made here.
    """
    if query_shared_BTHr.stride(-1) != 1:
        query_shared_BTHr = query_shared_BTHr.contiguous()
    latent_BSL, shared_BSr = (x if x.stride(-1) == 1 else x.contiguous() for x in (latent_BSL, shared_BSr))
    batch, tokens, heads, extra = query_shared_BTHr.shape
    count, width = tokens * heads, query_BQL.shape[2]
    page = latent_BSL.shape[1]  # with a table; tiles lie in one, since 64 divides it
    capacity = page if table_BP is None else table_BP.shape[1] * page
    padded, padded_extra = max(16, power_of_two(width)), max(16, power_of_two(extra))
    tile = options or tiling(count, query_BQL.element_size())
    tiles = blocks(count, tile.rows)
    if splits is None:
        splits = pieces(batch, tiles, blocks(capacity, tile.keys), units(query_BQL.device))
    out = torch.empty_like(query_BQL)
    sums, logs = out, None
    if splits > 1:
        sums = torch.empty(batch, splits, count, width, device=out.device)
        logs = torch.empty(batch, splits, count, device=out.device)
    _split_kernel[(tiles, splits, batch)](
        query_BQL, query_shared_BTHr, latent_BSL, shared_BSr, length_B, table_BP, sums, logs, *query_shared_BTHr.stride()[:3],
        *latent_BSL.stride()[:2], *shared_BSr.stride()[:2], 0 if table_BP is None else table_BP.stride(0), capacity, tokens,
        heads, scale * LOG2E, L=width, R=extra, BL=padded, BR=padded_extra, BM=tile.rows, BS=tile.keys,
        PAGE=1 if table_BP is None else page, PAGED=table_BP is not None, num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    if logs is not None:
        pieces_padded = power_of_two(splits)
        part = max(16, min(padded, MERGE_NUMBERS // pieces_padded))
        _merge_kernel[(count, blocks(width, part), batch)](
            sums, logs, out, splits, count, L=width, BL=part, BN=pieces_padded, num_warps=4
        )
    return out
