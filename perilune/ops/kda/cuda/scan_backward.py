"""The serial kernel of the backward pass in CUDA: for which calls, and its launches. See scan_backward.cu."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from perilune.ops.cuda import Kernel, Launch
from perilune.ops.kda.cuda.serial import obstacle, serial_kernel

if TYPE_CHECKING:
    from perilune.ops.kda.gpu.forward import Prepared
    from perilune.ops.kda.gpu.plan import Plan


@cache
def kernel(key_dim: int, width: int, summary: bool) -> Kernel:
    """The kernel for K channels and `width` value channels a block; `summary`: only what units add to the cotangent."""
    parameters, defines = "P" * 13 + "q" * 10 + "i" * 3, {"SUMMARY": int(summary)}
    return serial_kernel("scan_backward", parameters, key_dim, width, defines)


def unsuitable(do: Tensor, key_dim: int, *dtypes: torch.dtype) -> str | None:
    """Why the kernel does not take this call; None if it does. Arguments as those of `serial.obstacle`."""
    return obstacle(do, key_dim, *dtypes) or kernel(key_dim, do.shape[-1], False).unavailable_reason(do.device)


def run(
    do: Tensor, x: Prepared, p: Plan, leaving: Tensor | None, strides: tuple[int, ...], split: bool,
    entering: Tensor | None, entering_strides: tuple[int, ...], E: Tensor | None, dS: Tensor | None,
) -> None:  # fmt: skip
    """Walk the units in reverse.

    Args:
        do: cotangent of o, `[tokens, heads, V]`.
        x: what `prepare` found.
        p: chunks and units.
        leaving: cotangent of the state that leaves, by strides (row, head, V, K): a row a unit if split, else a sequence.
        entering: filled with the cotangent of the state that enters each sequence; without E, with what each unit that
            does not begin a sequence adds to it, `[units, heads, V, K]`.
        E: gradient of v `[tokens, heads, V]`, with dS `[chunks, heads, V, K]`, of the state that leaves each chunk.
    """
    launch = laid_out(do, x.Kd.shape[-1], p, E is None, strides, split, entering_strides)
    launch(do, *x, p.units, leaving, entering, E, dS)


def laid_out(
    do: Tensor, key_dim: int, p: Plan, summary: bool, strides: tuple[int, ...], split: bool, entering_strides: tuple[int, ...]
) -> Launch:  # fmt: skip
    """The launch for a cotangent that lies like this one; the rest as in `run`. Its pointers as in scan_backward.cu."""
    heads, value_dim = do.shape[1:]
    return kernel(key_dim, p.width, summary).fixed(
        do.device, (heads * (value_dim // p.width), p.unit_count),
        *do.stride()[:2], *strides, *entering_strides, heads, value_dim, int(split),
    )  # fmt: skip
