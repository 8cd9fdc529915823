"""The shared scale of an MX block: a power of two in one byte (E8M0), and the rules that choose it.

A byte s means 2^(s - 127); 255 is NaN, and there is no zero and no sign. With a the largest magnitude of a block and a
format whose greatest value is m * 2^most (1.5 * 4 for E2M1, 1.75 * 256 for E4M3), the exponent is

    floor: floor(log2 a) - most                      (OCP MX 1.0, 6.3): values in (m, 2) * 2^most saturate
    even:  the same after rounding a to the element's mantissa: saturates only what would round to the top anyway
    ceil:  the least exponent for which a <= m * 2^(most + exponent): nothing saturates, small values lose resolution

On normally distributed weights the relative RMS error in MXFP4 is .1149, .1119 and .1155, with 2.3 %, 0.6 % and 0 % of the
values beyond the top (training, "QAT"). What K3 used is not published; floor is the default because it is the standard's.

All three are the exponent field of (bits of a + a constant), so the exponent is exact: a detour through bfloat16 would
round twice, and log2 is off by one next to powers of two.
"""

from __future__ import annotations

import torch
from torch import Tensor

from perilune.errors import ConfigError
from perilune.ops.mx.element import Element
from perilune.ops.mx.words import word
from perilune.shapes.tensors import MX_GROUP

RULES = ("floor", "even", "ceil")
BIAS = 127
NAN_SCALE = 255
GROUP = MX_GROUP  # elements that share a scale


def carry(element: Element, rule: str, mantissa: int) -> int:
    """What a rule adds to the bits of a block's largest magnitude before its mantissa is cut off.

    Args:
        element: the elements' format.
        rule: one of `RULES`.
        mantissa: bits of mantissa of the magnitude's dtype.

    Raises:
        ConfigError: no such rule.
    """
    if rule == "floor":
        return 0
    if rule == "even":
        return 1 << (mantissa - element.mantissa - 1)
    if rule == "ceil":
        top_mantissa = round((element.top / 2.0**element.most - 1) * (1 << mantissa))
        return (1 << mantissa) - 1 - top_mantissa
    raise ConfigError(f"scale rule {rule!r} is not known; allowed: {', '.join(RULES)}")


def scale_bytes(largest: Tensor, element: Element, rule: str) -> Tensor:
    """Scale bytes (uint8) of blocks with these largest magnitudes (float32 or float64); NaN and infinity give 255.

    Exponents below -127 become -127. Those of float32 blocks end at 127 - most, so that the top of the grid is a float32:
    a finite tensor never decodes to infinity. Those of float64 blocks end at 127, the byte's own end.
    """
    integer, mantissa, bias = word(largest.dtype)
    exponent = ((largest.view(integer) + carry(element, rule, mantissa)) >> mantissa) - bias - element.most
    end = BIAS if largest.dtype == torch.float64 else BIAS - element.most
    found = (exponent.clamp_(-BIAS, end) + BIAS).to(torch.uint8)
    return found.masked_fill_(~largest.isfinite(), NAN_SCALE)


def scale_values(scale: Tensor, dtype: torch.dtype) -> Tensor:
    """2^(byte - 127) for each byte, in float32 or float64 (2^-127 is a float32 subnormal); 255 gives NaN."""
    integer, mantissa, bias = word(dtype)
    wide = scale.to(integer)
    bits = (wide + (bias - BIAS)) << mantissa
    if dtype == torch.float32:
        bits.masked_fill_(wide == 0, 1 << (mantissa - 1))
    return bits.view(dtype).masked_fill_(wide == NAN_SCALE, torch.nan)


def inverse_scale_values(scale: Tensor, dtype: torch.dtype) -> Tensor:
    """2^(127 - byte) for each byte, in float32 or float64; 255 gives NaN."""
    return scale_values(torch.where(scale == NAN_SCALE, scale, 2 * BIAS - scale), dtype)
