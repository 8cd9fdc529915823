"""The router of a mixture of experts: sigmoid scores, biased selection, unbiased weights.

    s = sigmoid(logits)                      [N, E]
    chosen = the A largest of s + b          b steers selection only, it never enters a weight
    weight = s[chosen] / sum(s[chosen])      renormalised over the chosen experts
    cutoff = the (A+1)-th largest of s + b   what an expert has to beat; the balancer reads it

One top-(A+1) per call gives both the routes (its first A entries) and the cutoff (its last one): report §2.3.3, Eq.
13-14. Equal biased scores go to the expert with the lower index, so that loads never depend on an implementation.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from perilune.errors import ConfigError
from perilune.ops.choice import Choice, forced
from perilune.ops.moe import native

SUM_FLOOR = 1e-20  # keeps the renormalisation finite when every chosen score underflows to zero


class Routing(NamedTuple):
    """Where each token goes.

    Attributes:
        index_NA: int64 `[N, A]`, the chosen experts, largest biased score first.
        weight_NA: `[N, A]` mixing weights in the logits' dtype; the only part that carries a gradient.
        scores_NE: `[N, E]` unbiased sigmoid scores, detached.
        cutoff_N: `[N]` the (A+1)-th largest biased score, detached.
    """

    index_NA: Tensor
    weight_NA: Tensor
    scores_NE: Tensor
    cutoff_N: Tensor


def select(logits_NE: Tensor) -> Choice:
    """Return which implementation `route` takes for these logits, and why."""
    if (wanted := forced()) in ("torch", "reference"):
        return Choice("torch", f"asked for {wanted}")
    reason = native.why_not(logits_NE, dtypes=(torch.float32,))
    return Choice("torch", reason) if reason else Choice("native", "fp32 on CPU: one pass instead of a full top-k")


def route(
    logits_NE: Tensor,
    bias_E: Tensor,
    k: int,
    *,
    renormalize: bool = True,
    scaling_factor: float = 1.0,
) -> Routing:
    """Choose `k` experts for each token.

    Args:
        logits_NE: `[N, E]` router logits, fp32 (fp64 stays fp64).
        bias_E: `[E]` selection bias in the same dtype; no gradient flows to it.
        k: active experts A a token, 1 <= k < E.
        renormalize: divide the chosen scores by their sum.
        scaling_factor: multiplies the weights.

    Raises:
        ConfigError: `k` leaves no (k+1)-th expert to be the cutoff.
    """
    experts = logits_NE.shape[-1]
    if not 1 <= k < experts:
        raise ConfigError(f"{k} active experts of {experts}; allowed: 1 to {experts - 1}; lower top-k or add experts")
    assert bias_E.shape == (experts,), f"bias {tuple(bias_E.shape)} for {experts} experts"
    if bias_E.dtype is not logits_NE.dtype:
        bias_E = bias_E.to(logits_NE.dtype)
    if select(logits_NE).implementation == "native":
        tracked = torch.is_grad_enabled() and logits_NE.requires_grad  # an untracked apply costs more than the routing
        function = _NativeRoute.apply if tracked else native.route
        return Routing(*function(logits_NE, bias_E, k, renormalize, scaling_factor))
    scores_NE = torch.sigmoid(logits_NE)
    with torch.no_grad():
        biased_NE = scores_NE + bias_E
        # A stable descending sort is the only torch call that promises lowest-index-first among equals.
        value_NE, order_NE = torch.sort(biased_NE, dim=-1, descending=True, stable=True)
        index_NA, cutoff_N = order_NE[:, :k].contiguous(), value_NE[:, k].contiguous()
    weight_NA = scores_NE.gather(-1, index_NA)
    if renormalize:
        weight_NA = weight_NA / (weight_NA.sum(-1, keepdim=True) + SUM_FLOOR)
    return Routing(index_NA, weight_NA * scaling_factor, scores_NE.detach(), cutoff_N)


class _NativeRoute(torch.autograd.Function):
    """One C pass forward; and one backward."""

    @staticmethod
    def forward(ctx, logits_NE, bias_E, k, renormalize, scaling_factor):
        index_NA, weight_NA, scores_NE, cutoff_N = native.route(logits_NE, bias_E, k, renormalize, scaling_factor)
        ctx.save_for_backward(index_NA, scores_NE)
        ctx.renormalize, ctx.scaling_factor = renormalize, scaling_factor
        ctx.mark_non_differentiable(index_NA, scores_NE, cutoff_N)
        return index_NA, weight_NA, scores_NE, cutoff_N

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, _index, dweight_NA, _scores, _cutoff):
        index_NA, scores_NE = ctx.saved_tensors
        dlogits_NE = native.route_backward(scores_NE, index_NA, dweight_NA, ctx.renormalize, ctx.scaling_factor)
        return dlogits_NE, None, None, None, None
