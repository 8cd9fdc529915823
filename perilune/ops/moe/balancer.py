"""What a load balancer is: a rule that moves the router's selection bias between optimiser steps.

The bias b is added to the scores for selection only (`router.route`) and carries no gradient. A rule watches every
micro-batch of a step (`observe`) and gives the next step's bias (`update`). Sign convention here, everywhere: a
*larger* b_j sends *more* tokens to expert j.

Quantile balancing (report §2.3.3 Eq.14, App. C, App. D). alpha_i is token i's cutoff, the (k+1)-th largest biased score.
Expert j would take token i if its bias exceeded the *required bias* r_ij = alpha_i - s_ij, so the bias that gives it
exactly its share q = m k / n of m tokens is the (k/n)-quantile of r over the tokens:

    b^_j = quantile_{k/n}(alpha - s_j) = -quantile_{1-k/n}(s_j - alpha),       b = b^ - mean(b^)

One of the articles on this model prints -quantile_{1-k/n}(alpha - s_j), which has the wrong sign and inverts the balance.

Everything accumulated is an integer count (or, in the exact oracles, the margins themselves): the result is the same
bits for any split of the step's tokens over micro-batches and ranks. The only state that outlives a step is b itself.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from perilune.errors import ConfigError


def in_recompute() -> bool:
    """True inside a backward pass: there a forward is activation recomputation and its tokens were counted before."""
    return torch._C._current_graph_task_id() != -1


class Balancer(ABC):
    """Base of the rules: accumulates over a step, then gives the next bias.

    Args:
        num_experts: experts n.
        k: active experts a token.
        ema: share of the old bias kept at each update, 0 = none (report App. D names an average over steps as an
            option). Averaging mean-centred biases needs no state beyond the bias.

    Raises:
        ConfigError: `k` or `ema` is out of range.
    """

    name = "base"

    def __init__(self, num_experts: int, k: int, *, ema: float = 0.0) -> None:
        if not 1 <= k < num_experts:
            raise ConfigError(f"{k} active experts of {num_experts}; allowed: 1 to {num_experts - 1}; lower top-k")
        if not 0.0 <= ema < 1.0:
            raise ConfigError(f"balancer ema {ema}; allowed: 0 <= ema < 1; use 0 for no averaging")
        self.num_experts, self.k, self.ema = num_experts, k, ema
        self.reset()

    @torch.no_grad()
    def observe(
        self, scores_NE: Tensor, cutoff_N: Tensor, valid_N: Tensor | None, counts_E: Tensor, bias_E: Tensor
    ) -> None:
        """Add one micro-batch. Does nothing in a recomputation during backward, so that no token counts twice.

        Args:
            scores_NE: `[N, E]` unbiased scores.
            cutoff_N: `[N]` the (k+1)-th largest biased score of each token.
            valid_N: bool `[N]`, False for padding; None = all valid.
            counts_E: int64 `[E]`, valid tokens that chose each expert.
            bias_E: the bias with which these tokens were routed, the same at every call of a step.
        """
        if in_recompute():
            return
        self._move(scores_NE.device)  # the model may have been moved since the last micro-batch
        self._add(scores_NE, cutoff_N, valid_N, counts_E, bias_E)

    @torch.no_grad()
    def update(self, bias_E: Tensor) -> Tensor:
        """Return the next bias `[E]` and forget the step. Without a token seen, the bias stays as it is."""
        self._move(bias_E.device)
        new_E = self._averaged(self._next(bias_E), bias_E)
        self.reset()
        return new_E

    @staticmethod
    @torch.no_grad()
    def update_all(balancers: Sequence[Balancer], biases: Sequence[Tensor]) -> list[Tensor]:
        """`update` of every layer's balancer; on a CUDA device one call for all of them, where the rule has one."""
        kind = type(balancers[0]) if balancers else None
        if kind is not None and all(type(b) is kind for b in balancers) and all(b.is_cuda for b in biases):
            for balancer, bias_E in zip(balancers, biases, strict=True):
                balancer._move(bias_E.device)
            new_LE = kind._update_together(balancers, bias_LE := torch.stack(list(biases)))
            if new_LE is not None:
                for balancer in balancers:
                    balancer.reset()
                return list(balancers[0]._averaged(new_LE, bias_LE))
        return [balancer.update(bias_E) for balancer, bias_E in zip(balancers, biases, strict=True)]

    @classmethod
    def _update_together(cls, balancers: Sequence[Any], bias_LE: Tensor) -> Tensor | None:
        """The next biases of all layers before averaging, `[L, E]`; None if the rule, or these balancers, have no such form."""
        return None

    def _averaged(self, new: Tensor, old: Tensor) -> Tensor:
        return self.ema * old + (1 - self.ema) * new if self.ema else new

    def merge(self, other: Balancer) -> None:
        """Add what `other`, of the same rule and routed with the same bias, has seen (another shard of the step)."""
        assert type(other) is type(self), f"cannot merge {other.name} into {self.name}"
        self._merge(other)

    def reduce_(self, sum_: Callable[[Tensor], object]) -> None:
        """Sum the accumulated counts over ranks, once a step and layer, before `update`.

        Args:
            sum_: sums an integer tensor in place over every group that holds *distinct* tokens (data, context and
                expert parallel; never tensor-parallel replicas, which saw the same tokens).
        """
        self._reduce(sum_)

    @abstractmethod
    def reset(self) -> None:
        """Forget what was seen since the last update."""

    @abstractmethod
    def _move(self, device: torch.device) -> None:
        """Bring what was seen to a device."""

    @abstractmethod
    def _add(
        self, scores_NE: Tensor, cutoff_N: Tensor, valid_N: Tensor | None, counts_E: Tensor, bias_E: Tensor
    ) -> None:
        """Accumulate a micro-batch."""

    @abstractmethod
    def _next(self, bias_E: Tensor) -> Tensor:
        """The rule."""

    @abstractmethod
    def _merge(self, other: Balancer) -> None:
        """Add another shard's accumulators."""

    @abstractmethod
    def _reduce(self, sum_: Callable[[Tensor], object]) -> None:
        """Sum the accumulators over ranks."""


def centred(bias_E: Tensor) -> Tensor:
    """Subtract the mean: a common offset never changes a selection, and would otherwise drift."""
    return bias_E - bias_E.mean(-1, keepdim=True)
