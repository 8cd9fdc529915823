"""Several projections of a few tokens as one launch; see project.cu."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from perilune.ops.cuda import Kernel
from perilune.ops.few_rows.kernels import ROWS, TILE_TOKENS, WARPS, early_kernel, ring_bytes, rows_of, token_tiles
from perilune.ops.triton.sizes import blocks

MOST_MATRICES = 6
MANY_TILES = 1024  # of 16 matrix rows, some for each multiprocessor
SOME_TILES = 400  # in blocks of four there is one for three of four multiprocessors


@cache
def kernel(width: int, segments: int, rows: int, tiles: int, norm: bool, gated: bool) -> Kernel:
    """The kernel for these macros; rows: tiles of them in a block."""
    return early_kernel(
        Path(__file__).with_suffix(".cu"), "P" * (2 * segments) + "i" * segments + "PPP" + "qqq" + "if", 32 * WARPS,
        ring_bytes(width, rows, (2 if gated else 1) * tiles) + 4 * WARPS * TILE_TOKENS * tiles,
        WIDTH=width, SEGMENTS=segments, TOKEN_TILES=tiles, ROW_TILES=rows, NORM=int(norm), GATED=int(gated),
    )  # fmt: skip


def row_tiles(matrix_tiles: int, tiles: int) -> int:
    """Tiles of rows for a block: more where matrices are large or tokens many, since every block reads all tokens."""
    if matrix_tiles >= MANY_TILES:
        return 8 if tiles > 2 else 4
    if tiles > 2 and matrix_tiles >= SOME_TILES:
        return 4
    return 2 if tiles > 1 or 2 * matrix_tiles >= MANY_TILES else 1


def project(
    x_NK: Tensor,
    weights_OK: Sequence[Tensor],
    *,
    norm: tuple[Tensor, float] | None = None,
    gate_NK: Tensor | None = None,
) -> list[Tensor]:
    """W x of each matrix.

    Args:
        x_NK: `[N, K]` bfloat16 tokens that `kernels.why_not` lets pass.
        weights_OK: up to six `[O_s, K]` bfloat16 matrices.
        norm: (weight `[K]` float32, eps) of an RMSNorm of x.
        gate_NK: x is multiplied by sigmoid(gate).

    Returns:
        `[N, O_s]` of each, bfloat16: slices of one tensor whose rows start at multiples of 16 bytes.
    """
    x_NK = rows_of(x_NK)
    tokens, width = x_NK.shape
    tiles = token_tiles(tokens)
    sizes = [len(weight) for weight in weights_OK]
    places = [0]
    for size in sizes:
        places.append(places[-1] + 8 * blocks(size, 8))
    out = torch.empty(tokens, places[-1], dtype=x_NK.dtype, device=x_NK.device)
    outs = [out[:, place : place + size] for place, size in zip(places, sizes)]
    gate = None if gate_NK is None else rows_of(gate_NK)
    each = row_tiles(sum(blocks(size, ROWS) for size in sizes), tiles)
    run, rows = kernel(width, len(sizes), each, tiles, norm is not None, gate is not None), ROWS * each
    scale, eps = (None, 0.0) if norm is None else norm
    run.launch(
        (sum(blocks(size, rows) for size in sizes),), *weights_OK, *outs, *sizes, x_NK, gate, scale, x_NK.stride(0),
        0 if gate is None else gate.stride(0), out.stride(0), tokens, eps,
    )  # fmt: skip
    return outs
