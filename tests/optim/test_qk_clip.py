"""QK-clip: on the batch that exceeded the bound, no logit exceeds it afterwards, and other heads are untouched."""

from __future__ import annotations

import torch

from perilune.config import MLAConfig
from perilune.optim.qk_clip import clip_

MLA = MLAConfig(num_heads=3, kv_lora_rank=8, qk_nope_head_dim=4, qk_rope_head_dim=2, v_head_dim=5)


def parts(seed: int = 0) -> tuple[torch.Tensor, ...]:
    torch.manual_seed(seed)
    q_weight = torch.randn(3 * 6, 16, dtype=torch.float64)
    kv_b = torch.randn(3 * 9, 8, dtype=torch.float64)
    x, latent = torch.randn(20, 16, dtype=torch.float64), torch.randn(20, 8, dtype=torch.float64)
    shared = torch.randn(20, 2, dtype=torch.float64)
    return q_weight, kv_b, x, latent, shared


def logits(q_weight, kv_b, x, latent, shared) -> torch.Tensor:
    """Plain definition, [H, T, T], no mask."""
    q = (x @ q_weight.T).view(-1, 3, 6)
    k = (latent @ kv_b.T).view(-1, 3, 9)[..., :4]
    content = torch.einsum("thn,shn->hts", q[..., :4], k)
    position = torch.einsum("thr,sr->hts", q[..., 4:], shared)
    return (content + position) * 6**-0.5


def test_every_logit_shrinks_by_gamma_and_ends_at_or_below_tau():
    q_weight, kv_b, *batch = parts()
    before = logits(q_weight, kv_b, *batch)
    top = before.amax((1, 2))
    tau = float(top.sort().values[1]) * 0.99  # two of three heads exceed it
    gamma = (tau / top).clamp(max=1.0)
    assert clip_(q_weight, kv_b, top, tau, MLA) == 2
    after = logits(q_weight, kv_b, *batch)
    torch.testing.assert_close(after, before * gamma[:, None, None])
    assert after.amax() <= tau * (1 + 1e-12)


def test_values_and_heads_below_the_bound_are_untouched():
    q_weight, kv_b, *batch = parts()
    q_old, kv_old = q_weight.clone(), kv_b.clone()
    clip_(q_weight, kv_b, torch.tensor([200.0, 50.0, -3.0]), 100.0, MLA)
    assert torch.equal(kv_b.view(3, 9, 8)[:, 4:], kv_old.view(3, 9, 8)[:, 4:]), "value rows"
    assert torch.equal(q_weight[6:], q_old[6:]) and torch.equal(kv_b[9:], kv_old[9:]), "other heads"
    torch.testing.assert_close(q_weight[:4], q_old[:4] * 0.5**0.5, rtol=1e-7, atol=0)
    torch.testing.assert_close(q_weight[4:6], q_old[4:6] * 0.5, rtol=1e-7, atol=0)


def test_nothing_to_do_below_the_bound():
    q_weight, kv_b, *_ = parts()
    old = q_weight.clone()
    assert clip_(q_weight, kv_b, torch.tensor([1.0, 2.0, 100.0]), 100.0, MLA) == 0
    assert torch.equal(q_weight, old)
