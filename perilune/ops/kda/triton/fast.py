"""Elementary functions of one instruction each, and a chunk's rows in fours.

Triton's own exp2 keeps results below 2^-126 and its division is rounded correctly: three and six instructions more, for
every element. Log-decays are to base 2 in here, so that a decay is one instruction; they stay in registers. (traps T09)
"""

from __future__ import annotations

import triton
import triton.language as tl

from perilune.ops.kda.triton.tiles import CHUNK, INTERPRET, LOG2E

FOUR = tl.constexpr(4)
LEAST_LOG2 = tl.constexpr(-150.0)  # 2^-150 is nothing beside any other term; keeps sums of log-decays exact enough


@triton.jit
def exp2(x):
    """2^x, zero below 2^-126."""
    if INTERPRET:
        return tl.exp2(x)
    return tl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def reciprocal(x):
    """1 / x to 1 ulp."""
    if INTERPRET:
        return 1.0 / x
    return tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def log2_decay(z, bias, rate, lower_bound, GATE: tl.constexpr):
    """Log-decays to base 2. GATE 0: z holds natural ones; 1: the bounded gate of logits z; 2: the softplus gate.

    rate = exp(A_log), a number; bias broadcasts to z.
    """
    if GATE == 0:
        return tl.maximum(z * LOG2E, LEAST_LOG2, propagate_nan=tl.PropagateNan.ALL)
    if GATE == 1:  # the exponent is one multiply-add of z
        c = -LOG2E * rate
        return (lower_bound * LOG2E) * reciprocal(1.0 + exp2(z * c + bias * c))
    x = z + bias
    softplus = tl.maximum(x, 0.0) * LOG2E + tl.log2(1.0 + exp2(-LOG2E * tl.abs(x)))
    return tl.maximum(-rate * softplus, LEAST_LOG2, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def row_of():
    """The chunk's rows as `[16, 4]`: a thread holds four that follow each other, so running sums mostly stay in it."""
    return tl.arange(0, CHUNK // FOUR)[:, None] * FOUR + tl.arange(0, FOUR)[None, :]


@triton.jit
def load_fours(pointer, start, count, stride, D: tl.constexpr):
    """Rows start .. start + 63 of a token-major tensor as `[16, 4, D]` float32; rows from `count` on are 0."""
    r = row_of()
    offsets = (start + r).to(tl.int64)[:, :, None] * stride + tl.arange(0, D)[None, None, :]
    return tl.load(pointer + offsets, mask=(r < count)[:, :, None], other=0.0).to(tl.float32)


@triton.jit
def _then(sum_1, before_1, sum_2, before_2):
    """Sums of two runs of groups, and the sum before the last group: not a difference, which would hold its rounding."""
    return sum_1 + sum_2, sum_1 + before_2


@triton.jit
def tile_sums(x_FRD, D: tl.constexpr):
    """Of `[16, 4, D]`, in tiles of 32 rows: the running sum, and the totals of the first and the last tile `[D]`."""
    group = tl.sum(x_FRD, axis=1)
    folded = tl.reshape(group, [2, CHUNK // FOUR // 2, D])
    _, before = tl.associative_scan((folded, tl.zeros_like(folded)), 1, _then)
    before = tl.reshape(before, [CHUNK // FOUR, D])
    second = (tl.arange(0, CHUNK // FOUR) >= CHUNK // FOUR // 2)[:, None]
    first = tl.sum(tl.where(second, 0.0, group), axis=0)
    last = tl.sum(tl.where(second, group, 0.0), axis=0)
    return tl.cumsum(x_FRD, axis=1) + before[:, None, :], first, last


@triton.jit
def running_after(x_FRD, D: tl.constexpr):
    """Of `[16, 4, D]`: the sum of each row and those after it, over the whole chunk."""
    group = tl.sum(x_FRD, axis=1)
    total = tl.sum(group, axis=0)
    before = tl.cumsum(group, axis=0) - group  # a reversed scan would turn every warp around first
    return (total[None, :] - before)[:, None, :] - (tl.cumsum(x_FRD, axis=1) - x_FRD)
