"""Cut-offs of nuclei: the Triton kernel against a sort."""

from __future__ import annotations

import pytest
import torch

from perilune.ops.choice import force
from perilune.ops.top_p import by_lists, select, top_p_cutoff


@pytest.mark.parametrize(("size", "share"), [(37, 0.3), (300, 0.9999)])
def test_cutoffs(size: int, share: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("perilune.ops.triton.top_p.LARGEST", 128)
    torch.manual_seed(size)
    logits_NZ = torch.randn(2, size + 3)[:, :size] * torch.tensor([[9.0], [1.0]])
    logits_NZ[0, : size // 3] = -torch.inf
    logits_NZ[1] = (logits_NZ[1] * 8).round() / 8  # many ties, on both sides of zero
    weights_NZ = torch.exp((logits_NZ - logits_NZ.amax(-1, keepdim=True)) * torch.tensor([[0.5], [1.3]]))
    goal_N1 = share * weights_NZ.sum(-1, True, dtype=torch.float64)
    with force("triton"):
        assert select(logits_NZ).implementation == "triton"
        ours = top_p_cutoff(logits_NZ, weights_NZ, goal_N1)
    assert torch.equal(ours, by_lists(logits_NZ, weights_NZ, goal_N1, ()))
