"""Weighted sums of a token's expert outputs by two CUDA kernels. See output.cu and sum.cu."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from perilune.ops.cuda import Kernel
from perilune.ops.mx.pack import DeviceWeight
from perilune.ops.triton.available import units
from perilune.ops.triton.sizes import blocks

TILE = 32  # output columns of a warp
WARPS, BLOCKS = 16, 1  # of a block; blocks that a multiprocessor takes at once
SUM_THREADS = 64  # of a block that puts the parts together


@cache
def kernel() -> Kernel:
    """The kernel of the products."""
    return Kernel(Path(__file__).parent / "output.cu", "output", "PPPPPPiiiii", threads=32 * WARPS)


@cache
def sum_kernel() -> Kernel:
    """The kernel that puts the parts together."""
    return Kernel(Path(__file__).parent / "sum.cu", "sum", "PPiiii", threads=SUM_THREADS)


def run_of(total: int, count: int, warps: int) -> int:
    """Steps of a warp's run: `total` dealt out evenly among `warps`, but no more than a tile's `count`."""
    return max(1, min(count, blocks(total, warps)))


def output(h_PF: Tensor, index_NA: Tensor, weight_NA: Tensor, w2: DeviceWeight) -> Tensor:
    """sum over a token's experts of p W2 h, `[N, L]` bfloat16; h bfloat16 and index int64, dense."""
    tokens, active = index_NA.shape
    count = active * w2.steps
    total = w2.rows // TILE * count
    run = run_of(total, count, BLOCKS * WARPS * units(h_PF.device))
    grid = blocks(total, run * WARPS)
    parts = torch.empty(tokens, grid * WARPS, 2, TILE, device=h_PF.device)
    y_NL = torch.empty(tokens, w2.rows, dtype=h_PF.dtype, device=h_PF.device)
    kernel().launch(
        (grid, tokens), h_PF, index_NA, weight_NA.to(torch.float32).contiguous(), w2.codes, w2.scale, parts, active, w2.steps,
        w2.rows, w2.columns, run,
    )  # fmt: skip
    sum_kernel().launch((blocks(w2.rows, SUM_THREADS), tokens), parts, y_NL, grid * WARPS, w2.rows, count, run)
    return y_NL
