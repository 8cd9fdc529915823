"""Pieces that the kernels of this folder share: products, and which tile a program takes."""

# What stands in a kernel is Triton's language, whose loops and constants Python's types do not describe.
# pyright: reportGeneralTypeIssues=false, reportAssignmentType=false, reportAttributeAccessIssue=false

from __future__ import annotations

import triton
import triton.language as tl

from perilune.ops.triton.available import interpreted

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
