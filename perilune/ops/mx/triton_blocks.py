"""Rounding, encoding and decoding of MX blocks on a CUDA device: every element read once, every result written once.

The arithmetic is that of `scale` and `element`, on the bits of float32, so results are those of the other implementations
bit for bit. A program takes whole groups of 32 columns; the columns beyond a row's end count as zeros.
"""

# What stands in a kernel is Triton's language, whose loops and constants Python's types do not describe.
# pyright: reportGeneralTypeIssues=false, reportAssignmentType=false, reportAttributeAccessIssue=false, reportOperatorIssue=false

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from perilune.ops.mx.element import Element
from perilune.ops.mx.scale import GROUP, carry
from perilune.ops.triton.sizes import blocks

GROUPS = 64  # of a program
WARPS = 4
_SIGN = tl.constexpr(-(1 << 31))
_MAGNITUDE = tl.constexpr((1 << 31) - 1)
_INFINITY = tl.constexpr(0x7F800000)


@triton.jit
def power(exponent):
    """2^exponent as float32, for -127 <= exponent <= 127; -127 is subnormal."""
    bits = tl.where(exponent == -127, 1 << 22, (exponent + 127) << 23)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def round_groups(x, carried, MANTISSA: tl.constexpr, LEAST: tl.constexpr, MOST: tl.constexpr, TOP: tl.constexpr):
    """Magnitudes of x [..., 32] float32 on the grid of its group, and the groups' exponents; -128 where the scale is NaN."""
    bits = x.to(tl.int32, bitcast=True) & _MAGNITUDE
    largest = tl.max(bits, len(x.shape) - 1, keep_dims=True)  # NaN is above every number here
    exponent = ((largest + carried) >> 23) - 127 - MOST
    exponent = tl.minimum(tl.maximum(exponent, -127), 127 - MOST)
    finite = largest < _INFINITY
    magnitude = bits.to(tl.float32, bitcast=True) * power(-exponent)
    binade = tl.maximum(magnitude.to(tl.int32, bitcast=True) & _INFINITY, (LEAST + 127) << 23)
    magic = binade.to(tl.float32, bitcast=True) * (1.5 * 2.0 ** (23 - MANTISSA))
    rounded = tl.minimum((magnitude + magic) - magic, TOP)
    return rounded, tl.where(finite, exponent, -128)


@triton.jit
def fake_round(x, carried, MANTISSA: tl.constexpr, LEAST: tl.constexpr, MOST: tl.constexpr, TOP: tl.constexpr):
    """Values of x [..., 32] float32 as they come back from the block format."""
    rounded, exponent = round_groups(x, carried, MANTISSA, LEAST, MOST, TOP)
    value = tl.where(exponent == -128, float("nan"), rounded * power(tl.maximum(exponent, -127)))
    sign = x.to(tl.int32, bitcast=True) & _SIGN
    return (value.to(tl.int32, bitcast=True) | sign).to(tl.float32, bitcast=True)


