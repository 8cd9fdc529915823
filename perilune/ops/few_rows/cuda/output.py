"""Outputs of (token, expert) pairs as one launch; see output.cu."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from perilune.ops.cuda import Kernel
from perilune.ops.few_rows.kernels import WARPS, ring_bytes


@cache
def kernel(hidden: int, width: int, rows: int, tiles: int) -> Kernel:
    """The kernel for matrices of `width` rows and `hidden` columns."""
    return Kernel(
        Path(__file__).parent / "output.cu", "output", "PPPP", threads=32 * WARPS, shared_bytes=ring_bytes(hidden, rows, tiles),
        defines={"WIDTH": hidden, "OUT": width, "ROW_TILES": rows, "TOKEN_TILES": tiles}, early=True,
    )  # fmt: skip
