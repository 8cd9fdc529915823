"""Routed experts between BF16 and MXFP4 (architecture §9.2).

Decoding is exact: every code times its scale is a bf16 number. Encoding chooses scales by the OCP rule, which need not be
the scales of the file that the weights came from (a block whose largest code is small gets a smaller scale). A decoded
checkpoint therefore keeps the scales it was read with, and `encode` uses them again while they still give exactly the
weights: packed → bf16 → packed is then the same bytes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from perilune.errors import CheckpointError
from perilune.ops.mx import dequantize_mxfp4, quantize_mxfp4

GROUP = 32
ROWS_ELEMENTS = 1 << 16
"""Elements that are re-encoded at once, so that the working copies stay in a cache."""
_POWER = torch.tensor([2.0 ** min(128 - scale, 127) for scale in range(256)])
"""2^(128 - scale) by scale; from scale 1 downwards it is no fp32 number, and such scales are not used."""


def decode(packed: Tensor, scale: Tensor, name: str) -> Tensor:
    """Weights `[O, I]` in bf16.

    Raises:
        CheckpointError: a scale is NaN (byte 255); the message names the tensor.
    """
    check_scale(scale, name)
    return dequantize_mxfp4(packed, scale, torch.bfloat16)


def check_scale(scale: Tensor, name: str) -> None:
    """Refuse NaN scales.

    Raises:
        CheckpointError: with the tensor's name, how many, and where the first is.
    """
    bad = scale == 255
    if bool(bad.any()):
        first = bad.nonzero()[0].tolist()
        raise CheckpointError(
            f"{name}_scale has {int(bad.sum())} of {scale.numel()} scales that are NaN (byte 255), the first at {first}: the "
            "weights were not finite when they were quantised, or the file is damaged; fetch or quantise it again"
        )


def encode(weight: Tensor, name: str, kept_scale: Tensor | None = None, rule: str = "floor") -> tuple[Tensor, Tensor]:
    """Codes `[O, I/2]` and scales `[O, I/32]` of weights `[O, I]`.

    Args:
        weight: bf16 or fp32.
        name: of the tensor, for messages.
        kept_scale: scales that the weights were once decoded with; used if they still express them exactly.
        rule: how other scales are chosen, see `ops.mx`; a quantised run's own, so that what was trained is stored.

    Raises:
        CheckpointError: the weights are not finite.
    """
    low, high = torch.aminmax(weight)
    if not bool(torch.isfinite(low) & torch.isfinite(high)):
        raise CheckpointError(
            f"{name} has {int((~torch.isfinite(weight)).sum())} values that are NaN or infinite and cannot be quantised; "
            "convert with --experts bf16 to look at them, or use an earlier checkpoint"
        )
    if kept_scale is not None:
        packed = _codes_at(weight, kept_scale)
        if packed is not None:
            return packed, kept_scale
    return quantize_mxfp4(weight, rule)


def _codes_at(weight: Tensor, scale: Tensor) -> Tensor | None:
    """Packed codes of `weight` at given scales, or None where they do not express it exactly.

    Twice an E2M1 value is one of 0, 1, 2, 3, 4, 6, 8, 12, which three caps turn into 0 … 7; the sign of zero is kept. Any other
    number gets a code that decodes to something else, so comparing the decoded weights is the whole check.
    """
    if int(scale.min()) < 2:  # 2^(128 - scale) is no fp32 number
        return None
    rows = max(1, ROWS_ELEMENTS // weight.shape[1])
    packed = torch.empty(weight.shape[0], weight.shape[1] // 2, dtype=torch.uint8)
    for part, factors, out in zip(weight.split(rows), scale.split(rows), packed.split(rows)):
        wide = part.float()
        power = _POWER[factors.int()]
        twice = wide.abs().unflatten(-1, (-1, GROUP)).mul_(power[..., None])
        code = twice.clamp(max=4)
        code += (twice - 4).clamp_(0, 4).mul_(0.5)
        code += twice.sub_(8).clamp_(0, 4).mul_(0.25)
        bits = code.to(torch.uint8).flatten(-2).add_(torch.signbit(wide), alpha=8)
        torch.bitwise_or(bits[:, 0::2], bits[:, 1::2] << 4, out=out)
        if not torch.equal(dequantize_mxfp4(out, factors, torch.float32), wide):
            return None
    return packed
