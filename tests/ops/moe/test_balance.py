"""Load balancers: quantile rules against order statistics, sharding, recomputation, and what they do to the load."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.checkpoint import checkpoint

from perilune.errors import ConfigError
from perilune.ops.choice import force
from perilune.ops.moe import native, router
from perilune.ops.moe.balance import BALANCERS, DualSolver, NoBalance, QuantileExact, QuantileHistogram, SignBias

IMPLEMENTATIONS = ["torch"] if native.why_not(torch.zeros(1), dtypes=(torch.float32,)) else ["torch", "native"]


def skewed_logits(tokens, experts, seed, spread=1.0):
    """Router logits whose experts differ in popularity; the same seed gives the same popularity."""
    popularity_E = torch.randn(experts, generator=torch.Generator().manual_seed(5)) * spread
    return torch.randn(tokens, experts, generator=torch.Generator().manual_seed(seed)) + popularity_E


def watch(balancer, routing, bias_E, valid_N=None):
    """Show one routed micro-batch to a balancer, with the loads of its valid tokens."""
    kept_NA = routing.index_NA if valid_N is None else routing.index_NA[valid_N]
    counts_E = torch.bincount(kept_NA.flatten(), minlength=balancer.num_experts)
    balancer.observe(routing.scores_NE, routing.cutoff_N, valid_N, counts_E, bias_E)
    return counts_E


def violation(counts_E):
    """Largest load over the mean load, minus 1."""
    return float(counts_E.max() / counts_E.double().mean() - 1)


def order_statistic(routing, k, rank):
    """Each expert's rank-th smallest required bias (1-based), from numpy's sort in float64."""
    required_NE = routing.cutoff_N.double().numpy()[:, None] - routing.scores_NE.double().numpy()
    return np.sort(required_NE, axis=0)[rank - 1]


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 300), st.integers(2, 24), st.data())
def test_histogram_is_within_one_bin_of_the_exact_quantile(tokens, experts, data):
    k = data.draw(st.integers(1, experts - 1))
    seed = data.draw(st.integers(0, 10**6))
    bias_E = torch.randn(experts, generator=torch.Generator().manual_seed(seed)) * data.draw(
        st.sampled_from([0, 0.2, 3])
    )
    routing = router.route(skewed_logits(tokens, experts, seed, spread=3.0), bias_E, k)
    balancer = QuantileHistogram(experts, k)
    watch(balancer, routing, bias_E)
    low, width = (float(x) for x in balancer.bounds(bias_E))
    required_NE = routing.cutoff_N[:, None] - routing.scores_NE
    assert low <= required_NE.min() and required_NE.max() <= low + balancer.bins * width + 1e-6
    assert (balancer.count_EB.sum(-1) == tokens).all()
    exact_E = order_statistic(routing, k, -(-tokens * k // experts))
    found_E = balancer.reading()
    assert np.abs(found_E.numpy() - exact_E).max() <= width + 1e-6
    torch.testing.assert_close(balancer.update(bias_E).double(), found_E - found_E.mean(), rtol=0, atol=1e-6)


def test_a_reading_interpolates_within_the_bin():
    balancer, bias_E = QuantileHistogram(2, 1, bins=4), torch.zeros(2)  # bins of width 1/2 over [-1, 1], q = m/2
    required_NE = torch.tensor([[-0.9, 0.1], [-0.8, 0.2], [0.1, 0.3], [0.6, 0.4], [0.7, 0.9]])
    balancer.observe(0.5 - required_NE, torch.full((5,), 0.5), None, torch.zeros(2), bias_E)
    assert balancer.count_EB.tolist() == [[2, 0, 1, 2], [0, 0, 4, 1]]
    # q = 2.5, ceil 3: expert 0 is (2.5 - 2)/1 into bin 2, expert 1 (2.5 - 0)/4 into bin 2
    torch.testing.assert_close(balancer.reading(), torch.tensor([0.25, 0.3125], dtype=torch.float64))


def test_exact_form_equals_both_readings_of_equation_14():
    experts, k, tokens = 16, 4, 4001  # q = 1000.25
    bias_E = torch.randn(experts) * 0.1
    routing = router.route(skewed_logits(tokens, experts, 0), bias_E, k)
    margin_NE = routing.scores_NE - routing.cutoff_N[:, None]
    balancer = QuantileExact(experts, k)
    watch(balancer, routing, bias_E)
    found_E = balancer.update(bias_E)
    expected_E = -torch.quantile(margin_NE, 1 - k / experts, dim=0, interpolation="nearest")
    torch.testing.assert_close(found_E, expected_E - expected_E.mean(), rtol=0, atol=1e-6)
    # Opposite sign convention (bias subtracted from the scores): beta = +quantile_{1-k/n}(s - alpha) = -b.
    beta_E = torch.quantile(margin_NE, 1 - k / experts, dim=0, interpolation="nearest")
    torch.testing.assert_close(-(beta_E - beta_E.mean()), found_E, rtol=0, atol=1e-6)
    histogram = QuantileHistogram(experts, k)
    watch(histogram, routing, bias_E)
    width = float(histogram.bounds(bias_E)[1])
    assert (histogram.update(bias_E) - found_E).abs().max() <= width


def test_reports_small_example_becomes_even():
    """Report Fig. 5: 8 tokens, 4 experts, 1 active, loads (4, 3, 1, 0) become (2, 2, 2, 2)."""
    torch.manual_seed(4)
    while True:
        logits_NE = torch.randn(8, 4) + torch.tensor([1.5, 1.0, -0.5, -1.5])
        counts_E = torch.bincount(router.route(logits_NE, torch.zeros(4), 1).index_NA.flatten(), minlength=4)
        if counts_E.tolist() == [4, 3, 1, 0]:
            break
    balancer, bias_E = DualSolver(4, 1), torch.zeros(4)
    watch(balancer, router.route(logits_NE, bias_E, 1), bias_E)
    bias_E = balancer.update(bias_E)
    balanced = router.route(logits_NE, bias_E, 1)
    assert torch.bincount(balanced.index_NA.flatten(), minlength=4).tolist() == [2, 2, 2, 2]


@pytest.mark.parametrize("rule", [QuantileHistogram, QuantileExact])
def test_load_becomes_even_within_a_few_steps(rule):
    """Measured for the report's form with a fresh batch a step: max/mean 7.80 -> 1.30 -> 1.19 -> 1.14."""
    experts, k = 64, 4
    balancer, bias_E, seen = rule(experts, k), torch.zeros(experts), []
    for step in range(5):
        seen.append(violation(watch(balancer, router.route(skewed_logits(8000, experts, step), bias_E, k), bias_E)))
        bias_E = balancer.update(bias_E)
    assert seen[0] > 3 and seen[1] < 0.6 and seen[4] < 0.3, seen


