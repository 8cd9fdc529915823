"""Attention over depth against the stacked formula in float64, for each implementation."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from perilune.errors import ConfigError
from perilune.ops.attnres import mix, mix_weights, select
from perilune.ops.choice import force
from perilune.ops.native import build, rows

pytestmark = pytest.mark.usefixtures("poisoned_memory")

EPS = 1e-5


@pytest.fixture(params=["torch", "native"])
def implementation(request: pytest.FixtureRequest) -> Iterator[str]:
    reason = build.unavailable_reason("attnres")
    if request.param == "native" and reason:
        pytest.skip(reason)
    with force(request.param):
        yield request.param


def by_formula(score_weight: Tensor, *sources: Tensor) -> Tensor:
    """Report Eq. 8-10, with everything stacked: keys are normalised sources, values are not."""
    values = torch.stack(sources)
    keys = values / torch.sqrt((values * values).mean(-1, keepdim=True) + EPS)
    weights = torch.softmax((keys * score_weight).sum(-1), 0)
    return (weights[..., None] * values).sum(0)


def in_float32(score_weight: Tensor, *sources: Tensor) -> Tensor:
    return by_formula(score_weight.float(), *[v.float() for v in sources]).to(sources[0].dtype)


def ours(score_weight: Tensor, *sources: Tensor) -> Tensor:
    return mix(sources, score_weight, EPS)


def values_and_gradients(function, inputs: list[Tensor]) -> list[Tensor]:
    inputs = [x.detach().clone().requires_grad_() for x in inputs]
    out = function(*inputs)
    cotangent = torch.randn(out.shape, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
    return [out.detach(), *torch.autograd.grad(out, inputs, cotangent.to(torch.bfloat16).to(out.dtype))]


def inputs_of(count: int, shape: tuple[int, ...], dtype: torch.dtype, spread: float = 0.2) -> list[Tensor]:
    """The score weight, then the sources."""
    wide = dtype if dtype == torch.float64 else torch.float32
    return [spread * torch.randn(shape[-1]).to(wide), *[(i + 1) * torch.randn(shape).to(dtype) for i in range(count)]]


def root_mean_square(x: Tensor) -> float:
    return float(x.double().square().mean().sqrt())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("count", [2, 3, 9])
def test_error_is_that_of_plain_float32(count: int, dtype: torch.dtype, implementation: str) -> None:
    for shape in ((4, 400, 64), (600, 301), (200, 1000)):
        inputs = inputs_of(count, shape, dtype)
        exact = values_and_gradients(by_formula, [x.double() for x in inputs])
        plain = values_and_gradients(in_float32, inputs)
        for got, theirs, truth in zip(values_and_gradients(ours, inputs), plain, exact, strict=True):
            assert got.dtype == theirs.dtype
            floor = 2**-24 * root_mean_square(truth)
            assert root_mean_square(got - truth) <= 2 * root_mean_square(theirs - truth) + floor


def test_float64_equals_the_formula() -> None:
    inputs = inputs_of(5, (2, 7, 19), torch.float64)
    for got, truth in zip(values_and_gradients(ours, inputs), values_and_gradients(by_formula, inputs), strict=True):
        torch.testing.assert_close(got, truth, rtol=1e-12, atol=1e-12)
    torch.autograd.gradcheck(ours, [x.requires_grad_() for x in inputs_of(3, (2, 4), torch.float64)])


@given(rows=st.integers(0, 40), width=st.integers(1, 70), count=st.integers(1, 12), native=st.booleans())
def test_any_shape(rows: int, width: int, count: int, native: bool) -> None:
    inputs = inputs_of(count, (rows, width), torch.float32)
    with force("native" if native else "torch"):
        got = values_and_gradients(ours, inputs) if count > 1 else [ours(*inputs)]
    truths = values_and_gradients(by_formula, [x.double() for x in inputs])
    for value, truth in zip(got, truths[: len(got)], strict=True):
        torch.testing.assert_close(value.double(), truth, rtol=1e-4, atol=1e-4)


def test_zero_score_weights_give_the_mean(implementation: str) -> None:
    sources = [torch.randn(4, 32) for _ in range(5)]
    torch.testing.assert_close(mix(sources, torch.zeros(32), EPS), torch.stack(sources).mean(0))


def test_a_single_source_is_returned_as_it_is(implementation: str) -> None:
    """Layer 0 reads the embedding alone: weight exactly 1, no gradient to the score weight."""
    source, score_weight = torch.randn(3, 8, requires_grad=True), torch.randn(8, requires_grad=True)
    mixed = mix([source], score_weight, EPS)
    assert mixed is source
    mixed.sum().backward()
    assert score_weight.grad is None and torch.equal(source.grad, torch.ones(3, 8))


def test_large_scores_pick_one_source(implementation: str) -> None:
    """Scores in the hundreds: the softmax must subtract the maximum."""
    sources = [torch.ones(2, 16), -torch.ones(2, 16), 3 * torch.ones(2, 16)]
    for value in values_and_gradients(ours, [torch.full((16,), 100.0), *sources]):
        assert value.isfinite().all()
    torch.testing.assert_close(mix(sources, torch.full((16,), 100.0), 0.0), torch.full((2, 16), 2.0))


@pytest.mark.parametrize("count", [1, 4])
def test_weights_are_those_of_the_mix(count: int, implementation: str) -> None:
    score_weight, *sources = inputs_of(count, (3, 5, 24), torch.float32)
    weights = mix_weights(sources, score_weight, EPS)
    assert weights.shape == (3, 5, count) and weights.dtype == torch.float32
    torch.testing.assert_close(weights.sum(-1), torch.ones(3, 5))
    by_weights = sum(weights[..., i, None] * source for i, source in enumerate(sources))
    torch.testing.assert_close(by_weights, mix(sources, score_weight, EPS), rtol=1e-5, atol=1e-5)
    score_weight.requires_grad_()
    torch.testing.assert_close(mix_weights(sources, score_weight, EPS), weights)
    if count > 1:
        (gradient,) = torch.autograd.grad(mix_weights(sources, score_weight, EPS)[..., 0].sum(), score_weight)
        assert gradient.abs().sum() > 0


def test_saves_no_stacked_copy(implementation: str) -> None:
    """Training keeps the sources by reference, and 2M numbers a token."""
    count, tokens, width = 6, 50, 64
    inputs = [x.requires_grad_() for x in inputs_of(count, (tokens, width), torch.float32)]
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        ours(*inputs)
    known = {x.data_ptr() for x in inputs}
    extra = sum(x.numel() for x in saved if x.data_ptr() not in known)
    assert extra == 2 * count * tokens


def test_forms_no_stacked_tensor(implementation: str) -> None:
    """No operation in forward or backward returns more than one source's size."""
    count, tokens, width = 6, 50, 64

    class Largest(TorchDispatchMode):
        size = 0

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            out = function(*args, **(kwargs or {}))
            for x in out if isinstance(out, (tuple, list)) else [out]:
                if isinstance(x, Tensor):
                    self.size = max(self.size, x.numel())
            return out

    inputs = [x.requires_grad_() for x in inputs_of(count, (tokens, width), torch.float32)]
    with Largest() as seen:
        ours(*inputs).sum().backward()
    assert seen.size == tokens * width


