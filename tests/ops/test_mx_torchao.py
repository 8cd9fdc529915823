"""Scales and codes against torchao, an implementation that is not ours.

Known differences, each asserted below rather than avoided: torchao has its scale rule "ceil" under the name RCEIL (its CEIL
rounds the exponent up whatever the top of the grid is, and has no counterpart here); at the scale byte 0 it divides by
2^-126 where the byte means 2^-127; it takes infinity as a large number; and its even and rceil let the top block of float32
decode to infinity. Both pack the even column into the low nibble.
"""

from __future__ import annotations

import pytest
import torch

from perilune.ops.mx import RULES, dequantize_mxfp4, fake_quantize, quantize_mxfp4, quantize_mxfp8

mx_tensor = pytest.importorskip("torchao.prototype.mx_formats.mx_tensor", reason="torchao is in the dev extra")
from torchao.prototype.mx_formats.config import ScaleCalculationMode  # noqa: E402

MODES = {
    "floor": ScaleCalculationMode.FLOOR,
    "even": ScaleCalculationMode.EVEN,
    "ceil": ScaleCalculationMode.RCEIL,
}
ELEMENTS = {"mxfp4": torch.float4_e2m1fn_x2, "mxfp8": torch.float8_e4m3fn}
QUANTIZE = {"mxfp4": quantize_mxfp4, "mxfp8": quantize_mxfp8}


def theirs(x: torch.Tensor, block_format: str, rule: str) -> tuple[torch.Tensor, torch.Tensor]:
    scale, codes = mx_tensor.to_mx(x, ELEMENTS[block_format], 32, MODES[rule])
    return codes.view(torch.uint8), scale.view(torch.uint8)


def ours(x: torch.Tensor, block_format: str, rule: str) -> tuple[torch.Tensor, torch.Tensor]:
    codes, scale = QUANTIZE[block_format](x, rule)
    return codes.view(torch.uint8), scale


def draws(dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Random blocks, blocks on binades' edges and half-ways, blocks with NaN."""
    generator = torch.Generator().manual_seed(1)
    normal = torch.randn(128, 128, generator=generator)
    wide = normal * torch.exp(4 * torch.randn(128, 128, generator=generator))
    edges = torch.arange(-512, 512).view(32, 32) / 64.0
    edges = torch.cat([edges * 2.0**p for p in (-60, -1, 0, 3, 60)])
    wrong = wide.clone()
    wrong[::3, 7] = torch.nan
    return {name: x.to(dtype) for name, x in {"normal": normal, "wide": wide, "edges": edges, "nan": wrong}.items()}


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("block_format", ["mxfp4", "mxfp8"])
def test_scales_and_codes_are_torchaos(block_format, dtype, rule):
    for name, x in draws(dtype).items():
        codes, scale = ours(x, block_format, rule)
        their_codes, their_scale = theirs(x, block_format, rule)
        assert torch.equal(scale, their_scale), name
        valid = (scale != 255).repeat_interleave(codes.shape[1] // scale.shape[1], -1)
        assert torch.equal(codes[valid], their_codes[valid]), name


def test_decoding_is_torchaos():
    packed = torch.arange(256, dtype=torch.uint8).repeat(2).view(32, 16)
    scale = torch.linspace(1, 252, 32).to(torch.uint8)[:, None]
    for dtype in (torch.float32, torch.bfloat16):
        decoded = mx_tensor.to_dtype(packed, scale.view(torch.float8_e8m0fnu), torch.float4_e2m1fn_x2, 32, dtype)
        assert torch.equal(dequantize_mxfp4(packed, scale, dtype), decoded)


def test_where_torchao_differs():
    tiny = torch.zeros(1, 32)
    tiny[0, :2] = torch.tensor([2.0**-127, 6 * 2.0**-127])
    packed, scale = ours(tiny, "mxfp4", "floor")
    their_codes, their_scale = theirs(tiny, "mxfp4", "floor")
    assert int(scale) == int(their_scale) == 0
    assert torch.equal(dequantize_mxfp4(packed, scale, torch.float32), tiny), "1 and 6 are on the grid of 2^-127"
    assert int(packed[0, 0]) == 0x72 and int(their_codes[0, 0]) == 0x51, "theirs decodes to half of what was encoded"

    top = torch.full((1, 32), 1.9 * 2.0**127)
    for rule in ("even", "ceil"):
        assert fake_quantize(top, "mxfp4", rule).eq(1.5 * 2.0**127).all()
        codes, scale = theirs(top, "mxfp4", rule)
        assert dequantize_mxfp4(codes, scale, torch.float32).isinf().all()

    infinite = torch.ones(1, 32)
    infinite[0, 3] = torch.inf
    assert int(ours(infinite, "mxfp4", "floor")[1]) == 255 and int(theirs(infinite, "mxfp4", "floor")[1]) == 253
