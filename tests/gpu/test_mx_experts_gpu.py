"""Experts on packed MXFP4 weights on a GPU against float64 on decoded weights: every launch setting, both activations."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from perilune.ops.choice import force
from perilune.ops.moe.triton.plan import row_plan
from perilune.ops.mx import (
    RULES,
    PackedWeight,
    blocks,
    dequantize_mxfp4,
    dequantize_mxfp8,
    fake_quantize,
    pack,
    packed_experts,
    quantize_mxfp4,
    quantize_mxfp8,
    triton_experts,
)
from perilune.ops.mx.cuda.output import output
from perilune.ops.mx.experts import select
from perilune.ops.mx.triton_experts import FEW, MANY, Tiling
from perilune.ops.situ_glu import situ_glu_reference

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

CAPS = (4.0, 25.0)


def operands(tokens: int, width: int, hidden: int, count: int, active: int) -> tuple:
    torch.manual_seed(0)
    z = torch.randn(tokens, width, device="cuda").bfloat16()
    index = torch.rand(tokens, count, device="cuda").topk(active).indices
    weight = torch.rand(tokens, active, device="cuda")
    shapes = ((count, hidden, width), (count, hidden, width), (count, width, hidden))
    return z, index, weight, [PackedWeight.of(torch.randn(*s, device="cuda") / s[-1] ** 0.5) for s in shapes]


def truth(z: Tensor, index: Tensor, weight: Tensor, weights: list[PackedWeight], activations: str) -> Tensor:
    out = torch.zeros(z.shape, dtype=torch.float64, device="cuda")
    quantised = (lambda x: fake_quantize(x, "mxfp8")) if activations == "mxfp8" else (lambda x: x)
    z = quantised(z).double()
    for e in range(weights[0].codes.shape[0]):
        token, slot = (index == e).nonzero(as_tuple=True)
        w1, w3, w2 = (w.expert(e, torch.float64) for w in weights)
        h = situ_glu_reference(z[token] @ w1.T, z[token] @ w3.T, *CAPS)
        h = quantised(h.bfloat16()).double() if activations == "mxfp8" else h
        out.index_add_(0, token, (h @ w2.T) * weight[token, slot, None].double())
    return out


@pytest.mark.parametrize("tile", [FEW, MANY], ids=["few", "many"])
@pytest.mark.parametrize("size", [(5, 3584, 3072, 24, 16), (300, 256, 384, 6, 3), (40, 2880, 160, 4, 2)], ids=str)
def test_every_setting_equals_float64(tile: Tiling, size: tuple) -> None:
    z, index, weight, weights = operands(*size)
    packed = [pack(*w) for w in weights]
    right = truth(z, index, weight, weights, "none")
    got = triton_experts.experts(z, index, weight, *packed, CAPS, None, tile)
    error = float((got.double() - right).norm() / right.norm())
    assert got.isfinite().all() and error < 6e-3
    assert torch.equal(got, triton_experts.experts(z, index, weight, *packed, CAPS, None, tile))


@pytest.mark.parametrize("size", [(1, 3584, 3072, 64, 16), (2, 2880, 160, 40, 4), (3, 384, 1056, 12, 1)], ids=str)
@pytest.mark.parametrize("activations", ["none", "mxfp8"])
def test_few_pairs_equal_float64(size: tuple, activations: str) -> None:
    z, index, weight, weights = operands(*size)
    device = [pack(*w) for w in weights]
    assert select(z, index, device[0]).implementation == "cuda"
    right = truth(z, index, weight, weights, activations)
    got = packed_experts(z, index, weight, *device, activations=activations)
    error = float((got.double() - right).norm() / right.norm())
    assert got.isfinite().all() and error < (6e-3 if activations == "none" else 2e-2)
    assert torch.equal(got, packed_experts(z, index, weight, *device, activations=activations))
    alone = packed_experts(z[-1:], index[-1:], weight[-1:], *device, activations=activations)
    assert torch.equal(got[-1:], alone), "a token's bits do not depend on its company"


@pytest.mark.parametrize("tokens", [3, 200])
@pytest.mark.parametrize("activations", ["none", "mxfp8"])
def test_both_activations_equal_float64(tokens: int, activations: str) -> None:
    z, index, weight, weights = operands(tokens, 512, 384, 8, 4)
    device = [pack(*w) for w in weights]
    assert select(z, index, device[0]).implementation == "triton"
    right = truth(z, index, weight, weights, activations)
    got = packed_experts(z, index, weight, *device, activations=activations)
    plain = packed_experts(z, index, weight, *weights, activations=activations)
    error, theirs = (float((x.double() - right).norm() / right.norm()) for x in (got, plain))
    assert got.isfinite().all() and error < (6e-3 if activations == "none" else 2e-2) and error < 1.2 * theirs


def test_t07_scales_end_before_a_whole_step() -> None:
    z, index, weight, weights = operands(2, 2880, 160, 3, 1)
    device = []
    for w in weights:
        packed = pack(*w)
        words = torch.full((packed.scale.numel() + 4096,), -1, dtype=torch.int32, device="cuda")
        words[: packed.scale.numel()] = packed.scale.flatten()
        device.append(packed._replace(scale=words[: packed.scale.numel()].view(packed.scale.shape)))
    right = truth(z, index, weight, weights, "none")
    got = packed_experts(z, index, weight, *device)
    assert float((got.double() - right).norm() / right.norm()) < 6e-3


def test_codes_and_scales_are_decoded_exactly() -> None:
    """Unit vectors read the weights: each code at each scale that `pack` takes, and NaN."""
    codes = torch.arange(16, dtype=torch.uint8, device="cuda").repeat(2)
    codes = (codes[::2] | codes[1::2] << 4).expand(1, 256, 16).contiguous()
    scale = torch.arange(256, dtype=torch.uint8, device="cuda").view(1, 256, 1).clone()
    scale[:, 129:255] = 128
    weights = PackedWeight(codes, scale)
    dense = weights.expert(0, torch.float64)
    packed = pack(*weights)
    h, weight = torch.zeros(16, 32, device="cuda", dtype=torch.bfloat16), torch.ones(1, 1, device="cuda")
    index = torch.zeros(1, 1, dtype=torch.int64, device="cuda")
    plan = row_plan(index, 1, 16)
    for column in range(32):
        h[0] = torch.nn.functional.one_hot(torch.tensor(column), 32)
        got = triton_experts.weighted(h, packed, weight, plan, triton_experts.FEW)[0]
        assert torch.equal(got.bfloat16().nan_to_num(1.0), output(h[:1], index, weight, packed)[0].nan_to_num(1.0))
        assert torch.equal(got.isnan(), dense[:, column].isnan()) and got[255].isnan()
        assert torch.equal(got.nan_to_num(1.0).double(), dense[:, column].nan_to_num(1.0))


@pytest.mark.parametrize("block_format", ["mxfp4", "mxfp8"])
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_blocks_equal_the_torch_form_bit_for_bit(block_format: str, rule: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x = torch.randn(300, 1000, device="cuda") * 2.0 ** torch.randint(-130, 124, (300, 1), device="cuda").float()
    x[0], x[1] = torch.arange(1000, device="cuda") / 4 - 70, torch.arange(1000, device="cuda") * 2.0**-149
    x[2, 5], x[3, 40], x[4] = torch.inf, torch.nan, torch.finfo(torch.float32).max
    x = x.to(dtype)
    assert blocks.select(x).implementation == "triton"
    quantize, dequantize = {"mxfp4": (quantize_mxfp4, dequantize_mxfp4), "mxfp8": (quantize_mxfp8, dequantize_mxfp8)}[
        block_format
    ]

    def results() -> list[Tensor]:
        codes, scale = quantize(x[:, :960], rule)
        return [fake_quantize(x, block_format, rule), codes.view(torch.uint8), scale, dequantize(codes, scale, dtype)]

    got = results()
    with force("torch"):
        right = results()
    for a, b in zip(got, right, strict=True):
        assert torch.equal(a.isnan(), b.isnan()) if a.is_floating_point() else True
        assert torch.equal(a.nan_to_num(3.0), b.nan_to_num(3.0)) if a.is_floating_point() else torch.equal(a, b)
