"""Attention over depth in two phases (report §2.2, §5.4.2).

Queries do not depend on activations, so all read sites that see the same finished blocks can score and sum these blocks
at once: `phase_one` returns for each site the softmax mix of the blocks and the logarithm of its denominator, and
`read_rest` adds the one source that differs from site to site, the running sum. The result is algebraically that of
`read` over bank and live source. The bank is then read once instead of once a site, which pays off from three
blocks; its gradient, too, is written once instead of once a site, which pays off from two.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from perilune.errors import ConfigError
from perilune.ops.attnres import fused_read
from perilune.ops.attnres.mixing import select as select_mix
from perilune.ops.attnres.slots import GradientSlots
from perilune.ops.choice import Choice, forced
from perilune.ops.norm import rms_norm

MOST_SITES = 32  # that the kernels score at once
LEAST_BYTES = 4 << 20  # of a block; below, launches count for more than traffic
MEMORY_SHARE = 1 / 64  # of a device's memory that partial mixes may take
# Shares of copy speed that the kernels reach (H200, T 8192, D 7168): a single read, its backward pass; scores and mixes of
# phase one, and its backward pass.
SINGLE, SINGLE_BACKWARD, SCORES, MIXES, SUMMED_BACKWARD = 0.9, 0.8, 0.8, 0.87, 0.65


class PartialMix(NamedTuple):
    """Softmax mixes of a bank of finished blocks, for S read sites.

    Attributes:
        mixes: S tensors [..., D], float32 or float64; on a CUDA device in the sources' dtype. None for an empty bank.
        log_denominators: S tensors [...], the logarithm of the sum of exp(score); float32, or float64 for float64 sources.
        score_weights_SD: each site's score weight.
        eps: of the scores' norm.
        slots: where each site's gradient of its mix should go, and the site's number there; None = anywhere.
    """

    mixes: Sequence[Tensor] | None
    log_denominators: Sequence[Tensor] | None
    score_weights_SD: Tensor
    eps: float
    slots: Sequence[tuple[GradientSlots, int]] | None = None


def select(bank: Sequence[Tensor]) -> Choice:
    """Say which implementation of phase one runs for a bank (n >= 1), and why."""
    choice = select_mix(bank)
    if choice.implementation in ("cuda", "triton"):
        return Choice("triton", "four launches for all sites, gradients included")
    return Choice("torch", choice.reason if choice.implementation == "torch" else "two phases have no such form")


def sites_at_once(bank: Sequence[Tensor], queries: Sequence[Tensor]) -> int:
    """How many of the coming reads of a bank should share a first phase; 0 = each should read the bank itself.

    Decided by traffic over measured bandwidth, without looking at values.

    Args:
        bank: n >= 0 finished blocks [..., D], which all these reads see.
        queries: a parameter of each of the reads.
    """
    if not bank or bank[0].is_cpu and forced() != "triton":
        return 0
    size = bank[0].numel() * bank[0].element_size()
    if size < LEAST_BYTES or select(bank).implementation != "triton":
        return 0
    if any(type(query) not in (Tensor, Parameter) for query in queries):
        return 0  # a sharded parameter is whole only inside its own layer
    sites = min(len(queries), int(MEMORY_SHARE * _memory(bank[0].device) / size))
    gradients = torch.is_grad_enabled() and any(x.requires_grad for x in (*bank, *queries))
    return sites if sites and _cost(len(bank), sites, gradients) < sites * _single_cost(len(bank), gradients) else 0


def _single_cost(blocks: int, gradients: bool) -> float:
    """Of a read with running-sum add and output norm, in passes over one source at copy speed."""
    cost = (blocks + 4) / SINGLE
    if gradients:
        cost += (2 * blocks + 5) / SINGLE_BACKWARD + 3 * blocks  # autograd adds the gradients of every read
    return cost


def _cost(blocks: int, sites: int, gradients: bool) -> float:
    """The same of both phases, for all sites."""
    cost = blocks / SCORES + (blocks + sites) / MIXES + 5 * sites / SINGLE
    if gradients:
        cost += (3 * blocks + 2 * sites) / SUMMED_BACKWARD + 7 * sites / SINGLE_BACKWARD
    return cost


@cache
def _memory(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else 1 << 32


def phase_one(bank: Sequence[Tensor], score_weights_SD: Tensor, eps: float) -> PartialMix:
    """Score and mix the finished blocks for S sites at once.

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
        return PartialMix(None, None, score_weights_SD, eps)
    if select(bank).implementation == "triton":
        from perilune.ops.attnres.triton_two_phase import phase_one as fused

        mixes, logs, places = [], [], []
        for some_SD in score_weights_SD.split(MOST_SITES):
            some_mixes, some_logs, slots = fused(bank, some_SD, eps)
            mixes += some_mixes
            logs += some_logs
            places += [(slots, s) for s in range(len(some_SD))] if slots is not None else []
        return PartialMix(mixes, logs, score_weights_SD, eps, places or None)
    values = [source.to(torch.promote_types(source.dtype, torch.float32)) for source in bank]
    scores_MS = torch.stack([_scores(v, score_weights_SD, eps).movedim(-1, 0) for v in values])
    logs_S = scores_MS.logsumexp(0)
    weights_MS = (scores_MS - logs_S).exp()
    mixes_S = weights_MS[0][..., None] * values[0]
    for weight_S, value in zip(weights_MS[1:], values[1:], strict=True):
        mixes_S = torch.addcmul(mixes_S, weight_S[..., None], value)
    return PartialMix(mixes_S.unbind(), logs_S.unbind(), score_weights_SD, eps)


