"""A token's experts together, and their norm, as one launch; see combine.cu."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from perilune.ops.cuda import Kernel
from perilune.ops.triton.sizes import blocks


@cache
def kernel(width: int, active: int, norm: bool) -> Kernel:
    """The kernel for tokens of `width` numbers, with or without the norm."""
    threads = 32 * blocks(width // 4, 32)
    return Kernel(
        Path(__file__).parent / "combine.cu", "combine", "PPPPPPf", threads=threads, shared_bytes=128,
        defines={"WIDTH": width, "ACTIVE": active, "THREADS": threads, "NORM": int(norm)}, early=True,
    )  # fmt: skip
