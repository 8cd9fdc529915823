"""Absorbed attention with many rows as a CUDA kernel: for which calls, and its launch. See decode.cu."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from perilune.ops.cuda import Kernel
from perilune.ops.mla.cuda import merge

LATENT = 512  # channels that the kernel is written for
EXTRAS = (0, 64)  # shared channels
ROWS = 64  # of a tile: new tokens x heads
KEYS = 64  # cached tokens of a block
CHUNK_BYTES = 8192  # of 64 rows of 64 channels
ALIGNMENT = 16  # bytes of a copy


@cache
def kernel(extra: int) -> Kernel:
    """The kernel for a cache with shared channels, of which there are 64, or without (`extra` = 0)."""
    chunks = LATENT // 64 + bool(extra)
    return Kernel(
        Path(__file__).parent / "decode.cu",
        "decode",
        "P" * 9 + "q" * 8 + "iiiiif",
        threads=384,
        shared_bytes=CHUNK_BYTES * (3 * chunks + 1) + 4 * 4 * ROWS + 8 * 4 * (2 + bool(extra)),
        defines={"EXTRA": 64 * bool(extra)},
    )


def why_not(device: torch.device, dtype: torch.dtype, width: int) -> str | None:
    """Why the kernel takes no latents of `width` channels, `dtype` and `device`; None if it does."""
    if dtype != torch.bfloat16:
        return f"the CUDA kernel reads bfloat16, not {str(dtype).removeprefix('torch.')}"
    if width != LATENT:
        return f"the CUDA kernel is written for latents of {LATENT} channels, not {width}"
    return kernel(EXTRAS[-1]).unavailable_reason(device) or merge.kernel().unavailable_reason(device)


def unsuitable(query_shared_BTHr: Tensor, latent_BSL: Tensor, shared_BSr: Tensor, scale: float) -> str | None:
    """Why the kernel does not take this call, `why_not` having let it pass; None if it does."""
    extra = shared_BSr.shape[2]
    if extra not in EXTRAS:
        return f"the CUDA kernel is written for 0 or 64 shared channels, not {extra}"
    if not scale > 0:
        return f"the CUDA kernel needs a positive factor on the scores, not {scale}"
    tensors = (query_shared_BTHr, latent_BSL, shared_BSr) if extra else (latent_BSL,)
    if any(x.stride(-1) != 1 or x.data_ptr() % ALIGNMENT or any(n % 8 for n in x.stride()[:-1]) for x in tensors):
        return "the CUDA kernel copies 16 bytes at a time: rows must begin at multiples of that"
    return kernel(extra).unavailable_reason(latent_BSL.device)


def attend(
    query_BQL: Tensor, query_shared_BTHr: Tensor, latent_BSL: Tensor, shared_BSr: Tensor, factor: float, length_B: Tensor | None,
    table_BP: Tensor | None, out_BQL: Tensor, sums: Tensor, logs: Tensor,
) -> None:  # fmt: skip
    """Fill `out` where one run holds a sequence; elsewhere `sums`, float `[runs, 2, T*H, 512]`, and `logs` `[runs, 2, T*H]`.

    The other operands are those of `device.context`, which `unsuitable` lets pass; factor: on the scores, to base 2.
    """
    batch, tokens, heads, extra = query_shared_BTHr.shape
    cached = latent_BSL.shape[1] * (1 if table_BP is None else table_BP.shape[1])
    kernel(extra).launch(
        (-(-tokens * heads // ROWS), logs.shape[0]),
        query_BQL, query_shared_BTHr, latent_BSL, shared_BSr, length_B, table_BP, out_BQL, sums, logs,
        *query_shared_BTHr.stride()[:3], *latent_BSL.stride()[:2], *shared_BSr.stride()[:2],
        0 if table_BP is None else table_BP.stride(0), latent_BSL.shape[1] // KEYS, cached, batch, tokens, heads, factor,
    )  # fmt: skip
