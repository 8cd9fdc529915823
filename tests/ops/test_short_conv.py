"""Short convolution against a loop over tokens and taps in float64, whole, split into calls, and packed."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from perilune.errors import ConfigError
from perilune.ops import short_conv as op
from perilune.ops.choice import force
from perilune.ops.native import build, rows
from perilune.ops.segments import Segments
from perilune.ops.short_conv import short_conv

pytestmark = pytest.mark.usefixtures("poisoned_memory")


@pytest.fixture(params=["torch", "native"])
def implementation(request: pytest.FixtureRequest) -> Iterator[str]:
    reason = build.unavailable_reason("elementwise")
    if request.param == "native" and reason:
        pytest.skip(reason)
    with force(request.param):
        yield request.param


def by_hand(
    x: Tensor, weight: Tensor, window: Tensor | None = None, starts: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """y_t = silu(sum over taps), token by token; `starts` [B, T] is True at a document's first token."""
    batch, length, width = x.shape
    taps = weight.shape[1]
    rows_out, windows = [], []
    for b in range(batch):
        history = [torch.zeros_like(x[0, 0]) for _ in range(taps - 1)]
        if window is not None:
            history = [window[b, :, j] for j in range(taps - 1)]
        outputs = []
        for t in range(length):
            if starts is not None and starts[b, t]:
                history = [torch.zeros_like(x[0, 0]) for _ in range(taps - 1)]
            history = [*history, x[b, t]]
            pre = sum(weight[:, j] * history[j] for j in range(taps))
            outputs.append(pre * torch.sigmoid(pre))
            history = history[1:]
        rows_out.append(torch.stack(outputs) if outputs else x[b])
        windows.append(torch.stack(history, -1) if history else x.new_zeros(width, 0))
    return torch.stack(rows_out), torch.stack(windows)


def plain_in_float32(x: Tensor, weight: Tensor) -> Tensor:
    """The usual torch way: depthwise conv1d over padded input, then silu."""
    taps = weight.shape[1]
    padded = F.pad(x.float().transpose(1, 2), (taps - 1, 0))
    return F.silu(F.conv1d(padded, weight[:, None], groups=len(weight))).transpose(1, 2).to(x.dtype)


def values_and_gradients(function, inputs: list[Tensor]) -> list[Tensor]:
    """All outputs, then the gradients of all inputs for fixed cotangents of all outputs."""
    inputs = [x.detach().clone().requires_grad_() for x in inputs]
    outs = function(*inputs)
    outs = [o for o in (outs if isinstance(outs, tuple) else (outs,)) if o.numel()]  # one tap leaves an empty window
    generator = torch.Generator().manual_seed(7)
    cotangents = [
        torch.randn(o.shape, generator=generator, dtype=torch.float64).to(torch.bfloat16).to(o.dtype) for o in outs
    ]
    return [*[o.detach() for o in outs], *torch.autograd.grad(outs, inputs, cotangents)]


def root_mean_square(x: Tensor) -> float:
    return float(x.double().square().mean().sqrt())


def starts_of(batch: int, length: int, cuts: list[int]) -> Tensor:
    starts = torch.zeros(batch, length, dtype=torch.bool)
    starts[:, 0] = True
    for cut in cuts:
        starts[cut % batch, cut % length] = True
    return starts


@pytest.mark.parametrize("taps", [1, 2, 3, 4, 6])
def test_float64_equals_the_loop(taps: int) -> None:
    x, weight = torch.randn(2, 9, 5, dtype=torch.float64), torch.randn(5, taps, dtype=torch.float64)
    window = torch.randn(2, 5, taps - 1, dtype=torch.float64)
    inputs = [x, weight, window] if taps > 1 else [x, weight]
    for ours, truth in zip(
        values_and_gradients(short_conv, inputs), values_and_gradients(by_hand, inputs), strict=True
    ):
        torch.testing.assert_close(ours, truth, rtol=1e-12, atol=1e-12)


def test_gradients_by_finite_differences() -> None:
    x, weight = torch.randn(2, 5, 3, dtype=torch.float64), torch.randn(3, 4, dtype=torch.float64)
    window = torch.randn(2, 3, 3, dtype=torch.float64)
    torch.autograd.gradcheck(short_conv, [x.requires_grad_(), weight.requires_grad_(), window.requires_grad_()])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("taps", [2, 4, 5])
def test_error_is_that_of_plain_float32(taps: int, dtype: torch.dtype, implementation: str) -> None:
    inputs = [torch.randn(2, 600, 40).to(dtype), torch.randn(40, taps)]
    exact = values_and_gradients(lambda x, w: by_hand(x, w)[0], [x.double() for x in inputs])
    plain = values_and_gradients(plain_in_float32, inputs)
    ours = values_and_gradients(lambda x, w: short_conv(x, w)[0], inputs)
    for got, theirs, truth in zip(ours, plain, exact, strict=True):
        assert got.dtype == theirs.dtype
        floor = 2**-24 * root_mean_square(truth)
        assert root_mean_square(got - truth) <= 2 * root_mean_square(theirs - truth) + floor


