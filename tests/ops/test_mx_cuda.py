"""The CUDA kernels of experts on MXFP4 weights, emulated on the CPU, against float64 on decoded weights."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from perilune.ops.choice import force
from perilune.ops.cuda import emulated, emulator
from perilune.ops.mx import PackedWeight, pack, packed_experts
from perilune.ops.mx.cuda.output import output
from perilune.ops.mx.experts import select

pytestmark = [
    pytest.mark.skipif(emulator.missing() is not None, reason=str(emulator.missing())),
    pytest.mark.usefixtures("poisoned_memory"),
]


def operands(tokens: int, width: int, hidden: int, count: int, active: int) -> tuple:
    draw = torch.Generator().manual_seed(0)
    z = torch.randn(tokens, width, generator=draw).bfloat16()
    index = torch.rand(tokens, count, generator=draw).topk(active).indices
    weight = torch.rand(tokens, active, generator=draw)
    shapes = ((count, hidden, width), (count, hidden, width), (count, width, hidden))
    return z, index, weight, [PackedWeight.of(torch.randn(*s, generator=draw) / s[-1] ** 0.5) for s in shapes]


def run(z: Tensor, index: Tensor, weight: Tensor, weights: list[PackedWeight], backwards: bool, **options) -> Tensor:
    device = [pack(*w) for w in weights]
    with force("cuda"), emulated(backwards):
        assert select(z, index, device[0]).implementation == "cuda"
        return packed_experts(z, index, weight, *device, **options)


CASES = [  # tokens, width, hidden, experts, active; options
    ((1, 160, 288, 20, 5), {}),  # neither side in whole steps; warps with parts of two experts
    ((2, 1152, 64, 8, 1), {"activations": "mxfp8"}),  # more steps than a warp loads ahead, warps without steps
    ((1, 128, 96, 8, 2), {"activation": "swiglu"}),
]


@pytest.mark.parametrize(("size", "options"), CASES, ids=str)
def test_equals_float64_in_both_orders(size: tuple, options: dict) -> None:
    z, index, weight, weights = operands(*size)
    right = packed_experts(z.double(), index, weight.double(), *weights, **options)
    got = run(z, index, weight, weights, False, **options)
    plain = packed_experts(z, index, weight, *weights, **options)
    error, theirs = (float((x.double() - right).norm() / right.norm()) for x in (got, plain))
    assert got.isfinite().all() and error < (2e-2 if "activations" in options else 6e-3) and error < 1.2 * theirs
    assert torch.equal(got, run(z, index, weight, weights, True, **options))


def test_rows_of_a_wider_tensor_that_do_not_begin_at_16_bytes() -> None:
    z, index, weight, weights = operands(2, 128, 96, 8, 1)
    wide = torch.cat((z.new_full((2, 3), torch.nan), z, z.new_full((2, 2), torch.nan)), 1)
    assert torch.equal(run(wide[:, 3:-2], index, weight, weights, False), run(z, index, weight, weights, False))


def test_codes_and_scales_are_decoded_exactly() -> None:
    """Unit vectors read the weights: each code at each scale that `pack` takes, and NaN."""
    codes = torch.arange(16, dtype=torch.uint8).repeat(2)
    codes = (codes[::2] | codes[1::2] << 4).expand(1, 256, 16).contiguous()
    scale = torch.arange(256, dtype=torch.uint8).view(1, 256, 1).clone()
    scale[:, 129:255] = 128
    weights = PackedWeight(codes, scale)
    dense, packed = weights.expert(0, torch.float64), pack(*weights)
    index, weight = torch.zeros(32, 1, dtype=torch.int64), torch.ones(32, 1)
    with emulated():
        got = output(torch.eye(32).bfloat16(), index, weight, packed).T
    assert torch.equal(got.isnan(), dense.isnan()) and got[255].isnan().all()
    normal = dense.abs() >= 2.0**-126  # what lies below, and the product with it, may count as zero in the emulator
    assert torch.equal(got.double()[normal], dense[normal])


def test_what_the_kernels_do_not_take_is_said() -> None:
    z, index, _, weights = operands(3, 128, 96, 8, 1)
    device = pack(*weights[0])
    with force("cuda"):
        assert "not on cpu" in select(z[:1], index[:1], device).reason
        with emulated():
            assert "3 pairs share 8 experts" in select(z, index, device).reason
            assert "not float32" in select(z[:1].float(), index[:1], device).reason
    assert select(z, index, device).implementation == "torch"
