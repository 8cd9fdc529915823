"""The two-phase kernels against whole reads in float64."""

from __future__ import annotations

import pytest
import torch

from perilune.ops.attnres import merge, phase_one
from perilune.ops.attnres.reference import mix_reference
from perilune.ops.attnres.two_phase import select
from perilune.ops.choice import force

pytestmark = pytest.mark.usefixtures("poisoned_memory")

EPS = 1e-5


@pytest.mark.parametrize(
    ("count", "shape", "sites"), [(1, (2, 3, 40), 1), (3, (70, 96), 5), (8, (2, 1100), 24), (2, (1, 17), 3)]
)
def test_every_site_equals_a_whole_read(count: int, shape: tuple[int, ...], sites: int) -> None:
    torch.manual_seed(0)
    bank = [(i + 1) * torch.randn(shape) for i in range(count)]
    score_weights, live = 0.3 * torch.randn(sites, shape[-1]), torch.randn(shape)
    with force("triton"):
        assert select(bank, score_weights, live).implementation == "triton"
        partial = phase_one(bank, score_weights, EPS)
        got = [merge(partial, site, live) for site in range(sites)]
    assert partial.acc.shape == (sites, *shape) and partial.max.shape == (sites, *shape[:-1])
    for site, value in enumerate(got):
        truth = mix_reference([x.double() for x in (*bank, live)], score_weights[site].double(), EPS)
        torch.testing.assert_close(value.double(), truth, rtol=3e-4, atol=3e-5)


def test_half_precision_partials_cost_one_more_rounding() -> None:
    torch.manual_seed(0)
    bank = [torch.randn(9, 64).half() for _ in range(3)]
    score_weights, live = 0.3 * torch.randn(4, 64), torch.randn(9, 64).half()
    with force("triton"):
        partial = phase_one(bank, score_weights, EPS)
        got = merge(partial, 2, live)
    assert partial.acc.dtype == torch.float16 and partial.max.dtype == torch.float32
    truth = mix_reference([x.double() for x in (*bank, live)], score_weights[2].double(), EPS)
    assert float((got.double() - truth).norm() / truth.norm()) < 2**-10


def test_strided_blocks_and_large_scores() -> None:
    torch.manual_seed(0)
    bank = [torch.randn(5, 100)[:, 3:40] for _ in range(2)]
    live = 30 * torch.ones(5, 37)
    score_weights = torch.full((1, 37), 100.0)
    with force("triton"):
        got = merge(phase_one(bank, score_weights, EPS), 0, live)
    torch.testing.assert_close(got, live)


def test_gradients_take_the_torch_form_and_say_so() -> None:
    bank, weights = [torch.randn(2, 8, requires_grad=True)], torch.randn(1, 8)
    with force("triton"):
        assert "no gradients" in select(bank, weights).reason
        merge(phase_one(bank, weights, EPS), 0, torch.randn(2, 8)).sum().backward()
        with torch.no_grad():
            assert select(bank, weights).implementation == "triton"
    assert bank[0].grad is not None
