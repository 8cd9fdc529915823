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
from perilune.ops.triton.available import choose as choose_triton

SUM_FLOOR = 1e-20  # keeps the renormalisation finite when every chosen score underflows to zero


class Routing(NamedTuple):
    """Where each token goes.

    Attributes:
        index_NA: int64 `[N, A]`, the chosen experts, largest biased score first.
        weight_NA: `[N, A]` mixing weights in the logits' dtype; the only part that carries a gradient.
        scores_NE: `[N, E]` unbiased sigmoid scores, detached.
        cutoff_N: `[N]` the (A+1)-th largest biased score, detached.
        counts_E: int64 `[E]`, tokens that chose each expert, where the routing counts them on its way; `counts` has them
            in any case.
    """

    index_NA: Tensor
    weight_NA: Tensor
    scores_NE: Tensor
    cutoff_N: Tensor
    counts_E: Tensor | None = None

    def counts(self) -> Tensor:
        """Return int64 `[E]`, the tokens that chose each expert."""
        if self.counts_E is not None:
            return self.counts_E
        return torch.bincount(self.index_NA.flatten(), minlength=self.scores_NE.shape[-1])


def select(logits_NE: Tensor, A: int) -> Choice:
    """Return which implementation `route` takes for these logits and A active experts, and why."""
    if (wanted := forced()) in ("torch", "reference"):
        return Choice("torch", f"asked for {wanted}")
    if (choice := choose_triton(logits_NE)) is not None:
        if choice.implementation != "triton":
            return choice
        from perilune.ops.moe.triton.router import obstacle

        reason = obstacle(logits_NE, A)
        return choice if reason is None else Choice("torch", f"a stable sort: {reason}")
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
    implementation = select(logits_NE, k).implementation
    if implementation == "triton":
        return Routing(*_TritonRoute.apply(logits_NE, bias_E, k, renormalize, scaling_factor))
    if implementation == "native":
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


class _TritonRoute(torch.autograd.Function):
    """One launch each way."""

    @staticmethod
    def forward(ctx, logits_NE, bias_E, k, renormalize, scaling_factor):
        from perilune.ops.moe.triton.router import route

        index_NA, weight_NA, scores_NE, cutoff_N, counts_E = route(
            logits_NE, bias_E, k, renormalize, scaling_factor, SUM_FLOOR
        )
        ctx.save_for_backward(index_NA, scores_NE)
        ctx.options = renormalize, scaling_factor, SUM_FLOOR
        ctx.mark_non_differentiable(index_NA, scores_NE, cutoff_N, counts_E)
        return index_NA, weight_NA, scores_NE, cutoff_N, counts_E

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, _index, dweight_NA, *_):
        from perilune.ops.moe.triton.router import route_backward

        index_NA, scores_NE = ctx.saved_tensors
        return route_backward(scores_NE, index_NA, dweight_NA, *ctx.options), None, None, None, None
