"""Hidden values of (token, expert) pairs by one CUDA kernel. See hidden.cu."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from perilune.ops.cuda import Kernel
from perilune.ops.mx.pack import DeviceWeight
from perilune.ops.triton.sizes import blocks

ROWS, WARPS = 16, 4  # of a block


@cache
def kernel(gate_capped: bool, up_capped: bool) -> Kernel:
    """The kernel for SiTU, SiTU without a cap on the up side, or SwiGLU."""
    return Kernel(
        Path(__file__).parent / "hidden.cu",
        "hidden",
        "P" * 7 + "qiiiiff",
        threads=32 * WARPS,
        shared_bytes=4 * WARPS * 2 * ROWS,
        defines={"GATE_CAPPED": int(gate_capped), "UP_CAPPED": int(up_capped)},
    )


def hidden(
    z_NL: Tensor, index_NA: Tensor, w1: DeviceWeight, w3: DeviceWeight, caps: tuple[float, float | None] | None
) -> Tensor:
    """glu(W1 z, W3 z) of each pair, `[N A, F]` bfloat16; z bfloat16 with a dense last axis, index int64, dense."""
    h_PF = torch.empty(index_NA.numel(), w1.rows, dtype=z_NL.dtype, device=z_NL.device)
    beta, linear_beta = caps or (0.0, None)
    kernel(caps is not None, linear_beta is not None).launch(
        (blocks(w1.rows, ROWS), len(h_PF)), z_NL, index_NA, w1.codes, w1.scale, w3.codes, w3.scale, h_PF, z_NL.stride(0),
        index_NA.shape[1], w1.steps, w1.rows, w1.columns, beta, linear_beta or 0.0,
    )  # fmt: skip
    return h_PF
