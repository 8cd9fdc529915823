"""A decode step over caches that differ in length: absorbed attention with lengths, and page tables, on the device.

`latent.attend_latent` takes a cache cut to a length that the host knows. A server's sequences have lengths of their own that
grow from step to step; here they are a tensor, so nothing waits for the device, and a CUDA graph replays with whatever
lies in `length_B` by then.
"""

from __future__ import annotations

import torch
from torch import Tensor

from perilune.ops.choice import Choice
from perilune.ops.mla import device
from perilune.ops.mla.kernel_choice import PAGE, choose
from perilune.ops.mla.latent import absorbed


def select(q_nope_BTHn: Tensor, cache_BSC: Tensor, w_uk_HnL: Tensor) -> Choice:
    """Return which implementation `attend_cached` takes for these operands, and why."""
    return choose(q_nope_BTHn, cache_BSC, w_uk_HnL) or Choice(
        "torch", "scores of the whole cache in plain torch; the C form takes one length for all rows"
    )


def attend_cached(
    q_nope_BTHn: Tensor,
    q_rope_BTHr: Tensor,
    cache_BSC: Tensor,
    w_uk_HnL: Tensor,
    w_uv_HvL: Tensor,
    scale: float,
    length_B: Tensor,
    table_BP: Tensor | None = None,
) -> Tensor:
    """Causal attention of the T newest tokens of each sequence, whose rows [latent | shared] are in the cache already.

    Args:
        q_nope_BTHn: `[B, T, H, n]` query part that meets the keys rebuilt from the latent.
        q_rope_BTHr: `[B, T, H, r]` query part that meets the shared key channels; r may be 0.
        cache_BSC: `[B, S, L + r]` caches with room for S tokens each; with a table `[P, 64 n, L + r]`, pages of all sequences.
            What lies beyond a sequence's length is not read into the result, be it NaN.
        w_uk_HnL: `[H, n, L]` key up-projection.
        w_uv_HvL: `[H, v, L]` value up-projection.
        scale: factor on the scores, (n + r)^-1/2.
        length_B: int32 `[B]` cached tokens of each sequence, the T new ones included, at most S; 0 or at least T.
        table_BP: int32 `[B, pages of the longest]` numbers of each sequence's pages, in order; entries beyond its length are not used.

    Returns:
        `[B, T, H, v]` in the queries' dtype; zeros for a sequence of length 0. Scores, softmax and sums in fp32 (fp64).
    """
    batch, tokens = q_nope_BTHn.shape[:2]
    latent_width = w_uk_HnL.shape[2]
    assert length_B.shape == (batch,) and cache_BSC.shape[2] == latent_width + q_rope_BTHr.shape[3], (
        f"{batch} sequences need {batch} lengths and rows of {latent_width} + {q_rope_BTHr.shape[3]} channels, not "
        f"{tuple(length_B.shape)} and {cache_BSC.shape[2]}"
    )
    assert table_BP is None or cache_BSC.shape[1] % PAGE == 0, (
        f"a page has a multiple of {PAGE} tokens, not {cache_BSC.shape[1]}"
    )
    choice = select(q_nope_BTHn, cache_BSC, w_uk_HnL).implementation
    if choice in ("triton", "cuda"):
        return device.attend_latent(
            q_nope_BTHn, q_rope_BTHr, *cache_BSC.split((latent_width, q_rope_BTHr.shape[3]), -1), w_uk_HnL, w_uv_HvL, scale,
            length_B, table_BP, in_cuda=choice == "cuda",
        )  # fmt: skip
    if table_BP is not None:
        known = table_BP.clamp(0, cache_BSC.shape[0] - 1).long()
        cache_BSC = cache_BSC[known].flatten(1, 2)
    key_S = torch.arange(cache_BSC.shape[1], device=cache_BSC.device)
    cache_BSC = cache_BSC.masked_fill((key_S >= length_B[:, None])[..., None], 0.0)
    limit_BT = length_B[:, None] - tokens + 1 + torch.arange(tokens, device=cache_BSC.device)
    out_BTHv = absorbed(
        q_nope_BTHn, q_rope_BTHr, *cache_BSC.split((latent_width, q_rope_BTHr.shape[3]), -1), w_uk_HnL, w_uv_HvL, scale,
        key_S >= limit_BT[..., None],
    )  # fmt: skip
    return out_BTHv.masked_fill((length_B == 0)[:, None, None, None], 0.0)
