"""Attention over depth in two phases on a CUDA device, without gradients.

Phase one scores and sums n finished blocks for S read sites at once. Scores are a matrix product, [tokens, D] x [D, S] for
each block, with float32 weights (three tf32 products; the blocks themselves are exact in tf32 if they are half-precision).
The sums take each block once for all sites. They are stored in the blocks' dtype: a partial sum of weights at most 1 is
rounded as the result will be. Phase two, the merge with the running sum, is the kernel of a whole read with a bank that
is already summed.
"""

# What stands in a kernel is Triton's language, whose loops and constants Python's types do not describe.
# pyright: reportGeneralTypeIssues=false, reportAssignmentType=false

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from perilune.ops.attnres.triton_mix import aligned, pick, row_views
from perilune.ops.native.rows import parameter
from perilune.ops.triton.available import interpreted
from perilune.ops.triton.sizes import blocks, power_of_two

TOKENS, PIECE = 64, 64  # of the product's tile
CHANNELS = 1024  # numbers of a row that a program of the sums takes


@triton.jit
def _scores_kernel(
    bank, strides, score_weights, scores, rows, sites, eps, D: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr,
    BS: tl.constexpr, ALIGNED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(1)
    source, stride = pick(bank, block), pick(strides, block)
    if ALIGNED:  # to 16 bytes
        STEP: tl.constexpr = 128 // source.dtype.element_ty.primitive_bitwidth
        source, stride = tl.multiple_of(source, 16), tl.multiple_of(stride, STEP)
    row = tl.program_id(0).to(tl.int64) * BT + tl.arange(0, BT)
    site = tl.arange(0, BS)
    products = tl.zeros([BT, BS], tl.float32)
    squares = tl.zeros([BT], tl.float32)
    for begin in range(0, D, BD):
        at = begin + tl.arange(0, BD)
        v = tl.load(source + row[:, None] * stride + at[None, :], (row < rows)[:, None] & (at < D)[None, :], 0.0)
        v = v.to(tl.float32)
        c = tl.load(score_weights + site[None, :] * D + at[:, None], (site < sites)[None, :] & (at < D)[:, None], 0.0)
        products = tl.dot(v, c, products, input_precision=PRECISION)
        squares += tl.sum(v * v, 1)
    found = products * (1.0 / tl.sqrt(squares / D + eps))[:, None]
    target = (row[:, None] * len(bank) + block) * sites + site[None, :]
    tl.store(scores + target, found, (row < rows)[:, None] & (site < sites)[None, :])


@triton.jit
def _sums_kernel(bank, strides, weights, acc, site_stride, sites, D: tl.constexpr, BD: tl.constexpr):
    N: tl.constexpr = len(bank)
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BD + tl.arange(0, BD)
    inside = at < D
    values = ()
    for i in tl.static_range(N):
        values = values + (tl.load(bank[i] + row * strides[i] + at, inside, 0.0).to(tl.float32),)
    weights += row * N * sites
    acc += row * D
    site = 0
    while site < sites:  # the interpreter of 3.6 takes no range over numbers known at run time
        total = tl.zeros([BD], tl.float32)
        for i in tl.static_range(N):
            total += tl.load(weights + i * sites + site) * values[i]
        tl.store(acc + at, total.to(acc.dtype.element_ty), inside)
        acc += site_stride
        site += 1


def phase_one(bank: Sequence[Tensor], score_weights_SD: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """Launch both kernels. Returns the largest scores [S, ...], the denominators, and the sums [S, ..., D]."""
    first = bank[0]
    width, sites = first.shape[-1], len(score_weights_SD)
    rows = first.numel() // width
    views, strides = row_views(bank)
    scores = torch.empty(rows, len(bank), sites, device=first.device)
    acc = torch.empty(sites, *first.shape, dtype=first.dtype, device=first.device)
    if rows and sites:
        _scores_kernel[(blocks(rows, TOKENS), len(bank))](
            views, strides, parameter(score_weights_SD), scores, rows, sites, eps, D=width, BT=TOKENS, BD=PIECE,
            BS=max(16, power_of_two(sites)), ALIGNED=aligned(views, strides, width), PRECISION="ieee" if interpreted() else "tf32x3",
        )  # fmt: skip
    top = scores.amax(1, keepdim=True) if rows else scores.new_empty(0, 1, sites)
    weights = (scores - top).exp_()
    if rows and sites:
        _sums_kernel[(rows, blocks(width, CHANNELS))](
            views, strides, weights, acc, rows * width, sites, D=width, BD=CHANNELS
        )
    shape = (sites, *first.shape[:-1])
    return top[:, 0].t().reshape(shape), weights.sum(1).t().reshape(shape), acc
