"""The serial kernels of `chunk_kda` in CUDA, forward: for which calls, and their launches. See scan.cu and summary.cu."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from perilune.ops.cuda import Kernel

if TYPE_CHECKING:
    from perilune.ops.kda.triton.launch import Prepared
    from perilune.ops.kda.triton.plan import Plan

DIMS = (64, 128)
GROUP = 64  # value channels of a warpgroup
_FOLDER = Path(__file__).parent
_BLOCK, _SLOTS = 8192, 5


@cache
def scan_kernel(key_dim: int, width: int, keep: bool) -> Kernel:
    """The scan for K channels and `width` value channels a block; `keep`: U and S are written too."""
    parameters, defines = "P" * 15 + "q" * 10 + "i" * 3, {"KEEP": int(keep)}
    return serial_kernel("scan", parameters, key_dim, width, defines)


@cache
def summary_kernel(key_dim: int, width: int) -> Kernel:
    """The effect of segments, `width` columns a block."""
    return serial_kernel("summary", "P" * 9 + "q" * 6 + "i" * 2, key_dim, width, {})


def serial_kernel(name: str, parameters: str, key_dim: int, width: int, defines: dict[str, int]) -> Kernel:
    """A kernel built on scan_tiles.h; its shared memory is laid out there."""
    groups, wide = width // GROUP, key_dim // 64
    half = max(wide + 1 + groups, 2 * wide + 1) * _BLOCK + 1024
    return Kernel(
        _FOLDER / f"{name}.cu",
        name,
        parameters,
        threads=128 * groups,
        shared_bytes=_SLOTS * half + groups * _BLOCK,
        defines={"KEY_DIM": key_dim, "GROUPS": groups} | defines,
    )


def unsuitable(rows: Tensor, key_dim: int, *dtypes: torch.dtype) -> str | None:
    """Why the serial kernels, forward or backward, do not take this call; None if they do.

    Args:
        rows: v, or the cotangent of o, `[tokens, heads, V]`.
        key_dim: K.
        dtypes: of what `prepare` writes, and of the outputs.
    """
    for dtype in (rows.dtype, *dtypes):
        if dtype != torch.bfloat16:
            return f"the CUDA kernel works in bfloat16, not {str(dtype).removeprefix('torch.')}"
    value_dim = rows.shape[-1]
    if key_dim not in DIMS or value_dim not in DIMS:
        return f"the CUDA kernel is written for K and V of 64 or 128, not {key_dim} and {value_dim}"
    if rows.data_ptr() % 16 or any(n % 8 for n in rows.stride()[:2]):
        return "the CUDA kernel copies 16 bytes at a time: v must begin, and its rows lie, at multiples of that"
    return scan_kernel(key_dim, value_dim, False).unavailable_reason(rows.device)


def scan(
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
    heads, value_dim = v.shape[1:]
    scan_kernel(x.Kd.shape[-1], p.width, U is not None).launch(
        (heads * (value_dim // p.width), p.unit_count),
        v, x.Qd, x.Kd, x.Kr, x.P, x.A, x.gamma, p.units, state, final, o, U, S, slots, exported,
        *v.stride()[:2], *strides, *final_strides, heads, value_dim, int(p.split),
    )  # fmt: skip


def summary(
    v: Tensor, x: Prepared, p: Plan, state: Tensor | None, strides: tuple[int, ...], M: Tensor, N: Tensor
) -> None:
    """Fill M^T `[units, heads, K, K]` and N^T `[units, heads, V, K]` of every unit but the last of its sequence."""
    heads, value_dim = v.shape[1:]
    key_dim = x.Kd.shape[-1]
    width = min(value_dim, key_dim)
    summary_kernel(key_dim, width).launch(
        (heads * ((value_dim + key_dim) // width), p.unit_count),
        v, x.Kd, x.Kr, x.A, x.gamma, p.units, state, M, N, *v.stride()[:2], *strides, heads, value_dim,
    )  # fmt: skip
