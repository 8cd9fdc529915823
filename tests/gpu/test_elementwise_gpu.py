"""Norms, gated units and the short convolution on a GPU against the formulas in float64."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from perilune.ops import cross_entropy, norm, short_conv, situ_glu
from perilune.ops.segments import Segments

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.usefixtures("poisoned_memory"),
]

EPS = 1e-5
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def relative_error(got: Tensor, truth: Tensor) -> float:
    got, truth = got.double(), truth.double()
    assert got.isfinite().all()
    return float((got - truth).norm() / truth.norm().clamp_min(1e-300))


def normal(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator("cuda").manual_seed(seed), device="cuda").to(dtype)


def values_and_gradients(function: Callable, inputs: list[Tensor]) -> list[Tensor]:
    inputs = [x.detach().requires_grad_() for x in inputs]
    outputs = function(*inputs)
    outputs = [x for x in (outputs if isinstance(outputs, tuple) else (outputs,)) if x.requires_grad]
    cotangents = [normal(*x.shape, seed=3).bfloat16().to(x.dtype) for x in outputs]
    return [x.detach() for x in outputs] + list(torch.autograd.grad(outputs, inputs, cotangents))


def check(ours: Callable, formula: Callable, inputs: list[Tensor]) -> None:
    got, again = values_and_gradients(ours, inputs), values_and_gradients(ours, inputs)
    assert all(torch.equal(a, b) for a, b in zip(got, again, strict=True)), "not repeatable"
    tolerance = 5e-6 if inputs[0].dtype == torch.float32 else 4e-3
    for value, right in zip(got, values_and_gradients(formula, [x.double() for x in inputs]), strict=True):
        assert relative_error(value, right) < tolerance


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(2, 300, 24, 128), (500, 7168), (7, 16384), (1000, 64), (33, 100), (5000, 8)])
def test_norms(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x, gate, weight = normal(*shape, dtype=dtype), normal(*shape, dtype=dtype, seed=1), normal(shape[-1], seed=2)
    assert norm.select(x).implementation == "triton"
    check(lambda x, w: norm.rms_norm(x, w, EPS), lambda x, w: norm.rms_norm_reference(x, w, EPS), [x, weight])
    check(norm.l2_norm, norm.l2_norm_reference, [x])
    check(
        lambda x, g, w: norm.gated_rms_norm(x, g, w, EPS), lambda x, g, w: norm.gated_rms_norm_reference(x, g, w, EPS),
        [x, gate, weight],
    )  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("caps", [(4.0, 25.0), (4.0, None), (None, None)])
def test_gated_units(caps: tuple[float | None, float | None], dtype: torch.dtype) -> None:
    ours = situ_glu.swiglu if caps[0] is None else lambda a, b: situ_glu.situ_glu(a, b, *caps)
    formula = lambda a, b: situ_glu.situ_glu_reference(a, b, *caps)  # noqa: E731
    for shape in ((700, 3072), (3, 5, 37), (1, 5)):
        both = 4 * normal(*shape[:-1], 2 * shape[-1] + 3, dtype=dtype)
        halves = [both[..., : shape[-1]], both[..., -shape[-1] :]]
        assert situ_glu.select(*halves).implementation == "triton"
        check(ours, formula, halves)
        check(ours, formula, [x.contiguous() for x in halves])


def test_saturated_gated_unit_has_finite_gradients() -> None:
    gate = torch.tensor([[-1e4, -200.0, -60.0, 60.0, 200.0, 1e4]], device="cuda").requires_grad_()
    up = torch.tensor([[1e4, -1e4, 3000.0, -3000.0, 1e4, -1e4]], device="cuda").requires_grad_()
    y = situ_glu.situ_glu(gate, up)
    gradients = torch.autograd.grad(y.sum(), (gate, up))
    assert y.isfinite().all() and float(y.detach().abs().max()) <= 100.0
    assert all(float(g.abs().max()) < 1e-6 for g in gradients)


def packed(batch: int, length: int) -> Segments:
    mask = torch.zeros(batch, length, dtype=torch.bool, device="cuda")
    mask[0, [7, 8, 64, 130]] = True
    mask[-1, [1, 63, length - 1]] = True
    segments = Segments.from_starts(mask)
    assert segments is not None
    return segments


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("taps", [1, 2, 4, 8])
def test_short_convolution(taps: int, dtype: torch.dtype) -> None:
    for shape in ((2, 300, 1536), (1, 2, 40), (3, 129, 100)):
        x, weight = normal(*shape, dtype=dtype), normal(shape[-1], taps, seed=1)
        window = normal(shape[0], shape[-1], taps - 1, dtype=dtype, seed=2)
        assert short_conv.select(x, weight).implementation == "triton"
        check(short_conv.short_conv, short_conv.short_conv_reference, [x, weight])
        if taps > 1:
            check(short_conv.short_conv, short_conv.short_conv_reference, [x, weight, window])
        if shape[1] > 200:
            segments = packed(*shape[:2])
            check(
                lambda x, w: short_conv.short_conv(x, w, None, segments),  # noqa: B023
                lambda x, w: short_conv.short_conv_reference(x, w, None, segments),  # noqa: B023
                [x, weight],
            )


def test_convolution_of_strided_views() -> None:
    wide, weight = normal(2, 80, 600, dtype=torch.bfloat16), normal(512, 4)
    for view in (wide[:, ::2, 8:520], wide[:, :, 3:515]):
        got, truth = (short_conv.short_conv(x, weight)[0] for x in (view, view.contiguous()))
        assert torch.equal(got, truth)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("reduction", ["sum", "mean", "none"])
def test_cross_entropy(reduction: str, dtype: torch.dtype) -> None:
    x, weight = normal(700, 64, dtype=dtype), 0.3 * normal(9001, 64, dtype=torch.float32, seed=1)
    target = torch.randint(0, 9001, (700,), device="cuda")
    target[::7] = -100
    assert cross_entropy.select(x).implementation == "triton"

    def found(function: Callable, x: Tensor, weight: Tensor) -> list[Tensor]:
        x, weight = x.detach().requires_grad_(), weight.detach().requires_grad_()
        loss = function(x, weight)
        cotangent = (
            torch.linspace(0.1, 1.0, loss.numel(), device="cuda", dtype=torch.float64).view(loss.shape).to(loss.dtype)
        )
        return [loss.detach(), *torch.autograd.grad(loss, (x, weight), cotangent)]

    def plain(x: Tensor, weight: Tensor) -> Tensor:
        return functional.cross_entropy(
            (x @ weight.to(x.dtype).t()).to(torch.promote_types(x.dtype, torch.float32)), target, reduction=reduction
        )

    ours, again = (
        found(lambda x, w: cross_entropy.linear_cross_entropy(x, w, target, reduction=reduction, chunk=256), x, weight)
        for _ in range(2)
    )
    exact, theirs = found(plain, x.double(), weight.double()), found(plain, x, weight)
    for got, twice, truth, peer in zip(ours, again, exact, theirs, strict=True):
        assert torch.equal(got, twice)
        # A summed loss is differentiated before its factor is known: dx is rounded once more.
        assert relative_error(got, truth) <= 1.15 * relative_error(peer, truth) + 1e-6


def test_t49_offsets_beyond_32_bits() -> None:
    """More than 2^31 numbers: the last rows equal a short run."""
    rows, width = 262144 + 8, 8192
    x = torch.zeros(rows, width, device="cuda", dtype=torch.bfloat16)
    x[-8:] = normal(8, width, dtype=torch.bfloat16)
    weight = normal(width)
    assert torch.equal(norm.rms_norm(x, weight, EPS)[-8:], norm.rms_norm(x[-8:], weight, EPS))
    assert torch.equal(situ_glu.swiglu(x, x)[-8:], situ_glu.swiglu(x[-8:], x[-8:]))
