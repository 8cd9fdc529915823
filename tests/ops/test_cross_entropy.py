"""Chunked cross-entropy of a linear head against torch's own on whole logits in float64."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from perilune.errors import ConfigError, RequestError
from perilune.ops import cross_entropy as op
from perilune.ops.choice import force
from perilune.ops.cross_entropy import linear_cross_entropy
from perilune.ops.native import build, rows

pytestmark = pytest.mark.usefixtures("poisoned_memory")


@pytest.fixture(params=["torch", "native"])
def implementation(request: pytest.FixtureRequest) -> Iterator[str]:
    reason = build.unavailable_reason("elementwise")
    if request.param == "native" and reason:
        pytest.skip(reason)
    with force(request.param):
        yield request.param


def whole(x: Tensor, weight: Tensor, target: Tensor, reduction: str, ignore_index: int = -100) -> Tensor:
    return F.cross_entropy(x @ weight.t(), target, reduction=reduction, ignore_index=ignore_index)


def loss_and_gradients(function, x: Tensor, weight: Tensor) -> list[Tensor]:
    x, weight = (t.detach().clone().requires_grad_() for t in (x, weight))
    loss = function(x, weight)
    cotangent = torch.randn(loss.shape, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
    return [loss.detach(), *torch.autograd.grad(loss, (x, weight), cotangent.to(torch.bfloat16).to(loss.dtype))]


def targets(tokens: int, vocabulary: int, ignored: float = 0.2, ignore_index: int = -100) -> Tensor:
    target = torch.randint(0, vocabulary, (tokens,))
    return target.masked_fill(torch.rand(tokens) < ignored, ignore_index)


@given(
    tokens=st.integers(1, 40), vocabulary=st.integers(1, 50), width=st.integers(1, 12), chunk=st.integers(1, 45),
    reduction=st.sampled_from(["sum", "mean", "none"]), ignored=st.sampled_from([0.0, 0.5]),
)  # fmt: skip
def test_float64_equals_the_whole(tokens, vocabulary, width, chunk, reduction, ignored) -> None:
    x, weight = torch.randn(tokens, width, dtype=torch.float64), torch.randn(vocabulary, width, dtype=torch.float64)
    target = targets(tokens, vocabulary, ignored)
    target[0] = 0  # at least one token counts
    ours = loss_and_gradients(
        lambda x, w: linear_cross_entropy(x, w, target, reduction=reduction, chunk=chunk), x, weight
    )
    for got, want in zip(ours, loss_and_gradients(lambda x, w: whole(x, w, target, reduction), x, weight), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


def root_mean_square(x: Tensor) -> float:
    return float(x.double().square().mean().sqrt())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("reduction", ["sum", "mean", "none"])
def test_error_is_that_of_plain_logits(reduction: str, dtype: torch.dtype, implementation: str) -> None:
    """The plain path: logits in the inputs' dtype, softmax in float32."""
    x, weight, target = torch.randn(300, 48).to(dtype), 0.3 * torch.randn(701, 48).to(dtype), targets(300, 701)

    def plain(x: Tensor, weight: Tensor) -> Tensor:
        return F.cross_entropy((x @ weight.t()).float(), target, reduction=reduction)

    exact = loss_and_gradients(lambda x, w: whole(x, w, target, reduction), x.double(), weight.double())
    theirs = loss_and_gradients(plain, x, weight)
    ours = loss_and_gradients(lambda x, w: linear_cross_entropy(x, w, target, reduction=reduction, chunk=64), x, weight)
    assert ours[0].dtype == torch.float32 and ours[1].dtype == ours[2].dtype == dtype
    for got, other, truth in zip(ours, theirs, exact, strict=True):
        floor = 2**-23 * root_mean_square(truth)
        assert root_mean_square(got - truth) <= 2 * root_mean_square(other - truth) + floor


