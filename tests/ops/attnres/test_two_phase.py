"""Two-phase mixing is `mix` over bank and live source, algebraically: equal in float64, close in float32."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from perilune.errors import ConfigError
from perilune.ops.attnres import merge, mix, phase_one

EPS = 1e-5


def one_by_one(score_weights: Tensor, lives: Tensor, *bank: Tensor) -> Tensor:
    return torch.stack([mix([*bank, live], weight, EPS) for weight, live in zip(score_weights, lives, strict=True)])


def in_two_phases(score_weights: Tensor, lives: Tensor, *bank: Tensor) -> Tensor:
    partial = phase_one(bank, score_weights, EPS)
    return torch.stack([merge(partial, site, live) for site, live in enumerate(lives)])


@given(sites=st.integers(1, 5), blocks=st.integers(0, 8), tokens=st.integers(1, 6), width=st.integers(1, 20))
def test_equals_the_single_pass(sites: int, blocks: int, tokens: int, width: int) -> None:
    score_weights, lives = (
        3 * torch.randn(sites, *shape, dtype=torch.float64) for shape in ((width,), (tokens, width))
    )
    bank = [torch.randn(tokens, width, dtype=torch.float64) for _ in range(blocks)]
    inputs = [score_weights.requires_grad_(), lives.requires_grad_(), *[v.requires_grad_() for v in bank]]
    whole, phased = one_by_one(*inputs), in_two_phases(*inputs)
    torch.testing.assert_close(phased, whole, rtol=1e-12, atol=1e-12)
    cotangent = torch.randn_like(whole)
    gradients = [torch.autograd.grad(out, inputs, cotangent, allow_unused=True) for out in (phased, whole)]
    for got, want in zip(*gradients, strict=True):
        assert (got is None) == (want is None)
        if want is not None:
            torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_low_precision_sources_keep_float32_statistics(dtype: torch.dtype) -> None:
    bank = [torch.randn(2, 7, 64).to(dtype) for _ in range(8)]
    live, score_weights = torch.randn(2, 7, 64).to(dtype), torch.randn(3, 64)
    partial = phase_one(bank, score_weights, EPS)
    assert partial.mixes[0].dtype == partial.log_denominators[0].dtype == torch.float32
    exact = mix([v.double() for v in (*bank, live)], score_weights[1].double(), EPS)
    single = mix([*bank, live], score_weights[1], EPS)
    phased = merge(partial, 1, live)
    assert phased.dtype == dtype
    assert (phased - exact).square().mean() <= 4 * (single - exact).square().mean()


def test_scores_far_apart_do_not_overflow() -> None:
    """One side's largest score exceeds the other's by hundreds, either way."""
    up, down = torch.ones(1, 16), -torch.ones(1, 16)
    for bank, live in (([down, down], up), ([up, down], down), ([up], up)):
        partial = phase_one(bank, torch.full((1, 16), 50.0), EPS)
        torch.testing.assert_close(merge(partial, 0, live), up)


def test_an_empty_bank_returns_the_live_source() -> None:
    live = torch.randn(3, 8)
    assert merge(phase_one([], torch.randn(2, 8), EPS), 1, live) is live


def test_arguments_are_checked() -> None:
    with pytest.raises(ConfigError, match="sites 0..1"):
        merge(phase_one([torch.randn(3, 8)], torch.randn(2, 8), EPS), 2, torch.randn(3, 8))
    with pytest.raises(ConfigError, match=r"\[\[3, 8\]\]"):
        phase_one([torch.randn(3, 8)], torch.randn(2, 7), EPS)
