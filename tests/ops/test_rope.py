"""Rotary positions against complex multiplication in float64."""

from __future__ import annotations

import pytest
import torch

from perilune.errors import ConfigError
from perilune.ops.rope import rope


def test_equals_complex_rotation() -> None:
    x, position = torch.randn(2, 5, 3, 8, dtype=torch.float64), torch.randint(0, 100_000, (2, 5))
    pairs = torch.complex(x[..., :4], x[..., 4:])
    angle = position[..., None, None] * 10000.0 ** (-torch.arange(4, dtype=torch.float64) / 4)
    turned = pairs * torch.polar(torch.ones_like(angle), angle)
    torch.testing.assert_close(
        rope(x, position, 10000.0), torch.cat([turned.real, turned.imag], -1), rtol=1e-11, atol=1e-11
    )


def test_scores_depend_on_distance_alone() -> None:
    """Also far out, where angles computed in float32 would be off by hundredths of a radian."""
    q, k = torch.randn(1, 1, 2, 64), torch.randn(1, 1, 2, 64)

    def score(at: int) -> torch.Tensor:
        return (rope(q, torch.tensor([[at + 7]]), 10000.0) * rope(k, torch.tensor([[at]]), 10000.0)).sum(-1)

    torch.testing.assert_close(score(1_000_000), score(0), rtol=1e-4, atol=1e-4)


def test_position_zero_and_length_are_kept() -> None:
    x = torch.randn(2, 3, 1, 6)
    assert torch.equal(rope(x, torch.zeros(2, 3, dtype=torch.int64), 500.0), x)
    turned = rope(x, torch.arange(3), 500.0)  # [T]: the same positions in every row
    torch.testing.assert_close(turned.norm(dim=-1), x.norm(dim=-1))
    assert torch.equal(turned, rope(x, torch.arange(3).expand(2, 3), 500.0))
    assert rope(x.bfloat16(), torch.arange(3), 500.0).dtype == torch.bfloat16


def test_gradients_by_finite_differences() -> None:
    x = torch.randn(1, 3, 2, 4, dtype=torch.float64, requires_grad=True)
    torch.autograd.gradcheck(lambda x: rope(x, torch.arange(3), 100.0), [x])


def test_settings_are_checked() -> None:
    with pytest.raises(ConfigError, match="7 channels"):
        rope(torch.randn(1, 2, 1, 7), torch.arange(2), 100.0)
    with pytest.raises(ConfigError, match="theta=0"):
        rope(torch.randn(1, 2, 1, 8), torch.arange(2), 0.0)
