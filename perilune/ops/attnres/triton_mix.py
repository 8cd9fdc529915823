"""A read of the residual stream on a CUDA device: running-sum add, scores, softmax, mix and output RMSNorm in one launch.

Forward: one program a token, online softmax, each source read once and fetched while the one before it is summed.
Backward: programs walk over the tokens; a first pass over the sources takes <dmix, v_i>, a second one, out of the cache,
writes dv_i. Gradients of the score weight and the norm weight are summed in registers, one row a program, and the rows
are added in a fixed order: results repeat bit for bit.

With g_i = <dmix, v_i>, f_i = p_i (g_i - sum_j p_j g_j) r_i:   dv_i = p_i dmix + f_i c - f_i s_i r_i v_i / D,  dc = sum f_i v_i
"""

# What stands in a kernel is Triton's language, whose loops and constants Python's types do not describe.
# pyright: reportGeneralTypeIssues=false, reportAssignmentType=false, reportAttributeAccessIssue=false

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from perilune.ops.native.rows import as_rows, fresh, parameter
from perilune.ops.triton.available import units
from perilune.ops.triton.sizes import power_of_two

# Of a Hopper multiprocessor, for one program.
SHARED_BYTES = 220 * 1024


@triton.jit
def add_pairs(a, b, c, d):
    return a + c, b + d


@triton.jit
def pick(choices, i):
    """choices[i] of a tuple of pointers or numbers, for an i known at run time."""
    chosen = choices[0]
    for j in tl.static_range(1, len(choices)):
        chosen = tl.where(i == j, choices[j], chosen)
    return chosen


@triton.jit
def load_source(sources, strides, i, row, at, inside, ALIGNED: tl.constexpr):
    start = pick(sources, i) + row * pick(strides, i)
    if ALIGNED:
        start = tl.multiple_of(start, 16)
    return tl.load(start + at, inside, 0.0)


@triton.jit
def _score(v, c, eps, D: tl.constexpr):
    product, square = tl.reduce((v * c, v * v), 0, add_pairs)
    rstd = 1.0 / tl.sqrt(square / D + eps)
    return product * rstd, rstd


@triton.jit
def _take_source(v, i, row, c, given, statistics, acc, denominator, top, eps, N: tl.constexpr, D: tl.constexpr):
    """One step of the online softmax over sources."""
    v = v.to(tl.float32)
    score, rstd = _score(v, c, eps, D)
    if given is not None:
        known = tl.load(given + row)
        score, rstd = tl.where(i == 0, known, score), tl.where(i == 0, 0.0, rstd)
    if statistics is not None:
        tl.store(statistics + i, score)
        tl.store(statistics + N + 1 + i, rstd)
    higher = tl.maximum(top, score, propagate_nan=tl.PropagateNan.ALL)
    kept, weight = tl.exp(top - higher), tl.exp(score - higher)
    return acc * kept + v * weight, denominator * kept + weight, higher


@triton.jit
def _forward_kernel(
    bank, strides, live, live_stride, delta, delta_stride, given, score_weight, norm_weight, total, mixed, out, statistics,
    eps, norm_eps, D: tl.constexpr, BD: tl.constexpr, ALIGNED: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    N: tl.constexpr = len(bank)
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BD)
    inside = at < D
    v = tl.load(live + row * live_stride + at, inside, 0.0).to(tl.float32)
    if delta is not None:
        v += tl.load(delta + row * delta_stride + at, inside, 0.0).to(tl.float32)
        rounded = v.to(total.dtype.element_ty)  # the source is what is stored
        tl.store(total + row * D + at, rounded, inside)
        v = rounded.to(tl.float32)
    c = tl.load(score_weight + at, inside, 0.0)
    if statistics is not None:
        statistics += row * (2 * N + 3)
    top, rstd = _score(v, c, eps, D)
    if statistics is not None:
        tl.store(statistics + N, top)
        tl.store(statistics + 2 * N + 1, rstd)
    acc, denominator = v, 1.0
    if N == 1:  # as a loop its load would wait for its turn
        acc, denominator, top = _take_source(
            load_source(bank, strides, 0, row, at, inside, ALIGNED), 0, row, c, given, statistics, acc, denominator, top, eps, N, D
        )  # fmt: skip
    elif N > 1:
        for i in tl.range(0, N, num_stages=STAGES):
            acc, denominator, top = _take_source(
                load_source(bank, strides, i, row, at, inside, ALIGNED), i, row, c, given, statistics, acc, denominator, top, eps, N, D
            )  # fmt: skip
    acc = acc * (1.0 / denominator)
    if mixed is not None:
        tl.store(mixed + row * D + at, acc.to(mixed.dtype.element_ty), inside)
    if statistics is not None:
        tl.store(statistics + 2 * N + 2, top + tl.log(denominator))
    if norm_weight is not None:
        rstd = 1.0 / tl.sqrt(tl.sum(acc * acc, 0) / D + norm_eps)
        acc = acc * rstd * tl.load(norm_weight + at, inside, 0.0)
    tl.store(out + row * D + at, acc.to(out.dtype.element_ty), inside)


