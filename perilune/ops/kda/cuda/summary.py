"""What segments do to the states that enter them, for calls that `scan.unsuitable` lets pass. See summary.cu."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

from torch import Tensor

from perilune.ops.cuda import Kernel, Launch
from perilune.ops.kda.cuda.serial import serial_kernel

if TYPE_CHECKING:
    from perilune.ops.kda.gpu.forward import Prepared
    from perilune.ops.kda.gpu.plan import Plan


@cache
def kernel(key_dim: int, width: int) -> Kernel:
    """The effect of segments, `width` columns a block."""
    return serial_kernel("summary", "P" * 10 + "q" * 6 + "i" * 2, key_dim, width, {})


def run(v: Tensor, x: Prepared, p: Plan, state: Tensor | None, strides: tuple[int, ...], M: Tensor, N: Tensor) -> None:
    """Fill M^T `[units, heads, K, K]` and N^T `[units, heads, V, K]` of every unit but the last of its sequence."""
    laid_out(v, x.Kd.shape[-1], p, strides)(v, x.Kd, x.Kr, x.A, x.gamma, x.beta, p.units, state, M, N)


def laid_out(v: Tensor, key_dim: int, p: Plan, strides: tuple[int, ...]) -> Launch:
    """The launch for values that lie like these and the units of p. Its pointers as in summary.cu."""
    heads, value_dim = v.shape[1:]
    width = min(value_dim, key_dim)
    return kernel(key_dim, width).fixed(
        v.device, (heads * ((value_dim + key_dim) // width), p.unit_count),
        *v.stride()[:2], *strides, heads, value_dim,
    )  # fmt: skip
