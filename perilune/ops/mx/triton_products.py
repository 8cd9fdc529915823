"""Products of routed rows with MXFP4 matrices on a CUDA device: codes become bfloat16 in registers, tensor cores multiply.

Weights stand on the M side of a product, rows of tokens on the N side, so that one kernel serves a decode step (16 rows a
tile) and a prefill (128 rows). A step along the depth takes four groups of 32 columns as `pack` lays them out: 16 bytes a
group and row, whose low nibbles are the group's first 16 columns and whose high nibbles are the others.

A code is moved into the sign, the last two exponent bits and the first mantissa bit of a bfloat16: that is its value times
2^-126, subnormals included. One product with 2^(scale - 1) makes the weight, exactly; eight codes take 22 instructions.
"""

# What stands in a kernel is Triton's language, whose loops and constants Python's types do not describe.
# pyright: reportGeneralTypeIssues=false, reportAssignmentType=false, reportAttributeAccessIssue=false

from __future__ import annotations

import triton
import triton.language as tl

from perilune.ops.moe.triton.tiles import capped, place_of_tile
from perilune.ops.triton.gates import sigmoid
from perilune.ops.triton.products import INTERPRET, product

NAN_CODE = tl.constexpr(255)  # of a packed scale; see `pack`
# Of four bytes b0..b3 and their rows' factors: low nibbles as bfloat16 (two registers), high nibbles alike.
DECODE = tl.constexpr("""{
    .reg .b32 p, q, s, t;
    prmt.b32 p, $4, 0, 0x4140;
    prmt.b32 q, $4, 0, 0x4342;
    shl.b32 s, p, 6;
    shl.b32 t, p, 12;
    and.b32 s, s, 0x01C001C0;
    lop3.b32 s, t, 0x80008000, s, 0xEA;
    mul.bf16x2 $0, s, $5;
    shl.b32 s, q, 6;
    shl.b32 t, q, 12;
    and.b32 s, s, 0x01C001C0;
    lop3.b32 s, t, 0x80008000, s, 0xEA;
    mul.bf16x2 $1, s, $6;
    shl.b32 s, p, 2;
    shl.b32 t, p, 8;
    and.b32 s, s, 0x01C001C0;
    lop3.b32 s, t, 0x80008000, s, 0xEA;
    mul.bf16x2 $2, s, $5;
    shl.b32 s, q, 2;
    shl.b32 t, q, 8;
    and.b32 s, s, 0x01C001C0;
    lop3.b32 s, t, 0x80008000, s, 0xEA;
    mul.bf16x2 $3, s, $6;
}""")


@triton.jit
def _code_value(code, factor):
    """Value of a code 0..15 times the factor, in float32: what `DECODE` computes, for the interpreter."""
    magnitude = code & 7
    exponent, half = magnitude >> 1, (magnitude & 1).to(tl.float32) * 0.5
    value = tl.where(exponent == 0, half, (1.0 + half) * (1 << tl.maximum(exponent - 1, 0)).to(tl.float32))
    return tl.where(code > 7, -value, value) * factor


@triton.jit
def weights_of(codes, scale):
    """The two halves of a group, [rows, 16] each, from its bytes [rows, 16] and packed scales int32 [rows]."""
    if INTERPRET:
        wide = codes.to(tl.int32)
        factor = tl.where(scale == NAN_CODE, float("nan"), tl.exp2((scale - 253).to(tl.float32)))[:, None]
        return _code_value(wide & 15, factor), _code_value(wide >> 4, factor)
    bits = tl.where(scale == NAN_CODE, 0x7FFF, scale << 7).to(tl.int16)
    factor = tl.broadcast_to(bits.to(tl.bfloat16, bitcast=True)[:, None], codes.shape)
    return tl.inline_asm_elementwise(
        DECODE, "=r,=r,=r,=r,r,r,r", [codes, factor], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=4
    )


@triton.jit
def load_columns(x, real, column, I: tl.constexpr, STEP: tl.constexpr):
    """[rows, 16] columns from `column` on; x points to each row's start."""
    at = column + tl.arange(0, 16)
    if I % STEP == 0:
        return tl.load(x[:, None] + at[None, :], real[:, None], 0.0)
    return tl.load(x[:, None] + at[None, :], real[:, None] & (at < I)[None, :], 0.0)


@triton.jit
def glu_kernel(
    x, x_stride, codes1, scales1, codes3, scales3, h, slot_of_row, expert_of_tile, start, counts, experts, active, beta,
    linear_beta, L: tl.constexpr, F: tl.constexpr, STEPS: tl.constexpr, BO: tl.constexpr, BM: tl.constexpr,
    GROUP: tl.constexpr, GATE_CAPPED: tl.constexpr, UP_CAPPED: tl.constexpr,
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
    unit, byte = n * BO + tl.arange(0, BO), tl.arange(0, 16)
    there = unit < F
    at = unit[:, None] * 16 + byte[None, :]
    codes1 += expert.to(tl.int64) * (STEPS * 4 * F * 16)
    codes3 += expert.to(tl.int64) * (STEPS * 4 * F * 16)
    scales1 += expert.to(tl.int64) * (STEPS * F)
    scales3 += expert.to(tl.int64) * (STEPS * F)
    a = tl.zeros([BO, BM], tl.float32)
    b = tl.zeros([BO, BM], tl.float32)
    for k in range(STEPS):
        scale1 = tl.load(scales1 + k * F + unit, there, 0)
        scale3 = tl.load(scales3 + k * F + unit, there, 0)
        for g in tl.static_range(4):
            first = load_columns(x, real, k * 128 + g * 32, L, 128)
            second = load_columns(x, real, k * 128 + g * 32 + 16, L, 128)
            place = (k * 4 + g) * (F * 16) + at
            low, high = weights_of(tl.load(codes1 + place, there[:, None], 0), (scale1 >> (8 * g)) & 255)
            a = product(high, tl.trans(second), product(low, tl.trans(first), a))
            low, high = weights_of(tl.load(codes3 + place, there[:, None], 0), (scale3 >> (8 * g)) & 255)
            b = product(high, tl.trans(second), product(low, tl.trans(first), b))
    left, _ = capped(a, beta, GATE_CAPPED)
    right, _ = capped(b, linear_beta, UP_CAPPED)
    hidden = left * sigmoid(a) * right
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
    unit, byte = n * BO + tl.arange(0, BO), tl.arange(0, 16)
    there = unit < L
    at = unit[:, None] * 16 + byte[None, :]
    codes += expert.to(tl.int64) * (STEPS * 4 * L * 16)
    scales += expert.to(tl.int64) * (STEPS * L)
    total = tl.zeros([BO, BM], tl.float32)
    for k in range(STEPS):
        scale = tl.load(scales + k * L + unit, there, 0)
        for g in tl.static_range(4):
            first = load_columns(h, real, k * 128 + g * 32, F, 128)
            second = load_columns(h, real, k * 128 + g * 32 + 16, F, 128)
            place = (k * 4 + g) * (L * 16) + at
            low, high = weights_of(tl.load(codes + place, there[:, None], 0), (scale >> (8 * g)) & 255)
            total = product(high, tl.trans(second), product(low, tl.trans(first), total))
    p = tl.load(weight + tl.load(slot_of_row + row, real, 0), real, 0.0)
    total *= p[None, :]
    tl.store(y + row.to(tl.int64)[None, :] * L + unit[:, None], total.to(y.dtype.element_ty), there[:, None])
