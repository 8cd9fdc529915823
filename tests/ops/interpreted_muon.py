"""Muon by addresses of blocks: the Triton kernels against the plain step, block by block."""

from __future__ import annotations

import pytest
import torch

from perilune.ops.choice import force
from perilune.optim.groups import Cut
from perilune.optim.muon import Muon

SHAPES = {"heads": (24, 10), "experts": (3, 4, 10), "tall": (80, 61), "odd": (3, 7), "silent": (4, 10)}
CUTS = {
    "heads": (Cut(0, 24, 12, 0, 8), Cut(0, 24, 12, 8, 4)),
    "experts": (Cut(0, 12, 4, 0, 4),),
    "tall": (Cut(0, 80, 80, 0, 80),),
    "odd": (Cut(0, 3, 3, 0, 3),),
    "silent": (Cut(0, 4, 4, 0, 4),),
}


@pytest.mark.parametrize("scaled", [False, True])
def test_steps_equal_the_plain_ones(scaled: bool) -> None:
    draw = torch.Generator().manual_seed(0)
    start = {name: torch.randn(shape, generator=draw) for name, shape in SHAPES.items()}
    grads = [{name: torch.randn(shape, generator=draw) for name, shape in SHAPES.items()} for _ in range(3)]
    scale, ends = torch.tensor(0.25) if scaled else None, []
    for forced in ("torch", "triton"):
        params = {name: p.clone().requires_grad_() for name, p in start.items()}
        muon = Muon(params, CUTS)
        for grad in grads:
            for name, p in params.items():
                p.grad = None if name == "silent" else grad[name].clone()
            with force(forced):
                assert (muon.prepare() is None) is (forced == "torch")
                muon.step(torch.tensor(0.02), scale)
        ends.append({n: p.detach() for n, p in params.items()} | {f"{n}.momentum": m for n, m in muon.momentum.items()})
    for name, plain in ends[0].items():
        torch.testing.assert_close(ends[1][name], plain, rtol=2e-5, atol=2e-6, msg=lambda m, n=name: f"{n}: {m}")
