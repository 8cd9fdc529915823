"""The serial scan of the forward pass as a CUDA kernel, for which calls, and its launch. See scan.cu."""

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
def kernel(key_dim: int, width: int, keep: bool) -> Kernel:
    """The scan for K channels and `width` value channels a block; `keep`: U and S are written too."""
    parameters, defines = "P" * 16 + "q" * 10 + "i" * 3, {"KEEP": int(keep)}
    return serial_kernel("scan", parameters, key_dim, width, defines)


def unsuitable(v: Tensor, key_dim: int, *dtypes: torch.dtype) -> str | None:
    """Why the kernel, or `summary`, does not take this call; None if both do. Arguments as those of `serial.obstacle`."""
    return obstacle(v, key_dim, *dtypes) or kernel(key_dim, v.shape[-1], False).unavailable_reason(v.device)


def run(
    v: Tensor, x: Prepared, p: Plan, state: Tensor | None, strides: tuple[int, ...], final: Tensor | None,
    final_strides: tuple[int, ...], o: Tensor, U: Tensor | None, S: Tensor | None, slots: Tensor | None = None,
    exported: Tensor | None = None,
) -> None:  # fmt: skip
    """Fill o `[tokens, heads, V]` and what else is given.

    Args:
        v: `[tokens, heads, V]`.
        x: what `prepare` found.
        p: chunks and units, and how many value channels a block takes.
        state: that enters the sequences, or the units if they are segments; strides by (row, head, V, K).
        final: state behind each sequence, likewise.
        U: `[chunks, heads, 64, V]`, with S `[chunks, heads, V, K]` for the backward pass.
        slots: with exported, see `states.Exports`.
    """
    launch = laid_out(v, x.Kd.shape[-1], p, U is not None, strides, final_strides)
    launch(v, *x, p.units, state, final, o, U, S, slots, exported)


def laid_out(
    v: Tensor, key_dim: int, p: Plan, keep: bool, strides: tuple[int, ...], final_strides: tuple[int, ...]
) -> Launch:  # fmt: skip
    """The launch for values that lie like these, units and widths of p; `keep`: with U and S. Its pointers as in scan.cu."""
    heads, value_dim = v.shape[1:]
    return kernel(key_dim, p.width, keep).fixed(
        v.device, (heads * (value_dim // p.width), p.unit_count),
        *v.stride()[:2], *strides, *final_strides, heads, value_dim, int(p.split),
    )  # fmt: skip
