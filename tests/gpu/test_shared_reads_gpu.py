"""A model on a GPU whose reads share passes over the bank: its gradients are as exact as those of single reads."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed; pip install perilune[kernels]")

from perilune.bench.kimi_linear import random_ids
from perilune.config.presets import nano
from perilune.model import Transformer, init_weights, residual
from perilune.ops.attnres import two_phase

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.mark.parametrize("compute_dtype", [torch.bfloat16, torch.float32])
def test_as_exact_as_single_reads(monkeypatch: pytest.MonkeyPatch, compute_dtype: torch.dtype) -> None:
    cfg = replace(nano(), num_layers=10, attn_res_block_layers=4, dense_layers=10, moe=None)
    ids = random_ids(cfg, 2, 301)
    model = init_weights(Transformer(cfg)).train()
    with torch.no_grad():
        for name, p in model.named_parameters():
            if name.endswith("query"):
                p.normal_(0, 0.3, generator=torch.Generator().manual_seed(len(name)))

    def gradients(dtype: torch.dtype) -> torch.Tensor:
        model.compute_dtype = dtype
        model.zero_grad()
        loss = model.loss(ids[:, :-1], ids[:, 1:])
        (loss.nats / loss.tokens).backward()
        return torch.cat([p.grad.double().cpu().flatten() for p in model.parameters() if p.grad is not None])

    model.double()
    truth = gradients(torch.float64)
    model.float().cuda()
    ids = ids.cuda()
    phases: list[tuple[int, int]] = []
    inner = residual.phase_one

    def counted(bank, score_weights_SD, eps):
        phases.append((len(bank), len(score_weights_SD)))
        return inner(bank, score_weights_SD, eps)

    monkeypatch.setattr(residual, "phase_one", counted)
    single = gradients(compute_dtype)
    assert not phases, "too little to be worth the launches"
    monkeypatch.setattr(residual, "sites_at_once", lambda bank, queries: min(5, len(queries)))
    shared = gradients(compute_dtype)
    assert sum(sites for _, sites in phases) == 2 * cfg.num_layers
    assert two_phase.select([torch.zeros(1, 8, device="cuda")]).implementation == "triton"
    errors = [float((x - truth).norm() / truth.norm()) for x in (shared, single)]
    print(errors)
    assert errors[0] < 1.3 * errors[1] + 1e-5
