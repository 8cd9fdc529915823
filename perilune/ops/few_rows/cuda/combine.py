"""A token's experts together, and their norm, as one launch; see combine.cu."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from perilune.ops.cuda import Kernel
from perilune.ops.few_rows.kernels import early_kernel
from perilune.ops.triton.sizes import blocks


@cache
def kernel(width: int, active: int, norm: bool) -> Kernel:
    """The kernel for tokens of `width` numbers, with or without the norm."""
    threads = 32 * blocks(width // 4, 32)
    return early_kernel(
        Path(__file__).with_suffix(".cu"), "PPPPPPf", threads, 128, WIDTH=width, ACTIVE=active, THREADS=threads, NORM=int(norm)
    )  # fmt: skip
