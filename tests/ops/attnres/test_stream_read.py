"""A fused read equals the add, the mix and the norm one after another."""

from __future__ import annotations

import pytest
import torch

from perilune.errors import ConfigError
from perilune.ops.attnres import mix, read
from perilune.ops.norm import rms_norm

EPS = 1e-5


@pytest.mark.parametrize("count", [0, 1, 4])
@pytest.mark.parametrize("pending", [False, True])
def test_equals_its_parts(count: int, pending: bool) -> None:
    bank = [torch.randn(2, 3, 16, requires_grad=True) for _ in range(count)]
    live, delta = (torch.randn(2, 3, 16, requires_grad=True) for _ in range(2))
    score_weight, norm_weight = (torch.randn(16, requires_grad=True) for _ in range(2))
    out, total = read(bank, live, delta if pending else None, score_weight, EPS, norm_weight, 1e-6)
    right = live + delta if pending else live
    mixed = mix([*bank, right], score_weight, EPS)
    assert torch.equal(total, right) and torch.equal(out, rms_norm(mixed, norm_weight, 1e-6))
    plain, _ = read(bank, live, delta if pending else None, score_weight, EPS)
    assert torch.equal(plain, mixed)
    inputs = [*bank, live, norm_weight, *([score_weight] if count else []), *([delta] if pending else [])]
    for a, b in zip(
        torch.autograd.grad(out.square().sum() + total.sum(), inputs),
        torch.autograd.grad(rms_norm(mixed, norm_weight, 1e-6).square().sum() + right.sum(), inputs),
        strict=True,
    ):
        torch.testing.assert_close(a, b)


def test_a_sum_and_an_output_of_two_shapes_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"\[2, 8\].*\[1, 8\]"):
        read([], torch.randn(2, 8), torch.randn(1, 8), torch.randn(8), EPS)