def test_sources_that_want_no_gradient_get_none(implementation: str) -> None:
    score_weight, *sources = inputs_of(4, (6, 16), torch.float32)
    wanted = values_and_gradients(ours, [score_weight, *sources])
    sources[1].requires_grad_()
    score_weight.requires_grad_()
    cotangent = torch.randn((6, 16), generator=torch.Generator().manual_seed(7), dtype=torch.float64)
    mix(sources, score_weight, EPS).backward(cotangent.to(torch.bfloat16).float())
    torch.testing.assert_close(sources[1].grad, wanted[3])
    torch.testing.assert_close(score_weight.grad, wanted[1])
    assert sources[0].grad is None and sources[3].grad is None


def test_the_same_tensor_twice(implementation: str) -> None:
    """Where a block boundary falls, the running sum may also stand in the bank: its two gradients add up."""
    shared, other = torch.randn(3, 8), torch.randn(3, 8)
    score_weight = torch.randn(8)
    got = values_and_gradients(lambda c, v, w: mix([v, w, v], c, EPS), [score_weight, shared, other])
    truth = values_and_gradients(
        lambda c, v, w: by_formula(c, v, w, v), [score_weight.double(), shared.double(), other.double()]
    )
    for value, exact in zip(got, truth, strict=True):
        torch.testing.assert_close(value.double(), exact, rtol=1e-4, atol=1e-5)


