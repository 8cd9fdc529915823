"""Reads over depth: the Triton kernels against the stacked formula in float64, with and without what is fused to them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from perilune.errors import ConfigError
from perilune.ops.attnres import mix, read, select
from perilune.ops.attnres.reference import mix_reference
from perilune.ops.choice import force
from perilune.ops.norm import rms_norm_reference

pytestmark = pytest.mark.usefixtures("poisoned_memory")

EPS = 1e-5


def by_formula(bank, live, delta, score_weight, norm_weight):
    live = live if delta is None else live + delta
    mixed = mix_reference([*bank, live], score_weight, EPS)
    return (mixed if norm_weight is None else rms_norm_reference(mixed, norm_weight, 1e-6)), live


def fused(bank, live, delta, score_weight, norm_weight):
    with force("triton"):
        return read(bank, live, delta, score_weight, EPS, norm_weight, 1e-6)


def values_and_gradients(function, bank, live, delta, score_weight, norm_weight) -> list[Tensor]:
    """Outputs, then gradients of all inputs for cotangents of both outputs."""
    leaves = [
        None if x is None else x.detach().clone().requires_grad_() for x in (live, delta, score_weight, norm_weight)
    ]
    bank = [x.detach().clone().requires_grad_() for x in bank]
    outputs = function(bank, *leaves)
    generator = torch.Generator().manual_seed(3)
    cotangents = [torch.randn(outputs[0].shape, generator=generator).to(outputs[0].dtype) for _ in outputs]
    inputs = [x for x in (*bank, *leaves) if x is not None]
    gradients = torch.autograd.grad(outputs, inputs, cotangents)
    return [x.detach() for x in outputs] + list(gradients)


def case(count: int, shape: tuple[int, ...], delta: bool, norm: bool) -> list:
    torch.manual_seed(0)
    width = shape[-1]
    return [
        [(i + 1) * torch.randn(shape) for i in range(count)],
        torch.randn(shape),
        torch.randn(shape) if delta else None,
        0.3 * torch.randn(width),
        torch.randn(width) if norm else None,
    ]


@pytest.mark.parametrize("count", [1, 3, 16])
@pytest.mark.parametrize("delta", [False, True])
@pytest.mark.parametrize("norm", [False, True])
def test_values_and_gradients(count: int, delta: bool, norm: bool) -> None:
    inputs = case(count, (3, 40) if count == 16 else (2, 3, 36), delta, norm)
    exact = [[x.double() for x in inputs[0]], *(None if x is None else x.double() for x in inputs[1:])]
    got = values_and_gradients(fused, *inputs)
    truth = values_and_gradients(by_formula, *exact)
    assert len(got) == len(truth)
    for value, right in zip(got, truth, strict=True):
        torch.testing.assert_close(value.double(), right, rtol=2e-4, atol=2e-5)


def test_only_the_running_sum_and_a_norm() -> None:
    """Layer 0: no bank. The weight is exactly 1, and the score weight's gradient exactly 0."""
    inputs = case(0, (4, 32), delta=True, norm=True)
    exact = [[], *(None if x is None else x.double() for x in inputs[1:])]
    got, truth = values_and_gradients(fused, *inputs), values_and_gradients(by_formula, *exact)
    for value, right in zip(got, truth, strict=True):
        torch.testing.assert_close(value.double(), right, rtol=1e-5, atol=1e-6)
    assert (got[-2] == 0).all()
    bank, live, delta, score_weight, _ = inputs
    out, total = fused(bank, live, delta, score_weight, None)
    assert torch.equal(out, total) and torch.equal(total, live + delta)


def test_the_running_sum_is_rounded_before_it_is_scored() -> None:
    """Half precision: what is stored is what is mixed (architecture §5.3)."""
    bank, live, delta, score_weight, _ = case(2, (5, 64), delta=True, norm=False)
    bank, live, delta = [x.half() for x in bank], live.half(), delta.half()
    out, total = fused(bank, live, delta, score_weight, None)
    assert torch.equal(total, live + delta)
    with force("triton"):
        assert torch.equal(out, mix([*bank, total], score_weight, EPS))


def test_rows_a_stride_apart_and_odd_addresses() -> None:
    """Views of wider tensors; a start that is no multiple of 16 bytes; a width that is no multiple of 4 numbers."""
    torch.manual_seed(0)
    wide = [torch.randn(6, 100) for _ in range(3)]
    views, score_weight = [x[:, 3:40] for x in wide], torch.randn(37)
    cotangent = torch.randn(37).expand(6, 37)
    results = []
    for sources in (views, [v.contiguous() for v in views]):
        sources = [v.detach().requires_grad_() for v in sources]
        with force("triton"):
            out = mix(sources, score_weight, EPS)
        results.append([out.detach(), *torch.autograd.grad(out, sources, cotangent)])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_t08_nothing_shares_memory_with_the_bank() -> None:
    """A finished block stays as it is through later reads, and no read returns its memory."""
    bank, live, delta, score_weight, norm_weight = case(3, (4, 32), delta=True, norm=True)
    before = [x.clone() for x in bank]
    out, total = fused(bank, live, delta, score_weight, norm_weight)
    bank.append(total)
    before.append(total.clone())
    later, _ = fused(bank, delta, torch.ones_like(delta), score_weight, norm_weight)
    assert all(torch.equal(a, b) for a, b in zip(bank, before, strict=True))
    places = {x.data_ptr() for x in (*bank, live, delta)}
    assert out.data_ptr() not in places and later.data_ptr() not in places


def test_large_scores_and_nan() -> None:
    sources = [torch.ones(2, 16), -torch.ones(2, 16), 3 * torch.ones(2, 16)]
    with force("triton"):
        torch.testing.assert_close(mix(sources, torch.full((16,), 100.0), 0.0), torch.full((2, 16), 2.0))
        sources[1][1, 3] = float("nan")
        out = mix(sources, torch.full((16,), 0.1), EPS)
    assert out[0].isfinite().all() and out[1].isnan().all()


def test_frozen_inputs_get_no_gradient() -> None:
    bank, live, _, score_weight, _ = case(2, (3, 16), delta=False, norm=False)
    live.requires_grad_()
    out, total = fused(bank, live, None, score_weight, None)
    assert total is live
    out.sum().backward()
    assert live.grad is not None and all(x.grad is None for x in bank) and score_weight.grad is None


def test_limits_and_misuse() -> None:
    with force("triton"):
        assert select([torch.randn(2, 8)] * 3).implementation == "triton"
        assert "17 sources, not 18" in select([torch.randn(2, 8)] * 18).reason
        assert "16384 numbers, not 16400" in select([torch.randn(1, 16400)] * 2).reason
        with pytest.raises(ConfigError, match=r"\[2, 8\].*\[2, 4\]"):
            read([], torch.randn(2, 8), torch.randn(2, 4), torch.randn(8), EPS)
        with pytest.raises(ConfigError, match="score weight"):
            read([torch.randn(2, 8)], torch.randn(2, 8), None, torch.randn(4), EPS)
