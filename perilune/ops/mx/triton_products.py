"""Products of routed rows with MXFP4 matrices on a CUDA device: codes become bfloat16 in registers, tensor cores multiply.

Weights stand on the M side of a product, rows of tokens on the N side, so that one kernel serves a decode step (16 rows a
tile) and a prefill (128 rows). A step along the depth takes 128 columns as `pack` lays them out: each word of a row holds a
code of each of four groups, and a group is one product of depth 32 with a scale of its own.

A code's sign, exponent and mantissa bit become the sign, the last two exponent bits and the first mantissa bit of a
bfloat16: that is its value times 2^-126, subnormals included. One product with 2^(scale - 1) makes the weight, exactly;
eight weights take 15 instructions.
"""

# What stands in a kernel is Triton's language, whose loops and constants Python's types do not describe.
# pyright: reportGeneralTypeIssues=false, reportAssignmentType=false, reportAttributeAccessIssue=false

from __future__ import annotations

import triton
import triton.language as tl

from perilune.ops.moe.triton.tiles import place_of_tile
from perilune.ops.moe.triton.unit import gated_unit
from perilune.ops.triton.products import INTERPRET, product

NAN_CODE = tl.constexpr(255)  # of a packed scale; see `pack`
# Of two words, and the factors of their rows for each group: the weights of each group.
DECODE = tl.constexpr("""{
    .reg .b32 s, t;
    and.b32 s, $4, 0x81C081C0;
    mul.bf16x2 $0, s, $5;
    shl.b32 s, $4, 3;
    and.b32 s, s, 0x81C081C0;
    mul.bf16x2 $1, s, $6;
    shl.b32 s, $4, 6;
    and.b32 s, s, 0x81C081C0;
    mul.bf16x2 $2, s, $7;
    shl.b32 s, $4, 1;
    and.b32 s, s, 0x80008000;
    shr.u32 t, $4, 5;
    lop3.b32 s, t, 0x01000100, s, 0xEA;
    shr.u32 t, $4, 4;
    lop3.b32 s, t, 0x00C000C0, s, 0xEA;
    mul.bf16x2 $3, s, $8;
}""")


@triton.jit
def _value(sign, exponent, mantissa, scale):
    """A weight from the bits of its code and its packed scale [rows], in float32: what `DECODE` computes."""
    half = (mantissa & 1).to(tl.float32) * 0.5
    high, low = (exponent >> 1) & 1, exponent & 1
    magnitude = tl.where(high + low == 0, half, (1.0 + half) * (1 + high + 2 * high * low).to(tl.float32))
    factor = tl.where(scale == NAN_CODE, float("nan"), tl.exp2((scale - 253).to(tl.float32)))
    return tl.where((sign & 1) == 1, -magnitude, magnitude) * factor[:, None]


@triton.jit
def _factor(scale, SHAPE: tl.constexpr):
    """2^(s - 1) of packed scales [rows] as bfloat16 [rows, 32]; infinity for NaN, whose codes are 0."""
    bits = (scale << 7).to(tl.int16)
    return tl.broadcast_to(bits.to(tl.bfloat16, bitcast=True)[:, None], SHAPE)


@triton.jit
def weights_of(words, scales):
    """The four groups of a step, [rows, 32] each, from its words int16 [rows, 32] and scales int32 [rows]."""
    s0, s1, s2, s3 = scales & 255, (scales >> 8) & 255, (scales >> 16) & 255, (scales >> 24) & 255
    if INTERPRET:
        w = words.to(tl.int32)
        fourth = ((w >> 12) & 2) | ((w >> 11) & 1)
        return (
            _value(w >> 15, w >> 7, w >> 6, s0), _value(w >> 12, w >> 4, w >> 3, s1), _value(w >> 9, w >> 1, w, s2),
            _value(w >> 14, fourth, w >> 10, s3),
        )  # fmt: skip
    return tl.inline_asm_elementwise(
        DECODE, "=r,=r,=r,=r,r,r,r,r,r",
        [words, _factor(s0, words.shape), _factor(s1, words.shape), _factor(s2, words.shape), _factor(s3, words.shape)],
        dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16), is_pure=True, pack=2,
    )  # fmt: skip


@triton.jit
def load_columns(x, real, column, I: tl.constexpr):
    """[rows, 32] columns from `column` on; x points to each row's start."""
    at = column + tl.arange(0, 32)
    if I % 128 == 0:
        return tl.load(x[:, None] + at[None, :], real[:, None], 0.0)
    return tl.load(x[:, None] + at[None, :], real[:, None] & (at < I)[None, :], 0.0)


