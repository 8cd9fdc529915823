"""When the Triton kernels of absorbed attention can take a call; importable without Triton."""

from __future__ import annotations

import torch
from torch import Tensor

from perilune.ops.choice import Choice
from perilune.ops.triton import available

PAGE = 64  # tokens of a page of a paged cache
MAX_LATENT = 512  # channels of the latent whose sums fit into a program's registers


def choose(q_nope_BTHn: Tensor, cache_BSC: Tensor, w_uk_HnL: Tensor) -> Choice | None:
    """The Triton kernels, or torch and why they cannot run; None where they are of no concern (tensors on a CPU)."""
    choice = available.choose(q_nope_BTHn, cache_BSC)
    if choice is None or choice.implementation != "triton":
        return choice
    if torch.is_grad_enabled() and any(x.requires_grad for x in (q_nope_BTHn, cache_BSC, w_uk_HnL)):
        return Choice(
            "torch", "plain torch: the kernel of absorbed attention has no backward, and a gradient is wanted"
        )
    if w_uk_HnL.shape[2] > MAX_LATENT:
        return Choice("torch", f"plain torch: the kernel takes latents of at most {MAX_LATENT} channels")
    return choice
