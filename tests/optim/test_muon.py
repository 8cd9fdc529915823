"""Muon against torch's own, and what cutting along the heads is for."""

from __future__ import annotations

import pytest
import torch

from perilune.optim.groups import Cut
from perilune.optim.muon import Muon, blocks


def whole(p: torch.Tensor) -> tuple[Cut, ...]:
    rows = p.numel() // p.shape[-1]
    return (Cut(0, rows, rows, 0, rows),)


@pytest.fixture
def exact_oracle(monkeypatch):
    """torch.optim.Muon iterates in bf16; let it keep the input's dtype so that the two can be compared closely."""
    monkeypatch.setattr(torch.Tensor, "bfloat16", lambda t: t.clone())


@pytest.mark.parametrize("shape", [(8, 8), (6, 20), (20, 6)])
def test_whole_matrix_muon_equals_torch(exact_oracle, shape):
    torch.manual_seed(0)
    start = torch.randn(shape, dtype=torch.float64)
    ours, theirs = start.clone().requires_grad_(), start.clone().requires_grad_()
    muon = Muon({"w": ours}, {"w": whole(ours)}, momentum=0.95, weight_decay=0.1)
    # Their buffer is an average, lerp(G, 1 - momentum); Newton–Schulz does not see its scale.
    oracle = torch.optim.Muon([theirs], lr=0.02, weight_decay=0.1, momentum=0.95, nesterov=True, eps=1e-30,
                              adjust_lr_fn="match_rms_adamw")  # fmt: skip
    for _ in range(4):
        ours.grad = torch.randn(shape, dtype=torch.float64)
        theirs.grad = ours.grad.clone()
        muon.step(0.02)
        oracle.step()
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-7)


def test_blocks_of_several_parameters_equal_one_muon_each(exact_oracle):
    torch.manual_seed(1)
    params = {
        "heads": torch.randn(24, 10, dtype=torch.float64),  # 2 heads: k 8 rows, v 4 rows, interleaved
        "experts": torch.randn(3, 4, 10, dtype=torch.float64),
        "tall": torch.randn(10, 4, dtype=torch.float64),
    }
    cuts = {
        "heads": (Cut(0, 24, 12, 0, 8), Cut(0, 24, 12, 8, 4)),
        "experts": (Cut(0, 12, 4, 0, 4),),
        "tall": (Cut(0, 10, 10, 0, 10),),
    }
    for p in params.values():
        p.grad = torch.randn_like(p)
    pieces = []
    for name, p in params.items():
        for cut in cuts[name]:
            for block, grad in zip(blocks(p, cut), blocks(p.grad, cut), strict=True):
                alone = block.clone().requires_grad_()
                alone.grad = grad.clone()
                torch.optim.Muon([alone], lr=0.02, adjust_lr_fn="match_rms_adamw", eps=1e-30).step()
                pieces.append(alone.detach())
    Muon(params, cuts).step(0.02)
    results = [block for name, p in params.items() for cut in cuts[name] for block in blocks(p, cut)]
    for result, piece in zip(results, pieces, strict=True):
        torch.testing.assert_close(result, piece, rtol=1e-6, atol=1e-7)


def update_rms(cuts: tuple[Cut, ...], grad: torch.Tensor) -> torch.Tensor:
    """RMS of the update of each of 8 heads of 16 rows."""
    weight = torch.zeros(128, 64)
    weight.grad = grad
    Muon({"w": weight}, {"w": cuts}, weight_decay=0.0).step(1.0)
    return weight.view(8, -1).square().mean(1).sqrt()


def test_a_loud_head_does_not_change_the_update_of_the_others():
    torch.manual_seed(2)
    grad = torch.randn(128, 64)
    loud = grad.clone()
    loud[:16] *= 50
    heads, one = (Cut(0, 128, 16, 0, 16),), (Cut(0, 128, 128, 0, 128),)
    torch.testing.assert_close(update_rms(heads, loud), update_rms(heads, grad), rtol=1e-3, atol=0)
    assert (update_rms(heads, loud) / update_rms(heads, loud).mean() - 1).abs().max() < 0.05
    whole_matrix = update_rms(one, loud)
    assert whole_matrix[0] / whole_matrix[1:].mean() > 1.25, "a whole-matrix update favours the loud head"


def test_update_rms_is_near_adamws():
    torch.manual_seed(3)
    for rows in (16, 64, 128):
        rms = update_rms((Cut(0, 128, rows, 0, rows),), torch.randn(128, 64))
        assert ((rms > 0.1) & (rms < 0.25)).all(), rms


def test_t44_zero_and_missing_gradients_stay_finite():
    weights = {name: torch.ones(4, 6) for name in ("zero", "missing")}
    weights["zero"].grad = torch.zeros(4, 6)
    Muon(weights, {name: whole(w) for name, w in weights.items()}, weight_decay=0.1).step(0.5)
    for weight in weights.values():
        torch.testing.assert_close(weight, torch.full((4, 6), 0.95))
