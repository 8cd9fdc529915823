"""The balancing rules by name, and the two that look at loads only (the quantile rules are in `quantile`)."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from perilune.ops.moe.balancer import Balancer
from perilune.ops.moe.quantile import DualSolver, QuantileExact, QuantileHistogram

__all__ = ["BALANCERS", "Balancer", "DualSolver", "NoBalance", "QuantileExact", "QuantileHistogram", "SignBias"]


class NoBalance(Balancer):
    """Leaves the bias alone: the ablation's baseline."""

    name = "none"

    def reset(self) -> None:
        """There is nothing to forget."""

    def _move(self, device: torch.device) -> None:
        """There is nothing to move."""

    def _add(
        self, scores_NE: Tensor, cutoff_N: Tensor, valid_N: Tensor | None, counts_E: Tensor, bias_E: Tensor
    ) -> None:
        """Look at nothing."""

    def _merge(self, other: Balancer) -> None:
        """There is nothing to add."""

    def _reduce(self, sum_: Callable[[Tensor], object]) -> None:
        """There is nothing to sum."""

    def _next(self, bias_E: Tensor) -> Tensor:
        return bias_E.clone()


class SignBias(Balancer):
    """A fixed step towards the mean load (auxiliary-loss-free balancing): b_j += rate * sign(mean load - load_j).

    SignSGD on the dual of the assignment problem (report App. C, Eq.27).

    Args:
        rate: the step, 1e-3 in the K2 line.
    """

    name = "sign"

    def __init__(self, num_experts: int, k: int, *, ema: float = 0.0, rate: float = 1e-3) -> None:
        super().__init__(num_experts, k, ema=ema)
        self.rate = rate

    def reset(self) -> None:
        """Forget the loads."""
        self.load_E: Tensor | None = None

    def _move(self, device: torch.device) -> None:
        self.load_E = None if self.load_E is None else self.load_E.to(device)

    def _add(self, scores_NE, cutoff_N, valid_N, counts_E, bias_E) -> None:
        if self.load_E is None:
            self.load_E = counts_E.to(torch.int64, copy=True)
        else:
            self.load_E += counts_E  # in place, for recordings that are replayed

    def _next(self, bias_E: Tensor) -> Tensor:
        if self.load_E is None:
            return bias_E.clone()
        # n * load - total is an exact integer, so a load equal to the mean leaves its bias untouched.
        excess_E = self.load_E * self.num_experts - self.load_E.sum()
        return bias_E - self.rate * torch.sign(excess_E).to(bias_E)

    def _merge(self, other: SignBias) -> None:
        if other.load_E is not None:
            self.load_E = other.load_E.clone() if self.load_E is None else self.load_E + other.load_E

    def _reduce(self, sum_: Callable[[Tensor], object]) -> None:
        assert self.load_E is not None, "a rank must observe at least one micro-batch, possibly of padding only"
        sum_(self.load_E)


BALANCERS: dict[str, type[Balancer]] = {
    rule.name: rule for rule in (QuantileHistogram, QuantileExact, DualSolver, SignBias, NoBalance)
}