def test_t08_sources_stay_as_they_were(implementation: str) -> None:
    """The bank's slots are immutable: no source is written to, and the result shares no memory with them."""
    bank = torch.randn(4, 10, 32)  # slots of one buffer, as a server keeps them
    sources = list(bank)
    before = bank.clone()
    mixed = mix(sources, torch.randn(32), EPS)
    mixed.add_(100)
    assert torch.equal(bank, before)


def test_any_layout_in_memory(implementation: str) -> None:
    score_weight, *plain = inputs_of(3, (4, 6, 32), torch.float32)
    wanted = values_and_gradients(ours, [score_weight, *plain])
    token_major = torch.stack(plain, 2)  # [B, T, M, D]: rows M*D apart
    for sources in (
        list(token_major.unbind(2)),
        [v.mT.contiguous().mT for v in plain],
        [plain[0].transpose(0, 1).contiguous().transpose(0, 1), *plain[1:]],
    ):
        leaves = [score_weight.detach().requires_grad_(), *[v.detach().requires_grad_() for v in sources]]
        out = ours(*leaves)
        cotangent = torch.randn(out.shape, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
        cotangent = cotangent.to(torch.bfloat16).float().mT.contiguous().mT
        for got, want in zip([out, *torch.autograd.grad(out, leaves, cotangent)], wanted, strict=True):
            torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


def test_not_a_number_stays_in_its_token(implementation: str) -> None:
    score_weight, *sources = inputs_of(3, (5, 16), torch.float32)
    sources[1][2, 3] = float("nan")
    mixed, _, *gradients = values_and_gradients(ours, [score_weight, *sources])
    for value in (mixed, *gradients):
        assert value[2].isnan().all() and value[[0, 1, 3, 4]].isfinite().all()


def test_repeats_bitwise_with_any_number_of_threads(implementation: str) -> None:
    if implementation == "torch":
        pytest.skip("torch's own reductions decide")
    inputs = inputs_of(4, (300, 64), torch.float32)
    assert 4 * 300 * 64 > rows.PARALLEL_ELEMENTS, "too small to run in parallel"
    before = torch.get_num_threads()
    try:
        results = []
        for count in (1, 2, 3, 1):
            torch.set_num_threads(count)
            results.append(values_and_gradients(ours, inputs))
    finally:
        torch.set_num_threads(before)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


def test_select_and_reference() -> None:
    sources = [torch.randn(2, 4), torch.randn(2, 4).bfloat16()]
    assert "float32 and" in select(sources).reason
    inputs = inputs_of(3, (2, 4), torch.float64)
    with force("reference"):
        assert select(inputs[1:]).implementation == "reference"
        torch.testing.assert_close(ours(*inputs), by_formula(*inputs))


def test_arguments_are_checked() -> None:
    with pytest.raises(ConfigError, match="no sources"):
        mix([], torch.randn(4), EPS)
    with pytest.raises(ConfigError, match="one shape"):
        mix([torch.randn(2, 4), torch.randn(3, 4)], torch.randn(4), EPS)
    with pytest.raises(ConfigError, match=r"shape \[5\].*need \[4\]"):
        mix_weights([torch.randn(2, 4)], torch.randn(5), EPS)
