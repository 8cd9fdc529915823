"""Phase one of attention over depth on a CUDA device: n finished blocks scored and mixed for S read sites at once.

Scores are a matrix product, [tokens, D] x [D, S] for each block. Its weights are float32: for bfloat16 blocks each is a sum
of two bfloat16 numbers (16 bits; the error of a score is that of a float32 sum), for others there are three tf32 products.
The mixes take each block once for all sites and are stored in the blocks' dtype, as convex combinations of the blocks.

The backward pass reads the blocks and the sites' gradients twice, first for the products <dmix_s, v_i>, then for

    dv_i = sum_s (p_si dmix_s + f_si c_s) - e_i v_i,   dc_s = sum over tokens and i of f_si v_i
    with ds_si = p_si (<dmix_s, v_i> - <dmix_s, mix_s> + dlog_s),   f_si = ds_si r_i,   e_i = sum_s ds_si s_si r_i^2 / D

and writes the gradient of a block once, where single reads write it once a site and leave the sum to autograd. Sums over
tokens are taken in a fixed order: results repeat bit for bit.
"""

# What stands in a kernel is Triton's language, whose loops and constants Python's types do not describe.
# pyright: reportGeneralTypeIssues=false, reportAssignmentType=false, reportAttributeAccessIssue=false

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from perilune.ops.attnres.slots import GradientSlots, parts
from perilune.ops.attnres.triton_mix import aligned, pick, row_views
from perilune.ops.native.rows import parameter
from perilune.ops.triton.available import interpreted, units
from perilune.ops.triton.sizes import blocks, power_of_two

TOKENS, PIECE = 128, 64  # of the scores' tile
CHANNELS = 1024  # numbers of a row that a program of the mixes takes
PULL_CHANNELS = 256
PUSH_CHANNELS, PUSH_ROWS = 128, 16
PROGRAMS = 4  # of the second backward pass, a multiprocessor


@triton.jit
def dot(a, b, c, PRECISION: tl.constexpr):
    """c + a b. The interpreter's product of bfloat16 is wrong, so there operands are widened."""
    if PRECISION == "interpreted":
        return tl.dot(a.to(tl.float32), b.to(tl.float32), c, input_precision="ieee")
    else:
        return tl.dot(a, b, c, input_precision=PRECISION)


@triton.jit
def row_pointers(choices, strides, i, row, ALIGNED: tl.constexpr):
    """The start of row `row` of tensor i of a tuple, for blocks of i and row."""
    start, stride = pick(choices, i), pick(strides, i)
    start += row * stride + 0 * i  # a block even where there is one tensor only
    if ALIGNED:
        start = tl.multiple_of(start, 16)
    return start


