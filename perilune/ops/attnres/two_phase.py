"""Attention over depth in two phases (report §2.2, §5.4.2).

Queries do not depend on activations, so all read sites that see the same finished blocks can score and sum these blocks
at once: `phase_one` returns for each site the partial softmax (maximum, denominator, weighted sum), and `merge` adds the
one source that differs from site to site, the running sum. The result is algebraically that of `mix` over bank and live
source. The bank is then read once instead of once a site, which pays off beyond about three blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from perilune.errors import ConfigError
from perilune.ops.attnres.mixing import select as select_mix
from perilune.ops.choice import Choice, forced


class PartialMix(NamedTuple):
    """Partial softmax over a bank of finished blocks, for S read sites.

    Attributes:
        max: [S, ...] largest score; None for an empty bank.
        denominator: [S, ...] sum of exp(score - max).
        acc: [S, ..., D] sum of exp(score - max) * value. All three in float32, or float64 for float64 sources; the Triton
            form keeps acc in the sources' dtype.
        score_weights_SD: each site's score weight.
        eps: of the scores' norm.
    """

    max: Tensor | None
    denominator: Tensor | None
    acc: Tensor | None
    score_weights_SD: Tensor
    eps: float


def select(bank: Sequence[Tensor], *others: Tensor) -> Choice:
    """Say which implementation of the two phases runs for a bank (n >= 1) and score weights or a running sum, and why."""
    choice = select_mix(bank)
    if choice.implementation != "triton":
        return Choice("torch", choice.reason if choice.implementation == "torch" else "two phases have no such form")
    if forced() != "triton":
        return Choice("torch", "plain torch: the Triton form of two phases has not been run on a GPU yet; force it to")
    if torch.is_grad_enabled() and any(x.requires_grad for x in (*bank, *others)):
        return Choice("torch", "plain torch: the Triton form of two phases has no gradients")
    return choice


def phase_one(bank: Sequence[Tensor], score_weights_SD: Tensor, eps: float) -> PartialMix:
    """Score and sum the finished blocks for S sites at once.

    Args:
        bank: n >= 0 tensors [..., D].
        score_weights_SD: [S, D], one row a site.
        eps: added to the mean of squares.

    Returns:
        The partial mixes; differentiable by autograd.

    Raises:
        ConfigError: shapes disagree.
    """
    if score_weights_SD.dim() != 2 or any(
        v.shape != bank[0].shape or v.shape[-1] != score_weights_SD.shape[1] for v in bank
    ):
        raise ConfigError(
            f"phase_one got a bank {[list(v.shape) for v in bank]} and score weights {list(score_weights_SD.shape)}; "
            "it needs equal [..., D] and [S, D]"
        )
    if not bank:
        return PartialMix(None, None, None, score_weights_SD, eps)
    if select(bank, score_weights_SD).implementation == "triton":
        from perilune.ops.attnres.triton_two_phase import phase_one as fused

        return PartialMix(*fused(bank, score_weights_SD, eps), score_weights_SD, eps)
    values = [source.to(torch.promote_types(source.dtype, torch.float32)) for source in bank]
    scores_MS = torch.stack([_scores(v, score_weights_SD, eps).movedim(-1, 0) for v in values])
    top_S = scores_MS.detach().amax(0)
    weights_MS = (scores_MS - top_S).exp()
    acc = weights_MS[0][..., None] * values[0]
    for weight_S, value in zip(weights_MS[1:], values[1:], strict=True):
        acc = torch.addcmul(acc, weight_S[..., None], value)
    return PartialMix(top_S, weights_MS.sum(0), acc, score_weights_SD, eps)


def merge(partial: PartialMix, site: int, live: Tensor) -> Tensor:
    """Add the running sum to one site's partial mix.

    Args:
        partial: from `phase_one`.
        site: row of its score weights.
        live: [..., D] the running sum.

    Returns:
        [..., D] in live's dtype, equal to `mix([*bank, live], score_weights_SD[site], eps)`; `live` itself if the bank
        was empty.

    Raises:
        ConfigError: no such site.
    """
    if not 0 <= site < len(partial.score_weights_SD):
        raise ConfigError(f"merge got site={site}; the partial mix has sites 0..{len(partial.score_weights_SD) - 1}")
    if partial.max is None:
        return live
    parts = (partial.acc[site], partial.max[site], partial.denominator[site])
    fused = partial.acc.dtype == live.dtype and live.shape == parts[0].shape and all(x.is_contiguous() for x in parts)
    if fused and select([live], *parts, partial.score_weights_SD).implementation == "triton":
        from perilune.ops.attnres.triton_mix import forward

        return forward([live], None, partial.score_weights_SD[site], partial.eps, None, 0.0, partial=parts)[1]
    value = live.to(partial.max.dtype)
    score = _scores(value, partial.score_weights_SD[site : site + 1], partial.eps)[..., 0]
    top = torch.maximum(partial.max[site], score.detach())
    kept, added = (partial.max[site] - top).exp(), (score - top).exp()
    denominator = partial.denominator[site] * kept + added
    mixed = partial.acc[site] * (kept / denominator)[..., None] + value * (added / denominator)[..., None]
    return mixed.to(live.dtype)


def _scores(value: Tensor, score_weights_SD: Tensor, eps: float) -> Tensor:
    """[..., S]: <v, c_s> * rsqrt(mean(v^2) + eps)."""
    rstd = (value.square().mean(-1, keepdim=True) + eps).rsqrt()
    return (value @ score_weights_SD.to(value.dtype).t()) * rstd
