"""The two-phase kernels against whole reads in float64: values and gradients."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from perilune.ops.attnres import merge, phase_one, read_rest, sites_at_once, triton_two_phase, two_phase
from perilune.ops.attnres.reference import mix_reference
from perilune.ops.attnres.two_phase import MOST_SITES, select
from perilune.ops.choice import force
from perilune.ops.norm import rms_norm_reference

pytestmark = pytest.mark.usefixtures("poisoned_memory")

EPS = 1e-5


@pytest.mark.parametrize(
    ("count", "shape", "sites"), [(1, (2, 2, 40), 1), (3, (18, 24), 1), (8, (1, 1100), 2), (2, (1, 17), MOST_SITES + 2)]
)
def test_every_site_equals_a_whole_read(
    monkeypatch: pytest.MonkeyPatch, count: int, shape: tuple[int, ...], sites: int
) -> None:
    monkeypatch.setattr(triton_two_phase, "TOKENS", 16)
    torch.manual_seed(0)
    bank = [(i + 1) * torch.randn(shape) for i in range(count)]
    score_weights, live = 0.3 * torch.randn(sites, shape[-1]), torch.randn(shape)
    with force("triton"):
        assert select(bank).implementation == "triton"
        partial = phase_one(bank, score_weights, EPS)
        got = [merge(partial, site, live) for site in range(sites)]
    assert len(partial.mixes) == sites and partial.log_denominators[0].shape == shape[:-1]
    for site, value in enumerate(got):
        truth = mix_reference([x.double() for x in (*bank, live)], score_weights[site].double(), EPS)
        torch.testing.assert_close(value.double(), truth, rtol=3e-4, atol=3e-5)


def reads(bank: list[Tensor], score_weights: Tensor, live: Tensor, norm_weight: Tensor, deltas: list[Tensor]) -> Tensor:
    """A block's reads by formula, each of which changes the running sum."""
    outs = []
    for site, weight in enumerate(score_weights):
        live = live + deltas[site]
        outs.append(rms_norm_reference(mix_reference([*bank, live], weight, EPS), norm_weight, 1e-6))
    return torch.stack([*outs, live])


def phased(
    bank: list[Tensor], score_weights: Tensor, live: Tensor, norm_weight: Tensor, deltas: list[Tensor]
) -> Tensor:
    outs = []
    with force("triton"):
        partial = phase_one(bank, score_weights, EPS)
        for site in range(len(score_weights)):
            out, live = read_rest(partial, site, live, deltas[site], norm_weight, 1e-6)
            outs.append(out)
    return torch.stack([*outs, live])


@pytest.mark.parametrize(("count", "shape", "sites"), [(1, (3, 40), 2), (4, (3, 3, 150), 2), (8, (3, 136), 3), (17, (2, 24), 2)])  # fmt: skip
def test_gradients_of_a_block_of_reads(count: int, shape: tuple[int, ...], sites: int) -> None:
    torch.manual_seed(1)
    width = shape[-1]
    leaves = [(1 + i / 4) * torch.randn(shape) for i in range(count)]
    leaves += [torch.randn(sites, width) * width**-0.5, torch.randn(shape), torch.randn(width)]
    leaves += [torch.randn(shape) for _ in range(sites)]
    cotangent = torch.randn(sites + 1, *shape)
    results = []
    for function, dtype in ((phased, torch.float32), (reads, torch.float64)):
        inputs = [x.to(dtype).requires_grad_() for x in leaves]
        out = function(inputs[:count], *inputs[count : count + 3], inputs[count + 3 :])
        results.append([out.detach(), *torch.autograd.grad(out, inputs, cotangent.to(dtype))])
    for got, truth in zip(*results, strict=True):
        assert got.isfinite().all()
        assert float((got.double() - truth).norm() / truth.norm()) < 3e-5


def test_sites_that_nobody_uses_and_gradients_from_elsewhere() -> None:
    torch.manual_seed(2)
    bank = [torch.randn(4, 32, requires_grad=True) for _ in range(3)]
    score_weights = torch.randn(4, 32, requires_grad=True)
    live = torch.randn(4, 32)
    with force("triton"):
        partial = phase_one(bank, score_weights, EPS)
        out = merge(partial, 2, live) + partial.mixes[2] + partial.mixes[0]
    got = torch.autograd.grad(out.sum(), [*bank, score_weights])
    with force("torch"):
        partial = phase_one(bank, score_weights, EPS)
        out = merge(partial, 2, live) + partial.mixes[2] + partial.mixes[0]
    for value, right in zip(got, torch.autograd.grad(out.sum(), [*bank, score_weights]), strict=True):
        torch.testing.assert_close(value, right, rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_partials_cost_one_more_rounding(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    bank = [torch.randn(9, 64).to(dtype) for _ in range(3)]
    score_weights, live = 0.3 * torch.randn(4, 64), torch.randn(9, 64).to(dtype)
    with force("triton"):
        partial = phase_one(bank, score_weights, EPS)
        got = merge(partial, 2, live)
    assert partial.mixes[2].dtype == dtype and partial.log_denominators[2].dtype == torch.float32
    truth = mix_reference([x.double() for x in (*bank, live)], score_weights[2].double(), EPS)
    assert float((got.double() - truth).norm() / truth.norm()) < (2**-10 if dtype == torch.float16 else 2**-7)
    logs = torch.stack(
        [(b.double() @ score_weights[2].double()) * (b.double().square().mean(-1) + EPS).rsqrt() for b in bank]
    )
    torch.testing.assert_close(partial.log_denominators[2].double(), logs.logsumexp(0), rtol=1e-5, atol=2e-5)


def test_strided_blocks_and_large_scores() -> None:
    torch.manual_seed(0)
    bank = [torch.randn(5, 100)[:, 3:40] for _ in range(2)]
    live = 30 * torch.ones(5, 37)
    score_weights = torch.full((1, 37), 100.0)
    with force("triton"):
        got = merge(phase_one(bank, score_weights, EPS), 0, live)
    torch.testing.assert_close(got, live)


def test_reads_share_a_pass_where_it_pays(monkeypatch: pytest.MonkeyPatch) -> None:
    queries = [torch.randn(64)] * 24
    bank = [torch.randn(16, 64)] * 8
    with force("triton"):
        assert sites_at_once(bank, queries) == 0, "too little to be worth the launches"
        monkeypatch.setattr(two_phase, "LEAST_BYTES", 0)
        assert sites_at_once(bank, queries) == 24
        assert sites_at_once(bank[:1], queries) == 0 and sites_at_once(bank, queries[:1]) == 0
        monkeypatch.setattr(two_phase, "_memory", lambda device: 64 * 9 * 4096)
        assert sites_at_once(bank, queries) == 9
    assert sites_at_once(bank, queries) == 0, "on the CPU each read is one pass over all sources"
