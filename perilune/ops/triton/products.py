"""Products and loop bounds that the compiler and Triton's interpreter both take."""

from __future__ import annotations

import triton
import triton.language as tl

from perilune.ops.triton.available import interpreted

INTERPRET = tl.constexpr(interpreted())


@triton.jit
def product(a, b, accumulator):
    """accumulator + a @ b in float32; float32 operands are multiplied as such, not as tf32.

    The interpreter's product of bfloat16 is garbage (traps T51), so there the operands are widened.
    """
    if INTERPRET:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), accumulator, input_precision="ieee")
    return tl.dot(a, b, accumulator, input_precision="ieee")


@triton.jit
def trips(count):
    """A loaded or computed number as the bound of a loop; the interpreter needs a plain number there."""
    if INTERPRET:
        return count.handle.data.item()
    return count
