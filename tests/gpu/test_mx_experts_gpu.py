"""Experts on packed MXFP4 weights on a GPU against float64 on decoded weights: every launch setting, both activations."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from perilune.ops.mx import PackedWeight, fake_quantize, triton_experts
from perilune.ops.mx.pack import pack
from perilune.ops.mx.triton_experts import TILINGS, Tiling
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


@pytest.mark.parametrize("tile", TILINGS, ids=str)
@pytest.mark.parametrize("size", [(5, 3584, 3072, 24, 16), (300, 256, 384, 6, 3), (40, 2880, 160, 4, 2)], ids=str)
def test_every_setting_equals_float64(tile: Tiling, size: tuple) -> None:
    z, index, weight, weights = operands(*size)
    packed = [pack(*w) for w in weights]
    right = truth(z, index, weight, weights, "none")
    got = triton_experts.experts(z, index, weight, *packed, CAPS, None, tile)
    error = float((got.double() - right).norm() / right.norm())
    print(tile, size, f"{error:.1e}")
    assert got.isfinite().all() and error < 6e-3
    assert torch.equal(got, triton_experts.experts(z, index, weight, *packed, CAPS, None, tile))
