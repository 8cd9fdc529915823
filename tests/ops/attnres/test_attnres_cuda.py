"""The CUDA kernels of a read over depth, emulated: values and gradients against float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from perilune.ops.attnres import PartialMix, merge, read, select
from perilune.ops.attnres.cuda import read as kernels
from perilune.ops.attnres.reference import mix_reference
from perilune.ops.choice import force
from perilune.ops.cuda import emulated, unavailable_reason
from perilune.ops.norm import rms_norm_reference

EPS, NORM_EPS = 1e-3, 1e-4


@pytest.fixture(autouse=True)
def emulator(poisoned_memory):
    with emulated():
        if (reason := unavailable_reason(torch.device("cpu"))) is not None:
            pytest.skip(reason)
        yield


def close(got: Tensor, truth: Tensor, limit: float) -> None:
    assert got.isfinite().all()
    error = float(((got.double() - truth).norm() / truth.norm()).detach())
    assert error < limit, error


def case(count: int, shape: tuple[int, ...], delta: bool, norm: bool, seed: int = 0) -> list:
    generator = torch.Generator().manual_seed(seed)

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator)

    width = shape[-1]
    return [
        [(1 + i / 2) * normal(*shape).bfloat16() for i in range(count)],
        normal(*shape).bfloat16() if delta else None,
        normal(width) * width**-0.5,
        1 + normal(width) / 4 if norm else None,
    ]


def truth_of(sources, delta, score_weight, norm_weight, dout, dtotal):
    """Values and gradients in float64; the running sum is rounded to bfloat16 as what is stored."""
    sources = [x.double() for x in sources]
    if delta is not None:
        sources[-1] = (sources[-1] + delta.double()).bfloat16().double()
    leaves = [x.requires_grad_() for x in (*sources, score_weight.double())]
    if norm_weight is not None:
        leaves.append(norm_weight.double().requires_grad_())
    out = mix_reference(leaves[: len(sources)], leaves[len(sources)], EPS)
    if norm_weight is not None:
        out = rms_norm_reference(out, leaves[-1], NORM_EPS)
    outputs, cotangents = [out], [dout.double()]
    if dtotal is not None:
        outputs, cotangents = [out, leaves[len(sources) - 1]], [dout.double(), dtotal.double()]
    return out.detach(), sources[-1].detach(), torch.autograd.grad(outputs, leaves, cotangents)


def test_values_and_gradients() -> None:
    """Rows a stride apart, a width of 9 pieces for 32 threads, more tokens than blocks; each kernel built once."""
    sources, delta, score_weight, norm_weight = case(3, (9, 72), True, True)
    sources = [torch.cat([x, x], -1)[:, 8:80] for x in sources]
    dout, dtotal = torch.randn(9, 72).bfloat16(), torch.randn(9, 72).bfloat16()
    out, live, gradients = truth_of(sources, delta, score_weight, norm_weight, dout, dtotal)

    def run() -> list[Tensor]:
        leaves = [x.detach().requires_grad_() for x in (*sources, delta, score_weight, norm_weight)]
        with force("cuda"):
            assert select(leaves[:4]).implementation == "cuda"
            values = read(leaves[:2], leaves[2], leaves[3], leaves[4], EPS, leaves[5], NORM_EPS)
        return [*values, *torch.autograd.grad(values, leaves, [dout, dtotal])]

    got, total, *found = run()
    close(got, out, 3e-3)
    assert torch.equal(total.double(), live)
    assert torch.equal(found[2], found[3]), "the running sum and what is added to it"
    for value, right in zip(found[:3] + found[4:], gradients, strict=True):
        close(value, right, 4e-3)
    with emulated(backwards=True):
        assert all(torch.equal(a, b) for a, b in zip(run(), [got, total, *found], strict=True)), "a barrier is missing"


def test_a_partial_mix_counts_by_its_denominator_and_gets_its_gradient() -> None:
    (summed, live), _, score_weight, _ = case(2, (6, 80), False, False)
    log, dout = torch.randn(6), torch.randn(6, 80).bfloat16()
    leaves = [x.double().requires_grad_() for x in (summed, live, log, score_weight)]
    score = (leaves[1] * leaves[3]).sum(-1) * (leaves[1].square().mean(-1) + EPS).rsqrt()
    p = torch.stack([leaves[2], score], -1).softmax(-1)
    truth = torch.autograd.grad(p[:, :1] * leaves[0] + p[:, 1:] * leaves[1], leaves, dout.double())
    inputs = [x.detach().requires_grad_() for x in (summed, live, log, score_weight)]
    with force("cuda"):
        got = merge(PartialMix([inputs[0]], [inputs[2]], inputs[3][None], EPS), 0, inputs[1])
    for value, right in zip(torch.autograd.grad(got, inputs, dout), truth, strict=True):
        close(value, right, 4e-3)


def test_what_does_not_fit_is_said() -> None:
    rows = [torch.zeros(1, 7168).bfloat16()] * 16
    assert kernels.plan(7168, 11, 9) is not None and "shared memory" in kernels.unsuitable(rows)
    assert "bfloat16" in kernels.unsuitable([torch.zeros(1, 64)] * 2)
    assert "16 bytes" in kernels.unsuitable([torch.zeros(2, 200).bfloat16()[:, 3:67]] * 2)
    assert "multiple of 8" in kernels.unsuitable([torch.zeros(1, 60).bfloat16()] * 2)