@given(
    batch=st.integers(1, 3), length=st.integers(1, 40), width=st.integers(1, 20), taps=st.integers(1, 6),
    carried=st.booleans(), cuts=st.lists(st.integers(0, 200), max_size=6), block=st.integers(5, 300), native=st.booleans(),
)  # fmt: skip
def test_any_shape_with_window_or_segments(batch, length, width, taps, carried, cuts, block, native) -> None:
    """Also with a time block far below the length, so that tasks meet inside documents and windows."""
    inputs = [torch.randn(batch, length, width), torch.randn(width, taps)]
    starts, segments = None, None
    if carried and taps > 1:
        inputs.append(torch.randn(batch, width, taps - 1))
    elif not carried:
        starts = starts_of(batch, length, cuts)
        segments = Segments.from_starts(starts)

    def exact(x, w, window=None):
        return by_hand(x, w, window, starts)

    def ours(x, w, window=None):
        return short_conv(x, w, window, segments)

    with pytest.MonkeyPatch.context() as patch, force("native" if native else "torch"):
        patch.setattr(op, "TIME_BLOCK", block)
        got = values_and_gradients(ours, inputs)
    for value, truth in zip(got, values_and_gradients(exact, [x.double() for x in inputs]), strict=True):
        torch.testing.assert_close(value.double(), truth, rtol=1e-4, atol=1e-5)


@given(length=st.integers(1, 24), cuts=st.sets(st.integers(1, 23)), taps=st.integers(2, 5), native=st.booleans())
def test_any_split_into_calls_equals_one_call(length: int, cuts: set[int], taps: int, native: bool) -> None:
    x, weight = torch.randn(2, length, 6), torch.randn(6, taps)
    bounds = [0, *sorted(c for c in cuts if c < length), length]
    with force("native" if native else "torch"), torch.no_grad():
        whole, last = short_conv(x, weight)
        pieces, window = [], None
        for start, end in zip(bounds[:-1], bounds[1:], strict=True):
            piece, window = short_conv(x[:, start:end], weight, window)
            pieces.append(piece)
    torch.testing.assert_close(torch.cat(pieces, 1), whole, rtol=1e-6, atol=1e-6)
    assert torch.equal(window, last)


