"""Norms against the plain formulas in float64, for each implementation."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from perilune.errors import ConfigError
from perilune.ops import norm
from perilune.ops.choice import force
from perilune.ops.native import build, rows

pytestmark = pytest.mark.usefixtures("poisoned_memory")

EPS = 1e-5


@pytest.fixture(params=["torch", "native"])
def implementation(request: pytest.FixtureRequest) -> Iterator[str]:
    reason = build.unavailable_reason("elementwise")
    if request.param == "native" and reason:
        pytest.skip(reason)
    with force(request.param):
        yield request.param


def plain_rms(x: Tensor, weight: Tensor) -> Tensor:
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + EPS) * weight


def plain_l2(x: Tensor) -> Tensor:
    return x / torch.sqrt((x * x).sum(-1, keepdim=True) + 1e-6)


def plain_gated(o: Tensor, gate: Tensor, weight: Tensor) -> Tensor:
    return plain_rms(o, weight) / (1 + torch.exp(-gate))


OPS = {
    "rms": (lambda x, w: norm.rms_norm(x, w, EPS), plain_rms, "xw"),
    "l2": (norm.l2_norm, plain_l2, "x"),
    "gated": (lambda o, g, w: norm.gated_rms_norm(o, g, w, EPS), plain_gated, "xxw"),
}


def inputs_of(kinds: str, shape: tuple[int, ...], dtype: torch.dtype) -> list[Tensor]:
    """Activations in dtype; parameters always float32, unless everything is float64."""
    wide = dtype if dtype == torch.float64 else torch.float32
    return [
        torch.randn(shape).to(dtype) if kind == "x" else (1 + 0.3 * torch.randn(shape[-1])).to(wide) for kind in kinds
    ]


def values_and_gradients(function, inputs: list[Tensor], seed: int = 7) -> list[Tensor]:
    inputs = [x.detach().clone().requires_grad_() for x in inputs]
    out = function(*inputs)
    cotangent = torch.randn(out.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return [out.detach(), *torch.autograd.grad(out, inputs, cotangent.to(torch.bfloat16).to(out.dtype))]


def in_float32(formula):
    """The formula computed in float32 and rounded to the first input's dtype: the path that ours must not be worse than."""
    return lambda *inputs: formula(*[x.float() for x in inputs]).to(inputs[0].dtype)


def root_mean_square(x: Tensor) -> float:
    return float(x.double().square().mean().sqrt())


def assert_no_worse_than_plain(function, formula, inputs: list[Tensor]) -> None:
    """Every value's and gradient's error against float64 is at most twice that of the plain float32 path."""
    exact = values_and_gradients(formula, [x.double() for x in inputs])
    plain = values_and_gradients(in_float32(formula), inputs)
    for ours, theirs, truth in zip(values_and_gradients(function, inputs), plain, exact, strict=True):
        assert ours.dtype == theirs.dtype
        floor = 2**-24 * root_mean_square(truth)  # one rounding: a small tensor may be exact by luck
        assert root_mean_square(ours - truth) <= 2 * root_mean_square(theirs - truth) + floor


