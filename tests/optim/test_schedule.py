"""Warm-up and cosine: a pure function of the step."""

from __future__ import annotations

import pytest

from perilune.optim.schedule import multiplier


def test_rises_over_one_percent_then_falls_along_one_cosine():
    values = [multiplier(step, 1000) for step in range(1000)]
    assert values[:10] == pytest.approx([(i + 1) / 10 for i in range(10)])
    assert values[10] == 1.0
    assert multiplier(10 + 495, 1000) == pytest.approx(0.5)
    assert all(a >= b for a, b in zip(values[10:], values[11:], strict=False))
    assert 0 < values[-1] < 1e-4


def test_a_short_run_still_warms_up_for_one_step():
    assert multiplier(0, 10) == 1.0
    assert multiplier(0, 10, warmup=0.3) == pytest.approx(1 / 3)
    assert multiplier(0, 1) == 1.0
    assert multiplier(0, 10, warmup=0.0) == 1.0


def test_ends_at_the_final_fraction():
    assert multiplier(100, 100, final=0.1) == pytest.approx(0.1)
    assert multiplier(10_000, 100, final=0.1) == pytest.approx(0.1)