class Sizes(TorchDispatchMode):
    """Records every operation's largest result, to see that whole logits never exist."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[int, ...]] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        for x in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(x, Tensor):
                self.seen.append(tuple(x.shape))
        return out


@pytest.mark.parametrize("reduction", ["sum", "none"])
def test_logits_of_one_chunk_at_most(reduction: str, implementation: str) -> None:
    tokens, vocabulary, width, chunk = 96, 500, 8, 16
    x, weight = torch.randn(tokens, width, requires_grad=True), torch.randn(vocabulary, width, requires_grad=True)
    saved: list[Tensor] = []
    with Sizes() as sizes, torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        loss = linear_cross_entropy(x, weight, targets(tokens, vocabulary), reduction=reduction, chunk=chunk)
        loss.sum().backward()
    with_vocabulary = [shape for shape in sizes.seen if vocabulary in shape and width not in shape]
    assert with_vocabulary and all(torch.Size(shape).numel() <= chunk * vocabulary for shape in with_vocabulary)
    assert all(vocabulary not in t.shape or width in t.shape for t in saved)


def test_the_default_chunk_bounds_the_logits(implementation: str) -> None:
    vocabulary = op.CPU_CHUNK_ELEMENTS // 20
    with Sizes() as sizes:
        linear_cross_entropy(torch.randn(50, 2), torch.randn(vocabulary, 2), targets(50, vocabulary, 0.0))
    assert max(torch.Size(shape).numel() for shape in sizes.seen) <= op.CPU_CHUNK_ELEMENTS


def test_the_head_is_multiplied_once(implementation: str) -> None:
    """Sum and mean compute their gradients in the forward pass: three products a chunk, none in backward."""
    x, weight = torch.randn(64, 8, requires_grad=True), torch.randn(30, 8, requires_grad=True)

    class Products(TorchDispatchMode):
        count = 0

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            self.count += "mm" in function.__name__
            return function(*args, **(kwargs or {}))

    with Products() as products:
        loss = linear_cross_entropy(x, weight, targets(64, 30, 0.0), reduction="sum", chunk=16)
        forward = products.count
        loss.backward()
    assert forward == 12 and products.count == 12
    with Products() as products, torch.no_grad():
        linear_cross_entropy(x, weight, targets(64, 30, 0.0), reduction="sum", chunk=16)
    assert products.count == 4


@pytest.mark.parametrize("frozen", ["x", "weight"])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_one_side_without_gradient(frozen: str, reduction: str, implementation: str) -> None:
    x, weight, target = torch.randn(20, 6), torch.randn(11, 6), targets(20, 11)
    wanted = loss_and_gradients(lambda x, w: linear_cross_entropy(x, w, target, reduction=reduction).sum(), x, weight)
    leaf = (weight if frozen == "x" else x).requires_grad_()
    loss = linear_cross_entropy(x, weight, target, reduction=reduction).sum()
    cotangent = torch.randn((), generator=torch.Generator().manual_seed(7), dtype=torch.float64).bfloat16().float()
    (gradient,) = torch.autograd.grad(loss, leaf, cotangent)
    torch.testing.assert_close(gradient, wanted[2 if frozen == "x" else 1])


def test_float32_weight_under_bfloat16_activations(implementation: str) -> None:
    """The products are in bfloat16, the parameter's gradient in its own float32."""
    x, weight, target = torch.randn(40, 16).bfloat16(), torch.randn(33, 16), targets(40, 33)
    loss, dx, dweight = loss_and_gradients(lambda x, w: linear_cross_entropy(x, w, target), x, weight)
    assert (loss.dtype, dx.dtype, dweight.dtype) == (torch.float32, torch.bfloat16, torch.float32)
    exact = loss_and_gradients(lambda x, w: whole(x, w, target, "mean"), x.double(), weight.bfloat16().double())
    torch.testing.assert_close(dweight.double(), exact[2], rtol=0.05, atol=1e-3)


def test_ignored_tokens_count_for_nothing(implementation: str) -> None:
    """Whatever they hold: not even a NaN gets out of them."""
    x, weight = torch.randn(10, 4), torch.randn(7, 4)
    target = targets(10, 7, 0.0)
    target[3:6] = -100
    x[3:6] = float("nan")
    kept = [0, 1, 2, 6, 7, 8, 9]
    for reduction in ("sum", "mean", "none"):
        ours = loss_and_gradients(
            lambda x, w, r=reduction: linear_cross_entropy(x, w, target, reduction=r).sum(), x, weight
        )
        want = loss_and_gradients(lambda x, w, r=reduction: whole(x[kept], w, target[kept], r).sum(), x, weight)
        torch.testing.assert_close(ours[0], want[0])
        torch.testing.assert_close(ours[2], want[2])
        torch.testing.assert_close(ours[1][kept], want[1][kept])
        assert (ours[1][3:6] == 0).all()


