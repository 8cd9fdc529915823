"""Bidirectional softmax attention over items packed end to end (architecture §8.4).

    o_i = Σ_j softmax_j(scale · q_i·k_j) v_j        j over the item that i belongs to, before and after i

No mask over the pack is ever built: items of equal length run as one batch, each length as one fused call, so the work is
Σ length². Keys and values have the same width, which the fused kernels need to run without a matrix of scores.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from perilune.errors import RequestError
from perilune.ops.choice import Choice, forced


def select(q_PHK: Tensor) -> Choice:
    """Say which implementation runs for these queries, and why."""
    if forced() == "reference":
        return Choice("reference", "asked for")
    return Choice("torch", f"scaled_dot_product_attention on {q_PHK.device.type}, one call for each item length")


def packed_attention(q_PHK: Tensor, k_PHK: Tensor, v_PHK: Tensor, lengths: Sequence[int], scale: float) -> Tensor:
    """Attend within each item, in both directions.

    Args:
        q_PHK, k_PHK, v_PHK: queries, keys and values of P packed rows and H heads.
        lengths: rows of each item, in order; at least 1 each, P in all.
        scale: factor on the scores.

    Returns:
        `[P, H, K]` in q's dtype.

    Raises:
        RequestError: the lengths do not add up to P, or one is below 1.
    """
    if sum(lengths) != len(q_PHK) or any(length < 1 for length in lengths):
        raise RequestError(
            f"item lengths {list(lengths)} must be at least 1 and add up to the {len(q_PHK)} packed rows (they give {sum(lengths)})"
        )
    if select(q_PHK).implementation == "reference":
        return packed_attention_reference(q_PHK, k_PHK, v_PHK, lengths, scale)
    if len(set(lengths)) <= 1:
        return _batch(*(x.unflatten(0, (-1, lengths[0])) if lengths else x for x in (q_PHK, k_PHK, v_PHK)), scale)
    parts = [x.split(list(lengths)) for x in (q_PHK, k_PHK, v_PHK)]
    out: list[Tensor] = [q_PHK] * len(lengths)
    for length in sorted(set(lengths)):
        items = [index for index, other in enumerate(lengths) if other == length]
        together = _batch(*(torch.stack([part[index] for index in items]) for part in parts), scale)
        for index, o_LHK in zip(items, together.split(length), strict=True):
            out[index] = o_LHK
    return torch.cat(out)


def _batch(q_NLHK: Tensor, k_NLHK: Tensor, v_NLHK: Tensor, scale: float) -> Tensor:
    """N items of one length L; returns them packed, `[N·L, H, K]`."""
    heads_first = (x.transpose(1, 2) for x in (q_NLHK, k_NLHK, v_NLHK))
    return F.scaled_dot_product_attention(*heads_first, scale=scale).transpose(1, 2).flatten(0, 1)


def packed_attention_reference(
    q_PHK: Tensor, k_PHK: Tensor, v_PHK: Tensor, lengths: Sequence[int], scale: float
) -> Tensor:
    """The definition: one item at a time, softmax written out in fp32 (fp64 for fp64 inputs)."""
    exact = torch.promote_types(q_PHK.dtype, torch.float32)
    out = []
    for q, k, v in zip(*(x.to(exact).split(list(lengths)) for x in (q_PHK, k_PHK, v_PHK)), strict=True):
        weights = torch.softmax(scale * torch.einsum("ihk,jhk->hij", q, k), dim=-1)
        out.append(torch.einsum("hij,jhk->ihk", weights, v))
    return torch.cat(out).to(q_PHK.dtype)
