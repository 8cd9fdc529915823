"""Quantile balancing: the bias jumps to the value at which each expert gets exactly its share (see `balancer`).

`QuantileHistogram` is the method in use (report App. D): integer histograms of the required bias, one integer
all-reduce a layer and step. `QuantileExact` keeps every margin (Eq.14) and `DualSolver` iterates to the optimum of the
balanced assignment (App. C, Alg. 1): both are oracles for one process.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from perilune.errors import ConfigError
from perilune.ops.choice import Choice, forced
from perilune.ops.moe import native
from perilune.ops.moe.balancer import Balancer, centred
from perilune.ops.moe.cuda import histogram as cuda_histogram
from perilune.ops.triton.available import choose as choose_triton


def select(scores_NE: Tensor, bins: int) -> Choice:
    """Return which implementation accumulates a histogram of so many bins for these scores, and why."""
    if (wanted := forced()) in ("torch", "reference"):
        return Choice("torch", f"asked for {wanted}")
    if wanted == "cuda" or wanted is None and scores_NE.is_cuda:
        obstacle = _cuda_obstacle(scores_NE, bins)
        if obstacle is None:
            return Choice("cuda", "bins are summed in shared memory")
        if wanted == "cuda":
            return Choice("torch", f"cuda was asked for, but {obstacle}")
    if (choice := choose_triton(scores_NE)) is not None:
        if choice.implementation == "triton" and scores_NE.dtype != torch.float32:
            return Choice("torch", "the histogram's kernels take float32")
        return choice
    reason = native.why_not(scores_NE, dtypes=(torch.float32,))
    return Choice("torch", reason) if reason else Choice("native", "fp32 on CPU: no [N, E] temporaries")


def _cuda_obstacle(scores_NE: Tensor, bins: int) -> str | None:
    if scores_NE.dtype != torch.float32 or torch.compiler.is_compiling():
        return "the histogram's kernel takes float32, untraced"
    return cuda_histogram.unavailable_reason(scores_NE, bins)


class QuantileHistogram(Balancer):
    """The quantile read from a histogram of r_ij = alpha_i - s_ij.

    With scores in (0, 1), alpha lies within [min b, max b + 1], so r lies within [min b - 1, max b + 1]: a range that
    follows from the current bias alone, is equal on every rank without communication, and needs no overflow bins. The
    error against the exact quantile is at most one bin width, w = (max b - min b + 2) / bins.

    Args:
        bins: B, 1000 in the report.
    """

    name = "quantile"

    def __init__(self, num_experts: int, k: int, *, ema: float = 0.0, bins: int = 1000) -> None:
        super().__init__(num_experts, k, ema=ema)
        if bins < 2:
            raise ConfigError(f"{bins} histogram bins; allowed: 2 or more; the report uses 1000")
        self.bins = bins

    def reset(self) -> None:
        """Forget the histogram."""
        self.count_EB: Tensor | None = None  # int32 [E, B]: tokens whose required bias falls in each bin
        self.bias_E: Tensor | None = None  # the bias that fixes the range of this step's histogram

    def _move(self, device: torch.device) -> None:
        if self.count_EB is not None:
            self.count_EB, self.bias_E = self.count_EB.to(device), self.bias_E.to(device)

    def bounds(self, bias_E: Tensor) -> tuple[Tensor, Tensor]:
        """Return (lower edge, bin width) of the histogram under biases `[..., E]`, fp32 (fp64) `[..., 1]`."""
        low = bias_E.amin(-1, keepdim=True) - 1
        # Divided by a tensor: by a number, torch on CUDA multiplies with a rounded inverse, and devices would disagree.
        return low, (bias_E.amax(-1, keepdim=True) + 1 - low) / torch.full_like(low, self.bins)

    def _add(self, scores_NE, cutoff_N, valid_N, counts_E, bias_E) -> None:
        if self.count_EB is None:
            shape = (self.num_experts, self.bins)
            self.count_EB = torch.zeros(shape, dtype=torch.int32, device=scores_NE.device)
            self.bias_E = bias_E.detach().to(scores_NE.device, copy=True)
        implementation = select(scores_NE, self.bins).implementation
        if implementation in ("cuda", "triton"):
            if implementation == "cuda":
                histogram_add = cuda_histogram.histogram_add
            else:
                from perilune.ops.moe.triton.histogram import histogram_add
            histogram_add(self.count_EB, scores_NE, cutoff_N, valid_N, self.bias_E.to(scores_NE.dtype))
            return
        low, width = self.bounds(self.bias_E.to(scores_NE.dtype))
        if implementation == "native":
            native.histogram_add(self.count_EB, scores_NE, cutoff_N, valid_N, float(low), float(1 / width))
            return
        if valid_N is not None:
            scores_NE, cutoff_N = scores_NE[valid_N], cutoff_N[valid_N]
        required_NE = cutoff_N[:, None] - scores_NE
        bin_NE = ((required_NE - low) * (1 / width)).to(torch.int64).clamp_(0, self.bins - 1)
        bin_NE += torch.arange(self.num_experts, device=bin_NE.device) * self.bins
        count = torch.bincount(bin_NE.flatten(), minlength=self.count_EB.numel())
        self.count_EB += count.view_as(self.count_EB)

    def reading(self) -> Tensor:
        """Return `[E]` fp64, each expert's quantile b^ (not centred). Needs at least one valid token."""
        return self._quantiles(self.count_EB, self.bias_E)

    def _quantiles(self, count_EB: Tensor, bias_E: Tensor) -> Tensor:
        """`reading` of any number of histograms `[..., E, B]` under biases `[..., E]`; NaN without a token."""
        tokens = count_EB[..., 0, :].sum(-1)[..., None]  # m: each token is once in every row
        routes = tokens * self.k
        share = routes.double() / torch.full_like(routes, self.num_experts)  # q = m k / n, not always an integer
        rank = torch.div(routes + self.num_experts - 1, self.num_experts, rounding_mode="floor")  # ceil(q), exactly
        before_EB = count_EB.cumsum(-1, dtype=torch.int64)
        bin_E1 = (before_EB < rank[..., None]).sum(-1, keepdim=True)  # first bin whose cumulative count reaches ceil(q)
        inside_E = count_EB.gather(-1, bin_E1).squeeze(-1).double()
        below_E = before_EB.gather(-1, bin_E1).squeeze(-1).double() - inside_E
        low, width = self.bounds(bias_E)
        fraction_E = ((share - below_E) / inside_E).clamp_(0, 1)
        return low.double() + (bin_E1.squeeze(-1) + fraction_E) * width.double()

    def _next(self, bias_E: Tensor) -> Tensor:
        if self.count_EB is None:
            return bias_E.clone()
        if bias_E.is_cuda:  # where a look at a number would be waited for
            return self._next_on_device(self.count_EB, self.bias_E)
        if not self.count_EB.any():
            return bias_E.clone()
        assert torch.equal(self.bias_E, bias_E), "update was given another bias than the tokens were routed with"
        return centred(self.reading()).to(bias_E.dtype)

    def _next_on_device(self, count_EB: Tensor, bias_E: Tensor) -> Tensor:
        """As `_next`, of any number of histograms, without reading a number on the host."""
        seen = count_EB[..., 0, :].any(-1, keepdim=True)
        return torch.where(seen, centred(self._quantiles(count_EB, bias_E)).to(bias_E.dtype), bias_E)

    @classmethod
    def _update_together(cls, balancers: Sequence[QuantileHistogram], bias_LE: Tensor) -> Tensor | None:
        """One launch for all layers."""
        first = balancers[0]
        same = all(
            (b.num_experts, b.k, b.bins, b.ema) == (first.num_experts, first.k, first.bins, first.ema)
            for b in balancers
        )
        if not same or any(b.count_EB is None for b in balancers):
            return None
        count_LEB = torch.stack([b.count_EB for b in balancers])
        return first._next_on_device(count_LEB, torch.stack([b.bias_E for b in balancers]))

    def _merge(self, other: QuantileHistogram) -> None:
        if other.count_EB is None:
            return
        if self.count_EB is None:
            self.count_EB, self.bias_E = other.count_EB.clone(), other.bias_E.clone()
            return
        assert torch.equal(self.bias_E, other.bias_E), "shards of one step were routed with different biases"
        self.count_EB += other.count_EB

    def _reduce(self, sum_: Callable[[Tensor], object]) -> None:
        assert self.count_EB is not None, "a rank must observe at least one micro-batch, possibly of padding only"
        sum_(self.count_EB)