def test_masked_rows_where_tokens_are_not_dropped() -> None:
    """On a device the ignored tokens stay in the chunks; both row kernels must mask them."""
    logits, target = torch.randn(6, 9), torch.tensor([1, -7, 2, -7, 0, 8])
    truth = logits.double().requires_grad_()
    F.cross_entropy(truth, target, reduction="sum", ignore_index=-7).backward()
    scale = torch.arange(1.0, 7.0)
    assert build.unavailable_reason("elementwise") or op.select(logits).implementation == "native"
    for step in (op._torch_rows, *([] if build.unavailable_reason("elementwise") else [op._native_rows])):
        loss, gradient = step(logits.clone(), target, -7, True, scale)
        assert loss[1] == loss[3] == 0
        torch.testing.assert_close(gradient, (truth.grad * scale[:, None].double()).float(), rtol=1e-5, atol=1e-6)


def test_nothing_to_count(implementation: str) -> None:
    x, weight = torch.randn(5, 4), torch.randn(7, 4)
    loss, dx, dweight = loss_and_gradients(
        lambda x, w: linear_cross_entropy(x, w, torch.full((5,), -100), reduction="sum"), x, weight
    )
    assert loss == 0 and (dx == 0).all() and (dweight == 0).all()
    assert linear_cross_entropy(x, weight, torch.full((5,), -100)).isnan()


def test_extreme_logits(implementation: str) -> None:
    """Logits of +-1e4: the loss is their distance, exactly, and the gradient is finite."""
    x, weight = torch.tensor([[1.0], [1.0]]), torch.tensor([[1e4], [-1e4], [0.0]])
    loss, *gradients = loss_and_gradients(
        lambda x, w: linear_cross_entropy(x, w, torch.tensor([0, 1]), reduction="none"), x, weight
    )
    assert loss.tolist() == [0.0, 2e4]
    assert all(gradient.isfinite().all() for gradient in gradients)


def test_not_a_number_reaches_the_loss(implementation: str) -> None:
    x = torch.randn(5, 4)
    x[2, 1] = float("nan")
    loss = linear_cross_entropy(x, torch.randn(7, 4), targets(5, 7, 0.0), reduction="none")
    assert loss.isnan().tolist() == [False, False, True, False, False]


def test_confident_losses_keep_their_digits(implementation: str) -> None:
    """A loss of 1e-4 is log(1 + 1e-4): it must not drown in the logits' size."""
    x, weight = torch.ones(1, 1), torch.tensor([[12.0], [12.0 - 9.21034]])
    loss = linear_cross_entropy(x, weight, torch.tensor([0]))
    torch.testing.assert_close(
        loss.double(), whole(x.double(), weight.double(), torch.tensor([0]), "mean"), rtol=1e-2, atol=0
    )


def test_any_layout_in_memory(implementation: str) -> None:
    x, weight, target = torch.randn(8, 20).t(), torch.randn(8, 13).t(), targets(40, 13)[::2]
    ours = linear_cross_entropy(x, weight, target, reduction="none", chunk=6)
    torch.testing.assert_close(ours, whole(x, weight, target, "none"))


def test_repeats_bitwise(implementation: str) -> None:
    x, weight, target = torch.randn(200, 32), torch.randn(400, 32), targets(200, 400)
    assert x.shape[0] * 400 > rows.PARALLEL_ELEMENTS
    runs = [loss_and_gradients(lambda x, w: linear_cross_entropy(x, w, target, chunk=90), x, weight) for _ in range(2)]
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


def test_arguments_are_checked() -> None:
    x, weight, target = torch.randn(5, 4), torch.randn(7, 4), torch.tensor([0, 1, -100, 7, 2])
    with pytest.raises(RequestError, match=r"target 7 at token 3 lies outside the vocabulary 0\.\.6"):
        linear_cross_entropy(x, weight, target)
    with pytest.raises(RequestError, match="target -1 at token 0"):
        linear_cross_entropy(x, weight, torch.full((5,), -1))
    with pytest.raises(ConfigError, match=r"\[N, D\], \[Z, D\], \[N\]"):
        linear_cross_entropy(x, torch.randn(7, 5), target)
    with pytest.raises(ConfigError, match="mean, sum, none"):
        linear_cross_entropy(x, weight, target, reduction="max")
    with pytest.raises(ConfigError, match="chunk=0"):
        linear_cross_entropy(x, weight, target, chunk=0)
