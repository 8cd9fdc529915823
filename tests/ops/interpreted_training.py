"""What a training step runs beside attention and experts, against formulas in float64 and plain steps: the loss, Muon, keys
from content and shared channels, the output gate."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from perilune.ops.choice import force
from perilune.ops.cross_entropy import linear_cross_entropy
from perilune.ops.mla.keys import keys_and_values
from perilune.ops.newton_schulz import iterate
from perilune.ops.sigmoid_gate import sigmoid_gate
from perilune.ops.triton.cross_entropy import rows
from perilune.ops.triton.newton_schulz import obstacle, symmetric
from perilune.optim.groups import Cut
from perilune.optim.muon import Muon

pytestmark = pytest.mark.usefixtures("poisoned_memory")

SHAPES = {"heads": (24, 10), "experts": (3, 4, 10), "tall": (80, 61), "odd": (3, 7), "silent": (4, 10)}
CUTS = {
    "heads": (Cut(0, 24, 12, 0, 8), Cut(0, 24, 12, 8, 4)),
    "experts": (Cut(0, 12, 4, 0, 4),),
    "tall": (Cut(0, 80, 80, 0, 80),),
    "odd": (Cut(0, 3, 3, 0, 3),),
    "silent": (Cut(0, 4, 4, 0, 4),),
}


@pytest.mark.parametrize("vocabulary", [37, 4096, 5000])
@pytest.mark.parametrize("reduction", ["sum", "none"])
def test_cross_entropy(reduction: str, vocabulary: int) -> None:
    torch.manual_seed(0)
    x, weight, target = torch.randn(9, 6), torch.randn(vocabulary, 6), torch.randint(0, vocabulary, (9,))
    found = []
    for dtype in (torch.float32, torch.float64):
        inputs = [t.to(dtype).requires_grad_() for t in (x, weight)]
        if dtype == torch.float32:
            with force("triton"):
                loss = linear_cross_entropy(*inputs, target, reduction=reduction, chunk=4)
        else:
            loss = functional.cross_entropy(inputs[0] @ inputs[1].t(), target, reduction=reduction)
        cotangent = torch.linspace(0.5, 1.5, loss.numel(), dtype=dtype).view(loss.shape)
        found.append([loss.detach(), *torch.autograd.grad(loss, inputs, cotangent)])
    for got, right in zip(*found, strict=True):
        torch.testing.assert_close(got.double(), right, rtol=1e-5, atol=1e-5)


def test_cross_entropy_of_rows_that_do_not_count() -> None:
    torch.manual_seed(0)
    logits, target = 9 * torch.randn(6, 300), torch.tensor([5, -100, 299, 300, -100, 0])
    logits[1, 7], logits[4] = float("inf"), float("-inf")
    exact, factor = logits.double(), torch.rand(6)
    loss = rows(logits, target, -100, True, factor)
    assert loss[1] == loss[4] == 0 and loss[3].isnan(), "ignored, ignored, outside the vocabulary"
    assert not logits[1].any() and not logits[4].any()
    for row in (0, 2, 5):
        own = exact[row].clone().requires_grad_()
        value = functional.cross_entropy(own, target[row])
        (factor[row].double() * value).backward()
        torch.testing.assert_close(loss[row].double(), value.detach(), rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(logits[row].double(), own.grad, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("scaled", [False, True])
def test_muon_by_addresses_equals_the_plain_steps(scaled: bool) -> None:
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
        x = functional.normalize(torch.randn(shape).flatten(1), dim=1).view(shape)
        with force("triton"):
            got = iterate(x)
        with force("torch"):
            plain = iterate(x)
        torch.testing.assert_close(got, plain, rtol=1e-4, atol=1e-5)


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