@triton.jit
def glu_kernel(
    x, x_stride, codes1, scales1, codes3, scales3, h, slot_of_row, expert_of_tile, start, counts, experts, active, beta,
    linear_beta, L: tl.constexpr, F: tl.constexpr, STEPS: tl.constexpr, BO: tl.constexpr, BM: tl.constexpr,
    GROUP: tl.constexpr, FOUR: tl.constexpr, GATE_CAPPED: tl.constexpr, UP_CAPPED: tl.constexpr,
):  # fmt: skip
    """h = glu(x W1^T, x W3^T) of one tile of rows and BO hidden units."""
    columns: tl.constexpr = (F + BO - 1) // BO
    if tl.program_id(0) >= tl.load(start + experts) * columns:
        return
    expert, m, n = place_of_tile(tl.program_id(0), expert_of_tile, start, columns, GROUP)
    row = m * BM + tl.arange(0, BM)
    real = row - tl.load(start + expert) * BM < tl.load(counts + expert)
    token = (tl.load(slot_of_row + row, real, 0) // active).to(tl.int64)
    x += token * x_stride
    unit = n * BO + tl.arange(0, BO)
    there = unit < F
    at = unit[:, None] * 32 + tl.arange(0, 32)[None, :]
    codes1 += expert.to(tl.int64) * (STEPS * F * 32)
    codes3 += expert.to(tl.int64) * (STEPS * F * 32)
    scales1 += expert.to(tl.int64) * (STEPS * F)
    scales3 += expert.to(tl.int64) * (STEPS * F)
    a = tl.zeros([BO, BM], tl.float32)
    b = tl.zeros([BO, BM], tl.float32)
    for k in range(STEPS):
        word1 = tl.load(codes1 + k * (F * 32) + at, there[:, None], 0)
        word3 = tl.load(codes3 + k * (F * 32) + at, there[:, None], 0)
        gates = weights_of(word1, tl.load(scales1 + k * F + unit, there, 0))
        ups = weights_of(word3, tl.load(scales3 + k * F + unit, there, 0))
        for g in tl.static_range(4):
            v = tl.trans(load_columns(x, real, k * 128 + g * 32, L))
            a = product(gates[g], v, a)
            b = product(ups[g], v, b)
    hidden = gated_unit(a, b, beta, linear_beta, FOUR, GATE_CAPPED, UP_CAPPED)
    tl.store(h + row.to(tl.int64)[None, :] * F + unit[:, None], hidden.to(h.dtype.element_ty), there[:, None])


@triton.jit
def down_kernel(
    h, codes, scales, y, weight, slot_of_row, expert_of_tile, start, counts, experts, F: tl.constexpr, L: tl.constexpr,
    STEPS: tl.constexpr, BO: tl.constexpr, BM: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """y = p h W2^T of one tile of rows and BO columns; p is 0 in the padding."""
    columns: tl.constexpr = (L + BO - 1) // BO
    if tl.program_id(0) >= tl.load(start + experts) * columns:
        return
    expert, m, n = place_of_tile(tl.program_id(0), expert_of_tile, start, columns, GROUP)
    row = m * BM + tl.arange(0, BM)
    real = row - tl.load(start + expert) * BM < tl.load(counts + expert)
    h += row.to(tl.int64) * F
    unit = n * BO + tl.arange(0, BO)
    there = unit < L
    at = unit[:, None] * 32 + tl.arange(0, 32)[None, :]
    codes += expert.to(tl.int64) * (STEPS * L * 32)
    scales += expert.to(tl.int64) * (STEPS * L)
    total = tl.zeros([BO, BM], tl.float32)
    for k in range(STEPS):
        word = tl.load(codes + k * (L * 32) + at, there[:, None], 0)
        weights = weights_of(word, tl.load(scales + k * L + unit, there, 0))
        for g in tl.static_range(4):
            total = product(weights[g], tl.trans(load_columns(h, real, k * 128 + g * 32, F)), total)
    p = tl.load(weight + tl.load(slot_of_row + row, real, 0), real, 0.0)
    total *= p[None, :]
    tl.store(y + row.to(tl.int64)[None, :] * L + unit[:, None], total.to(y.dtype.element_ty), there[:, None])
