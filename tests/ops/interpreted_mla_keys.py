"""Keys from content and shared channels, and the output gate: the Triton kernels against the formulas in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from perilune.ops.choice import force
from perilune.ops.mla.keys import keys_and_values
from perilune.ops.sigmoid_gate import sigmoid_gate

pytestmark = pytest.mark.usefixtures("poisoned_memory")


def values_and_gradients(function, forced: str, *inputs: Tensor) -> list[Tensor]:
    inputs = tuple(x.detach().clone().requires_grad_() for x in inputs)
    with force(forced):
        out = function(*inputs)
        out = out if isinstance(out, tuple) else (out,)
        draw = torch.Generator().manual_seed(1)
        cotangents = [torch.randn(x.shape, generator=draw).to(x.dtype) for x in out]
        return [x.detach() for x in out] + list(torch.autograd.grad(out, inputs, cotangents))


@pytest.mark.parametrize(("heads", "content", "value", "shared"), [(3, 12, 20, 6), (1, 16, 16, 8)])
def test_keys(heads: int, content: int, value: int, shared: int) -> None:
    torch.manual_seed(0)
    kv, wide = torch.randn(2, 19, heads, content + value), torch.randn(2, 19, 40)
    part = wide[..., 5 : 5 + shared]  # a slice, as in the model

    def joined(kv: Tensor, part: Tensor) -> tuple[Tensor, Tensor]:
        return keys_and_values(kv, part, content)

    got = values_and_gradients(joined, "triton", kv, part)
    plain = values_and_gradients(joined, "torch", kv.double(), part.double())
    for a, b in zip(got, plain, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    "dtypes", [(torch.float32, torch.float32), (torch.float32, torch.float16), (torch.float16, torch.float16)]
)
def test_gate(dtypes: tuple[torch.dtype, torch.dtype]) -> None:
    torch.manual_seed(0)
    x, gate = torch.randn(3, 7, 131).to(dtypes[0]), (9 * torch.randn(3, 7, 131)).to(dtypes[1])
    got = values_and_gradients(sigmoid_gate, "triton", x, gate)
    assert [t.dtype for t in got] == [dtypes[1], dtypes[0], dtypes[1]]
    plain = values_and_gradients(sigmoid_gate, "torch", x.double(), gate.double())
    tolerance = 2e-3 if torch.float16 in dtypes else 1e-6
    for a, b in zip(got, plain, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=tolerance, atol=tolerance)