class _Margins(Balancer):
    """Keeps every valid token's scores and cutoff of the step."""

    def reset(self) -> None:
        """Forget the margins."""
        self.scores: list[Tensor] = []
        self.cutoffs: list[Tensor] = []

    def _move(self, device: torch.device) -> None:
        self.scores = [scores_NE.to(device) for scores_NE in self.scores]
        self.cutoffs = [cutoff_N.to(device) for cutoff_N in self.cutoffs]

    def _add(self, scores_NE, cutoff_N, valid_N, counts_E, bias_E) -> None:
        kept = slice(None) if valid_N is None else valid_N
        self.scores.append(scores_NE[kept].clone())
        self.cutoffs.append(cutoff_N[kept].clone())

    def _merge(self, other: _Margins) -> None:
        self.scores += other.scores
        self.cutoffs += other.cutoffs

    def _reduce(self, sum_: Callable[[Tensor], object]) -> None:
        raise ConfigError(f"balancer {self.name!r} keeps every margin and runs on one rank; use 'quantile'")


class QuantileExact(_Margins):
    """Eq.14 on the margins themselves: -b^_j is the (q+1)-th largest of s_ij - alpha_i."""

    name = "quantile_exact"

    def _next(self, bias_E: Tensor) -> Tensor:
        if not sum(len(cutoff_N) for cutoff_N in self.cutoffs):
            return bias_E.clone()
        scores_NE, cutoff_N = torch.cat(self.scores), torch.cat(self.cutoffs)
        return centred(share_quantile(cutoff_N[:, None] - scores_NE, self.k)).to(bias_E.dtype)


