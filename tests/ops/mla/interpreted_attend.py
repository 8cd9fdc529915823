"""The attention kernels against plain torch in float64: values, gradients, documents, caches, widths, guard bands."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from perilune.ops.choice import force
from perilune.ops.mla import attend, triton_attend, triton_attend_backward
from perilune.ops.mla.packed import CachedChunks, attend_packed
from perilune.ops.mla.triton_attend import Tiles
from perilune.ops.segments import Segments

pytestmark = pytest.mark.usefixtures("poisoned_memory")

CASES = [  # batch, tokens, past, heads, K, V, documents
    (1, 70, 0, 2, 24, 16, 0),
    (2, 33, 0, 1, 16, 8, 0),
    (1, 9, 50, 1, 48, 32, 0),
    (2, 1, 37, 2, 12, 20, 0),
    (2, 50, 0, 2, 24, 16, 3),
    (1, 64, 0, 1, 5, 4, 40),
]
WIDE, TALL = Tiles(16, 32, 4, 1), Tiles(32, 16, 4, 1)


def packed(batch: int, tokens: int, documents: int) -> Segments | None:
    if not documents:
        return None
    starts = torch.zeros(batch * tokens, dtype=torch.bool)
    starts[torch.randperm(batch * tokens, generator=torch.Generator().manual_seed(0))[:documents]] = True
    return Segments.from_starts(starts.view(batch, tokens))


def guarded(*shape: int, dtype: torch.dtype) -> Tensor:
    """A strided view with NaN around it and between its rows."""
    wide = torch.full((shape[0], shape[1] + 2, shape[2], shape[3] + 3), torch.nan, dtype=dtype)
    wide[:, 1:-1, :, :-3] = torch.randn(*shape)
    return wide[:, 1:-1, :, :-3]


def results(inputs: list[Tensor], dout: Tensor, *arguments, **options) -> list[Tensor]:
    inputs = [x.detach().requires_grad_() for x in inputs]
    out = attend(*inputs, *arguments, **options)
    return [out.detach(), *torch.autograd.grad(out, inputs, dout.to(out.dtype))]


@pytest.mark.parametrize(
    ("case", "dtype", "tiles"),
    [
        *((case, torch.float32, WIDE) for case in CASES),
        (CASES[0], torch.float32, TALL),
        (CASES[4], torch.float32, TALL),
        (CASES[4], torch.float16, WIDE),
    ],
    ids=str,
)
def test_values_and_gradients(case: tuple, dtype: torch.dtype, tiles: Tiles, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_attend, "forward_tiles", lambda _: tiles)
    monkeypatch.setattr(triton_attend_backward, "backward_tiles", lambda _: (tiles, tiles))
    batch, tokens, past, heads, key, value, documents = case
    torch.manual_seed(0)
    shapes = ((tokens, key), (past + tokens, key), (past + tokens, value))
    inputs = [guarded(batch, count, heads, width, dtype=dtype) for count, width in shapes]
    dout = torch.randn(batch, tokens, heads, value)
    segments = packed(batch, tokens, documents)
    with force("torch"):
        right = results([x.double() for x in inputs], dout, 0.3, segments, past)
    tolerance = 3e-6 if dtype == torch.float32 else 4e-3
    with force("triton"):
        got = results(inputs, dout, 0.3, segments, past)
        again = results(inputs, dout, 0.3, segments, past)
    assert got[0].dtype == torch.float32 and {x.dtype for x in got[1:]} == {dtype}
    for value_, truth, repeated in zip(got, right, again, strict=True):
        torch.testing.assert_close(value_.double(), truth, rtol=tolerance, atol=tolerance)
        assert torch.equal(value_, repeated)


def test_an_output_in_fp32_is_not_rounded_on_the_way() -> None:
    torch.manual_seed(0)
    inputs = [torch.randn(1, 40, 1, 16).half() for _ in range(3)]
    with force("torch"):
        right = attend(*(x.double() for x in inputs), 0.25)
    with force("triton"):
        wide, narrow = attend(*inputs, 0.25), attend(*inputs, 0.25, fp32_output=False)
    assert wide.dtype == torch.float32 and narrow.dtype == torch.float16
    assert torch.equal(wide.half(), narrow) and not torch.equal(wide.half().float(), wide)
    torch.testing.assert_close(wide.double(), right, rtol=1e-3, atol=1e-3)


def test_nothing_crosses_a_document() -> None:
    """Other values in one document leave the bits of its neighbours, forward and backward."""
    starts = torch.zeros(1, 60, dtype=torch.bool)
    starts[0, [20, 41]] = True
    segments = Segments.from_starts(starts)
    torch.manual_seed(0)
    inputs = [torch.randn(1, 60, 1, 16) for _ in range(3)]
    changed = [x.clone() for x in inputs]
    for x in changed:
        x[:, 20:41] *= 30.0
    dout = torch.randn(1, 60, 1, 16)
    with force("triton"):
        first, second = results(inputs, dout, 0.25, segments), results(changed, dout, 0.25, segments)
    for a, b in zip(first, second, strict=True):
        assert torch.equal(a[:, :20], b[:, :20]) and torch.equal(a[:, 41:], b[:, 41:]) and not torch.equal(a, b)


@pytest.mark.parametrize("tiles", [WIDE, TALL], ids=str)
def test_chunks_behind_caches_of_their_own(tiles: Tiles, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tile with one sequence, tiles with several, a sequence of several tiles; between the sequences' keys lie 1e9s."""
    monkeypatch.setattr(triton_attend, "forward_tiles", lambda _: tiles)
    torch.manual_seed(0)
    lengths, past = (50, 3, 1, 40), (70, 0, 31, 64)
    chunks = CachedChunks.of(lengths, past, 32, lambda x: x)
    assert chunks.begins == (0, 128, 160, 192) and chunks.last_T.tolist()[48:55] == [118, 119, 128, 129, 130, 191, 256]
    keys = chunks.begins[-1] + 128
    q, k, v = torch.randn(94, 2, 24), torch.randn(keys, 2, 24), torch.randn(keys, 2, 16)
    for begin, size in zip(chunks.begins, (x + y for x, y in zip(lengths, past))):
        for x in (k, v):
            x[begin + size : begin + -(-size // 32) * 32] = 1e9
    with force("torch"):
        right = attend_packed(q.double(), k.double(), v.double(), 0.3, chunks)
    with force("triton"):
        got = attend_packed(q, k, v, 0.3, chunks)
    torch.testing.assert_close(got.double(), right, rtol=3e-6, atol=3e-6)
