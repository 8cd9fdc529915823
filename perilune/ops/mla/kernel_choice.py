"""Which kernels of absorbed attention can take a call; importable without Triton."""

from __future__ import annotations

import torch
from torch import Tensor

from perilune.ops.choice import Choice, forced
from perilune.ops.mla.cuda import decode as cuda
from perilune.ops.triton import available

PAGE = 64  # tokens of a page of a paged cache
MAX_LATENT = 512  # channels of the latent whose sums fit into a Triton program's registers

_CUDA = Choice(
    "cuda", "one block a multiprocessor copies, two groups of warps multiply in turns; rows not at 16 bytes: Triton"
)


def choose(q_nope_BTHn: Tensor, cache_BSC: Tensor, w_uk_HnL: Tensor) -> Choice | None:
    """The kernels to take, or torch and why none can run; None where they are of no concern (tensors on a CPU)."""
    wanted = forced()
    if wanted == "cuda":
        reason = _cuda_obstacle(q_nope_BTHn, cache_BSC, w_uk_HnL)
        return _CUDA if reason is None else Choice("torch", f"cuda was asked for, but {reason}")
    choice = available.choose(q_nope_BTHn, cache_BSC)
    if choice is None or choice.implementation != "triton":
        return choice
    if _wants_gradient(q_nope_BTHn, cache_BSC, w_uk_HnL):
        return Choice(
            "torch", "plain torch: the kernels of absorbed attention have no backward, and a gradient is wanted"
        )
    if w_uk_HnL.shape[2] > MAX_LATENT:
        return Choice("torch", f"plain torch: the kernels take latents of at most {MAX_LATENT} channels")
    if wanted is not None:
        return choice
    reason = _cuda_obstacle(q_nope_BTHn, cache_BSC, w_uk_HnL)
    return _CUDA if reason is None else Choice("triton", f"Triton kernels: {reason}")


def _wants_gradient(*tensors: Tensor) -> bool:
    return torch.is_grad_enabled() and any(x.requires_grad for x in tensors)


def _cuda_obstacle(q_nope_BTHn: Tensor, cache_BSC: Tensor, w_uk_HnL: Tensor) -> str | None:
    if _wants_gradient(q_nope_BTHn, cache_BSC, w_uk_HnL):
        return "the kernel has no backward, and a gradient is wanted"
    if cache_BSC.dtype != q_nope_BTHn.dtype:
        return f"queries are {q_nope_BTHn.dtype}, the cache is {cache_BSC.dtype}"
    return cuda.why_not(cache_BSC.device, cache_BSC.dtype, w_uk_HnL.shape[2])