@triton.jit
def _place(count, groups, stride, width, BG: tl.constexpr):
    """Offsets [BG, 32] of a program's groups in rows `stride` apart, and what lies inside."""
    group = tl.program_id(0).to(tl.int64) * BG + tl.arange(0, BG)
    column = (group % groups)[:, None] * 32 + tl.arange(0, 32)[None, :]
    return group, (group // groups)[:, None] * stride + column, (group < count)[:, None] & (column < width)


@triton.jit
def _round_kernel(
    x, stride, out, count, groups, width, carried, MANTISSA: tl.constexpr, LEAST: tl.constexpr, MOST: tl.constexpr,
    TOP: tl.constexpr, BG: tl.constexpr,
):  # fmt: skip
    _, at, inside = _place(count, groups, stride, width, BG)
    v = fake_round(tl.load(x + at, inside, 0.0).to(tl.float32), carried, MANTISSA, LEAST, MOST, TOP)
    _, at, inside = _place(count, groups, width, width, BG)
    tl.store(out + at, v.to(out.dtype.element_ty), inside)


@triton.jit
def _encode_kernel(
    x, stride, codes, scales, count, groups, width, carried, MANTISSA: tl.constexpr, LEAST: tl.constexpr, MOST: tl.constexpr,
    TOP: tl.constexpr, BITS: tl.constexpr, BG: tl.constexpr,
):  # fmt: skip
    group, at, inside = _place(count, groups, stride, width, BG)
    v = tl.load(x + at, inside, 0.0).to(tl.float32)
    rounded, exponent = round_groups(v, carried, MANTISSA, LEAST, MOST, TOP)
    valid = exponent != -128
    rounded = tl.where(valid, rounded, 0.0)
    normal = (rounded.to(tl.int32, bitcast=True) >> (23 - MANTISSA)) - ((126 + LEAST) << MANTISSA)
    subnormal = (rounded * 2.0 ** (MANTISSA - LEAST)).to(tl.int32)
    code = tl.where(rounded < 2.0**LEAST, subnormal, normal)
    sign = (v.to(tl.int32, bitcast=True) >> 31) & 1
    code = tl.where(valid, code | (sign << (BITS - 1)), 0)
    tl.store(scales + group[:, None], tl.where(valid, exponent + 127, 255).to(tl.uint8), (group < count)[:, None])
    if BITS == 4:
        low, high = tl.split(tl.reshape(code, [BG, 16, 2]))
        byte = group[:, None] * 16 + tl.arange(0, 16)[None, :]
        tl.store(codes + byte, (low | (high << 4)).to(tl.uint8), (group < count)[:, None])
    else:
        byte = group[:, None] * 32 + tl.arange(0, 32)[None, :]
        tl.store(codes + byte, code.to(tl.uint8), (group < count)[:, None])


@triton.jit
def _decode_kernel(
    codes, scales, out, count, MANTISSA: tl.constexpr, LEAST: tl.constexpr, BITS: tl.constexpr, BG: tl.constexpr
):  # fmt: skip
    group = tl.program_id(0).to(tl.int64) * BG + tl.arange(0, BG)
    there = (group < count)[:, None]
    if BITS == 4:
        byte = tl.load(codes + group[:, None] * 16 + tl.arange(0, 16)[None, :], there, 0).to(tl.int32)
        code = tl.reshape(tl.join(byte & 15, byte >> 4), [BG, 32])
    else:
        code = tl.load(codes + group[:, None] * 32 + tl.arange(0, 32)[None, :], there, 0).to(tl.int32)
    magnitude = code & ((1 << (BITS - 1)) - 1)
    normal = ((magnitude << (23 - MANTISSA)) + ((126 + LEAST) << 23)).to(tl.float32, bitcast=True)
    value = tl.where(magnitude < 1 << MANTISSA, magnitude.to(tl.float32) * 2.0 ** (LEAST - MANTISSA), normal)
    if BITS == 8:
        value = tl.where(magnitude == 127, float("nan"), value)
    scale = tl.load(scales + group, group < count, 0).to(tl.int32)
    factor = tl.where(scale == 255, float("nan"), power_of_byte(scale))
    sign = (code >> (BITS - 1)) << 31  # a negative zero stays one
    value = ((value * factor[:, None]).to(tl.int32, bitcast=True) | sign).to(tl.float32, bitcast=True)
    tl.store(out + group[:, None] * 32 + tl.arange(0, 32)[None, :], value.to(out.dtype.element_ty), there)


@triton.jit
def power_of_byte(scale):
    """2^(scale - 127) of scale bytes 0 to 254; any for 255."""
    return tl.where(scale == 0, 1 << 22, tl.minimum(scale, 254) << 23).to(tl.float32, bitcast=True)


def _numbers(element: Element) -> dict[str, int | float]:
    return {"MANTISSA": element.mantissa, "LEAST": element.least, "MOST": element.most, "TOP": element.top}


def round_rows(x: Tensor, stride: int, out: Tensor, width: int, element: Element, rule: str) -> None:
    """Write the rounded rows of x, `stride` apart and `width` wide, densely into `out`."""
    groups = blocks(width, GROUP)
    count = out.numel() // width * groups
    _round_kernel[(blocks(count, GROUPS),)](
        x, stride, out, count, groups, width, carry(element, rule, 23), **_numbers(element), BG=GROUPS, num_warps=WARPS
    )


def encode_rows(x: Tensor, stride: int, codes: Tensor, scales: Tensor, width: int, element: Element, rule: str) -> None:
    """Write codes and scales of the rows of x, `stride` apart and `width` (a multiple of 32) wide."""
    count = scales.numel()
    _encode_kernel[(blocks(count, GROUPS),)](
        x, stride, codes, scales, count, width // GROUP, width, carry(element, rule, 23), **_numbers(element),
        BITS=element.bits, BG=GROUPS, num_warps=WARPS,
    )  # fmt: skip


def decode_rows(codes: Tensor, scales: Tensor, out: Tensor, element: Element) -> None:
    """Write the values of dense codes and scales."""
    count = scales.numel()
    _decode_kernel[(blocks(count, GROUPS),)](
        codes, scales, out, count, MANTISSA=element.mantissa, LEAST=element.least, BITS=element.bits, BG=GROUPS,
        num_warps=WARPS,
    )  # fmt: skip