@triton.jit
def _scores_kernel(
    bank, strides, score_weights, scores, rstds, rows, sites, eps, D: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr,
    BS: tl.constexpr, PARTS: tl.constexpr, ALIGNED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """score_weights: [PARTS, BS, D], whose parts add up to the weights of BS sites."""
    N: tl.constexpr = len(bank)
    block = tl.program_id(1)
    source, stride = pick(bank, block), pick(strides, block)
    if ALIGNED:  # to 16 bytes
        STEP: tl.constexpr = 128 // source.dtype.element_ty.primitive_bitwidth
        source, stride = tl.multiple_of(source, 16), tl.multiple_of(stride, STEP)
    row = tl.program_id(0).to(tl.int64) * BT + tl.arange(0, BT)
    column = tl.arange(0, PARTS * BS)
    products = tl.zeros([BT, PARTS * BS], tl.float32)
    squares = tl.zeros([BT], tl.float32)
    for begin in range(0, D, BD):
        at = begin + tl.arange(0, BD)
        v = tl.load(source + row[:, None] * stride + at[None, :], (row < rows)[:, None] & (at < D)[None, :], 0.0)
        c = tl.load(score_weights + column[None, :] * D + at[:, None], (at < D)[:, None], 0.0)
        wide = v.to(tl.float32)
        products = dot(v.to(c.dtype), c, products, PRECISION)
        squares += tl.sum(wide * wide, 1)
    rstd = 1.0 / tl.sqrt(squares / D + eps)
    tl.store(rstds + row * N + block, rstd, row < rows)
    site = tl.arange(0, BS)
    products = tl.sum(tl.reshape(products, [BT, PARTS, BS]), 1)
    target = (row[:, None] * N + block) * sites + site[None, :]
    tl.store(scores + target, products * rstd[:, None], (row < rows)[:, None] & (site < sites)[None, :])


@triton.jit
def _shares_kernel(scores, shares, logs, rows, sites, N: tl.constexpr, BLOCK: tl.constexpr):
    """Softmax over the N blocks of a token and site."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    row, site = at // sites, at % sites
    inside = row < rows
    place = row * N * sites + site
    top = tl.full([BLOCK], float("-inf"), tl.float32)
    for i in tl.static_range(N):
        top = tl.maximum(top, tl.load(scores + place + i * sites, inside, 0.0), propagate_nan=tl.PropagateNan.ALL)
    total = tl.zeros([BLOCK], tl.float32)
    for i in tl.static_range(N):
        total += tl.exp(tl.load(scores + place + i * sites, inside, 0.0) - top)
    for i in tl.static_range(N):
        share = tl.exp(tl.load(scores + place + i * sites, inside, 0.0) - top) / total
        tl.store(shares + place + i * sites, share, inside)
    tl.store(logs + site * rows + row, top + tl.log(total), inside)


@triton.jit
def _mixes_kernel(bank, strides, shares, mixes, site_stride, sites, D: tl.constexpr, BD: tl.constexpr):
    N: tl.constexpr = len(bank)
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BD + tl.arange(0, BD)
    inside = at < D
    values = ()
    for i in tl.static_range(N):
        values = values + (tl.load(bank[i] + row * strides[i] + at, inside, 0.0).to(tl.float32),)
    shares += row * N * sites
    mixes += row * D
    site = 0
    while site < sites:  # the interpreter of 3.6 takes no range over numbers known at run time
        total = tl.zeros([BD], tl.float32)
        for i in tl.static_range(N):
            total += tl.load(shares + i * sites + site) * values[i]
        tl.store(mixes + at, total.to(mixes.dtype.element_ty), inside)
        mixes += site_stride
        site += 1


@triton.jit
def _pull_kernel(
    bank, strides, dmixes, dlogs, scores, shares, rstds, factors, decays, rows, sites, D: tl.constexpr, BD: tl.constexpr,
    BN: tl.constexpr, BS: tl.constexpr, ALIGNED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A token's products <dmix_s, v_i>, and from them f and e."""
    N: tl.constexpr = len(bank)
    row = tl.program_id(0).to(tl.int64)
    i, site = tl.arange(0, BN), tl.arange(0, BS)
    start = row_pointers(bank, strides, i, row, ALIGNED)
    along = tl.zeros([BS, BN], tl.float32)
    for begin in range(0, D, BD):
        at = begin + tl.arange(0, BD)
        v = tl.load(start[:, None] + at[None, :], (i < N)[:, None] & (at < D)[None, :], 0.0)
        d = tl.load(
            dmixes + (site.to(tl.int64) * rows + row)[:, None] * D + at[None, :],
            (site < sites)[:, None] & (at < D)[None, :], 0.0,
        )  # fmt: skip
        along = dot(d, tl.trans(v), along, PRECISION)
    place = (row * N + i)[None, :] * sites + site[:, None]
    known = (i < N)[None, :] & (site < sites)[:, None]
    share = tl.load(shares + place, known, 0.0)
    dlog = tl.load(dlogs + site * rows + row, site < sites, 0.0)
    slope = share * (along - tl.sum(share * along, 1)[:, None] + dlog[:, None])
    rstd = tl.load(rstds + row * N + i, i < N, 0.0)
    factor = slope * rstd[None, :]
    tl.store(factors + place, factor, known)
    decay = tl.sum(factor * tl.load(scores + place, known, 0.0), 0) * rstd / D
    tl.store(decays + row * N + i, decay, i < N)


@triton.jit
def _push_kernel(
    bank, strides, gradients, dmixes, shares, factors, decays, score_weights, dscores, rows, sites, D: tl.constexpr,
    BD: tl.constexpr, BN: tl.constexpr, BT: tl.constexpr, BS: tl.constexpr, ALIGNED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Gradients of the blocks' channels at .. at + BD: BT tokens of BN blocks at a time are the rows of each product."""
    N: tl.constexpr = len(bank)
    at = tl.program_id(0) * BD + tl.arange(0, BD)
    inside = at < D
    r = tl.arange(0, BT * BN)
    token, i = r // BN, r % BN
    site = tl.arange(0, BS)
    q = tl.arange(0, BT * BS)
    token_of, site_of = q // BS, q % BS
    c = tl.load(score_weights + site[:, None] * D + at[None, :], (site < sites)[:, None] & inside[None, :], 0.0)
    dc = tl.zeros([BS, BD], tl.float32)
    first = tl.program_id(1).to(tl.int64) * BT
    while first < rows:
        row = first + token
        here = (row < rows) & (i < N)
        place = (row * N + i) * sites
        v = tl.load(
            row_pointers(bank, strides, i, row, ALIGNED)[:, None] + at[None, :], here[:, None] & inside[None, :], 0.0
        )
        share = tl.load(
            shares + place[:, None] + site_of[None, :],
            here[:, None] & (site_of < sites)[None, :] & (token[:, None] == token_of[None, :]), 0.0,
        )  # fmt: skip
        d = tl.load(
            dmixes + (site_of.to(tl.int64) * rows + first + token_of)[:, None] * D + at[None, :],
            ((site_of < sites) & (first + token_of < rows))[:, None] & inside[None, :], 0.0,
        )  # fmt: skip
        factor = tl.load(factors + place[:, None] + site[None, :], here[:, None] & (site < sites)[None, :], 0.0)
        factor = factor.to(c.dtype)
        dv = dot(share.to(d.dtype), d, tl.zeros([BT * BN, BD], tl.float32), PRECISION)
        dv = dot(factor, c, dv, PRECISION)
        dc = dot(tl.trans(factor), v.to(c.dtype), dc, PRECISION)
        dv -= tl.load(decays + row * N + i, here, 0.0)[:, None] * v.to(tl.float32)
        target = pick(gradients, i) + row * D
        if ALIGNED:
            target = tl.multiple_of(target, 16)
        tl.store(target[:, None] + at[None, :], dv.to(gradients[0].dtype.element_ty), here[:, None] & inside[None, :])
        first += tl.num_programs(1) * BT
    target = dscores + (tl.program_id(1) * sites + site[:, None]) * D + at[None, :]
    tl.store(target, dc, (site < sites)[:, None] & inside[None, :])


def phase_one(
    bank: Sequence[Tensor], score_weights_SD: Tensor, eps: float
) -> tuple[Sequence[Tensor], Sequence[Tensor], GradientSlots | None]:
    """Mix n >= 1 blocks [..., D] for S sites.

    Returns:
        S mixes [..., D], S log-denominators [...], and, where gradients are wanted, where those of the mixes should go.
    """
    sites = len(score_weights_SD)
    if torch.is_grad_enabled() and any(x.requires_grad for x in (*bank, score_weights_SD)):
        slots = GradientSlots(sites, bank[0].detach())
        found = _PhaseOne.apply(score_weights_SD, eps, slots, *bank)
        return found[:sites], found[sites:], slots
    mixes, logs, *_ = forward(bank, score_weights_SD, eps)
    return mixes.unbind(), logs.unbind(), None


class _PhaseOne(torch.autograd.Function):
    @staticmethod
    def forward(ctx, score_weights_SD, eps, slots, *bank):
        mixes, logs, *kept = forward(bank, score_weights_SD, eps)
        ctx.save_for_backward(score_weights_SD, *kept, *bank)
        ctx.slots = slots
        ctx.set_materialize_grads(False)
        return *parts(mixes), *parts(logs)

    @staticmethod
    @once_differentiable
    def backward(ctx, *gradients):
        score_weights_SD, scores, shares, rstds, *bank = ctx.saved_tensors
        sites, shape = len(score_weights_SD), bank[0].shape[:-1]
        dmixes = ctx.slots.collect(gradients[:sites])
        dlogs = torch.stack([scores.new_zeros(shape) if x is None else x for x in gradients[sites:]])
        dscores_SD, dbank = backward(bank, dmixes, dlogs, scores, shares, rstds, score_weights_SD)
        wanted = ctx.needs_input_grad
        return (
            dscores_SD if wanted[0] else None, None, None,
            *[x if want else None for x, want in zip(dbank, wanted[3:], strict=True)],
        )  # fmt: skip


def _precision(dtype: torch.dtype) -> str:
    if interpreted():
        return "interpreted"
    return "tf32x3" if dtype == torch.float32 else "tf32"


def forward(bank: Sequence[Tensor], score_weights_SD: Tensor, eps: float) -> tuple[Tensor, ...]:
    """Launch the three kernels. Returns mixes [S, ..., D], log-denominators [S, ...]; scores and shares [rows, n, S], 1 / root mean square [rows, n]."""
    first, count, sites = bank[0], len(bank), len(score_weights_SD)
    width = first.shape[-1]
    rows = first.numel() // width
    views, strides = row_views(bank)
    scores = torch.empty(rows, count, sites, device=first.device)
    shares, rstds = torch.empty_like(scores), torch.empty(rows, count, device=first.device)
    logs = torch.empty(sites, *first.shape[:-1], device=first.device)
    mixes = torch.empty(sites, *first.shape, dtype=first.dtype, device=first.device)
    if not rows or not sites:
        return mixes, logs, scores, shares, rstds
    weights = _parts(parameter(score_weights_SD), first.dtype)
    _scores_kernel[(blocks(rows, TOKENS), count)](
        views, strides, weights, scores, rstds, rows, sites, eps, D=width, BT=TOKENS, BD=PIECE, BS=weights.shape[1],
        PARTS=len(weights), ALIGNED=aligned(views, strides, width), PRECISION="interpreted" if interpreted() else "tf32x3",
        num_warps=8, num_stages=4,
    )  # fmt: skip
    _shares_kernel[(blocks(rows * sites, 256),)](scores, shares, logs, rows, sites, N=count, BLOCK=256)
    _mixes_kernel[(rows, blocks(width, CHANNELS))](
        views, strides, shares, mixes, rows * width, sites, D=width, BD=CHANNELS
    )
    return mixes, logs, scores, shares, rstds


def _parts(weights_SD: Tensor, dtype: torch.dtype) -> Tensor:
    """Float32 weights for products with blocks of `dtype`: [parts, S, D], S filled up with zeros to a tile's size."""
    sites, width = weights_SD.shape
    padded = weights_SD.new_zeros(max(16, power_of_two(sites)), width)
    padded[:sites] = weights_SD
    if dtype != torch.bfloat16:
        return padded[None]
    high = padded.bfloat16()
    return torch.stack([high, (padded - high).bfloat16()])


def backward(
    bank: Sequence[Tensor], dmixes: Tensor, dlogs: Tensor, scores: Tensor, shares: Tensor, rstds: Tensor,
    score_weights_SD: Tensor,
) -> tuple[Tensor, list[Tensor]]:  # fmt: skip
    """Launch both passes. Returns the gradients of the score weights and of the blocks."""
    first, sites, width = bank[0], len(score_weights_SD), bank[0].shape[-1]
    rows, count = rstds.shape
    views, strides = row_views(bank)
    gradients = [torch.empty_like(x, memory_format=torch.contiguous_format) for x in bank]
    wide = power_of_two(count)
    tokens = max(1, PUSH_ROWS // wide)
    factors, decays = torch.empty_like(shares), torch.empty_like(rstds)
    chunks = blocks(width, PUSH_CHANNELS)
    slabs = max(1, min(blocks(rows, tokens), PROGRAMS * units(first.device) // chunks))
    dscores = torch.empty(slabs, sites, width, device=first.device)
    if not rows:
        return torch.zeros_like(score_weights_SD), gradients
    shared = {"D": width, "BS": max(16, power_of_two(sites)), "PRECISION": _precision(first.dtype)}
    straight = aligned(views, strides, width)
    _pull_kernel[(rows,)](
        views, strides, dmixes, dlogs, scores, shares, rstds, factors, decays, rows, sites, BD=PULL_CHANNELS,
        BN=max(16, wide), ALIGNED=straight, **shared,
    )  # fmt: skip
    _push_kernel[(chunks, slabs)](
        views, strides, tuple(gradients), dmixes, shares, factors, decays, parameter(score_weights_SD).to(first.dtype),
        dscores, rows, sites, BD=PUSH_CHANNELS, BN=wide, BT=tokens, ALIGNED=straight, **shared,
    )  # fmt: skip
    return dscores.sum(0).to(score_weights_SD.dtype), gradients