def test_gradients_pass_through_carried_windows(implementation: str) -> None:
    """Two calls joined by the window have the gradients of one call."""
    x, weight = torch.randn(2, 11, 6), torch.randn(6, 4)

    def split(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        parts, window = [], None
        for start, end in ((0, 2), (2, 3), (3, 11)):
            part, window = short_conv(x[:, start:end], weight, window)
            parts.append(part)
        return torch.cat(parts, 1), window

    for ours, whole in zip(
        values_and_gradients(split, [x, weight]), values_and_gradients(short_conv, [x, weight]), strict=True
    ):
        torch.testing.assert_close(ours, whole, rtol=1e-5, atol=1e-5)


def test_a_document_does_not_see_its_neighbours(implementation: str) -> None:
    """Values, window and gradients of a packed row equal those of each document alone."""
    lengths = [1, 2, 9, 3, 5]
    x, weight = torch.randn(1, sum(lengths), 8), torch.randn(8, 4)
    starts = torch.zeros(1, sum(lengths), dtype=torch.bool)
    starts[0, torch.tensor([0, *lengths[:-1]]).cumsum(0)] = True
    packed, window = short_conv(x, weight, segments=Segments.from_starts(starts))
    alone = [short_conv(part, weight) for part in x.split(lengths, dim=1)]
    torch.testing.assert_close(packed, torch.cat([y for y, _ in alone], 1))
    torch.testing.assert_close(window, alone[-1][1])
    x.requires_grad_()
    out, _ = short_conv(x, weight, segments=Segments.from_starts(starts))
    (reach,) = torch.autograd.grad(out[0, 3:12].sum(), x)  # the third document alone
    assert reach[0, :3].abs().max() == 0 and reach[0, 12:].abs().max() == 0


def test_a_last_document_shorter_than_the_window(implementation: str) -> None:
    starts = torch.tensor([[True, False, False, False, True, False]])
    x = torch.randn(1, 6, 4)
    _, window = short_conv(x, torch.randn(4, 4), segments=Segments.from_starts(starts))
    assert torch.equal(window, torch.cat([torch.zeros(1, 4, 1), x[:, 4:].transpose(1, 2)], 2))


def test_the_future_does_not_reach_back(implementation: str) -> None:
    x, weight = torch.randn(1, 300, 8), torch.randn(8, 4)
    changed = x.clone()
    changed[:, 200:] += 1
    assert torch.equal(short_conv(x, weight)[0][:, :200], short_conv(changed, weight)[0][:, :200])


def test_window_is_memory_of_its_own(implementation: str) -> None:
    x, weight = torch.randn(1, 5, 3), torch.randn(3, 4)
    for piece, given_window in ((x, None), (x[:, :1], torch.randn(1, 3, 3)), (x[:, :2], None)):
        with torch.no_grad():
            _, window = short_conv(piece, weight, given_window)
        kept = window.clone()
        piece.add_(1)
        assert torch.equal(window, kept)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("taps", [2, 4, 7])
def test_one_token_steps(taps: int, dtype: torch.dtype, implementation: str) -> None:
    x, weight = torch.randn(3, 20, 700).to(dtype), torch.randn(700, taps)
    whole, last = short_conv(x, weight)
    window = torch.zeros(3, 700, taps - 1, dtype=dtype)
    for t in range(20):
        y, window = short_conv(x[:, t : t + 1], weight, window)
        torch.testing.assert_close(y[:, 0], whole[:, t])
    assert torch.equal(window, last)


def test_any_layout_in_memory(implementation: str) -> None:
    packed, weight = torch.randn(3, 40, 24), torch.randn(8, 4)
    for x in (
        packed[..., 8:16],
        packed[:, ::2, :8],
        packed.mT.contiguous().mT[..., :8],
        packed.transpose(0, 1)[..., :8],
    ):
        wanted = values_and_gradients(lambda x, w: short_conv(x, w)[0], [x.contiguous(), weight])
        leaf, weight_leaf = x.detach().requires_grad_(), weight.detach().mT.contiguous().mT.requires_grad_()
        out = short_conv(leaf, weight_leaf)[0]
        cotangent = torch.randn(out.shape, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
        cotangent = cotangent.to(torch.bfloat16).float().mT.contiguous().mT
        for got, want in zip([out, *torch.autograd.grad(out, (leaf, weight_leaf), cotangent)], wanted, strict=True):
            torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


def test_not_a_number_reaches_only_its_readers(implementation: str) -> None:
    x, weight = torch.randn(1, 12, 5), torch.randn(5, 4)
    x[0, 4, 2] = float("nan")
    bad = torch.zeros(1, 12, 5, dtype=torch.bool)
    bad[0, 4:8, 2] = True
    assert torch.equal(short_conv(x, weight)[0].isnan(), bad)


def test_repeats_bitwise_with_any_number_of_threads(implementation: str) -> None:
    if implementation == "torch":
        pytest.skip("torch's own reductions decide")
    inputs = [torch.randn(2, 600, 96), torch.randn(96, 4)]
    assert inputs[0].numel() > rows.PARALLEL_ELEMENTS, "too small to run in parallel"
    before = torch.get_num_threads()
    try:
        results = []
        for count in (1, 2, 3, 1):
            torch.set_num_threads(count)
            results.append(values_and_gradients(short_conv, inputs))
    finally:
        torch.set_num_threads(before)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


def test_select_says_why() -> None:
    x = torch.randn(1, 3, 4)
    assert "at most 16 taps, not 17" in op.select(x, torch.randn(4, 17)).reason or build.unavailable_reason(
        "elementwise"
    )
    assert "float64" in op.select(x.double(), torch.randn(4, 4)).reason
    wide = torch.randn(4, 17)
    torch.testing.assert_close(short_conv(x, wide)[0], by_hand(x, wide)[0])


def test_reference_path_runs() -> None:
    starts = starts_of(2, 9, [3, 7, 12])
    x, weight = torch.randn(2, 9, 3, dtype=torch.float64), torch.randn(3, 4, dtype=torch.float64)
    with force("reference"):
        for got, want in zip(
            short_conv(x, weight, segments=Segments.from_starts(starts)), by_hand(x, weight, None, starts), strict=True
        ):
            torch.testing.assert_close(got, want)


def test_arguments_are_checked() -> None:
    x, weight = torch.randn(2, 5, 3), torch.randn(3, 4)
    with pytest.raises(ConfigError, match=r"\[B, T, X\] and \[X, W\]"):
        short_conv(x, torch.randn(4, 4))
    with pytest.raises(ConfigError, match=r"need \[2, 3, 3\]"):
        short_conv(x, weight, torch.zeros(2, 3, 4))
    with pytest.raises(ConfigError, match="both a window and segments"):
        short_conv(x, weight, torch.zeros(2, 3, 3), Segments.from_starts(starts_of(2, 5, [3])))
