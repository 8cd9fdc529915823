"""Gated units against the plain formulas in float64, for each implementation."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from perilune.errors import ConfigError
from perilune.ops import situ_glu as unit
from perilune.ops.choice import force
from perilune.ops.native import build, rows
from perilune.ops.situ_glu import glu, situ_glu, swiglu

pytestmark = pytest.mark.usefixtures("poisoned_memory")


@pytest.fixture(params=["torch", "native"])
def implementation(request: pytest.FixtureRequest) -> Iterator[str]:
    reason = build.unavailable_reason("elementwise")
    if request.param == "native" and reason:
        pytest.skip(reason)
    with force(request.param):
        yield request.param


def sigmoid(x: Tensor) -> Tensor:
    return 1 / (1 + torch.exp(-x))


FORMULAS = {
    "situ": (situ_glu, lambda a, b: 4 * torch.tanh(a / 4) * sigmoid(a) * 25 * torch.tanh(b / 25)),
    "uncapped": (lambda a, b: situ_glu(a, b, 4.0, None), lambda a, b: 4 * torch.tanh(a / 4) * sigmoid(a) * b),
    "other caps": (lambda a, b: situ_glu(a, b, 1.5, 3.0), lambda a, b: 4.5 * torch.tanh(a / 1.5) * sigmoid(a) * torch.tanh(b / 3)),
    "swiglu": (swiglu, lambda a, b: a * sigmoid(a) * b),
}  # fmt: skip


def values_and_gradients(function, inputs: list[Tensor]) -> list[Tensor]:
    inputs = [x.detach().clone().requires_grad_() for x in inputs]
    out = function(*inputs)
    cotangent = torch.randn(out.shape, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
    return [out.detach(), *torch.autograd.grad(out, inputs, cotangent.to(torch.bfloat16).to(out.dtype))]


def plain_in_float32(a: Tensor, b: Tensor, beta: float | None, cap: float | None) -> Tensor:
    """What one writes in torch for a CPU: tanh as 2 sigmoid(2x) - 1, in float32, rounded at the end."""
    x, y = a.float(), b.float()
    left = x if beta is None else beta * (2 * torch.sigmoid(2 / beta * x) - 1)
    right = y if cap is None else cap * (2 * torch.sigmoid(2 / cap * y) - 1)
    return (left * torch.sigmoid(x) * right).to(a.dtype)


CAPS = {"situ": (4.0, 25.0), "uncapped": (4.0, None), "other caps": (1.5, 3.0), "swiglu": (None, None)}


def root_mean_square(x: Tensor) -> float:
    return float(x.double().square().mean().sqrt())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", FORMULAS)
def test_error_is_that_of_plain_float32(name: str, dtype: torch.dtype, implementation: str) -> None:
    function, formula = FORMULAS[name]
    for spread in (0.01, 1.0, 30.0):
        inputs = [(spread * torch.randn(40, 333)).to(dtype) for _ in range(2)]
        exact = values_and_gradients(formula, [x.double() for x in inputs])
        plain = values_and_gradients(lambda a, b: plain_in_float32(a, b, *CAPS[name]), inputs)
        for ours, theirs, truth in zip(values_and_gradients(function, inputs), plain, exact, strict=True):
            assert ours.dtype == dtype
            floor = 2**-24 * root_mean_square(truth)
            assert root_mean_square(ours - truth) <= 2 * root_mean_square(theirs - truth) + floor


def test_small_inputs_keep_their_relative_accuracy() -> None:
    """2 sigmoid(2x) - 1 loses digits near 0; the native tanh does not, so the small-signal limit silu(g) u is met."""
    reason = build.unavailable_reason("elementwise")
    if reason:
        pytest.skip(reason)
    a, b = 1e-3 * torch.randn(500), 1e-3 * torch.randn(500)
    truth = FORMULAS["situ"][1](a.double(), b.double())
    with force("native"):
        torch.testing.assert_close(situ_glu(a, b).double(), truth, rtol=1e-6, atol=0.0)


@pytest.mark.parametrize("name", FORMULAS)
def test_float64_equals_the_formula(name: str) -> None:
    function, formula = FORMULAS[name]
    inputs = [3 * torch.randn(3, 5, 37, dtype=torch.float64) for _ in range(2)]
    for ours, truth in zip(values_and_gradients(function, inputs), values_and_gradients(formula, inputs), strict=True):
        torch.testing.assert_close(ours, truth, rtol=1e-11, atol=1e-12)
    torch.autograd.gradcheck(function, [x[0, :2, :4].clone().requires_grad_() for x in inputs])


@given(rows=st.integers(0, 9), width=st.integers(1, 70), name=st.sampled_from(sorted(FORMULAS)), native=st.booleans())
def test_any_shape(rows: int, width: int, name: str, native: bool) -> None:
    function, formula = FORMULAS[name]
    inputs = [4 * torch.randn(rows, width) for _ in range(2)]
    with force("native" if native else "torch"):
        ours = values_and_gradients(function, inputs)
    for got, truth in zip(ours, values_and_gradients(formula, [x.double() for x in inputs]), strict=True):
        torch.testing.assert_close(got.double(), truth, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_saturated_inputs_are_finite_with_zero_gradient(dtype: torch.dtype, implementation: str) -> None:
    large = torch.tensor([40.0, 88.0, 104.0, 1e3, 1e4], dtype=dtype)
    gate = torch.cat([large, -large, large, -large])
    up = torch.cat([large, large, -large, -large]) * 10
    value, dgate, dup = values_and_gradients(situ_glu, [gate, up])
    torch.testing.assert_close(
        value, torch.cat([large, -large, -large, large]).sign() * (gate > 0) * 100, atol=1e-4, rtol=0
    )
    assert value.abs().max() <= 100
    assert dgate.abs().max() < 1e-5 and dup.abs().max() < 1e-5


@given(
    gate=st.floats(-(2.0**100), 2.0**100, width=32), up=st.floats(-(2.0**100), 2.0**100, width=32), native=st.booleans()
)
def test_bounded_by_the_product_of_the_caps(gate: float, up: float, native: bool) -> None:
    with force("native" if native else "torch"):
        values = values_and_gradients(situ_glu, [torch.tensor([gate]), torch.tensor([up])])
    assert values[0].abs() <= 100
    assert all(value.isfinite().all() for value in values)


def test_the_sigmoid_takes_the_raw_gate(implementation: str) -> None:
    """At gate -20 the capped gate is -4: sigmoid(-4) = 0.018 would be a million times too much."""
    value = situ_glu(torch.tensor([-20.0]), torch.tensor([1000.0]))
    assert -100 * 3e-9 < value < 0


def test_any_layout_in_memory(implementation: str) -> None:
    packed = torch.randn(6, 8, 80)
    gate, up = packed.chunk(2, -1)  # as a fused projection gives them
    wanted = values_and_gradients(situ_glu, [gate.contiguous(), up.contiguous()])
    for a, b in (
        (gate, up),
        (gate.mT.contiguous().mT, up),
        (gate.contiguous(), up.transpose(0, 1).contiguous().transpose(0, 1)),
    ):
        leaves = [x.detach().requires_grad_() for x in (a, b)]
        out = situ_glu(*leaves)
        cotangent = torch.randn(out.shape, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
        gradients = torch.autograd.grad(out, leaves, cotangent.to(torch.bfloat16).float().mT.contiguous().mT)
        for got, want in zip([out, *gradients], wanted, strict=True):
            torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", FORMULAS)
def test_not_a_number_stays_in_its_element(name: str, implementation: str) -> None:
    for which in (0, 1):
        inputs = [torch.randn(4, 20), torch.randn(4, 20)]
        inputs[which][1, 3] = float("nan")
        value, *gradients = values_and_gradients(FORMULAS[name][0], inputs)
        assert value[1, 3].isnan() and value.isnan().sum() == 1
        assert gradients[1 - which][1, 3].isnan()
        assert all(gradient.isnan().sum() <= 1 for gradient in gradients)


def test_repeats_bitwise_with_any_number_of_threads(implementation: str) -> None:
    inputs = [3 * torch.randn(300, 256) for _ in range(2)]
    assert inputs[0].numel() > rows.PARALLEL_ELEMENTS, "too small to run in parallel"
    before = torch.get_num_threads()
    try:
        results = []
        for count in (1, 2, 1):
            torch.set_num_threads(count)
            results.append(values_and_gradients(situ_glu, inputs))
    finally:
        torch.set_num_threads(before)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


def test_backward_saves_nothing_but_the_inputs(implementation: str) -> None:
    gate, up = (torch.randn(5, 16, requires_grad=True) for _ in range(2))
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        situ_glu(gate, up)
    assert {x.data_ptr() for x in saved} == {gate.data_ptr(), up.data_ptr()}


def test_names_and_reference() -> None:
    assert glu("situ") is situ_glu and glu("swiglu") is swiglu
    with pytest.raises(ConfigError, match="'relu'.*situ, swiglu"):
        glu("relu")
    inputs = [torch.randn(3, 8, dtype=torch.float64) for _ in range(2)]
    with force("reference"):
        for function, formula in FORMULAS.values():
            torch.testing.assert_close(function(*inputs), formula(*inputs))
        assert unit.select(*inputs).implementation == "reference"


def test_settings_are_checked() -> None:
    x = torch.randn(2, 4)
    for caps in ((0.0, 25.0), (-1.0, 25.0), (4.0, 0.0), (float("nan"), 25.0)):
        with pytest.raises(ConfigError, match="above 0"):
            situ_glu(x, x, *caps)
    with pytest.raises(ConfigError, match="one shape"):
        swiglu(x, torch.randn(2, 5))
