"""Reads that share one pass over the bank give the model's results and gradients, however many share it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from models import random_ids, random_model

from perilune.config.presets import tiny
from perilune.model import residual


@pytest.mark.parametrize(("kind", "at_once"), [("block", 64), ("block", 3), ("full", 2)])
def test_sharing_changes_nothing(monkeypatch: pytest.MonkeyPatch, kind: str, at_once: int) -> None:
    cfg = replace(tiny(), residual=kind)
    model = random_model(cfg).train()
    ids = random_ids(cfg, 2, 12)
    phases: list[tuple[int, int]] = []

    def counted(bank, score_weights_SD, eps):
        phases.append((len(bank), len(score_weights_SD)))
        return phase_one(bank, score_weights_SD, eps)

    def run() -> list[torch.Tensor]:
        loss = model.loss(ids[:, :-1], ids[:, 1:])
        named = [p for n, p in model.named_parameters() if not n.startswith("layers.0.mixer_read")]
        return [loss.nats.detach(), *torch.autograd.grad(loss.nats, named)]

    phase_one = residual.phase_one
    apart = run()
    monkeypatch.setattr(residual, "phase_one", counted)
    monkeypatch.setattr(residual, "sites_at_once", lambda bank, queries: min(at_once, len(queries)))
    together = run()
    reads = 2 * cfg.num_layers  # all but the first, which has no bank
    assert sum(sites for _, sites in phases) == reads and max(sites for _, sites in phases) <= at_once
    assert len({blocks for blocks, _ in phases}) == -(
        -cfg.num_layers // (cfg.attn_res_block_layers if kind == "block" else 1)
    )
    for a, b in zip(apart, together, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11)
