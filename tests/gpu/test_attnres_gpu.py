"""Reads over depth on a GPU: forward, backward and two phases against float64, at K3's width and at odd ones."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="Triton is not installed; pip install perilune[kernels]")

from perilune.ops.attnres import merge, mix, phase_one, read, read_rest, select
from perilune.ops.attnres.reference import mix_reference
from perilune.ops.choice import force
from perilune.ops.norm import rms_norm_reference

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.usefixtures("poisoned_memory"),
]

EPS = 1e-5


def relative_error(got: Tensor, truth: Tensor) -> float:
    got, truth = got.double(), truth.double()
    assert got.isfinite().all()
    return float((got - truth).norm() / truth.norm().clamp_min(1e-300))


def by_formula(bank, live, delta, score_weight, norm_weight):
    live = live if delta is None else live + delta
    mixed = mix_reference([*bank, live], score_weight, EPS)
    return (mixed if norm_weight is None else rms_norm_reference(mixed, norm_weight, 1e-6)), live


def ours(bank, live, delta, score_weight, norm_weight):
    return read(bank, live, delta, score_weight, EPS, norm_weight, 1e-6)


def values_and_gradients(function, bank, live, delta, score_weight, norm_weight) -> list[Tensor]:
    leaves = [
        None if x is None else x.detach().clone().requires_grad_() for x in (live, delta, score_weight, norm_weight)
    ]
    bank = [x.detach().clone().requires_grad_() for x in bank]
    outputs = function(bank, *leaves)
    generator = torch.Generator("cuda").manual_seed(3)
    cotangents = [torch.randn(x.shape, generator=generator, device="cuda").bfloat16().to(x.dtype) for x in outputs]
    inputs = [x for x in (*bank, *leaves) if x is not None]
    return [x.detach() for x in outputs] + list(torch.autograd.grad(outputs, inputs, cotangents))


def case(count: int, shape: tuple[int, ...], dtype: torch.dtype, delta: bool, norm: bool) -> list:
    generator, width = torch.Generator("cuda").manual_seed(0), shape[-1]

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator, device="cuda")

    return [
        [(i + 1) * normal(*shape).to(dtype) for i in range(count)],
        normal(*shape).to(dtype),
        normal(*shape).to(dtype) if delta else None,
        normal(width) * width**-0.5,
        normal(width) if norm else None,
    ]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16])
@pytest.mark.parametrize(
    ("count", "shape"),
    [(8, (700, 7168)), (3, (2, 300, 1024)), (1, (500, 100)), (16, (64, 37)), (0, (9, 512)), (2, (3, 16384))],
)
def test_values_and_gradients(count: int, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    for delta, norm in ((False, False), (True, True)):
        if count == 0 and not norm:
            continue
        inputs = case(count, shape, dtype, delta, norm)
        ring = dtype == torch.bfloat16 and shape[-1] % 8 == 0 and shape[-1] <= 8192
        assert select([*inputs[0], inputs[1]]).implementation == ("cuda" if ring else "triton")
        got = values_and_gradients(ours, *inputs)
        again = values_and_gradients(ours, *inputs)
        assert all(torch.equal(a, b) for a, b in zip(got, again, strict=True)), "not repeatable"
        wide = [[x.double() for x in inputs[0]], *(None if x is None else x.double() for x in inputs[1:])]
        truth = values_and_gradients(by_formula, *wide)
        for value, right in zip(got, truth, strict=True):
            if count == 0 and not right.any():
                assert not value.any()
                continue
            assert relative_error(value, right) < (2e-5 if dtype == torch.float32 else 8e-3)


def test_rows_a_stride_apart_and_odd_addresses() -> None:
    wide = [torch.randn(64, 1104, device="cuda").bfloat16() for _ in range(3)]
    weight = torch.randn(1024, device="cuda") / 32
    for start, how in ((0, "cuda"), (8, "cuda"), (3, "triton")):
        views = [x[:, start : start + 1024] for x in wide]
        assert select(views).implementation == how
        with force(how):
            assert torch.equal(mix(views, weight, EPS), mix([v.contiguous() for v in views], weight, EPS))


def test_t08_a_finished_block_stays_as_it_is() -> None:
    bank, live, delta, score_weight, norm_weight = case(3, (50, 512), torch.bfloat16, True, True)
    before = [x.clone() for x in bank]
    _, total = ours(bank, live, delta, score_weight, norm_weight)
    bank, before = [*bank, total], [*before, total.clone()]
    for _ in range(4):
        _, delta = ours(bank, delta, torch.ones_like(delta), score_weight, norm_weight)
    assert all(torch.equal(a, b) for a, b in zip(bank, before, strict=True))


def test_the_triton_form_in_bfloat16() -> None:
    inputs = case(5, (300, 7168), torch.bfloat16, True, True)
    with force("triton"):
        got = values_and_gradients(ours, *inputs)
    wide = [[x.double() for x in inputs[0]], *(x.double() for x in inputs[1:])]
    for value, right in zip(got, values_and_gradients(by_formula, *wide), strict=True):
        assert relative_error(value, right) < 8e-3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("count", "shape", "sites"), [(8, (300, 7168), 24), (2, (2, 40, 100), 3), (5, (65, 1024), 35)])
def test_a_block_of_reads_in_two_phases(count: int, shape: tuple[int, ...], sites: int, dtype: torch.dtype) -> None:
    """Values and gradients of a block's reads, between which the running sum grows, against single reads in float64."""
    bank, live, delta, _, norm_weight = case(count, shape, dtype, True, True)
    score_weights = torch.randn(sites, shape[-1], device="cuda") * shape[-1] ** -0.5

    def two_phases(bank, live, delta, score_weights, norm_weight):
        partial, outs = phase_one(bank, score_weights, EPS), []
        for site in range(sites):
            out, live = read_rest(partial, site, live, delta, norm_weight, 1e-6)
            outs.append(out)
        return torch.stack(outs), live

    def single_reads(bank, live, delta, score_weights, norm_weight):
        outs = []
        for weight in score_weights:
            out, live = by_formula(bank, live, delta, weight, norm_weight)
            outs.append(out)
        return torch.stack(outs), live

    inputs = [bank, live, delta, score_weights, norm_weight]
    got, again = (values_and_gradients(two_phases, *inputs) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(got, again, strict=True)), "not repeatable"
    wide = [[x.double() for x in bank], *(x.double() for x in inputs[1:])]
    errors = [relative_error(a, b) for a, b in zip(got, values_and_gradients(single_reads, *wide), strict=True)]
    print([f"{e:.1e}" for e in errors])
    assert max(errors) < (3e-5 if dtype == torch.float32 else 3e-2)  # in bfloat16 the running sum is rounded 24 times


def test_two_phases_without_gradients() -> None:
    bank, live, *_ = case(8, (300, 7168), torch.bfloat16, False, False)
    score_weights = torch.randn(3, 7168, device="cuda") / 85
    partial = phase_one(bank, score_weights, EPS)
    assert partial.mixes[0].dtype == torch.bfloat16
    for site in range(3):
        truth = mix_reference([x.double() for x in (*bank, live)], score_weights[site].double(), EPS)
        assert relative_error(merge(partial, site, live), truth) < 6e-3


def test_agrees_with_the_torch_form() -> None:
    inputs = case(4, (200, 1024), torch.float32, True, True)
    got = values_and_gradients(ours, *inputs)
    with force("torch"):
        truth = values_and_gradients(ours, *inputs)
    assert all(relative_error(a, b) < 1e-5 for a, b in zip(got, truth, strict=True))
