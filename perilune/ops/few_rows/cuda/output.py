"""Outputs of (token, expert) pairs as one launch; see output.cu."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from perilune.ops.cuda import Kernel
from perilune.ops.few_rows.kernels import WARPS, early_kernel, ring_bytes


@cache
def kernel(hidden: int, width: int, rows: int, tiles: int) -> Kernel:
    """The kernel for matrices of `width` rows and `hidden` columns."""
    return early_kernel(
        Path(__file__).with_suffix(".cu"), "PPPP", 32 * WARPS, ring_bytes(hidden, rows, tiles),
        WIDTH=hidden, OUT=width, ROW_TILES=rows, TOKEN_TILES=tiles,
    )  # fmt: skip
