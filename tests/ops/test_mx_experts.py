"""Fake quantisation's gradient, and experts on packed weights, against straight-line float64 sums."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from perilune.errors import ConfigError
from perilune.ops.choice import force
from perilune.ops.moe import routed_experts
from perilune.ops.mx import PackedWeight, fake_quantize, packed_experts, rounded_input_experts
from perilune.ops.mx import experts as experts_module
from perilune.ops.native import build

pytestmark = pytest.mark.usefixtures("poisoned_memory")

ACTIVATION_ARGS = [("situ", 4.0, 25.0), ("situ", 4.0, None), ("swiglu", 4.0, None)]


def operands(tokens: int = 11, width: int = 64, hidden: int = 96, experts: int = 7, active: int = 3) -> list[Tensor]:
    """z, index, weight, w1, w3, w2 in float64; weights are not on the grid. Expert 0 gets no token."""
    draw = torch.Generator().manual_seed(2)

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=draw, dtype=torch.float64)

    index = torch.rand(tokens, experts - 1, generator=draw).topk(active).indices + 1
    weight = torch.rand(tokens, active, generator=draw, dtype=torch.float64)
    shapes = ((experts, hidden, width), (experts, hidden, width), (experts, width, hidden))
    return [randn(tokens, width), index, weight, *(randn(*s) / s[-1] ** 0.5 for s in shapes)]


def unit(gate: Tensor, up: Tensor, name: str, beta: float, cap: float | None) -> Tensor:
    if name == "swiglu":
        return gate * torch.sigmoid(gate) * up
    return beta * torch.tanh(gate / beta) * torch.sigmoid(gate) * (up if cap is None else cap * torch.tanh(up / cap))


def straight(x: Tensor, block_format: str) -> Tensor:
    """The roundings of the definition, with the identity's gradient, written as x plus a constant."""
    with force("reference"), torch.no_grad():
        delta = fake_quantize(x, block_format) - x
    return x + delta


def oracle(z, index, weight, w1, w3, w2, name="situ", beta=4.0, cap=25.0, activations="none") -> Tensor:
    """Token by token and slot by slot, no grouping."""
    rounded = (lambda x: straight(x, "mxfp8")) if activations == "mxfp8" else (lambda x: x)
    w1, w3, w2 = (straight(w, "mxfp4") for w in (w1, w3, w2))
    z = rounded(z)
    rows = []
    for n in range(z.shape[0]):
        row = torch.zeros_like(z[n])
        for a in range(index.shape[1]):
            e = int(index[n, a])
            hidden = rounded(unit(w1[e] @ z[n], w3[e] @ z[n], name, beta, cap))
            row = row + weight[n, a] * (w2[e] @ hidden)
        rows.append(row)
    return torch.stack(rows)


@pytest.mark.parametrize("options", ACTIVATION_ARGS)
@pytest.mark.parametrize("activations", ["none", "mxfp8"])
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 3e-6), (torch.bfloat16, 2.5e-2)]
)
def test_packed_experts_equal_the_straight_line(dtype, tolerance, activations, options):
    z, index, weight, *w = operands()
    z, w = z.to(dtype), [x.to(dtype) for x in w]
    name, beta, cap = options
    packed = [PackedWeight.of(x) for x in w]
    mixing = weight if dtype == torch.float64 else weight.float()
    found = packed_experts(z, index, mixing, *packed, name, beta=beta, linear_beta=cap, activations=activations)
    expected = oracle(z.double(), index, weight, *(x.double() for x in w), *options, activations)
    assert found.dtype == dtype
    # A hidden value next to a tie of the 8-bit grid may fall the other way in a lower precision, by one step.
    slack = max(tolerance, 1e-3) if dtype == torch.float32 and activations == "mxfp8" else tolerance
    assert float((found.double() - expected).norm()) < slack * float(expected.norm())
    assert not found.requires_grad


def test_activation_rounding_matters():
    z, index, weight, *w = operands()
    packed = [PackedWeight.of(x) for x in w]
    plain = packed_experts(z, index, weight, *packed)
    rounded = packed_experts(z, index, weight, *packed, activations="mxfp8")
    difference = float((plain - rounded).norm() / plain.norm())
    assert 0.005 < difference < 0.06, "two roundings at 3 bits of mantissa: a few percent"


