"""Routing, its gradient, and the balancer's histogram: the Triton kernels against slow definitions."""

from __future__ import annotations

import pytest
import torch
from test_router import by_definition

from perilune.ops.choice import force
from perilune.ops.moe import router
from perilune.ops.moe.quantile import QuantileHistogram
from perilune.ops.moe.quantile import select as select_histogram

pytestmark = pytest.mark.usefixtures("poisoned_memory")

SIZES = [(1, 2, 1), (20, 16, 4), (6, 896, 16), (10, 19, 18), (40, 130, 8), (3, 1100, 31), (0, 8, 2)]


@pytest.mark.parametrize(("tokens", "experts", "k"), SIZES)
def test_routes_weights_and_counts(tokens: int, experts: int, k: int) -> None:
    torch.manual_seed(0)
    logits_NE, bias_E = torch.randn(tokens, experts) * 2, torch.randn(experts) * 0.1
    index_NA, weight_NA, cutoff_N = by_definition(logits_NE, bias_E, k)
    with force("triton"):
        assert router.select(logits_NE, k).implementation == "triton"
        routing = router.route(logits_NE, bias_E, k, scaling_factor=2.5)
    if tokens:
        assert torch.equal(routing.index_NA, index_NA)
        torch.testing.assert_close(routing.weight_NA.double(), 2.5 * weight_NA, rtol=2e-6, atol=0)
        torch.testing.assert_close(routing.cutoff_N.double(), cutoff_N, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(routing.scores_NE, torch.sigmoid(logits_NE), rtol=1e-6, atol=1e-7)
    assert routing.counts_E.tolist() == torch.bincount(routing.index_NA.flatten(), minlength=experts).tolist()


@pytest.mark.parametrize("experts", [40, 200, 896])
def test_ties_go_to_the_lowest_index(experts: int) -> None:
    """More equal scores than the kernel ranks at once, all or some of them."""
    bias_E = torch.zeros(experts)
    with force("triton"):
        assert router.route(torch.zeros(2, experts), bias_E, 3).index_NA.tolist() == [[0, 1, 2]] * 2
        bias_E[[39, 20]] = 0.25
        bias_E[0] = -0.5
        routing = router.route(torch.zeros(1, experts), bias_E, 4)
    assert routing.index_NA.tolist() == [[20, 39, 1, 2]] and routing.cutoff_N.tolist() == [0.5]


def test_nan_and_extreme_logits() -> None:
    logits_NE = torch.randn(3, 100)
    logits_NE[0, 77], logits_NE[1, 5], logits_NE[1, 6] = float("nan"), 1e30, float("inf")
    logits_NE[2] = -1e30
    with force("triton"):
        routing = router.route(logits_NE, torch.zeros(100), 2)
    assert routing.index_NA[0, 0] == 77 and routing.weight_NA[0].isnan().all()
    assert routing.index_NA[1:].tolist() == [[5, 6], [0, 1]] and routing.weight_NA[1:].tolist() == [
        [0.5, 0.5],
        [0.0, 0.0],
    ]


@pytest.mark.parametrize("renormalize", [True, False])
def test_gradient(renormalize: bool) -> None:
    torch.manual_seed(2)
    logits_NE, bias_E, probe_NA = torch.randn(30, 70), torch.randn(70) * 0.1, torch.randn(30, 5)
    gradients = []
    for implementation, logits in (("triton", logits_NE.clone()), ("torch", logits_NE.double())):
        logits.requires_grad_()
        with force(implementation):
            options = {"renormalize": renormalize, "scaling_factor": 1.5}
            weight_NA = router.route(logits, bias_E.to(logits.dtype), 5, **options).weight_NA
        gradients.append(torch.autograd.grad(weight_NA, logits, probe_NA.to(logits.dtype))[0])
    torch.testing.assert_close(gradients[0].double(), gradients[1], rtol=1e-5, atol=1e-7)
    assert (gradients[0][gradients[1] == 0] == 0).all()


def test_what_the_kernel_does_not_take_goes_to_torch() -> None:
    logits_NE = torch.randn(2, 40)
    with force("triton"):
        assert "up to 31" in router.select(logits_NE, 32).reason
        assert "float32" in router.select(logits_NE.half(), 2).reason
        assert select_histogram(logits_NE.half(), 9).implementation == "torch"
        assert router.route(logits_NE, torch.zeros(40), 33).index_NA.shape == (2, 33)


@pytest.mark.parametrize(("tokens", "experts", "bins"), [(70, 40, 100), (1, 3, 1000), (33, 32, 7)])
def test_histogram_equals_torch_bitwise(tokens: int, experts: int, bins: int) -> None:
    torch.manual_seed(3)
    bias_E = torch.randn(experts)
    routing = router.route(torch.randn(tokens, experts), bias_E, 2)
    valid_N = torch.rand(tokens) < 0.5
    for valid in (None, valid_N):
        counts = []
        for implementation in ("torch", "triton"):
            balancer = QuantileHistogram(experts, 2, bins=bins)
            with force(implementation):
                for _ in range(2):
                    balancer.observe(routing.scores_NE, routing.cutoff_N, valid, routing.counts(), bias_E)
            counts.append(balancer.count_EB)
        assert torch.equal(*counts)
        assert int(counts[0].sum()) == 2 * experts * (tokens if valid is None else int(valid_N.sum()))
