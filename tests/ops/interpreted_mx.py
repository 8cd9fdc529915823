"""MX blocks and experts on packed weights: the Triton kernels against the definition, bit for bit, and against float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from perilune.errors import ConfigError
from perilune.ops.choice import force
from perilune.ops.mx import (
    RULES,
    PackedWeight,
    blocks,
    dequantize_mxfp4,
    dequantize_mxfp8,
    fake_quantize,
    packed_experts,
    quantize_mxfp4,
    quantize_mxfp8,
)
from perilune.ops.mx.experts import select
from perilune.ops.mx.pack import DeviceWeight, pack

pytestmark = pytest.mark.usefixtures("poisoned_memory")


def numbers(rows: int, columns: int) -> Tensor:
    """Blocks of every magnitude, with ties, subnormals, zeros, infinities and NaN among them."""
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(rows, columns, generator=draw) * 2.0 ** torch.randint(-130, 124, (rows, 1), generator=draw)
    x[0] = torch.arange(columns) / 4 - 7
    x[1] = torch.arange(columns) * 2.0**-149
    x[2, ::2] = 0.0
    x[3, 5], x[4, 40] = torch.inf, torch.nan
    x[5] = torch.finfo(torch.float32).max
    x[6] = -0.0
    return x


def same_bits(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.nan_to_num(3.0), b.nan_to_num(3.0)) and torch.equal(a.isnan(), b.isnan()) and torch.equal(
        a.signbit() & ~a.isnan(), b.signbit() & ~b.isnan()
    )  # fmt: skip


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("columns", [64, 96, 75])
@pytest.mark.parametrize("block_format", ["mxfp4", "mxfp8"])
def test_rounding_equals_the_definition(rule: str, columns: int, block_format: str) -> None:
    x = numbers(40, columns)
    for source in (x, numbers(40, 2 * columns)[:, columns:]):
        with force("triton"):
            assert blocks.select(source).implementation == "triton"
            got = fake_quantize(source, block_format, rule)
        with force("reference"):
            assert same_bits(got, fake_quantize(source, block_format, rule))


@pytest.mark.parametrize("rule", RULES)
def test_codes_and_scales_equal_the_definition(rule: str) -> None:
    x = numbers(70, 96)
    for quantize, dequantize in ((quantize_mxfp4, dequantize_mxfp4), (quantize_mxfp8, dequantize_mxfp8)):
        with force("triton"):
            codes, scale = quantize(x, rule)
            values = dequantize(codes, scale, torch.float32)
        with force("reference"):
            right_codes, right_scale = quantize(x, rule)
            right = dequantize(right_codes, right_scale, torch.float32)
        assert torch.equal(scale, right_scale) and torch.equal(codes.view(torch.uint8), right_codes.view(torch.uint8))
        assert same_bits(values, right)


def operands(tokens: int, width: int, hidden: int, count: int, active: int) -> tuple[Tensor, Tensor, Tensor, list]:
    draw = torch.Generator().manual_seed(0)

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=draw)

    index = torch.rand(tokens, count - 1, generator=draw).topk(active).indices + 1  # expert 0 gets no token
    weights = [randn(count, hidden, width), randn(count, hidden, width), randn(count, width, hidden)]
    packed = [PackedWeight.of(w / w.shape[-1] ** 0.5) for w in weights]
    return randn(tokens, width), index, torch.rand(tokens, active, generator=draw), packed


@pytest.mark.parametrize(
    ("size", "activations", "name", "cap"),
    [
        ((5, 64, 96, 6, 3), "none", "situ", 25.0),
        ((5, 64, 96, 6, 3), "mxfp8", "situ", None),
        ((3, 160, 32, 4, 2), "none", "swiglu", None),
        ((3, 160, 32, 4, 2), "mxfp8", "situ", 25.0),
        ((80, 32, 64, 2, 1), "none", "situ", 25.0),
    ],
)
def test_experts_equal_float64(size: tuple, activations: str, name: str, cap: float | None) -> None:
    z, index, weight, packed = operands(*size)
    options = {"activations": activations, "linear_beta": cap, "rule": "floor"}
    device = [pack(*w) for w in packed]
    with force("triton"):
        assert select(z, index, device[0]).implementation == "triton"
        got = packed_experts(z, index, weight, *device, name, **options)
        assert torch.equal(got, packed_experts(z, index, weight, *device, name, **options))
    with force("torch"):
        right = packed_experts(z.double(), index, weight.double(), *packed, name, **options)
        again = packed_experts(z.double(), index, weight.double(), *device, name, **options)
    assert torch.equal(right, again), "the packed layout holds the same weights"
    # a hidden value next to a rounding boundary may fall on the other side
    tolerance = 2e-5 if activations == "none" else 2e-2
    torch.testing.assert_close(got.double(), right, rtol=tolerance, atol=tolerance)


def test_no_tokens() -> None:
    z, index, weight, packed = operands(1, 64, 32, 3, 2)
    with force("triton"):
        got = packed_experts(z[:0], index[:0], weight[:0], *[pack(*w) for w in packed])
    assert got.shape == (0, 64)


def test_t07_scales_end_before_a_whole_step() -> None:
    """Fifteen groups of 480 columns are no whole number of steps; what lies behind the scales is NaN."""
    z, index, weight, packed = operands(1, 480, 32, 2, 1)
    buffers = []
    for w in packed:
        scale = torch.full((w.scale.numel() + 4096,), 255, dtype=torch.uint8)
        scale[: w.scale.numel()] = w.scale.flatten()
        packed_w = pack(w.codes, scale[: w.scale.numel()].view(w.scale.shape))
        words = torch.full((packed_w.scale.numel() + 4096,), -1, dtype=torch.int32)
        words[: packed_w.scale.numel()] = packed_w.scale.flatten()
        buffers.append(
            DeviceWeight(packed_w.codes, words[: packed_w.scale.numel()].view(packed_w.scale.shape), packed_w.columns)
        )
    with force("triton"):
        got = packed_experts(z, index, weight, *buffers)
    with force("torch"):
        right = packed_experts(z.double(), index, weight.double(), *packed)
    torch.testing.assert_close(got.double(), right, rtol=2e-5, atol=2e-5)


def test_every_code_every_scale_and_nan() -> None:
    """One row a scale byte, each code in it; the product with unit vectors is the weight itself."""
    codes = torch.arange(16, dtype=torch.uint8).repeat(2)
    bytes_J = (codes[::2] | codes[1::2] << 4).expand(1, 256, 16).contiguous()
    scale = torch.arange(256, dtype=torch.uint8).view(1, 256, 1)
    with pytest.raises(ConfigError, match="up to 2\\^1"):
        pack(bytes_J, scale)
    allowed = scale.clone()
    allowed[:, 129:255] = 128
    device = pack(bytes_J, allowed)
    dense = dequantize_mxfp4(bytes_J[0], allowed[0], torch.float32)
    torch.testing.assert_close(device.expert(0, torch.float32), dense, rtol=0, atol=0, equal_nan=True)
    assert dense[255].isnan().all() and dense[:255].isfinite().all()


def test_what_the_kernels_do_not_take_is_said() -> None:
    z, index, weight, packed = operands(1, 64, 32, 3, 2)
    with force("triton"):
        assert "pack" in select(z, index, packed[0]).reason
    assert select(z, index, pack(*packed[0])).implementation == "torch"