def merge(partial: PartialMix, site: int, live: Tensor) -> Tensor:
    """Add the running sum to one site's partial mix: `read_rest` with nothing around it.

    Returns:
        [..., D] in live's dtype, equal to `mix([*bank, live], score_weights_SD[site], eps)`; `live` itself if the bank
        was empty.
    """
    return read_rest(partial, site, live, None)[0]


def read_rest(
    partial: PartialMix,
    site: int,
    live: Tensor,
    delta: Tensor | None,
    norm_weight_D: Tensor | None = None,
    norm_eps: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """What `attnres.read` returns, for a bank of which one site's partial mix is there already.

    Args:
        partial: from `phase_one`.
        site: row of its score weights.
        live, delta, norm_weight_D, norm_eps: see `attnres.read`.

    Raises:
        ConfigError: no such site.
    """
    if not 0 <= site < len(partial.score_weights_SD):
        raise ConfigError(f"merge got site={site}; the partial mix has sites 0..{len(partial.score_weights_SD) - 1}")
    weight_D, eps = partial.score_weights_SD[site], partial.eps
    if partial.mixes is not None:
        summed, log = partial.mixes[site], partial.log_denominators[site]
        inputs = [summed, live] if delta is None else [summed, live, delta]
        if summed.dtype == live.dtype and (how := select_mix(inputs).implementation) in ("cuda", "triton"):
            slot = None if partial.slots is None else partial.slots[site]
            return fused_read.read(how, [summed, live], delta, weight_D, eps, norm_weight_D, norm_eps, log, slot)
    if delta is not None:
        live = live + delta
    out = live
    if partial.mixes is not None:
        value = live.to(summed.dtype)
        score = _scores(value, weight_D[None], eps)[..., 0]
        shares = torch.stack([log, score]).softmax(0)
        out = (summed * shares[0][..., None] + value * shares[1][..., None]).to(live.dtype)
    return out if norm_weight_D is None else rms_norm(out, norm_weight_D, norm_eps), live


def _scores(value: Tensor, score_weights_SD: Tensor, eps: float) -> Tensor:
    """[..., S]: <v, c_s> * rsqrt(mean(v^2) + eps)."""
    rstd = (value.square().mean(-1, keepdim=True) + eps).rsqrt()
    return (value @ score_weights_SD.to(value.dtype).t()) * rstd