@triton.jit
def _backward_kernel(
    sources, strides, gradients, dout, dout_stride, dtotal, dtotal_stride, mixed, statistics, score_weight, norm_weight,
    dgiven, dscore, dnorm, rows, norm_eps, D: tl.constexpr, BD: tl.constexpr, BM: tl.constexpr, ALIGNED: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    M: tl.constexpr = len(sources)
    program = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BD)
    inside = at < D
    every = tl.arange(0, BM)
    known = every < M
    c = tl.load(score_weight + at, inside, 0.0)
    dc = tl.zeros([BD], tl.float32)
    dw = tl.zeros([BD], tl.float32)
    row = program
    while row < rows:  # the interpreter of 3.6 takes no range over numbers known at run time
        dmix = tl.load(dout + row * dout_stride + at, inside, 0.0).to(tl.float32)
        if norm_weight is not None:
            mix = tl.load(mixed + row * D + at, inside, 0.0).to(tl.float32)
            scaled = dmix * tl.load(norm_weight + at, inside, 0.0)
            square, along = tl.reduce((mix * mix, mix * scaled), 0, add_pairs)
            rstd = 1.0 / tl.sqrt(square / D + norm_eps)
            dw += dmix * mix * rstd
            dmix = rstd * (scaled - mix * (rstd * rstd * along / D))
        score = tl.load(statistics + row * (2 * M + 1) + every, known, float("-inf"))
        rstd = tl.load(statistics + row * (2 * M + 1) + M + every, known, 0.0)
        weight = tl.exp(score - tl.load(statistics + row * (2 * M + 1) + 2 * M))
        pull = tl.zeros([BM], tl.float32)
        for i in tl.range(0, M, num_stages=STAGES):
            v = load_source(sources, strides, i, row, at, inside, ALIGNED).to(tl.float32)
            pull = tl.where(every == i, tl.sum(dmix * v, 0), pull)
        slope = weight * (pull - tl.sum(weight * pull, 0))  # the scores' gradients
        if dgiven is not None:
            tl.store(dgiven + row, tl.sum(tl.where(every == 0, slope, 0.0), 0))
        factor = slope * rstd  # 0 for a given score
        decay = tl.where(known, factor * score * rstd / D, 0.0)
        for i in tl.range(0, M, num_stages=STAGES):
            v = load_source(sources, strides, i, row, at, inside, ALIGNED).to(tl.float32)
            here = every == i
            f = tl.sum(tl.where(here, factor, 0.0), 0)
            dc += f * v
            dv = tl.sum(tl.where(here, weight, 0.0), 0) * dmix + f * c - tl.sum(tl.where(here, decay, 0.0), 0) * v
            if dtotal is not None:
                last = inside & (i == M - 1)
                dv += tl.load(dtotal + row * dtotal_stride + at, last, 0.0).to(tl.float32)
            target = pick(gradients, i) + row * D
            if ALIGNED:
                target = tl.multiple_of(target, 16)
            tl.store(target + at, dv.to(gradients[0].dtype.element_ty), inside)
        row += tl.num_programs(0)
    tl.store(dscore + program * D + at, dc, inside)
    if dnorm is not None:
        tl.store(dnorm + program * D + at, dw, inside)


def row_views(tensors: Sequence[Tensor]) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
    """Tensors [..., D] as rows, and the numbers from one row to the next."""
    views, strides = zip(*[as_rows(x) for x in tensors], strict=True)
    return views, strides


