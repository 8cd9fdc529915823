"""Latents and logits in one kernel, in the interpreter: values and gradients against float64, and exact to float32."""

from __future__ import annotations

import pytest
import torch

from perilune.config.presets import tiny
from perilune.model.latent_moe import LatentMoE
from perilune.ops.choice import Choice, force
from perilune.ops.moe import router_latent
from perilune.ops.moe.router_latent import project, select
from perilune.ops.moe.triton import router_latent as kernels

pytestmark = pytest.mark.usefixtures("poisoned_memory")


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, size in {
        "ROWS": 32, "COLUMNS": 16, "SCORED_ROWS": 16, "SCORED_COLUMNS": 16, "DEPTH": 16, "FLUSH": 2, "GROUP": 2, "SPLIT": 64,
    }.items():  # fmt: skip
        monkeypatch.setattr(kernels, name, size)
    monkeypatch.setattr(router_latent, "LEAST_TOKENS", 0)


def inputs(tokens: int, width: int, latent: int, experts: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(tokens)
    return [
        torch.randn(tokens, width, generator=generator).bfloat16(),
        torch.randn(latent, width, generator=generator) * width**-0.5,
        torch.randn(experts, width, generator=generator) * width**-0.5,
    ]


@pytest.mark.parametrize(("tokens", "width", "latent", "experts"), [(37, 40, 24, 20), (5, 64, 16, 40), (0, 16, 8, 4)])
def test_values_and_gradients(tokens: int, width: int, latent: int, experts: int) -> None:
    leaves = [x.requires_grad_() for x in inputs(tokens, width, latent, experts)]
    dz, dlogits = torch.randn(tokens, latent).bfloat16(), torch.randn(tokens, experts)
    with force("triton"):
        assert select(*leaves).implementation == "triton"
        z, logits = project(*leaves)
    assert z.dtype == torch.bfloat16 and logits.dtype == torch.float32
    exact = [x.detach().double().requires_grad_() for x in leaves]
    right = exact[0] @ exact[1].bfloat16().double().t(), exact[0] @ exact[2].t()
    torch.testing.assert_close(z.double(), right[0], rtol=2**-7, atol=2**-9)  # the interpreter rounds towards zero
    torch.testing.assert_close(logits.double(), right[1], rtol=2e-6, atol=2e-6)  # one part less errs by 2e-5
    got = torch.autograd.grad([z, logits], leaves, [dz, dlogits])
    truth = torch.autograd.grad([exact[0] @ exact[1].t(), right[1]], exact, [dz.double(), dlogits.double()])
    for value, wanted, limit in zip(got, truth, (6e-3, 1e-5, 2e-5), strict=True):
        assert value.shape == wanted.shape and float((value.double() - wanted).norm()) <= limit * float(wanted.norm())


def test_only_one_of_the_two_is_used() -> None:
    leaves = [x.requires_grad_() for x in inputs(9, 16, 8, 6)]
    for which in (0, 1):
        with force("triton"):
            outputs = project(*leaves)
        got = torch.autograd.grad(outputs[which].float().sum(), leaves, allow_unused=True)
        assert got[0] is not None and (got[1] is None) == (which == 1) and (got[2] is None) == (which == 0)


def test_parts_add_up_to_every_bit() -> None:
    weight = torch.randn(7, 33) * torch.logspace(-30, 30, 33)
    parts = kernels.split(weight)
    assert torch.equal(parts.double().sum(0), weight.double())


def test_what_the_kernel_does_not_take(monkeypatch: pytest.MonkeyPatch) -> None:
    x, down, router = inputs(4, 16, 8, 6)
    with force("triton"):
        assert "bfloat16 tokens" in select(x.float(), down, router).reason
        assert "multiples of 8" in select(x, down[:5], router).reason
        assert "float64" in select(x, down, router.double()).reason
        monkeypatch.setattr(router_latent, "LEAST_TOKENS", 5)
        assert "fewer than 5 tokens" in select(x, down, router).reason
    assert select(x, down, router).implementation == "torch"
    assert torch.equal(project(x, down, router)[1], x.float() @ router.t())


def test_the_layer_calls_it() -> None:
    """A layer's output and gradients with the kernel and without, in bfloat16."""
    cfg = tiny()
    assert cfg.moe is not None and cfg.moe.latent_size is not None
    torch.manual_seed(0)
    layer = LatentMoE(cfg)
    for p in layer.parameters():
        torch.nn.init.normal_(p, std=0.2)
    x = torch.randn(1, 9, cfg.hidden_size).bfloat16()
    results = []
    for name in ("triton", "torch"):
        inputs = x.clone().requires_grad_()
        called = []
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(router_latent, "project", lambda *a, called=called: called.append(1) or project(*a))
            patch.setattr(
                router_latent, "choose_triton", lambda x, name=name: Choice(name, "") if name == "triton" else None
            )
            out = layer(inputs)
        assert bool(called) == (name == "triton")
        results.append([out.detach(), *torch.autograd.grad(out.float().square().sum(), [inputs, layer.router.weight])])
    for got, right in zip(*results, strict=True):
        assert float((got - right).norm()) < 0.05 * float(right.norm())
