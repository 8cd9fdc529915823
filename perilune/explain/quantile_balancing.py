"""Quantile balancing: read the bias that evens the load off the scores, instead of creeping towards it."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from perilune.explain.chart import Bars, LineChart, Series
from perilune.explain.explanation import Explanation
from perilune.explain.subject import Subject
from perilune.ops.moe import BALANCERS, route
from perilune.ops.moe.quantile import QuantileExact

TOKENS, EXPERTS, ACTIVE, STEPS = 2048, 32, 4, 24
RULES = ("quantile", "quantile_exact", "sign", "none")
WRONG = "quantile with the sign of an article"

Rule = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""(scores, cutoffs, counts, bias) of a step to the next bias."""


def explain(subject: Subject) -> Explanation:
    """Run each rule on the same stream of skewed scores; show loads before and after one step."""
    curves = {name: simulate(balancer_rule(name)) for name in RULES}
    curves[WRONG] = simulate(wrong_sign)
    before, after = small_example()
    shown = {name: [ratio for ratio, _ in curve] for name, curve in curves.items()}
    steps = list(range(STEPS))
    charts = [
        LineChart(
            title="Busiest expert over the mean, by rule",
            series=[
                Series(name=name, x=steps, y=values, style="dash" if name == WRONG else "solid")
                for name, values in shown.items()
            ],
            x_label="step",
            y_label="max ÷ mean load",
            y_log=True,
            horizontals=[(1.0, "even")],
            caption=f"Fresh tokens every step ({TOKENS} tokens, {EXPERTS} experts, {ACTIVE} a token): the quantile is even after one step.",
        ),
        Bars(
            title="Eight tokens, four experts, one each",
            categories=[f"expert {i}" for i in range(4)],
            groups=[("bias 0", before), ("after solving", after)],
            y_label="tokens",
            caption="The alternating solver (App. C) finds the bias at which each expert gets exactly its share of these very tokens.",
        ),
    ]
    second = {name: values[1] for name, values in shown.items()}
    last = {name: values[-1] for name, values in shown.items()}
    return Explanation(
        name="quantile_balancing",
        title="Quantile balancing (QB)",
        source="K3 report §2.3.3, Eq. 14, App. C and D",
        formula=(
            "αᵢ = (k+1)-th largest of sᵢ + b               the score that gets a token in",
            "rᵢⱼ = αᵢ − sᵢⱼ                                  the bias with which expert j would take token i",
            "b̂ⱼ = quantile_{k/n}(r_:ⱼ),   b ← b̂ − mean(b̂)   n experts, k a token; from the next step on",
        ),
        unusual=(
            "No learning rate: the update jumps to the point where each expert has its share q = mk/n of m tokens.",
            "Only integer counts are added up (1000 bins an expert), so any split of the tokens over machines gives the same bias.",
            "An article on this model prints the quantile of the wrong sign; it drives the load apart, as the dashed curve shows.",
        ),
        reference=QuantileExact._next,
        findings=[
            f"From {shown['quantile'][0]:.2f} × the mean load, one update gives {second['quantile']:.2f} (exact quantile: {second['quantile_exact']:.2f}).",
            f"After {STEPS - 1} updates: quantile {last['quantile']:.2f}, sign rule {last['sign']:.2f}, no rule {last['none']:.2f}, wrong sign {last[WRONG]:.2f}.",
            f"Eight tokens on four experts: loads {tuple(before)} become {tuple(after)} with the solver's bias.",
        ],
        numbers={"max_over_mean": shown, "starved_experts_last_step": {name: curve[-1][1] for name, curve in curves.items()},
                 "example": {"before": before, "after": after}},
        charts=charts,
        next=("perilune explain latent_moe", "perilune ablate --preset nano --vary balancer=quantile,sign,none --seeds 3"),
    )  # fmt: skip


def balancer_rule(name: str) -> Rule:
    """The package's own balancer of that name as a rule."""
    balancer = BALANCERS[name](EXPERTS, ACTIVE)

    def rule(scores_NE: Tensor, cutoff_N: Tensor, counts_E: Tensor, bias_E: Tensor) -> Tensor:
        balancer.observe(scores_NE, cutoff_N, None, counts_E, bias_E)
        return balancer.update(bias_E)

    return rule


def wrong_sign(scores_NE: Tensor, cutoff_N: Tensor, counts_E: Tensor, bias_E: Tensor) -> Tensor:
    """What the article prints: −quantile_{1−k/n}(α − s)."""
    bias = -torch.quantile(cutoff_N[:, None] - scores_NE, 1 - ACTIVE / EXPERTS, dim=0)
    return bias - bias.mean()


def simulate(rule: Rule, seed: int = 0) -> list[tuple[float, int]]:
    """(busiest expert ÷ mean load, experts without a token) at each step, on fresh scores of a skewed router."""
    generator = torch.Generator().manual_seed(seed)
    preference_E = 1.2 * torch.randn(EXPERTS, generator=generator)
    bias_E = torch.zeros(EXPERTS)
    found = []
    for _ in range(STEPS):
        logits_NE = preference_E + torch.randn(TOKENS, EXPERTS, generator=generator)
        routing = route(logits_NE, bias_E, ACTIVE)
        counts_E = torch.bincount(routing.index_NA.flatten(), minlength=EXPERTS)
        found.append((float(counts_E.max() * EXPERTS / (TOKENS * ACTIVE)), int((counts_E == 0).sum())))
        bias_E = rule(routing.scores_NE, routing.cutoff_N, counts_E, bias_E)
    return found


def small_example() -> tuple[list[int], list[int]]:
    """Loads of 8 tokens on 4 experts before and after one exact update on those tokens."""
    best = (0, 0, 0, 0, 1, 1, 1, 2)
    generator = torch.Generator().manual_seed(2)
    logits_NE = 0.6 * torch.randn(8, 4, generator=generator)
    for token, expert in enumerate(best):
        logits_NE[token, expert] = logits_NE[token].max() + 0.2
    bias_E = torch.zeros(4)
    balancer = BALANCERS["dual"](4, 1)

    def loads(bias_E: Tensor) -> list[int]:
        routing = route(logits_NE, bias_E, 1)
        counts_E = torch.bincount(routing.index_NA.flatten(), minlength=4)
        balancer.observe(routing.scores_NE, routing.cutoff_N, None, counts_E, bias_E)
        return counts_E.tolist()

    before = loads(bias_E)
    return before, loads(balancer.update(bias_E))
