"""The router against a slow definition, in both implementations."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from perilune.errors import ConfigError
from perilune.ops.choice import force
from perilune.ops.moe import native, router

IMPLEMENTATIONS = ["torch"] if native.why_not(torch.zeros(1), dtypes=(torch.float32,)) else ["torch", "native"]


def by_definition(logits_NE, bias_E, k):
    """Loop over tokens in float64: order experts by (biased score, lower index first)."""
    scores = 1 / (1 + np.exp(-logits_NE.double().numpy()))
    chosen, weights, cutoffs = [], [], []
    for row in scores:
        biased = row + bias_E.double().numpy()
        order = sorted(range(len(row)), key=lambda e: (-biased[e], e))
        chosen.append(order[:k])
        weights.append(row[order[:k]] / row[order[:k]].sum())
        cutoffs.append(biased[order[k]])
    return torch.tensor(np.array(chosen)), torch.tensor(np.array(weights)), torch.tensor(np.array(cutoffs))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("tokens,experts,k", [(1, 2, 1), (33, 16, 4), (7, 896, 16), (50, 19, 18), (3000, 37, 5)])
def test_route_matches_the_definition(implementation, tokens, experts, k):
    torch.manual_seed(0)
    logits_NE, bias_E = torch.randn(tokens, experts) * 2, torch.randn(experts) * 0.1
    index_NA, weight_NA, cutoff_N = by_definition(logits_NE, bias_E, k)
    with force(implementation):
        routing = router.route(logits_NE, bias_E, k)
    assert torch.equal(routing.index_NA, index_NA)
    torch.testing.assert_close(routing.weight_NA.double(), weight_NA, rtol=2e-6, atol=0)
    torch.testing.assert_close(routing.cutoff_N.double(), cutoff_N, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(routing.scores_NE, torch.sigmoid(logits_NE), rtol=1e-6, atol=1e-7)
    assert not (routing.scores_NE.requires_grad or routing.cutoff_N.requires_grad)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_ties_go_to_the_lowest_index(implementation):
    with force(implementation):
        routing = router.route(torch.zeros(4, 40), torch.zeros(40), 3)
        assert routing.index_NA.tolist() == [[0, 1, 2]] * 4
        bias_E = torch.zeros(40)
        bias_E[[39, 20]] = 0.25  # tied with each other, above the rest
        assert router.route(torch.zeros(1, 40), bias_E, 3).index_NA.tolist() == [[20, 39, 0]]


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_constant_added_to_every_bias_changes_nothing(implementation):
    torch.manual_seed(1)
    logits_NE = torch.randn(64, 16)
    bias_E = torch.randint(-8, 8, (16,)) / 32  # sums exact in fp32, so that no comparison can flip by rounding
    scores = torch.sigmoid(logits_NE).mul(2**12).round().div(2**12).clamp(2**-12, 1 - 2**-12)
    with force(implementation):
        before, after = (router.route(torch.logit(scores), bias_E + shift, 4) for shift in (0.0, 2.0))
    assert torch.equal(before.index_NA, after.index_NA)
    assert torch.equal(before.weight_NA, after.weight_NA)
    torch.testing.assert_close(after.cutoff_N, before.cutoff_N + 2)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_bias_steers_the_choice_but_never_the_weights(implementation):
    torch.manual_seed(2)
    logits_NE, bias_E = torch.randn(100, 12), torch.zeros(12)
    bias_E[7] = 5.0
    with force(implementation):
        routing = router.route(logits_NE, bias_E, 3)
        scaled = router.route(logits_NE, bias_E, 3, scaling_factor=2.5)
        raw = router.route(logits_NE, bias_E, 3, renormalize=False)
    assert (routing.index_NA == 7).any(-1).all()
    chosen_NA = torch.sigmoid(logits_NE).gather(-1, routing.index_NA)
    torch.testing.assert_close(raw.weight_NA, chosen_NA)
    torch.testing.assert_close(routing.weight_NA, chosen_NA / chosen_NA.sum(-1, keepdim=True))
    torch.testing.assert_close(routing.weight_NA.sum(-1), torch.ones(100))
    torch.testing.assert_close(scaled.weight_NA, 2.5 * routing.weight_NA)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("renormalize", [True, False])
def test_gradient_reaches_the_chosen_experts_only(implementation, renormalize):
    torch.manual_seed(3)
    logits_NE, bias_E, probe_NA = torch.randn(300, 10), torch.randn(10) * 0.1, torch.randn(300, 3)
    exact_NE = logits_NE.double().requires_grad_()
    score_NE = torch.sigmoid(exact_NE)
    order_NE = torch.sort(score_NE + bias_E, descending=True, stable=True).indices
    score_NA = score_NE.gather(-1, order_NE[:, :3])
    weight_NA = 1.5 * (score_NA / score_NA.sum(-1, keepdim=True) if renormalize else score_NA)
    (weight_NA * probe_NA).sum().backward()
    logits_NE.requires_grad_()
    bias_E.requires_grad_()
    with force(implementation):
        routing = router.route(logits_NE, bias_E, 3, renormalize=renormalize, scaling_factor=1.5)
        (routing.weight_NA * probe_NA).sum().backward()
    torch.testing.assert_close(logits_NE.grad.double(), exact_NE.grad, rtol=1e-5, atol=1e-7)
    unchosen_NE = torch.ones(300, 10).scatter(-1, routing.index_NA, 0.0).bool()
    assert (logits_NE.grad[unchosen_NE] == 0).all()
    assert bias_E.grad is None


def test_gradcheck_in_float64():
    torch.manual_seed(4)
    logits_NE = torch.randn(5, 7, dtype=torch.float64, requires_grad=True)
    bias_E = torch.randn(7, dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda x: router.route(x, bias_E, 3).weight_NA, (logits_NE,))
    assert router.select(logits_NE, 2).implementation == "torch"


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_nan_and_extreme_logits(implementation):
    logits_NE = torch.full((3, 20), -200.0)
    logits_NE[1, 11] = float("nan")
    logits_NE[2] = 200.0
    with force(implementation):
        routing = router.route(logits_NE, torch.zeros(20), 4)
        empty = router.route(torch.zeros(0, 20), torch.zeros(20), 4)
    assert routing.index_NA[0].tolist() == [0, 1, 2, 3] and routing.weight_NA[0].isfinite().all()
    assert routing.index_NA[1].tolist() == [11, 0, 1, 2] and routing.weight_NA[1].isnan().all()
    torch.testing.assert_close(routing.weight_NA[2], torch.full((4,), 0.25))
    assert empty.index_NA.shape == (0, 4) and empty.cutoff_N.shape == (0,)


@pytest.mark.parametrize("k", [0, 8, 9])
def test_top_k_must_leave_a_cutoff(k):
    with pytest.raises(ConfigError, match="8"):
        router.route(torch.zeros(2, 8), torch.zeros(8), k)