def forward(
    sources: Sequence[Tensor], delta: Tensor | None, score_weight_D: Tensor, eps: float, norm_weight_D: Tensor | None,
    norm_eps: float, training: bool = False, given: Tensor | None = None, keep_mix: bool = True, num_warps: int = 4,
    stages: int = 3,
) -> tuple[Tensor | None, Tensor, Tensor | None, Tensor | None]:  # fmt: skip
    """Launch the forward kernel.

    given: scores [rows] float32 of the first source, which is then a sum over a bank.

    Returns:
        (running sum or None without delta, output, the mix before its norm, statistics [rows, 2 M + 1]: scores, rstd, and the
        logarithm of the softmax's denominator); the last two only for training, and the mix only if there is a norm and
        keep_mix.
    """
    first = sources[0]
    width = first.shape[-1]
    rows = first.numel() // width if width else 0
    views, strides = row_views(sources)
    total = None if delta is None else fresh(first)
    out = fresh(first)
    mixed = fresh(first) if training and keep_mix and norm_weight_D is not None else None
    statistics = torch.empty(rows, 2 * len(sources) + 1, device=first.device) if training else None
    if rows:
        delta_rows, delta_stride = (None, 0) if delta is None else as_rows(delta)
        _forward_kernel[(rows,)](
            views[:-1], strides[:-1], views[-1], strides[-1], delta_rows, delta_stride, given, parameter(score_weight_D),
            None if norm_weight_D is None else parameter(norm_weight_D), total, mixed, out, statistics, eps, norm_eps,
            D=width, BD=power_of_two(width), ALIGNED=aligned(views, strides, width),
            STAGES=stages_for(power_of_two(width) * first.element_size(), 1, stages), num_warps=warps_for(width, num_warps),
        )  # fmt: skip
    return total, out, mixed, statistics


def backward(
    sources: Sequence[Tensor], dout: Tensor, dtotal: Tensor | None, mixed: Tensor | None, statistics: Tensor,
    score_weight_D: Tensor, norm_weight_D: Tensor | None, norm_eps: float, given: bool = False,
    into: Tensor | None = None, num_warps: int = 8, stages: int = 3, per_unit: int = 1,
) -> tuple[Tensor, Tensor | None, Tensor | None, list[Tensor]]:  # fmt: skip
    """Launch the backward kernel. Returns the gradients of the score weight, the norm weight, given scores, the sources.

    into: where the first source's gradient goes; None = memory of its own.
    """
    first = sources[0]
    rows, width = len(statistics), first.shape[-1]
    views, strides = row_views(sources)
    gradients = [fresh(x) if into is None or i else into for i, x in enumerate(sources)]
    programs = min(rows, per_unit * units(first.device))
    dscore = torch.empty(programs, width, device=first.device)
    dnorm = None if norm_weight_D is None else torch.empty_like(dscore)
    dgiven = torch.empty(rows, device=first.device) if given else None
    if rows:
        dout_rows, dout_stride = as_rows(dout)
        dtotal_rows, dtotal_stride = (None, 0) if dtotal is None else as_rows(dtotal)
        _backward_kernel[(programs,)](
            views, strides, tuple(gradients), dout_rows, dout_stride, dtotal_rows, dtotal_stride, mixed, statistics,
            parameter(score_weight_D), None if norm_weight_D is None else parameter(norm_weight_D), dgiven, dscore, dnorm,
            rows, norm_eps, D=width, BD=power_of_two(width), BM=power_of_two(len(sources)),
            ALIGNED=aligned(views, strides, width), STAGES=stages_for(power_of_two(width) * first.element_size(), 2, stages),
            num_warps=warps_for(width, num_warps),
        )  # fmt: skip
    dscore_D = dscore.sum(0).to(score_weight_D.dtype)
    return dscore_D, None if dnorm is None else dnorm.sum(0).to(norm_weight_D.dtype), dgiven, gradients


def aligned(views: Sequence[Tensor], strides: Sequence[int], width: int) -> bool:
    """Whether every row of every tensor, those to be written included, starts at a multiple of 16 bytes. The compiler sees
    this of an argument but not of one picked from several."""
    step = 16 // views[0].element_size()
    return width % step == 0 and all(x.data_ptr() % 16 == 0 and s % step == 0 for x, s in zip(views, strides))


def stages_for(row_bytes: int, loads: int, most: int) -> int:
    """Stages of the loop over sources, each step of which fetches `loads` rows: one less than that many are on their way."""
    return min(most, 1 + SHARED_BYTES // (loads * row_bytes))


def warps_for(width: int, most: int) -> int:
    """Warps of a program that holds a row: no more than leave eight numbers to a thread."""
    return max(1, min(most, power_of_two(width) // 256))
