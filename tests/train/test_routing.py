"""The two routing numbers of a summary, against their definition."""

from __future__ import annotations

import pytest
import torch

from perilune.train import routing
from perilune.train.routing import RoutingHistory, max_over_mean


def loads(steps: int, layers: int = 3, experts: int = 5) -> torch.Tensor:
    return torch.randint(1, 50, (steps, layers, experts))


def by_definition(counts: torch.Tensor) -> tuple[float, float]:
    last = counts[int(len(counts) * 0.8) :].double()
    ratio = (last.amax(-1) / last.mean(-1)).mean()
    pooled = last.sum(0)
    return float(ratio), float((pooled.amax(-1) / pooled.mean(-1)).max())


@pytest.mark.parametrize("steps", [1, 4, 5, 37, 100])
def test_summary_is_the_definition(steps):
    counts, history = loads(steps), RoutingHistory(3, 5)
    for step in counts:
        assert history.add(step) == pytest.approx((step.double().amax(-1) / step.double().mean(-1)).tolist())
    ratio, pooled = by_definition(counts)
    assert history.summary()["max_over_mean"] == pytest.approx(ratio)
    assert history.summary()["pooled_worst_layer"] == pytest.approx(pooled)


def test_a_long_run_pools_neighbouring_steps(monkeypatch):
    monkeypatch.setattr(routing, "BUCKETS", 16)
    counts, history = loads(160), RoutingHistory(3, 5)
    for step in counts:
        history.add(step)
    ratio, pooled = by_definition(counts)  # 160 steps in buckets of 16: the last fifth is two whole buckets
    assert history.summary()["max_over_mean"] == pytest.approx(ratio)
    assert history.summary()["pooled_worst_layer"] == pytest.approx(pooled)


def test_state_carries_over():
    counts, whole, first = loads(30), RoutingHistory(3, 5), RoutingHistory(3, 5)
    for step in counts:
        whole.add(step)
    for step in counts[:13]:
        first.add(step)
    second = RoutingHistory(3, 5)
    second.load_state_tensors(first.state_tensors())
    for step in counts[13:]:
        second.add(step)
    assert second.summary() == whole.summary()


def test_a_dense_model_has_no_routing():
    history = RoutingHistory(0, 0)
    assert history.add(torch.zeros(0, 0)) == []
    assert history.summary() == {"max_over_mean": None, "pooled_worst_layer": None}


def test_one_expert_for_all_and_nothing_at_all():
    assert max_over_mean(torch.tensor([[8, 0, 0, 0], [0, 0, 0, 0]])).tolist() == [4.0, 1.0]
