"""Latents and logits in one kernel on a GPU: as exact as the two products, routes included."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed; pip install perilune[kernels]")

from perilune.ops.choice import force
from perilune.ops.moe import router_latent
from perilune.ops.moe.router import route
from perilune.ops.moe.router_latent import project, select

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def error(got: torch.Tensor, truth: torch.Tensor) -> float:
    assert got.isfinite().all()
    return float((got.double() - truth).norm() / truth.norm())


@pytest.mark.parametrize(
    ("tokens", "width", "latent", "experts"), [(8192, 7168, 3584, 896), (1000, 1024, 512, 64), (3, 520, 264, 100)]
)
def test_as_exact_as_two_products(
    monkeypatch: pytest.MonkeyPatch, tokens: int, width: int, latent: int, experts: int
) -> None:
    monkeypatch.setattr(router_latent, "LEAST_TOKENS", 0)
    torch.manual_seed(0)
    leaves = [torch.randn(tokens, width, device="cuda").bfloat16()]
    leaves += [torch.randn(size, width, device="cuda") * width**-0.5 for size in (latent, experts)]
    dz, dlogits = torch.randn(tokens, latent, device="cuda").bfloat16(), torch.randn(tokens, experts, device="cuda")
    exact = [x.double().requires_grad_() for x in leaves]
    outputs = exact[0] @ exact[1].t(), exact[0] @ exact[2].t()
    truth = [x.detach() for x in outputs] + list(torch.autograd.grad(outputs, exact, [dz.double(), dlogits.double()]))
    errors = {}
    for name in ("triton", "torch"):
        inputs = [x.detach().requires_grad_() for x in leaves]
        with force(name):
            assert select(*inputs).implementation == name
            found = project(*inputs)
        got = [*found, *torch.autograd.grad(found, inputs, [dz, dlogits])]
        assert found[1].dtype == torch.float32
        errors[name] = [error(a, b) for a, b in zip(got, truth, strict=True)]
        print(name, tokens, [f"{e:.1e}" for e in errors[name]])
        if name == "triton":
            with force(name):
                assert all(torch.equal(a, b) for a, b in zip(found, project(*inputs), strict=True)), "not repeatable"
    # Gradients of weights: sums over the tokens stay in the tensor cores.
    for ours, plain, more in zip(errors["triton"], errors["torch"], (0.0, 3e-6, 3e-4, 2e-5, 2e-5), strict=True):
        assert ours < 1.2 * plain + more


def test_tokens_go_where_float64_sends_them() -> None:
    """At most as many routes differ as with a float32 product."""
    torch.manual_seed(1)
    x = torch.randn(4096, 7168, device="cuda").bfloat16()
    down, router = torch.randn(64, 7168, device="cuda"), torch.randn(896, 7168, device="cuda") * 7168**-0.5
    bias = torch.zeros(896, device="cuda")
    truth = route((x.double() @ router.double().t()).float(), bias, 16).index_NA
    different = {}
    for name in ("triton", "torch"):
        with force(name):
            logits = project(x, down, router)[1]
        different[name] = int((route(logits, bias, 16).index_NA != truth).any(-1).sum())
    print(different)
    assert different["triton"] <= 2 * different["torch"] + 4
