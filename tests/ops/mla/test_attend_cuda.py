"""The CUDA kernels of causal attention, emulated on the CPU, against plain torch in float64: values, gradients, documents, logits."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from perilune.ops.choice import force
from perilune.ops.cuda import emulated, emulator
from perilune.ops.mla import attend, max_logit
from perilune.ops.mla.attend import select
from perilune.ops.mla.cuda import attend as kernels
from perilune.ops.mla.cuda import attend_backward
from perilune.ops.segments import Segments

pytestmark = [
    pytest.mark.skipif(emulator.missing() is not None, reason=str(emulator.missing())),
    pytest.mark.usefixtures("poisoned_memory"),
]

SCALE = 0.08
WIDTHS = (
    160,
    128,
)  # one pair for all tests, since each is compiled anew: a key's last chunk is half full, a value has two
CASES = [  # B, T, past, H, first tokens of documents, output in fp32
    (1, 200, 0, 1, (), True),
    (1, 130, 150, 1, (), True),  # the diagonal crosses tiles anywhere
    (2, 150, 0, 2, (128, 278), False),
    (1, 260, 0, 1, (230,), True),  # of a group's queries some see a whole block of keys, and others nothing of it
    (2, 70, 0, 1, (5, 69, 70, 71), True),  # documents of one token; a row's border inside a tile
]


@pytest.fixture(autouse=True)
def _widths(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "WIDTHS", (WIDTHS,))


def guarded(*shape: int) -> Tensor:
    """A strided view with NaN around it and between its rows, which begin at multiples of 16 bytes."""
    wide = torch.full((shape[0], shape[1] + 2, shape[2], shape[3] + 8), torch.nan).bfloat16()
    wide[:, 1:-1, :, :-8] = torch.randn(*shape)
    return wide[:, 1:-1, :, :-8]


def operands(case: tuple) -> tuple[list[Tensor], Tensor, Segments | None]:
    batch, tokens, past, heads, documents, _ = case
    key, value = WIDTHS
    torch.manual_seed(0)
    shapes = ((tokens, key), (past + tokens, key), (past + tokens, value))
    inputs = [guarded(batch, count, heads, width) for count, width in shapes]
    starts = torch.zeros(batch * tokens, dtype=torch.bool)
    starts[list(documents)] = True
    segments = Segments.from_starts(starts.view(batch, tokens)) if documents else None
    return inputs, torch.randn(batch, tokens, heads, value), segments


def results(inputs: list[Tensor], dout: Tensor, *arguments, **options) -> list[Tensor]:
    inputs = [x.detach().requires_grad_() for x in inputs]
    out = attend(*inputs, SCALE, *arguments, **options)
    return [out.detach(), *torch.autograd.grad(out, inputs, dout.to(out.dtype))]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_values_and_gradients_in_both_orders(case: tuple) -> None:
    inputs, dout, segments = operands(case)
    past, wide = case[2], case[-1]
    with force("torch"):
        right = results([x.double() for x in inputs], dout.bfloat16().double(), segments, past)
    got = []
    for backwards in (False, True):
        with force("cuda"), emulated(backwards):
            assert select(*inputs, segments, past, wide, SCALE).implementation == "cuda"
            got.append(results(inputs, dout, segments, past, fp32_output=wide))
    assert all(torch.equal(a, b) for a, b in zip(*got, strict=True)), "the order of threads is free"
    errors = [float((a.double() - b).norm() / b.norm()) for a, b in zip(got[0], right, strict=True)]
    assert got[0][0].dtype == (torch.float32 if wide else torch.bfloat16) and {x.dtype for x in got[0][1:]} == {
        torch.bfloat16
    }
    assert errors[0] < (2e-3 if wide else 3e-3) and max(errors[1:]) < 5e-3, errors


@pytest.mark.parametrize("case", [CASES[1], CASES[3]], ids=str)
def test_the_largest_logit_comes_with_the_output(case: tuple) -> None:
    inputs, _, segments = operands(case)
    known = torch.full((case[3],), -1.0)
    with force("cuda"), emulated():
        attend(*inputs, SCALE, segments, case[2], largest_H=known)
    torch.testing.assert_close(known, max_logit(*inputs[:2], SCALE, segments, case[2]), rtol=1e-6, atol=0)
    before = known.clone()
    with force("cuda"), emulated():
        attend(*(0 * x for x in inputs), SCALE, segments, case[2], largest_H=known)
    assert torch.equal(known, before), "it is raised, never lowered"


def test_keys_from_a_first_to_a_last() -> None:
    """Several prompts behind caches of their own: each query sees a run of keys, which need not be those of its number."""
    inputs, _, _ = operands((1, 140, 160, 1, (), True))
    first = torch.tensor([0] * 90 + [130] * 50, dtype=torch.int32)
    last = torch.cat((torch.arange(40, 130), torch.arange(250, 300))).int()
    q, k, v = inputs
    out = torch.full((1, 140, 1, WIDTHS[1]), torch.nan)
    with emulated():
        kernels.attend(q, k, v, SCALE * 1.4426950408889634, first, last, 0, out, None)
    key = torch.arange(300)
    hidden = (key < first[:, None]) | (key > last[:, None])
    score = torch.einsum("bthk,bshk->bhts", q.double(), k.double()) * SCALE
    right = torch.einsum("bhts,bshv->bthv", score.masked_fill(hidden, -torch.inf).softmax(-1), v.double())
    assert float((out - right).norm() / right.norm()) < 2e-3


def test_what_is_not_finite_shows_where_it_is_seen() -> None:
    inputs, _, _ = operands(CASES[1])
    inputs[0][0, 100, 0, 3] = torch.nan
    inputs[2][0, 200, 0, 5] = torch.inf
    with force("cuda"), emulated():
        out = attend(*inputs, SCALE, None, 150)
    assert out[0, 100].isnan().all() and not out[0, 50:, 0, 5].isfinite().any()
    assert out[0, :100, 0, 6:].isfinite().all() and out[0, 101:, 0, 6:].isfinite().all()


def test_what_the_kernels_do_not_take_is_said() -> None:
    inputs, _, _ = operands(CASES[1])
    with force("cuda"):
        assert "not on cpu" in select(*inputs, None, 150).reason
        with emulated():
            assert "not float32" in select(*(x.float() for x in inputs), None, 150).reason
            assert "differ" in select(inputs[0], inputs[1].float(), inputs[2], None, 150).reason
            assert "(160, 160)" in select(inputs[0], inputs[1], inputs[1], None, 150).reason
            assert "positive" in select(*inputs, None, 150, scale=0.0).reason
            shifted = torch.empty(1, 130, 1, 161).bfloat16()[..., 1:]
            assert "16 bytes" in select(shifted, *inputs[1:], None, 150).reason
    dense = torch.zeros(1, 4, 2, 64)
    assert attend_backward.readable(dense) is dense
    assert attend_backward.readable(dense[..., ::2]).is_contiguous()
    expanded = torch.ones(1).expand(1, 4, 2, 64)
    assert attend_backward.readable(expanded).stride(-1) == 1
