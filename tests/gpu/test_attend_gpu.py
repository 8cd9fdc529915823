"""Causal attention with fp32 output on a GPU against float64: values, gradients, documents."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from perilune.ops.choice import force
from perilune.ops.mla import attend, max_logit
from perilune.ops.mla.attend import select
from perilune.ops.mla.cuda.attend import WIDTHS
from perilune.ops.segments import Segments

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

SCALE = 192**-0.5
CASES = [  # batch, tokens, past, heads, K, V, documents
    (1, 1000, 0, 4, 192, 128, 0),
    (2, 300, 0, 2, 192, 128, 0),
    (1, 200, 700, 2, 192, 128, 0),
    (1, 77, 133, 3, 96, 64, 0),
    (2, 700, 0, 2, 192, 128, 5),
    (2, 513, 0, 3, 96, 64, 30),
    (1, 900, 0, 2, 80, 64, 200),
    (1, 513, 0, 2, 128, 128, 0),
    (2, 200, 0, 2, 64, 64, 7),
]


def packed(batch: int, tokens: int, documents: int) -> Segments | None:
    if not documents:
        return None
    starts = torch.zeros(batch * tokens, dtype=torch.bool)
    starts[torch.randperm(batch * tokens, generator=torch.Generator().manual_seed(0))[:documents]] = True
    segments = Segments.from_starts(starts.view(batch, tokens))
    assert segments is not None
    return Segments(segments.cu_seqlens.cuda(), batch, tokens)


def guarded(*shape: int, dtype: torch.dtype) -> Tensor:
    """A strided view with NaN around it and between its rows."""
    wide = torch.full((shape[0], shape[1] + 2, shape[2], shape[3] + 8), torch.nan, dtype=dtype, device="cuda")
    wide[:, 1:-1, :, :-8] = torch.randn(*shape).to("cuda", dtype)
    return wide[:, 1:-1, :, :-8]


def operands(case: tuple, dtype: torch.dtype) -> tuple[list[Tensor], Tensor, Segments | None]:
    batch, tokens, past, heads, key, value, documents = case
    torch.manual_seed(0)
    shapes = ((tokens, key), (past + tokens, key), (past + tokens, value))
    inputs = [guarded(batch, count, heads, width, dtype=dtype) for count, width in shapes]
    return inputs, torch.randn(batch, tokens, heads, value, device="cuda"), packed(batch, tokens, documents)


def results(inputs: list[Tensor], dout: Tensor, *arguments, **options) -> list[Tensor]:
    inputs = [x.detach().requires_grad_() for x in inputs]
    out = attend(*inputs, SCALE, *arguments, **options)
    return [out.detach(), *torch.autograd.grad(out, inputs, dout.to(out.dtype))]


def errors(got: list[Tensor], right: list[Tensor]) -> list[float]:
    assert all(x.isfinite().all() for x in got)
    return [float((a.double() - b).norm() / b.norm()) for a, b in zip(got, right, strict=True)]


def truth(inputs: list[Tensor], dout: Tensor, segments: Segments | None, past: int) -> list[Tensor]:
    with force("torch"):
        return results([x.double() for x in inputs], dout, segments, past)


def chosen(case: tuple, dtype: torch.dtype) -> str:
    return "cuda" if dtype == torch.bfloat16 and case[4:6] in WIDTHS else "triton"


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_values_and_gradients(case: tuple, dtype: torch.dtype) -> None:
    inputs, dout, segments = operands(case, dtype)
    assert select(*inputs, segments, case[2]).implementation == chosen(case, dtype)
    check(inputs, dout, segments, case[2])


@pytest.mark.parametrize("case", [CASES[0], CASES[4]], ids=str)
def test_values_and_gradients_of_the_other_form(case: tuple) -> None:
    inputs, dout, segments = operands(case, torch.bfloat16)
    with force("triton"):
        check(inputs, dout, segments, case[2])


def check(inputs: list[Tensor], dout: Tensor, segments: Segments | None, past: int) -> None:
    dtype = inputs[0].dtype
    got, right = results(inputs, dout, segments, past), truth(inputs, dout, segments, past)
    assert got[0].dtype == torch.float32 and {x.dtype for x in got[1:]} == {dtype}
    found = errors(got, right)
    assert found[0] < (3e-3 if dtype == torch.bfloat16 else 5e-4), found
    assert max(found[1:]) < (8e-3 if dtype == torch.bfloat16 else 1e-3), found
    assert all(torch.equal(a, b) for a, b in zip(got, results(inputs, dout, segments, past), strict=True))


def test_float32_with_documents() -> None:
    inputs, dout, segments = operands((1, 200, 0, 2, 48, 32, 6), torch.float32)
    assert select(*inputs, segments).implementation == "triton"
    assert select(*inputs).implementation == "torch"
    found = errors(results(inputs, dout, segments), truth(inputs, dout, segments, 0))
    assert max(found) < 5e-6, found


def test_the_largest_logit_comes_with_the_output() -> None:
    for case in CASES:
        inputs, _, segments = operands(case, torch.bfloat16)
        known = torch.zeros(case[3], device="cuda")
        attend(*inputs, SCALE, segments, case[2], largest_H=known)
        torch.testing.assert_close(known, max_logit(*inputs[:2], SCALE, segments, case[2]), rtol=1e-5, atol=0)


def test_an_output_in_fp32_keeps_what_half_precision_rounds_away() -> None:
    inputs, dout, _ = operands(CASES[0], torch.bfloat16)
    right = truth(inputs, dout, None, 0)[0]
    wide = errors([attend(*inputs, SCALE)], [right])[0]
    narrow = errors([attend(*inputs, SCALE, fp32_output=False)], [right])[0]
    assert wide < 0.85 * narrow, (wide, narrow)


def test_long_packed_rows_take_no_square() -> None:
    """65 536 tokens in 17 documents, forward and backward, in memory linear in their number."""
    tokens, heads = 65536, 1
    inputs = [torch.randn(1, tokens, heads, d, device="cuda").bfloat16() for d in (192, 192, 128)]
    bounds = torch.tensor([0, *range(1000, tokens, 4096), tokens], device="cuda", dtype=torch.int32)
    segments = Segments(bounds, 1, tokens)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    got = results(inputs, torch.ones(1, tokens, heads, 128, device="cuda"), segments)
    assert torch.cuda.max_memory_allocated() - before < 20 * sum(x.nbytes for x in inputs)
    last = slice(int(bounds[-2]), tokens)
    alone = truth([x[:, last] for x in inputs], torch.ones(1, tokens - last.start, heads, 128, device="cuda"), None, 0)
    assert max(errors([x[:, last] for x in got], alone)) < 2e-2
