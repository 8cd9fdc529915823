"""Entries of a latent cache into its pages by one CUDA kernel; see append.cu."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from torch import Tensor

from perilune.ops.cuda import Kernel
from perilune.ops.few_rows.kernels import early_kernel, rows_of
from perilune.ops.triton.sizes import blocks


@cache
def kernel(latent: int, shared: int) -> Kernel:
    """The kernel for these widths."""
    threads = min(1024, 32 * blocks((latent + shared) // 8, 32))
    return early_kernel(
        Path(__file__).with_suffix(".cu"), "PPPPPqqqf", threads, 128, LATENT=latent, SHARED_KEYS=shared, THREADS=threads
    )  # fmt: skip


def append(kv_NC: Tensor, norm_weight_L: Tensor, eps: float, entry_PSC: Tensor, page_N: Tensor, slot_N: Tensor) -> None:
    """`mla.append.append_latents` of operands that its `select` lets pass."""
    kv_NC = rows_of(kv_NC)
    latent = len(norm_weight_L)
    kernel(latent, kv_NC.shape[1] - latent).launch(
        (len(kv_NC),), kv_NC, norm_weight_L, page_N.contiguous(), slot_N.contiguous(), entry_PSC, kv_NC.stride(0),
        *entry_PSC.stride()[:2], eps,
    )  # fmt: skip
