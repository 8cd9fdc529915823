"""Pieces that the kernels of this folder share: products, gated units, and which tile a program takes."""

# What stands in a kernel is Triton's language, whose loops and constants Python's types do not describe.
# pyright: reportGeneralTypeIssues=false, reportAssignmentType=false, reportAttributeAccessIssue=false

from __future__ import annotations

import triton
import triton.language as tl

from perilune.ops.triton.available import interpreted
from perilune.ops.triton.gates import sigmoid

INTERPRET = tl.constexpr(interpreted())


@triton.jit
def trips(count):
    """A loaded number as the bound of a loop; the interpreter needs a plain number there."""
    if INTERPRET:
        return count.handle.data.item()
    return count


@triton.jit
def dot_add(a, b, accumulator, PRECISION: tl.constexpr):
    """accumulator + a @ b in float32. The interpreter's product of bfloat16 is garbage (traps T51), so not there."""
    if INTERPRET:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), accumulator, input_precision="ieee")
    return tl.dot(a, b, accumulator, input_precision=PRECISION)


@triton.jit
def capped(x, cap, CAPPED: tl.constexpr):
    """cap * tanh(x / cap) and its slope 1 - tanh^2; x and 1 without a cap."""
    if CAPPED:
        half = sigmoid(2.0 * x / cap)
        # 1 - tanh^2 = 4 half (1 - half): exact zero where the cap is reached, never an infinity
        return cap * (2.0 * half - 1.0), 4.0 * half * (1.0 - half)
    return x, tl.full(x.shape, 1.0, tl.float32)


@triton.jit
def place_of_tile(tile, tile_expert, tile_start, columns: tl.constexpr, GROUP: tl.constexpr):
    """Which part of the output the `tile`-th program of all takes.

    An expert's tiles follow each other, so that its weights are read while they are in the L2 cache; within an expert,
    GROUP tiles of rows take turns before the next tile of columns, so that its rows are too.

    Returns:
        (expert, tile of rows among all, tile of columns).
    """
    expert = tl.load(tile_expert + tile // columns)
    first = tl.load(tile_start + expert)
    tiles = tl.load(tile_start + expert + 1) - first
    local = tile - first * columns
    group = local // (GROUP * columns)
    above = group * GROUP
    size = tl.minimum(tiles - above, GROUP)
    inside = local - group * (GROUP * columns)
    return expert, first + above + inside % size, inside // size