def test_t47_the_printed_sign_inverts_the_balance():
    experts, k = 32, 4
    share = k / experts
    right_E = printed_E = torch.zeros(experts)
    for step in range(4):
        logits_NE = skewed_logits(4000, experts, step)
        right, printed = router.route(logits_NE, right_E, k), router.route(logits_NE, printed_E, k)
        loads = [torch.bincount(r.index_NA.flatten(), minlength=experts) for r in (right, printed)]
        if step == 0:
            start = violation(loads[0])
        balancer = QuantileHistogram(experts, k)
        watch(balancer, right, right_E)
        right_E = balancer.update(right_E)
        margin_NE = printed.cutoff_N[:, None] - printed.scores_NE
        printed_E = -torch.quantile(margin_NE, 1 - share, dim=0)
        printed_E = printed_E - printed_E.mean()
    assert violation(loads[0]) < 0.2 * start
    assert violation(loads[1]) > start and loads[1].min() == 0


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("rule", [QuantileHistogram, QuantileExact, SignBias])
def test_t10_any_sharding_gives_the_same_bias_bitwise(rule, implementation):
    experts, k, tokens = 24, 3, 3000
    bias_E = torch.randn(experts) * 0.2
    routing = router.route(skewed_logits(tokens, experts, 1), bias_E, k)
    valid_N = torch.rand(tokens) < 0.8
    whole = rule(experts, k)
    sums = [rule(experts, k) for _ in range(5)]
    with force(implementation):
        watch(whole, routing, bias_E, valid_N)
        for piece, rows in enumerate(torch.randperm(tokens).split(379)):  # micro-batches on 5 ranks, out of order
            part = router.Routing(*(x[rows] for x in routing[:4]))
            watch(sums[piece % 5], part, bias_E, valid_N[rows])
    total = sums[3]
    for other in (0, 4, 2, 1):
        total.merge(sums[other])
    assert torch.equal(total.update(bias_E), whole.update(bias_E))


def test_t10_an_all_reduce_over_ranks_equals_a_merge():
    experts, k = 12, 2
    bias_E = torch.zeros(experts)
    ranks, whole = [QuantileHistogram(experts, k) for _ in range(3)], QuantileHistogram(experts, k)
    for seed, rank in enumerate(ranks):
        routing = router.route(skewed_logits(500, experts, seed), bias_E, k)
        padding_only = torch.zeros(500, dtype=torch.bool) if seed == 2 else None
        watch(rank, routing, bias_E, padding_only)
        watch(whole, routing, bias_E, padding_only)
    others = [rank.count_EB.clone() for rank in ranks[1:]]
    assert all(count.dtype == torch.int32 for count in others)
    ranks[0].reduce_(lambda tensor: tensor.add_(sum(others)))
    assert torch.equal(ranks[0].update(bias_E), whole.update(bias_E))


