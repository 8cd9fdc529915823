"""Weighted sums of a token's expert outputs by one CUDA kernel. See output.cu."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from perilune.ops.cuda import Kernel
from perilune.ops.mx.pack import DeviceWeight
from perilune.ops.triton.sizes import blocks

ROWS, WARPS = 16, 8  # of a block


@cache
def kernel() -> Kernel:
    """The kernel."""
    shared_bytes = 4 * WARPS * ROWS
    return Kernel(
        Path(__file__).parent / "output.cu", "output", "PPPPPPiiii", threads=32 * WARPS, shared_bytes=shared_bytes
    )


def output(h_PF: Tensor, index_NA: Tensor, weight_NA: Tensor, w2: DeviceWeight) -> Tensor:
    """sum over a token's experts of p W2 h, `[N, L]` bfloat16; h bfloat16 and index int64, dense."""
    tokens, active = index_NA.shape
    y_NL = torch.empty(tokens, w2.rows, dtype=h_PF.dtype, device=h_PF.device)
    kernel().launch(
        (blocks(w2.rows, ROWS), tokens), h_PF, index_NA, weight_NA.to(torch.float32).contiguous(), w2.codes, w2.scale, y_NL,
        active, w2.steps, w2.rows, w2.columns,
    )  # fmt: skip
    return y_NL
