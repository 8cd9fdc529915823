"""Muon by addresses of blocks: the Triton kernels against the plain step, block by block."""

from __future__ import annotations

import pytest
import torch

from perilune.ops.choice import force
from perilune.ops.newton_schulz import iterate
from perilune.ops.triton.newton_schulz import obstacle, symmetric
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


@pytest.mark.parametrize("shape", [(3, 40, 72), (2, 72, 40), (2, 96, 32), (1, 64, 64), (2, 8, 24)])
def test_symmetric_products(shape: tuple[int, int, int]) -> None:
    torch.manual_seed(0)
    x = torch.randn(shape)
    tall = shape[1] > shape[2]
    if tall and shape[1] % 32:
        assert "steps of 32 rows" in (obstacle(x) or "")
        return
    assert obstacle(x) is None
    gram = symmetric(x)
    right = x.double().mT @ x.double() if tall else x.double() @ x.double().mT
    torch.testing.assert_close(gram.double(), right, rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(gram, gram.mT, rtol=1e-5, atol=1e-4)
    found = symmetric(gram, gram, identity=3.0, of_added=-2.0, of_products=0.5)
    exact = (
        3.0 * torch.eye(gram.shape[1], dtype=torch.float64) - 2.0 * gram.double() + 0.5 * gram.double() @ gram.double()
    )
    torch.testing.assert_close(found.double(), exact, rtol=1e-5, atol=1e-3)


def test_iteration_equals_the_plain_one() -> None:
    torch.manual_seed(0)
    for shape in ((3, 40, 72), (2, 64, 40)):
        x = torch.nn.functional.normalize(torch.randn(shape).flatten(1), dim=1).view(shape)
        with force("triton"):
            got = iterate(x)
        with force("torch"):
            plain = iterate(x)
        torch.testing.assert_close(got, plain, rtol=1e-4, atol=1e-5)
