"""Causal attention of many queries as a CUDA kernel: for which calls, and its launch. See attend.cu."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from perilune.ops.cuda import Kernel
from perilune.ops.triton.sizes import blocks

WARPS = 8  # that multiply
WIDTHS = (192, 128), (128, 128), (96, 64), (64, 64)  # channels of keys and values that the kernel is built for
QUERIES = 128  # of a tile
KEYS = 128  # of a block
ALIGNMENT = 16  # bytes of a copy


@cache
def kernel(key: int, value: int, wide: bool) -> Kernel:
    """The kernel for keys and values of these widths; `wide`: with an output in float32."""
    key_chunks, value_chunks = blocks(key, 64), blocks(value, 64)
    return Kernel(
        Path(__file__).parent / "attend.cu",
        "attend",
        "P" * 8 + "q" * 9 + "iiiif",
        threads=384,
        shared_bytes=128 * (QUERIES * key_chunks + 2 * KEYS * (key_chunks + value_chunks)) + 8 * 8,
        defines={"KEY": key, "VALUE": value, "WIDE": int(wide)},
    )


def why_not(q: Tensor, k: Tensor, v: Tensor, scale: float = 1.0) -> str | None:
    """Why the kernel does not take these operands `[B, T, H, D]`; None if it does."""
    widths = q.shape[3], v.shape[3]
    if q.dtype != torch.bfloat16:
        return f"the CUDA kernel reads bfloat16, not {str(q.dtype).removeprefix('torch.')}"
    if widths not in WIDTHS:
        return f"the CUDA kernel is built for keys and values of {' or '.join(map(str, WIDTHS))} channels, not {widths}"
    if not scale > 0:
        return f"the CUDA kernel needs a positive factor on the scores, not {scale}"
    if any(x.stride(-1) != 1 or x.data_ptr() % ALIGNMENT or any(n % 8 for n in x.stride()[:-1]) for x in (q, k, v)):
        return "the CUDA kernel copies 16 bytes at a time: rows must begin at multiples of that"
    return kernel(*widths, True).unavailable_reason(q.device)


def attend(
    q: Tensor, k: Tensor, v: Tensor, factor: float, first: Tensor | None, last: Tensor | None, past: int, out: Tensor,
    logs: Tensor | None, largest: Tensor | None = None,
) -> None:  # fmt: skip
    """Fill `out` and `logs`.

    Args:
        q, k, v: `[B, T, H, K]`, `[B, S, H, K]`, `[B, S, H, V]` that `why_not` lets pass.
        factor: on the scores, to base 2.
        first, last: int32 `[T]`, the first and the last key that a query sees, non-decreasing; None: 0, and past + t.
        past: keys before the first query; not used with `last`.
        out: `[B, T, H, V]` dense, float32 or bfloat16.
        logs: float32 `[B, H, T]` for log2 of the denominators, or None.
        largest: float32 `[B, H, tiles, 8]` for the largest factor q.k that each warp's queries saw, or None.
    """
    batch, tokens, heads, width = q.shape
    kernel(width, v.shape[3], out.dtype == torch.float32).launch(
        (blocks(tokens, QUERIES), heads, batch), q, k, v, first, last, out, logs, largest, *q.stride()[:3], *k.stride()[:3],
        *v.stride()[:3], tokens, k.shape[1], past, heads, factor,
    )  # fmt: skip