def test_native_histogram_equals_torch_bitwise():
    if len(IMPLEMENTATIONS) == 1:
        pytest.skip("no native kernels here")
    for experts, tokens in ((7, 1), (40, 5000)):
        bias_E = torch.randn(experts)
        routing = router.route(skewed_logits(tokens, experts, 3), bias_E, 2)
        valid_N = torch.rand(tokens) < 0.5
        counts = []
        for implementation in IMPLEMENTATIONS:
            balancer = QuantileHistogram(experts, 2, bins=100)
            with force(implementation):
                watch(balancer, routing, bias_E, valid_N)
            counts.append(balancer.count_EB)
        assert torch.equal(*counts)
        assert int(counts[0].sum()) == int(valid_N.sum()) * experts


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_t40_recomputation_in_backward_counts_once(use_reentrant):
    experts, k, bias_E = 8, 2, torch.zeros(8)
    weight_ED = torch.randn(experts, 4, requires_grad=True)
    x_ND = torch.randn(50, 4, requires_grad=True)
    biases = []
    for recompute in (False, True):
        balancer = QuantileHistogram(experts, k)
        calls = []

        def layer(x_ND, balancer=balancer, calls=calls):
            calls.append(1)
            routing = router.route(x_ND @ weight_ED.T, bias_E, k)
            watch(balancer, routing, bias_E)
            return routing.weight_NA

        out_NA = checkpoint(layer, x_ND, use_reentrant=use_reentrant) if recompute else layer(x_ND)
        (out_NA * torch.arange(k)).sum().backward()
        assert len(calls) == 1 + recompute
        assert (balancer.count_EB.sum(-1) == 50).all()
        biases.append(balancer.update(bias_E))
    assert torch.equal(*biases)


@pytest.mark.parametrize("name", sorted(BALANCERS))
def test_update_without_valid_tokens_keeps_the_bias_and_a_step_is_forgotten(name):
    balancer = BALANCERS[name](8, 2)
    bias_E = torch.linspace(-0.1, 0.1, 8)
    assert torch.equal(balancer.update(bias_E), bias_E)
    routing = router.route(skewed_logits(60, 8, 0), bias_E, 2)
    watch(balancer, routing, bias_E, torch.zeros(60, dtype=torch.bool))
    assert torch.equal(balancer.update(bias_E), bias_E)
    watch(balancer, router.route(skewed_logits(60, 8, 1), bias_E, 2), bias_E)
    first_E = balancer.update(bias_E)
    assert (first_E is not bias_E) and torch.equal(first_E, bias_E) == (name == "none")
    fresh = BALANCERS[name](8, 2)
    routing = router.route(skewed_logits(60, 8, 2), first_E, 2)
    for one in (balancer, fresh):
        watch(one, routing, first_E)
    assert torch.equal(balancer.update(first_E), fresh.update(first_E))


def test_a_bias_that_changes_within_a_step_is_caught():
    balancer, bias_E = QuantileHistogram(6, 2), torch.zeros(6)
    watch(balancer, router.route(torch.randn(9, 6), bias_E, 2), bias_E)
    with pytest.raises(AssertionError, match="another bias"):
        balancer.update(bias_E + 0.1)


def test_sign_rule_steps_towards_the_mean_load():
    balancer, bias_E = SignBias(4, 1, rate=0.01), torch.zeros(4)
    balancer.observe(torch.rand(8, 4), torch.rand(8), None, torch.tensor([4, 2, 2, 0]), bias_E)
    torch.testing.assert_close(balancer.update(bias_E), torch.tensor([-0.01, 0.0, 0.0, 0.01]))
    assert SignBias(4, 1).name == "sign" and NoBalance(4, 1).name == "none"


def test_ema_keeps_a_share_of_the_old_bias():
    bias_E = torch.randn(8) * 0.1
    bias_E -= bias_E.mean()
    routing = router.route(skewed_logits(100, 8, 0), bias_E, 2)
    plain, slow = QuantileHistogram(8, 2), QuantileHistogram(8, 2, ema=0.75)
    for balancer in (plain, slow):
        watch(balancer, routing, bias_E)
    torch.testing.assert_close(slow.update(bias_E), 0.75 * bias_E + 0.25 * plain.update(bias_E))


def test_dual_solver_is_at_least_as_even_as_one_quantile_step():
    experts, k = 16, 2
    bias_E = torch.zeros(experts)
    routing = router.route(skewed_logits(1600, experts, 9), bias_E, k)
    loads = []
    for rule in (QuantileExact, DualSolver):
        balancer = rule(experts, k)
        watch(balancer, routing, bias_E)
        again = router.route(skewed_logits(1600, experts, 9), balancer.update(bias_E), k)
        loads.append(violation(torch.bincount(again.index_NA.flatten(), minlength=experts)))
    assert loads[1] <= loads[0] and loads[1] < 0.03, loads


def test_wrong_settings_are_refused():
    with pytest.raises(ConfigError, match="experts"):
        QuantileHistogram(4, 4)
    with pytest.raises(ConfigError, match="ema"):
        SignBias(4, 2, ema=1.0)
    with pytest.raises(ConfigError, match="bins"):
        QuantileHistogram(4, 2, bins=1)
    exact, bias_E = QuantileExact(4, 2), torch.zeros(4)
    watch(exact, router.route(torch.randn(3, 4), bias_E, 2), bias_E)
    with pytest.raises(ConfigError, match="quantile"):
        exact.reduce_(lambda tensor: tensor)