def test_only_used_experts_are_decoded(monkeypatch):
    z, index, weight, *w = operands(tokens=2)
    seen = []
    original = experts_module.dequantize_mxfp4
    monkeypatch.setattr(
        experts_module, "dequantize_mxfp4", lambda c, s, d: seen.append(tuple(c.shape)) or original(c, s, d)
    )
    packed = [PackedWeight.of(x) for x in w]
    packed_experts(z, index, weight, *packed)
    assert len(seen) == 3 * len(index.unique()) < 3 * 7 and all(len(shape) == 2 for shape in seen)


@pytest.mark.parametrize("options", ACTIVATION_ARGS)
def test_gradients_go_straight_through(options):
    args = operands()
    name, beta, cap = options
    wanted = [0, 2, 3, 4, 5]

    def gradients(function) -> list[Tensor]:
        inputs = [a.clone().requires_grad_() if i in wanted else a for i, a in enumerate(args)]
        out = function(*inputs)
        cotangent = torch.randn(out.shape, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
        return [out.detach(), *torch.autograd.grad(out, [inputs[i] for i in wanted], cotangent)]

    def ours(z, index, weight, *w) -> Tensor:
        w = [fake_quantize(x, "mxfp4") for x in w]
        return rounded_input_experts(z, index, weight, *w, name, beta=beta, linear_beta=cap)

    expected = gradients(lambda *inputs: oracle(*inputs, *options, "mxfp8"))
    for found, exact in zip(gradients(ours), expected):
        torch.testing.assert_close(found, exact, rtol=0, atol=1e-12 * float(exact.abs().max()))


def test_gradients_in_bfloat16_stay_near():
    args = [a.float() if a.is_floating_point() else a for a in operands()]
    args[0] = args[0].bfloat16()

    def gradients(convert) -> list[Tensor]:
        inputs = [convert(a).requires_grad_() if a.is_floating_point() else a for a in args]
        out = rounded_input_experts(*inputs)
        return [out.detach(), *torch.autograd.grad(out.double().sum(), [i for i in inputs if i.is_floating_point()])]

    for found, exact, given in zip(
        gradients(torch.clone), gradients(lambda a: a.double()), [args[0], args[0], *args[2:]]
    ):
        assert found.dtype == given.dtype
        assert float((found.double() - exact).norm()) < 0.03 * float(exact.norm())


def test_packed_and_dense_agree_bitwise():
    """What a rollout computes from the packed weights is what training computed with the rounded ones."""
    z, index, weight, *w = [a.float() if a.is_floating_point() else a for a in operands(tokens=40)]
    packed = [PackedWeight.of(x) for x in w]
    dense = [fake_quantize(x, "mxfp4") for x in w]
    assert torch.equal(
        packed_experts(z, index, weight, *packed, activations="mxfp8"), rounded_input_experts(z, index, weight, *dense)
    )
    with force("torch"):
        assert torch.equal(packed_experts(z, index, weight, *packed), routed_experts(z, index, weight, *dense))


@pytest.mark.parametrize("implementation", ["torch", "native"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("rule", ["floor", "ceil"])
def test_fake_quantisation_has_the_gradient_of_the_identity(dtype, rule, implementation):
    if implementation == "native" and (reason := build.unavailable_reason("mx")):
        pytest.skip(reason)
    x = torch.randn(5, 70, dtype=dtype)
    x[0, 0] = 7.9 * 2.0**30  # saturates under floor; its neighbours fall to zero
    x.requires_grad_()
    with force(implementation):
        y = fake_quantize(x, "mxfp4", rule)
    cotangent = torch.randn(5, 70, dtype=dtype)
    (found,) = torch.autograd.grad(y, x, cotangent)
    assert torch.equal(found, cotangent) and y.dtype == dtype
    assert y[0, 0] != x[0, 0] and y[0, 1:32].eq(0).all()


def test_fake_quantisation_saves_nothing():
    saved = []
    x = torch.randn(4, 64, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        fake_quantize(x)
    assert saved == []


def test_no_tokens_and_wrong_names():
    z, index, weight, *w = operands()
    packed = [PackedWeight.of(x) for x in w]
    assert packed_experts(z[:0], index[:0], weight[:0], *packed, activations="mxfp8").shape == (0, 64)
    with pytest.raises(ConfigError, match="'relu'.*situ, swiglu"):
        packed_experts(z, index, weight, *packed, "relu")
    with pytest.raises(ConfigError, match="'int8'.*none, mxfp8"):
        packed_experts(z, index, weight, *packed, activations="int8")
