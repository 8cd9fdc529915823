"""Norms, gated units and the short convolution: the Triton kernels against the formulas in float64."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from perilune.ops import norm, packed_conv, short_conv, situ_glu
from perilune.ops.choice import force
from perilune.ops.segments import Segments

pytestmark = pytest.mark.usefixtures("poisoned_memory")

EPS = 1e-5


def values_and_gradients(function: Callable, inputs: list[Tensor]) -> list[Tensor]:
    inputs = [x.detach().requires_grad_() for x in inputs]
    outputs = function(*inputs)
    outputs = [x for x in (outputs if isinstance(outputs, tuple) else (outputs,)) if x.requires_grad]
    generator = torch.Generator().manual_seed(3)
    cotangents = [torch.randn(x.shape, generator=generator).to(x.dtype) for x in outputs]
    return [x.detach() for x in outputs] + list(torch.autograd.grad(outputs, inputs, cotangents))


def check(ours: Callable, formula: Callable, inputs: list[Tensor], tolerance: float = 1e-5) -> None:
    """Values and gradients, from inputs with poisoned memory behind every result."""
    with force("triton"):
        got = values_and_gradients(ours, inputs)
        again = values_and_gradients(ours, inputs)
    assert all(torch.equal(a, b) for a, b in zip(got, again, strict=True)), "not repeatable"
    for value, right in zip(got, values_and_gradients(formula, [x.double() for x in inputs]), strict=True):
        torch.testing.assert_close(value.double(), right, rtol=tolerance, atol=tolerance)


def test_select_takes_the_kernels() -> None:
    x = torch.randn(2, 8)
    with force("triton"):
        assert norm.select(x).implementation == "triton"
        assert situ_glu.select(x, x).implementation == "triton"
        assert short_conv.select(x[None], torch.randn(8, 4)).implementation == "triton"
        assert "8 taps, not 9" in short_conv.select(x[None], torch.randn(8, 9)).reason
        assert "16384 numbers, not 20000" in norm.select(torch.empty(1, 20000)).reason
        assert "float64" in norm.select(x.double()).reason
        assert "one element type" in situ_glu.select(x, x.half()).reason
    assert norm.select(x).implementation != "triton", "not without being asked for on a CPU"


@pytest.mark.parametrize("shape", [(7, 5, 24), (3, 128), (1, 300), (0, 8), (600, 2)])
def test_norms(shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    x, gate, weight = torch.randn(shape), torch.randn(shape), torch.randn(shape[-1])
    check(lambda x, w: norm.rms_norm(x, w, EPS), lambda x, w: norm.rms_norm_reference(x, w, EPS), [x, weight])
    check(norm.l2_norm, norm.l2_norm_reference, [x])
    check(
        lambda x, g, w: norm.gated_rms_norm(x, g, w, EPS), lambda x, g, w: norm.gated_rms_norm_reference(x, g, w, EPS),
        [x, gate, weight],
    )  # fmt: skip


def test_norms_of_slices() -> None:
    """Rows a stride apart are read in place; a transposed tensor is copied first."""
    torch.manual_seed(0)
    wide = torch.randn(6, 70)
    x, gate, weight = wide[:, :32], wide[:, 33:65], torch.randn(32)
    formula = lambda x, g, w: norm.gated_rms_norm_reference(x, g, w, EPS)  # noqa: E731
    check(lambda x, g, w: norm.gated_rms_norm(x, g, w, EPS), formula, [x, gate, weight])
    check(
        lambda x, w: norm.rms_norm(x, w, EPS),
        lambda x, w: norm.rms_norm_reference(x, w, EPS),
        [wide.t(), torch.randn(6)],
    )


CAPS = [(4.0, 25.0), (4.0, None), (None, None)]


def unit(caps: tuple[float | None, float | None]) -> Callable:
    return situ_glu.swiglu if caps[0] is None else lambda a, b: situ_glu.situ_glu(a, b, *caps)


@pytest.mark.parametrize("caps", CAPS)
@pytest.mark.parametrize("shape", [(5, 37), (2, 3, 2100), (0, 4)])
def test_gated_units(caps: tuple[float | None, float | None], shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    both = 4 * torch.randn(*shape[:-1], 2 * shape[-1] + 3)
    formula = lambda a, b: situ_glu.situ_glu_reference(a, b, *caps)  # noqa: E731
    halves = [both[..., : shape[-1]], both[..., -shape[-1] :]]
    check(unit(caps), formula, halves, 2e-5)
    check(unit(caps), formula, [x.contiguous() for x in halves], 2e-5)


def test_saturated_gated_unit_has_finite_zero_gradients() -> None:
    gate = torch.tensor([[-1e4, -200.0, -60.0, 60.0, 200.0, 1e4]]).requires_grad_()
    up = torch.tensor([[1e4, -1e4, 3000.0, -3000.0, 1e4, -1e4]]).requires_grad_()
    with force("triton"):
        y = situ_glu.situ_glu(gate, up)
    gradients = torch.autograd.grad(y.sum(), (gate, up))
    assert y.isfinite().all() and float(y.detach().abs().max()) <= 100.0
    assert torch.equal(y.detach()[0, 3:], torch.tensor([-100.0, 100.0, -100.0]))
    assert all(float(g.abs().max()) < 1e-6 for g in gradients)


def packed(batch: int, length: int, starts: list[tuple[int, int]]) -> Segments:
    mask = torch.zeros(batch, length, dtype=torch.bool)
    for row, token in starts:
        mask[row, token] = True
    segments = Segments.from_starts(mask)
    assert segments is not None
    return segments


SEGMENTS = packed(2, 70, [(0, 7), (0, 8), (0, 64), (1, 1), (1, 66)])


@pytest.mark.parametrize(
    ("shape", "taps", "window", "segments"),
    [
        ((2, 70, 24), 4, False, None),
        ((2, 70, 24), 4, True, None),
        ((2, 70, 24), 4, False, SEGMENTS),
        ((1, 2, 17), 4, True, None),
        ((1, 130, 16), 3, False, None),
        ((2, 5, 300), 2, True, None),
        ((1, 9, 8), 1, False, None),
        ((1, 20, 8), 8, True, None),
    ],
)
def test_short_convolution(shape: tuple[int, ...], taps: int, window: bool, segments: Segments | None) -> None:
    """Output, next window, and gradients of input, taps and window."""
    torch.manual_seed(0)
    inputs = [torch.randn(shape), torch.randn(shape[-1], taps)]
    if window:
        inputs.append(torch.randn(shape[0], shape[-1], taps - 1))

    def ours(x, weight, window=None):
        return short_conv.short_conv(x, weight, window, segments)

    def formula(x, weight, window=None):
        return short_conv.short_conv_reference(x, weight, window, segments)

    check(ours, formula, inputs)


def test_convolution_of_a_strided_view() -> None:
    torch.manual_seed(0)
    wide = torch.randn(2, 40, 50)
    weight = torch.randn(20, 4)
    for view in (wide[:, ::2, 5:25], wide.transpose(1, 2)[:, :, :20]):
        check(
            lambda x, w: short_conv.short_conv(x, w)[0],
            lambda x, w: short_conv.short_conv_reference(x, w)[0],
            [view, weight],
        )


def test_half_precision_rounds_once() -> None:
    torch.manual_seed(0)
    x, gate, weight = torch.randn(9, 64).half(), torch.randn(9, 64).half(), torch.randn(64)
    with force("triton"):
        got = [norm.gated_rms_norm(x, gate, weight, EPS), situ_glu.situ_glu(x, gate)]
    truth = [norm.gated_rms_norm_reference(x.double(), gate.double(), weight.double(), EPS),
             situ_glu.situ_glu_reference(x.double(), gate.double())]  # fmt: skip
    for value, right in zip(got, truth, strict=True):
        assert value.dtype == torch.float16
        torch.testing.assert_close(value.double(), right, rtol=2**-11 * 1.01, atol=1e-6)


def test_convolution_of_packed_chunks() -> None:
    """Chunks shorter and longer than the taps; windows at their ends and inside."""
    torch.manual_seed(0)
    lengths = (2, 40, 1, 3)
    points = [(n, length) for n, length in enumerate(lengths)] + [(1, 1), (1, 16), (3, 2)]
    chunks = packed_conv.Chunks.of(lengths, points, lambda x: x)
    x, weight, window = torch.randn(46, 300), torch.randn(300, 4), torch.randn(4, 300, 3)
    with force("torch"):
        right, windows = packed_conv.packed_conv(x.double(), weight.double(), window.double(), chunks)
    with force("triton"):
        assert packed_conv.select(x, weight).implementation == "triton"
        got, found = packed_conv.packed_conv(x, weight, window, chunks)
    torch.testing.assert_close(got.double(), right, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found.double(), windows, rtol=0, atol=1e-7)
