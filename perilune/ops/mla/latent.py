"""Attention of a few new tokens against the cached latents: the absorbed form of MLA (architecture §4.2).

The key up-projection moves to the query side, q_lat = q_n W_UK, and the value up-projection behind the softmax:

    o = (softmax(scale [q_lat | q_r] [c | r]^T) c) W_UV^T

so the cache rows [c | r] are read as they are, once for all heads, and no key or value is rebuilt.
"""

from __future__ import annotations

import torch
from torch import Tensor

from perilune.ops.choice import Choice, forced
from perilune.ops.mla import device, native
from perilune.ops.mla.kernel_choice import choose


def select(q_nope_BTHn: Tensor, latent_BSL: Tensor, w_uk_HnL: Tensor) -> Choice:
    """Return which implementation `attend_latent` takes for these operands, and why."""
    if (wanted := forced()) in ("torch", "reference"):
        return Choice("torch", f"asked for {wanted}")
    if (choice := choose(q_nope_BTHn, latent_BSL, w_uk_HnL)) is not None:
        return choice
    reason = native.why_no_decode(q_nope_BTHn, latent_BSL, w_uk_HnL)
    return Choice("torch", reason) if reason else Choice("native", "one C call reads the cache as it lies")


def attend_latent(
    q_nope_BTHn: Tensor,
    q_rope_BTHr: Tensor,
    latent_BSL: Tensor,
    rope_key_BSr: Tensor,
    w_uk_HnL: Tensor,
    w_uv_HvL: Tensor,
    scale: float,
    past: int,
) -> Tensor:
    """Causal attention in the latent space.

    Args:
        q_nope_BTHn: `[B, T, H, n]` query part that meets the keys rebuilt from the latent.
        q_rope_BTHr: `[B, T, H, r]` query part that meets the shared key channels.
        latent_BSL: `[B, S, L]` cached normalised latents, S = past + T.
        rope_key_BSr: `[B, S, r]` cached shared key channels.
        w_uk_HnL: `[H, n, L]` key up-projection.
        w_uv_HvL: `[H, v, L]` value up-projection.
        scale: factor on the scores, (n + r)^-1/2.
        past: tokens cached before the first query.

    Returns:
        `[B, T, H, v]` in the queries' dtype; scores, softmax and sums in fp32 (fp64).
    """
    tokens, cached = q_nope_BTHn.shape[1], latent_BSL.shape[1]
    assert cached == past + tokens, (
        f"{tokens} queries after {past} cached tokens need {past + tokens} rows, got {cached}"
    )
    choice = select(q_nope_BTHn, latent_BSL, w_uk_HnL).implementation
    operands = (q_nope_BTHn, q_rope_BTHr, latent_BSL, rope_key_BSr, w_uk_HnL, w_uv_HvL, scale)
    if choice == "native":
        return native.attend_latent(*operands, past)
    if choice in ("triton", "cuda"):
        return device.attend_latent(*operands, in_cuda=choice == "cuda")
    future_TS = None
    if tokens > 1:
        future_TS = torch.ones(tokens, cached, dtype=torch.bool, device=latent_BSL.device).triu(past + 1)
    return absorbed(*operands, future_TS)


def absorbed(
    q_nope_BTHn: Tensor,
    q_rope_BTHr: Tensor,
    latent_BSL: Tensor,
    rope_key_BSr: Tensor,
    w_uk_HnL: Tensor,
    w_uv_HvL: Tensor,
    scale: float,
    hidden_TS: Tensor | None,
) -> Tensor:
    """`attend_latent` in plain torch; `hidden_TS` bool `[T, S]` or `[B, T, S]` marks what a query does not see."""
    batch, tokens, heads, _ = q_nope_BTHn.shape
    cached, width = latent_BSL.shape[1:]
    dtype = q_nope_BTHn.dtype
    wide = torch.promote_types(dtype, torch.float32)
    query_BTHL = torch.einsum("bthn,hnl->bthl", q_nope_BTHn, w_uk_HnL.to(dtype))
    score_BQS = torch.bmm(query_BTHL.flatten(1, 2), latent_BSL.to(dtype).mT).to(wide)
    score_BQS += torch.bmm(q_rope_BTHr.flatten(1, 2), rope_key_BSr.to(dtype).mT)
    score_BTHS = score_BQS.mul_(scale).view(batch, tokens, heads, cached)
    if hidden_TS is not None:
        score_BTHS = score_BTHS.masked_fill(hidden_TS[..., None, :], -torch.inf)
    weight_BQS = torch.softmax(score_BTHS, dim=-1).flatten(1, 2)
    context_BQL = torch.bmm(weight_BQS.to(dtype), latent_BSL.to(dtype))
    return torch.einsum("bthl,hvl->bthv", context_BQL.view(batch, tokens, heads, width), w_uv_HvL.to(dtype))
