"""The backward pass of a read with two passes over the sources at once: the second one of a token beside the first one of the
token after it, and that token's other inputs on their way. So memory is not idle where a pass begins or ends.
"""

# What stands in a kernel is Triton's language, whose loops and constants Python's types do not describe.
# pyright: reportGeneralTypeIssues=false, reportAssignmentType=false

from __future__ import annotations

import triton
import triton.language as tl

from perilune.ops.attnres.triton_mix import add_pairs, load_source, pick


@triton.jit
def _row_inputs(dout, dout_stride, mixed, statistics, row, rows, at, inside, every, M: tl.constexpr, D: tl.constexpr):
    """What a row's first pass starts from: dout, mix (dout again if there is no norm), scores, rstd, log-denominator."""
    alive = row < rows
    statistics += row * (2 * M + 1)
    d = tl.load(dout + row * dout_stride + at, inside & alive, 0.0)
    mix = d
    if mixed is not None:
        mix = tl.load(mixed + row * D + at, inside & alive, 0.0)
    score = tl.load(statistics + every, (every < M) & alive, float("-inf"))
    rstd = tl.load(statistics + M + every, (every < M) & alive, 0.0)
    return d, mix, score, rstd, tl.load(statistics + 2 * M, alive, 0.0)


@triton.jit
def overlapped_kernel(
    sources, strides, gradients, dout, dout_stride, dtotal, dtotal_stride, mixed, statistics, score_weight, norm_weight,
    dscore, dnorm, rows, norm_eps, D: tl.constexpr, BD: tl.constexpr, BM: tl.constexpr, ALIGNED: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    M: tl.constexpr = len(sources)
    program, programs = tl.program_id(0).to(tl.int64), tl.num_programs(0)
    at = tl.arange(0, BD)
    inside = at < D
    every = tl.arange(0, BM)
    c = tl.load(score_weight + at, inside, 0.0)
    dc = tl.zeros([BD], tl.float32)
    dw = tl.zeros([BD], tl.float32)
    row, before = program, program  # of the first pass, and of the second pass: the row before
    begun = False
    before_dmix = tl.zeros([BD], tl.float32)
    before_weight, before_factor, before_decay = (tl.zeros([BM], tl.float32),) * 3
    d, mix, score, rstd, log_sum = _row_inputs(dout, dout_stride, mixed, statistics, row, rows, at, inside, every, M, D)
    while before < rows:  # the interpreter of 3.6 takes no range over numbers known at run time
        alive = row < rows
        dmix = d.to(tl.float32)
        if norm_weight is not None:
            v = mix.to(tl.float32)
            scaled = dmix * tl.load(norm_weight + at, inside, 0.0)
            square, along = tl.reduce((v * v, v * scaled), 0, add_pairs)
            r = 1.0 / tl.sqrt(square / D + norm_eps)
            dw += dmix * v * r
            dmix = r * (scaled - v * (r * r * along / D))
        following = row + programs
        d, mix, next_score, next_rstd, next_log_sum = _row_inputs(
            dout, dout_stride, mixed, statistics, following, rows, at, inside, every, M, D
        )
        pull = tl.zeros([BM], tl.float32)
        for i in tl.range(0, M, num_stages=STAGES):
            v = load_source(sources, strides, i, row, at, inside & alive, ALIGNED).to(tl.float32)
            pull = tl.where(every == i, tl.sum(dmix * v, 0), pull)
            v = load_source(sources, strides, i, before, at, inside & begun, ALIGNED).to(tl.float32)
            here = every == i
            f = tl.sum(tl.where(here, before_factor, 0.0), 0)
            dc += f * v
            dv = tl.sum(tl.where(here, before_weight, 0.0), 0) * before_dmix + f * c
            dv -= tl.sum(tl.where(here, before_decay, 0.0), 0) * v
            if dtotal is not None:
                last = inside & begun & (i == M - 1)
                dv += tl.load(dtotal + before * dtotal_stride + at, last, 0.0).to(tl.float32)
            target = pick(gradients, i) + before * D
            if ALIGNED:
                target = tl.multiple_of(target, 16)
            tl.store(target + at, dv.to(gradients[0].dtype.element_ty), inside & begun)
        before_weight = tl.where(every < M, tl.exp(score - log_sum), 0.0)
        before_factor = before_weight * (pull - tl.sum(before_weight * pull, 0)) * rstd
        before_decay = tl.where(every < M, before_factor * score * rstd / D, 0.0)
        before_dmix, begun, before, row = dmix, True, row, following
        score, rstd, log_sum = next_score, next_rstd, next_log_sum
    tl.store(dscore + program * D + at, dc, inside)
    if dnorm is not None:
        tl.store(dnorm + program * D + at, dw, inside)
