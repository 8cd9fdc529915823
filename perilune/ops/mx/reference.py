"""The MX block formats by their definition: for each element, search the whole grid for the nearest value, in float64."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from perilune.ops.mx.element import E4M3, Element
from perilune.ops.mx.scale import BIAS, GROUP, NAN_SCALE


def magnitudes(element: Element) -> Tensor:
    """Values of the codes without sign, float64 `[2^(bits-1)]`; E4M3's NaN code is given as infinity, so nothing is near it."""
    values = []
    for code in range(1 << (element.bits - 1)):
        exponent, mantissa = divmod(code, 1 << element.mantissa)
        fraction = mantissa / 2**element.mantissa
        values.append(
            (1 + fraction) * 2.0 ** (element.least + exponent - 1) if exponent else fraction * 2.0**element.least
        )
    if element is E4M3:
        values[-1] = float("inf")
    return torch.tensor(values, dtype=torch.float64)


def encode_blocks(x_NI: Tensor, element: Element, rule: str) -> tuple[Tensor, Tensor]:
    """Codes with sign, uint8 `[N, I]` (one a byte), and scales, uint8 `[N, G]`, of zero-padded rows."""
    x = F.pad(x_NI.double(), (0, -x_NI.shape[1] % GROUP)).unflatten(-1, (-1, GROUP))
    largest = x.abs().amax(-1)
    fraction, exponent = torch.frexp(largest)  # largest = fraction * 2^exponent with 0.5 <= fraction < 1
    if rule == "floor":
        shared = exponent - 1
    elif rule == "even":  # half away from zero, at the element's mantissa
        shared = torch.where(fraction >= 1 - 2.0 ** -(element.mantissa + 2), exponent, exponent - 1)
    else:
        shared = torch.where(fraction > element.top / 2.0 ** (element.most + 1), exponent, exponent - 1)
    end = BIAS if x_NI.dtype == torch.float64 else BIAS - element.most
    shared = torch.where(largest > 0, shared - element.most, -BIAS).clamp(-BIAS, end)
    scaled = torch.ldexp(x, -shared[..., None])
    distance = (scaled.abs()[..., None].clamp(max=element.top) - magnitudes(element)).abs()
    nearest = distance.amin(-1, keepdim=True)
    candidates = distance == nearest
    number = torch.arange(distance.shape[-1])
    even = (candidates & (number % 2 == 0)).int().argmax(-1)  # of two neighbours exactly one is even
    code = torch.where((candidates & (number % 2 == 0)).any(-1), even, candidates.int().argmax(-1))
    code = code + (x.signbit().long() << (element.bits - 1))
    finite = largest.isfinite()
    scale = torch.where(finite, shared + BIAS, NAN_SCALE).to(torch.uint8)
    return torch.where(finite[..., None], code, 0).to(torch.uint8).flatten(-2)[:, : x_NI.shape[1]], scale


def code_values(codes: Tensor, element: Element, dtype: torch.dtype) -> Tensor:
    """Values of codes, looked up."""
    table = magnitudes(element)
    table = torch.where(table.isinf(), torch.nan, table)
    return torch.cat((table, -table))[codes.long()].to(dtype)


def round_blocks(x_NI: Tensor, element: Element, rule: str) -> Tensor:
    """Encode and decode, `[..., I]` in x's dtype."""
    flat = x_NI.reshape(-1, x_NI.shape[-1])
    codes, scale = encode_blocks(flat, element, rule)
    factor = torch.where(scale == NAN_SCALE, torch.nan, torch.exp2(scale.double() - BIAS))
    values = code_values(codes, element, torch.float64) * factor.repeat_interleave(GROUP, -1)[:, : flat.shape[1]]
    return values.to(x_NI.dtype).view_as(x_NI)
