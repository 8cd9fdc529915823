"""Routing and the balancers' accumulators on a GPU, against slow definitions and across devices."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed; pip install perilune[kernels]")

from perilune.ops.choice import force
from perilune.ops.moe import BALANCERS, router
from perilune.ops.moe.quantile import QuantileHistogram, select

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.usefixtures("poisoned_memory_warned"),
    pytest.mark.filterwarnings("ignore:.*deterministic"),
]


def case(tokens: int, experts: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator("cuda").manual_seed(seed)
    logits = 2 * torch.randn(tokens, experts, generator=generator, device="cuda")
    return logits, torch.randn(experts, generator=generator, device="cuda") * 0.1


@pytest.mark.parametrize("renormalize", [True, False])
@pytest.mark.parametrize(
    ("tokens", "experts", "k"),
    [(8192, 896, 16), (5000, 64, 8), (777, 24, 3), (300, 4000, 31), (64, 65, 16), (1, 2, 1), (0, 8, 2)],
)
def test_routes_weights_counts_and_gradient(tokens: int, experts: int, k: int, renormalize: bool) -> None:
    logits, bias = case(tokens, experts)
    options = {"renormalize": renormalize, "scaling_factor": 2.5}
    assert router.select(logits, k).implementation == "triton"
    runs = []
    probe = torch.randn(tokens, k, device="cuda")
    for _ in range(2):
        leaf = logits.clone().requires_grad_()
        found = router.route(leaf, bias, k, **options)
        runs.append((*found, *torch.autograd.grad(found.weight_NA, leaf, probe)))
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True)), "not repeatable"
    index, weight, scores, cutoff, counts, gradient = (x.detach() for x in runs[0])
    torch.testing.assert_close(scores, torch.sigmoid(logits), rtol=1e-6, atol=1e-7)
    order = torch.sort(scores + bias, dim=-1, descending=True, stable=True)  # of the kernel's own scores: exact
    assert torch.equal(index, order.indices[:, :k]) and torch.equal(cutoff, order.values[:, k])
    assert torch.equal(counts, torch.bincount(index.flatten(), minlength=experts))
    leaf = logits.double().requires_grad_()
    exact = torch.sigmoid(leaf).gather(-1, index)
    exact = 2.5 * (exact / exact.sum(-1, keepdim=True) if renormalize else exact)
    torch.testing.assert_close(weight.double(), exact, rtol=3e-6, atol=1e-9)
    (right,) = torch.autograd.grad(exact, leaf, probe.double())
    torch.testing.assert_close(gradient.double(), right, rtol=2e-5, atol=1e-6)
    assert not gradient.scatter(-1, index, 0.0).any()


@pytest.mark.parametrize("experts", [40, 200, 896])
def test_ties_go_to_the_lowest_index(experts: int) -> None:
    """More equal scores than the kernel ranks at once; and groups of equal scores in random logits."""
    zeros = torch.zeros(64, experts, device="cuda")
    found = router.route(zeros, zeros[0], 3)
    assert torch.equal(found.index_NA, torch.arange(3, device="cuda").expand(64, 3))
    assert found.counts_E.tolist() == [64, 64, 64] + [0] * (experts - 3)
    logits = torch.randint(0, 5, (3000, experts), device="cuda").float()
    found = router.route(logits, zeros[0], 16)
    order = torch.sort(found.scores_NE, dim=-1, descending=True, stable=True)
    assert torch.equal(found.index_NA, order.indices[:, :16]) and torch.equal(found.cutoff_N, order.values[:, 16])


def test_nan_reaches_only_its_own_token() -> None:
    logits, bias = case(500, 896)
    logits[3, 700] = float("nan")
    found = router.route(logits, bias, 16)
    assert found.weight_NA[3].isnan().all() and found.index_NA[3, 0] == 700
    assert found.weight_NA[torch.arange(500, device="cuda") != 3].isfinite().all()


@pytest.mark.parametrize(("tokens", "experts", "bins"), [(8192, 896, 1000), (1001, 70, 100), (1, 3, 7)])
def test_histogram_equals_torch_bitwise(tokens: int, experts: int, bins: int) -> None:
    logits, bias = case(tokens, experts)
    routing = router.route(logits, bias, 2)
    mask = torch.rand(tokens, device="cuda") < 0.5
    assert select(routing.scores_NE, bins).implementation == "cuda"
    for valid in (None, mask):
        counts = []
        for implementation in ("cuda", "triton", "torch"):
            balancer = QuantileHistogram(experts, 2, bins=bins)
            with force(implementation):
                for _ in range(2):
                    balancer.observe(routing.scores_NE, routing.cutoff_N, valid, routing.counts(), bias)
            counts.append(balancer.count_EB)
        assert counts[0].is_cuda and torch.equal(counts[0], counts[2]) and torch.equal(counts[1], counts[2])


@pytest.mark.parametrize("name", sorted(BALANCERS))
def test_a_balancer_follows_its_model_to_another_device(name: str) -> None:
    """Between micro-batches, and between the last of them and the update; the bias is that of one device."""
    logits, bias = case(600, 32)
    parts = [router.route(part, bias, 4) for part in logits.split(200)]
    here, moved = BALANCERS[name](32, 4), BALANCERS[name](32, 4)
    for part in parts:
        here.observe(part.scores_NE, part.cutoff_N, None, part.counts(), bias)
    for part, device in zip(parts, ("cpu", "cuda", "cpu"), strict=True):
        seen = [x.to(device) for x in (part.scores_NE, part.cutoff_N, part.counts(), bias)]
        moved.observe(seen[0], seen[1], None, seen[2], seen[3])
    found = moved.update(bias)
    assert found.is_cuda
    torch.testing.assert_close(found, here.update(bias), rtol=1e-6, atol=1e-6)
    if name == "quantile":
        wide = [x.double() for x in (parts[0].scores_NE, parts[0].cutoff_N)]
        assert select(wide[0], 1000).implementation == "torch"
        here.observe(*wide, None, parts[0].counts(), bias)
        assert here.count_EB.is_cuda
