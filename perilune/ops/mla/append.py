"""New tokens' entries into the pages of a latent cache: the latent's RMSNorm, the shared key channels, and their places.

On Hopper one launch; elsewhere the norm, a concatenation and an indexed write.
"""

from __future__ import annotations

import torch
from torch import Tensor

from perilune.ops.choice import Choice, forced
from perilune.ops.few_rows import kernels as few_rows
from perilune.ops.norm import rms_norm


def select(kv_NC: Tensor, entry_PSC: Tensor) -> Choice:
    """Say whether `append_latents` is one kernel ("cuda") or operations of torch, and why."""
    if forced() not in (None, "cuda") or kv_NC.is_cpu and forced() is None:
        return Choice("torch", "norm, concatenation, indexed write: one kernel for them exists on CUDA devices")
    if (reason := few_rows.why_not(kv_NC)) is not None:
        return Choice("torch", reason)
    if entry_PSC.dtype is not kv_NC.dtype or entry_PSC.stride(2) != 1:
        return Choice("torch", "the kernel writes dense entries of the tokens' own type")
    if kv_NC.shape[1] % 8 or entry_PSC.data_ptr() % 16 or any(step % 8 for step in entry_PSC.stride()[:2]):
        return Choice("torch", "the kernel writes entries at multiples of 16 bytes")
    return Choice("cuda", "one launch")


def append_latents(
    kv_NC: Tensor, norm_weight_L: Tensor, eps: float, entry_PSC: Tensor, page_N: Tensor, slot_N: Tensor
) -> None:
    """Write the entries of new tokens, in place.

    Args:
        kv_NC: `[N, L + r]` latents before their norm, and shared key channels.
        norm_weight_L: `[L]` float32.
        eps: of the norm.
        entry_PSC: the pool, `[pages, tokens of a page, L + r]`.
        page_N, slot_N: int64, page and place in it of each token; no two tokens have the same.
    """
    width, latent = kv_NC.shape[1], len(norm_weight_L)
    if latent % 8 == 0 and select(kv_NC, entry_PSC).implementation == "cuda":
        from perilune.ops.few_rows.cuda.append import append

        append(kv_NC, norm_weight_L, eps, entry_PSC, page_N, slot_N)
        return
    latents, shared = kv_NC.split((latent, width - latent), dim=-1)
    entries = torch.cat((rms_norm(latents, norm_weight_L, eps), shared), dim=-1)
    entry_PSC[page_N, slot_N] = entries.to(entry_PSC.dtype)
