"""Element formats of the MX standard: the grids E2M1 (4 bits) and E4M3 (8 bits).

A code is sign, exponent and mantissa from high to low, the exponent biased so that its least normal value is 2^least; an
exponent field of 0 means a subnormal, a multiple of 2^(least - mantissa). E2M1 has eight magnitudes, 0 .5 1 1.5 2 3 4 6,
and neither infinity nor NaN; E4M3 goes to 448 and has one NaN per sign (all ones), like `torch.float8_e4m3fn`.

Values are kept in float32 or float64 and found by arithmetic on their bits, so nothing here loops or looks up.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from perilune.errors import ConfigError
from perilune.ops.mx.words import word


@dataclass(frozen=True, slots=True)
class Element:
    """An element format.

    Attributes:
        name: of the block format that uses it: "mxfp4" or "mxfp8".
        bits: of a code.
        mantissa: bits of mantissa.
        least, most: exponents of the least and the greatest normal value.
        top: greatest value; larger ones saturate at it.
    """

    name: str
    bits: int
    mantissa: int
    least: int
    most: int
    top: float


E2M1 = Element("mxfp4", 4, 1, 0, 2, 6.0)
E4M3 = Element("mxfp8", 8, 3, -6, 8, 448.0)
FORMATS = {element.name: element for element in (E2M1, E4M3)}


def element_of(name: str) -> Element:
    """Return the element format of the block format "mxfp4" or "mxfp8".

    Raises:
        ConfigError: no such format.
    """
    if name not in FORMATS:
        raise ConfigError(f"block format {name!r} is not known; allowed: {', '.join(FORMATS)}")
    return FORMATS[name]


def round_to_grid(magnitude: Tensor, element: Element) -> Tensor:
    """Nearest grid value of each magnitude (>= 0, float32 or float64), ties to the even mantissa, saturating at the top.

    1.5 * 2^p steps are added and taken away again, p being the number of mantissa bits of the dtype: what survives is a
    multiple of the step, rounded half to even by the addition itself. NaN stays NaN.
    """
    integer, mantissa, _ = word(magnitude.dtype)
    binade = magnitude.view(integer) & word(magnitude.dtype).exponent_mask
    binade.clamp_(min=_bits_of_power(element.least, magnitude.dtype))
    magic = binade.view(magnitude.dtype).mul_(1.5 * 2.0 ** (mantissa - element.mantissa))
    return (magnitude + magic).sub_(magic).clamp_(max=element.top)


def grid_codes(rounded: Tensor, element: Element) -> Tensor:
    """Codes without sign, in the integer type of the values' width, of magnitudes that lie on the grid."""
    integer, mantissa, bias = word(rounded.dtype)
    normal = (rounded.view(integer) >> (mantissa - element.mantissa)) - ((bias + element.least - 1) << element.mantissa)
    subnormal = (rounded * 2.0 ** (element.mantissa - element.least)).to(integer)
    return torch.where(rounded < 2.0**element.least, subnormal, normal)


def code_values(codes: Tensor, element: Element, dtype: torch.dtype) -> Tensor:
    """Values of integer codes (sign included) as float32 or float64; E4M3's two NaN codes give NaN."""
    integer, mantissa, bias = word(dtype)
    sign_place = element.bits - 1
    wide = codes.to(integer)
    magnitude = wide & ((1 << sign_place) - 1)
    normal = (magnitude << (mantissa - element.mantissa)) + ((bias + element.least - 1) << mantissa)
    subnormal = magnitude.to(dtype) * 2.0 ** (element.least - element.mantissa)
    values = torch.where(magnitude < 1 << element.mantissa, subnormal, normal.view(dtype))
    if element is E4M3:
        values = values.masked_fill(magnitude == 127, torch.nan)
    return torch.where(wide >> sign_place & 1 == 1, -values, values)


def _bits_of_power(exponent: int, dtype: torch.dtype) -> int:
    _, mantissa, bias = word(dtype)
    return (exponent + bias) << mantissa
