"""MXFP4 and MXFP8 as they are stored: codes, and one E8M0 scale for 32 neighbours of a row (architecture §9).

    MXFP4  weight_packed U8 [.., O, I/2]: byte b holds column 2b in its low nibble and 2b+1 in its high one
           weight_scale  U8 [.., O, I/32]
    MXFP8  float8_e4m3fn [.., I] and U8 [.., I/32]

value = code * 2^(scale - 127). There is no scale of the whole tensor. A block that holds NaN or infinity is stored with
the scale 255 and comes back as NaN. Any E2M1 value times a power of two is exact in bfloat16, so decoding loses nothing;
only scales from 253 on, which encoding a float32 tensor never gives, can exceed the range of float32.
"""

from __future__ import annotations

import torch
from torch import Tensor

from perilune.errors import CheckpointError, ConfigError
from perilune.ops.mx.blocks import decode_blocks, encode_blocks
from perilune.ops.mx.element import E2M1, E4M3, Element
from perilune.ops.mx.scale import GROUP


def quantize_mxfp4(weight: Tensor, rule: str = "floor") -> tuple[Tensor, Tensor]:
    """Encode weights.

    Args:
        weight: `[.., O, I]`, float32, bfloat16 or float64, I a multiple of 32.
        rule: how a block's scale is chosen: "floor", "even" or "ceil" (`scale`).

    Returns:
        (packed codes, uint8 `[.., O, I/2]`; scales, uint8 `[.., O, I/32]`).

    Raises:
        ConfigError: I is not a multiple of 32, or the rule or the dtype is unknown.
    """
    _check_width(weight, E2M1)
    return encode_blocks(weight, E2M1, rule)


def dequantize_mxfp4(packed: Tensor, scale: Tensor, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Decode weights, `[.., O, I]` in `dtype` (bfloat16, float32 or float64); NaN where a block's scale is NaN (byte 255).

    Args:
        packed: uint8 `[.., O, I/2]`.
        scale: uint8 or float8_e8m0fnu `[.., O, I/32]`.
        dtype: of the result.

    Raises:
        CheckpointError: the shapes or dtypes do not belong together.
        ConfigError: the dtype cannot hold the scales.
    """
    return _decode(packed, scale, E2M1, dtype)


def quantize_mxfp8(x: Tensor, rule: str = "floor") -> tuple[Tensor, Tensor]:
    """Encode activations `[.., I]`, I a multiple of 32: (float8_e4m3fn `[.., I]`, uint8 scales `[.., I/32]`).

    Raises:
        ConfigError: as `quantize_mxfp4`.
    """
    _check_width(x, E4M3)
    codes, scale = encode_blocks(x, E4M3, rule)
    return codes.view(torch.float8_e4m3fn), scale


def dequantize_mxfp8(codes: Tensor, scale: Tensor, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Decode MXFP8, `[.., I]` in `dtype`; codes are float8_e4m3fn (or its bytes), the rest as in `dequantize_mxfp4`.

    Raises:
        CheckpointError, ConfigError: as `dequantize_mxfp4`.
    """
    return _decode(codes.view(torch.uint8), scale, E4M3, dtype)


def _check_width(x: Tensor, element: Element) -> None:
    if x.shape[-1] % GROUP:
        raise ConfigError(
            f"{element.name} stores blocks of {GROUP} columns, but the tensor {list(x.shape)} has {x.shape[-1]}; choose a "
            f"width that is a multiple of {GROUP} (next: {-(-x.shape[-1] // GROUP) * GROUP}), or pad it with zeros"
        )


def _decode(codes: Tensor, scale: Tensor, element: Element, dtype: torch.dtype) -> Tensor:
    if scale.dtype == torch.float8_e8m0fnu:
        scale = scale.view(torch.uint8)
    if codes.dtype != torch.uint8 or scale.dtype != torch.uint8:
        raise CheckpointError(
            f"{element.name} codes and scales are bytes (U8), these are {codes.dtype} and {scale.dtype}"
        )
    wanted = (*scale.shape[:-1], scale.shape[-1] * GROUP * element.bits // 8)
    if tuple(codes.shape) != wanted:
        raise CheckpointError(
            f"{element.name} scales {list(scale.shape)} belong to codes {list(wanted)} (one scale for {GROUP} columns, "
            f"{8 // element.bits} a byte), these are {list(codes.shape)}"
        )
    return decode_blocks(codes, scale, element, dtype)