class DualSolver(_Margins):
    """Alternates exact coordinate steps on the dual until the loads are even (App. C, Alg. 1).

    Each step's minimiser is an interval, for a token between its k-th and (k+1)-th biased score, for an expert between
    two order statistics. Its ends are kinks at which the alternation can stall (most 8-token examples do); midpoints
    avoid that.

    Args:
        steps: the most alternations.
    """

    name = "dual"

    def __init__(self, num_experts: int, k: int, *, ema: float = 0.0, steps: int = 50) -> None:
        super().__init__(num_experts, k, ema=ema)
        self.steps = steps

    def _next(self, bias_E: Tensor) -> Tensor:
        tokens = sum(len(cutoff_N) for cutoff_N in self.cutoffs)
        if tokens == 0:
            return bias_E.clone()
        scores_NE = torch.cat(self.scores)
        current_E = best_E = bias_E.to(scores_NE.dtype)
        least = tokens + 1
        for _ in range(self.steps + 1):
            top = torch.topk(scores_NE + current_E, self.k + 1, dim=-1)
            most = int(torch.bincount(top.indices[:, : self.k].flatten(), minlength=self.num_experts).max())
            if most < least:
                least, best_E = most, current_E
            if least * self.num_experts <= tokens * self.k:
                break
            cutoff_N = (top.values[:, self.k - 1] + top.values[:, self.k]) / 2
            required_NE = cutoff_N[:, None] - scores_NE
            upper_E = share_quantile(required_NE, self.k)
            lower_E = torch.kthvalue(required_NE, max(1, tokens * self.k // self.num_experts), dim=0).values
            current_E = centred((lower_E + upper_E) / 2)
        return best_E.to(bias_E.dtype)


def share_quantile(required_NE: Tensor, k: int) -> Tensor:
    """Return `[E]`, each column's (floor(q)+1)-th smallest value, q = N k / E: exactly floor(q) values lie below it."""
    tokens, experts = required_NE.shape
    return torch.kthvalue(required_NE, tokens * k // experts + 1, dim=0).values