@pytest.mark.parametrize("name", OPS)
def test_float64_equals_the_formula(name: str) -> None:
    function, formula, kinds = OPS[name]
    inputs = inputs_of(kinds, (3, 5, 37), torch.float64)
    for ours, truth in zip(values_and_gradients(function, inputs), values_and_gradients(formula, inputs), strict=True):
        torch.testing.assert_close(ours, truth, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", OPS)
def test_gradients_by_finite_differences(name: str) -> None:
    function, _, kinds = OPS[name]
    inputs = [x.requires_grad_() for x in inputs_of(kinds, (2, 3, 5), torch.float64)]
    torch.autograd.gradcheck(function, inputs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", OPS)
def test_error_is_that_of_plain_float32(name: str, dtype: torch.dtype, implementation: str) -> None:
    function, formula, kinds = OPS[name]
    for shape in ((4, 33, 64), (50, 7), (17, 1024)):
        assert_no_worse_than_plain(function, formula, inputs_of(kinds, shape, dtype))


@given(rows=st.integers(0, 70), width=st.integers(1, 90), name=st.sampled_from(sorted(OPS)), native=st.booleans())
def test_any_shape(rows: int, width: int, name: str, native: bool) -> None:
    function, formula, kinds = OPS[name]
    inputs = inputs_of(kinds, (rows, width), torch.float32)
    with force("native" if native else "torch"):
        for ours, truth in zip(
            values_and_gradients(function, inputs),
            values_and_gradients(formula, [x.double() for x in inputs]),
            strict=True,
        ):
            torch.testing.assert_close(ours.double(), truth, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", OPS)
def test_without_gradients_the_values_are_the_same(name: str, implementation: str) -> None:
    function, _, kinds = OPS[name]
    inputs = inputs_of(kinds, (9, 48), torch.float32)
    with torch.no_grad():
        quick = function(*inputs)
    assert torch.equal(quick, values_and_gradients(function, inputs)[0])


@pytest.mark.parametrize("name", OPS)
def test_any_layout_in_memory(name: str, implementation: str) -> None:
    function, _, kinds = OPS[name]
    plain = inputs_of(kinds, (6, 8, 40), torch.float32)
    wanted = values_and_gradients(function, plain)
    for layout in (
        lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),  # rows evenly spaced in no order
        lambda x: torch.cat([x, x], -1)[..., : x.shape[-1]],  # rows a stride apart
        lambda x: x.transpose(-1, -2).contiguous().transpose(-1, -2),  # elements of a row apart
    ):
        strange = [layout(x) if x.dim() == 3 else x for x in plain]
        # no clone: it would lose the layout
        leaves = [x.detach().requires_grad_() for x in strange]
        out = function(*leaves)
        cotangent = torch.randn(out.shape, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
        cotangent = cotangent.to(torch.bfloat16).float()
        for got, want in zip([out, *torch.autograd.grad(out, leaves, layout(cotangent))], wanted, strict=True):
            torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6)
    # a gradient that was broadcast, as a sum's backward makes it
    leaves = [x.detach().requires_grad_() for x in plain]
    broadcast = torch.autograd.grad(function(*leaves).sum(), leaves)
    full = torch.autograd.grad(function(*leaves), leaves, torch.ones(6, 8, 40))
    assert all(torch.equal(a, b) for a, b in zip(broadcast, full, strict=True))


@pytest.mark.parametrize("name", OPS)
def test_not_a_number_stays_in_its_row(name: str, implementation: str) -> None:
    function, _, kinds = OPS[name]
    inputs = inputs_of(kinds, (5, 40), torch.float32)
    inputs[0][2, 17] = float("nan")
    out, *gradients = values_and_gradients(function, inputs)
    assert out[2].isnan().all()
    assert out[[0, 1, 3, 4]].isfinite().all()
    assert gradients[0][2].isnan().all() and gradients[0][[0, 1, 3, 4]].isfinite().all()


def test_extreme_gates_are_finite(implementation: str) -> None:
    gate = torch.tensor([[-1e4, -120.0, -90.0, -40.0, 40.0, 90.0, 1e4]])
    for value in values_and_gradients(OPS["gated"][0], [torch.randn(1, 7), gate, torch.ones(7)]):
        assert value.isfinite().all()


def test_result_does_not_depend_on_the_number_of_threads(implementation: str) -> None:
    if implementation == "torch":
        pytest.skip("torch's own reductions decide")
    before = torch.get_num_threads()
    try:
        for name, (function, _, kinds) in OPS.items():
            inputs = inputs_of(kinds, (700, 96), torch.float32)
            assert inputs[0].numel() > rows.PARALLEL_ELEMENTS, "too small to run in parallel"
            results = []
            for count in (1, 2, 3, 1):
                torch.set_num_threads(count)
                results.append(values_and_gradients(function, inputs))
            for other in results[1:]:
                assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True)), name
    finally:
        torch.set_num_threads(before)


def test_l2_eps_is_added_to_the_sum(implementation: str) -> None:
    x = torch.full((1, 100), 1e-3)  # sum of squares 1e-4, mean 1e-6
    torch.testing.assert_close(norm.l2_norm(x, eps=1e-4), x / (2e-4) ** 0.5)


def test_the_gate_acts_after_the_norm(implementation: str) -> None:
    """A gate common to a row would cancel if it came first."""
    o, weight = torch.randn(4, 16), torch.ones(16)
    half = norm.gated_rms_norm(o, torch.zeros(4, 16), weight, EPS)
    torch.testing.assert_close(half, 0.5 * norm.rms_norm(o, weight, EPS))


def test_parameter_gradients_keep_the_parameters_dtype(implementation: str) -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        weight = torch.ones(24, dtype=dtype, requires_grad=True)
        norm.rms_norm(torch.randn(5, 24), weight, EPS).sum().backward()
        assert weight.grad is not None and weight.grad.dtype == dtype


def test_select_says_why() -> None:
    x = torch.randn(2, 8)
    assert norm.select(x.double()).implementation == "torch"
    assert "float64" in norm.select(x.double()).reason
    assert "float32 and" in norm.select(x, x.bfloat16()).reason
    assert "meta" in norm.select(x.to("meta")).reason
    with force("torch"):
        assert norm.select(x) == ("torch", "asked for")
    with force("triton"):
        assert norm.select(x).implementation == "torch" and "triton" in norm.select(x).reason
    with force("reference"):
        assert norm.select(x).implementation == "reference"


def test_no_compiler_means_torch_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "switched_off", lambda: True)
    monkeypatch.setattr(rows, "_loaded", {})
    choice = norm.select(torch.randn(2, 8))
    assert choice.implementation == "torch" and "PERILUNE_NATIVE=0" in choice.reason
    torch.testing.assert_close(norm.rms_norm(torch.ones(2, 8), torch.ones(8), 0.0), torch.ones(2, 8))


def test_reference_path_runs() -> None:
    for function, formula, kinds in OPS.values():
        inputs = inputs_of(kinds, (3, 8), torch.float64)
        with force("reference"):
            torch.testing.assert_close(function(*inputs), formula(*inputs))


def test_shapes_are_checked() -> None:
    with pytest.raises(ConfigError, match=r"\[7\].*needs \[8\]"):
        norm.rms_norm(torch.randn(2, 8), torch.ones(7), EPS)
    with pytest.raises(ConfigError, match="one shape"):
        norm.gated_rms_norm(torch.randn(2, 8), torch.randn(3, 8), torch.ones(8), EPS)
