"""The ways out of a layer with experts as one launch; see outward.cu."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from perilune.ops.cuda import Kernel
from perilune.ops.few_rows.kernels import STEP, TILE_TOKENS, WARPS, early_kernel, ring_bytes, sum_bytes
from perilune.ops.triton.sizes import blocks

PAIR_TILES = 1  # tiles of tokens of which every block adds up the experts' outputs


@cache
def kernel(width: int, second: int, active: int, tiles: int, norm: bool) -> Kernel:
    """The kernel for these macros."""
    row_tiles = 1 if tiles == 1 else 2
    pairs, sums = tiles <= PAIR_TILES, sum_bytes(row_tiles, tiles)
    turns = max(ring_bytes(width, row_tiles, 0 if pairs else tiles), sums)
    more = max(ring_bytes(second, row_tiles, tiles), sums) if second else 0
    return early_kernel(
        Path(__file__).with_suffix(".cu"), "P" * 10 + "iif", 32 * WARPS, turns + more + 4 * blocks(width // STEP, 2) * TILE_TOKENS,
        WIDTH=width, SECOND=second, ACTIVE=active, TOKEN_TILES=tiles, ROW_TILES=row_tiles, PAIRS=int(pairs), NORM=int(norm),
    )  # fmt: skip
