"""QK-clip: keep the attention logits of every MLA head at or below τ by shrinking its weights after a step.

With S_h the largest pre-softmax logit of head h over the step's tokens (softmax scale included) and γ = min(1, τ/S_h):
the rows of head h that make its content query and its content key are scaled by sqrt(γ) each, value rows stay. The key
slice shared by all heads must not be scaled for one of them, so the head's query rows for that slice take all of γ. Each
term of the logit then shrinks by exactly γ. Report §3.3 names weight clipping as in Kimi K2; K3's τ is not stated.

KDA normalises q and k, so its logits are at most 1 and nothing is clipped there.
"""

from __future__ import annotations

import torch
from torch import Tensor

from perilune.config.model import MLAConfig


def heads_over(max_logit_H: Tensor, tau: float) -> Tensor:
    """bool `[H]`: the heads that `clip_` scales."""
    assert tau > 0, f"tau={tau} must be above 0"
    return max_logit_H > tau


@torch.no_grad()
def clip_(q_weight: Tensor, kv_b_weight: Tensor, max_logit_H: Tensor, tau: float, mla: MLAConfig) -> Tensor:
    """Scale the projections of heads whose largest logit exceeds `tau`, in place.

    Args:
        q_weight: `[H*(nope+shared), …]`, the query projection that is cut into heads (q_proj or q_b_proj).
        kv_b_weight: `[H*(nope+V), L]`, the up-projection of the latent into keys and values.
        max_logit_H: `[H]`, the largest logit of each head over all tokens of the step.
        tau: the bound, above 0.
        mla: head sizes.

    Returns:
        Number of heads that were scaled, on their device.
    """
    over_H = heads_over(max_logit_H, tau)
    if over_H.is_cpu and not over_H.any():  # on a device the answer would be waited for; a factor of 1 changes nothing
        return over_H.sum()
    gamma_H = torch.where(over_H, tau / max_logit_H, torch.ones_like(max_logit_H))
    root_H11 = gamma_H.sqrt().to(q_weight.dtype)[:, None, None]
    nope = mla.qk_nope_head_dim
    query = q_weight.view(mla.num_heads, mla.qk_head_dim, -1)
    query[:, :nope].mul_(root_H11)
    query[:, nope:].mul_(gamma_H.to(q_weight.dtype)[:, None, None])
    kv_b_weight.view(mla.num_heads, nope + mla.v_head_dim, -1)[:, :nope].mul_(root_H11)
    return over_H.sum()
