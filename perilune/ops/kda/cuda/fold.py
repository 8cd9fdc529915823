"""The states between segments, from the effects of these, as a CUDA kernel. See fold.cu."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import torch

from perilune.ops.cuda import Kernel, Launch
from perilune.ops.kda.gpu.plan import Plan

DIMS = (64, 128)
ROWS = 16  # value channels of a block


@cache
def kernel(key_dim: int, reverse: bool) -> Kernel:
    """The kernel for K channels; shared memory as in fold.cu."""
    return Kernel(
        Path(__file__).parent / "fold.cu",
        "fold",
        "P" * 5 + "q" * 4 + "i" * 2,
        threads=128,
        shared_bytes=4 * (key_dim + ROWS) * (key_dim + 4),
        defines={"KEY_DIM": key_dim, "REVERSE": int(reverse)},
        early=True,
    )


def unsuitable(key_dim: int, value_dim: int, device: torch.device, reverse: bool) -> str | None:
    """Why the kernel does not take states of these sizes; None if it does."""
    if key_dim not in DIMS or value_dim not in DIMS:
        return f"the CUDA kernel is written for K and V of 64 or 128, not {key_dim} and {value_dim}"
    return kernel(key_dim, reverse).unavailable_reason(device)


def laid_out(
    device: torch.device, heads: int, value_dim: int, key_dim: int, p: Plan, strides: tuple[int, ...], reverse: bool
) -> Launch:  # fmt: skip
    """The launch for the sequences of p and a state by these strides (row, head, V, K). Its pointers as in fold.cu."""
    grid = (heads * (value_dim // ROWS), len(p.sequences))
    return kernel(key_dim, reverse).fixed(device, grid, *strides, heads, value_dim)
