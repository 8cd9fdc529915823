"""MXFP4 matrices as the CUDA kernels read them: rearranged once, when a model is loaded.

A step is 128 columns, four groups of 32; I is rounded up to whole steps.

    codes  int16 [E, steps, O, 32]   word c of a row holds column c of each of the four groups
    scale  int32 [E, steps, O]       the four scales, first group in the lowest byte: 2^(s - 127) as s + 126, NaN as 255

A tile of rows of one step is one run of memory. In a word the bits of a code (sign, exponent, mantissa; "seem") lie where a
bfloat16 has them, up to a shift by 0, 3 or 6; only the fourth is torn apart:

    bit     15 14 13 12 11 10  9  8  7  6  5  4  3  2  1  0
    group    0  3  3  1  3  3  2  0  0  0  1  1  1  2  2  2
             s  s  e  s  e  m  s  e  e  m  e  e  m  e  e  m

Added codes and scales give zeros, so nothing is read past the end of the scales (traps T07). Codes under a NaN are 0: the byte
255 shifted into a bfloat16 is infinity, and zero times that is the NaN.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from perilune.errors import ConfigError
from perilune.ops.mx.blocks import decode_blocks, pack_nibbles, unpack_nibbles
from perilune.ops.mx.element import E2M1
from perilune.ops.mx.scale import GROUP, NAN_SCALE

GROUPS = 4  # of a step of the kernels
STEP = GROUPS * GROUP
PLACES = (
    (15, 8, 7, 6),
    (12, 5, 4, 3),
    (9, 2, 1, 0),
    (14, 13, 11, 10),
)  # of each group's sign, exponent and mantissa bits
MOST_SCALE = 128  # 2^1; the factor 2^(s - 1) of a greater one is beyond bfloat16, which weights never come near
SCALE_OFFSET = 126


class DeviceWeight(NamedTuple):
    """MXFP4 matrices `[E, O, I]` in the layout above; `columns` = I."""

    codes: Tensor
    scale: Tensor
    columns: int

    @property
    def steps(self) -> int:
        """Steps of 128 columns."""
        return self.scale.shape[1]

    @property
    def rows(self) -> int:
        """O."""
        return self.scale.shape[2]

    def expert(self, e: int, dtype: torch.dtype) -> Tensor:
        """The dense matrix `[O, I]` of expert e."""
        word_OSc = self.codes[e].transpose(0, 1).to(torch.int32)
        groups = [
            sum((word_OSc >> place & 1) << 3 - bit for bit, place in enumerate(places)) for places in PLACES
        ]  # of each code from the sign down
        codes = pack_nibbles(torch.stack(groups, -2).flatten(1)[:, : self.columns])
        places = 8 * torch.arange(GROUPS, device=self.scale.device)
        biased = (self.scale[e].T[..., None] >> places & 255).flatten(1)[:, : self.columns // GROUP]
        scale = torch.where(biased == NAN_SCALE, NAN_SCALE, biased - SCALE_OFFSET).to(torch.uint8)
        return decode_blocks(codes, scale, E2M1, dtype)


def pack(codes_EOJ: Tensor, scale_EOG: Tensor) -> DeviceWeight:
    """Rearrange codes uint8 `[E, O, I/2]` and scales uint8 `[E, O, I/32]`, as `PackedWeight` holds them.

    Raises:
        ConfigError: a scale is greater than 2; the kernels would not decode it exactly.
    """
    largest = int(scale_EOG.masked_fill(scale_EOG == NAN_SCALE, 0).max())
    if largest > MOST_SCALE:
        raise ConfigError(
            f"a scale of 2^{largest - 127} was given; allowed on a GPU: up to 2^{MOST_SCALE - 127}; divide the weights by a "
            f"power of two, or leave them in the published layout"
        )
    missing = -scale_EOG.shape[2] % GROUPS
    code_EOSgc = (
        F.pad(unpack_nibbles(codes_EOJ), (0, missing * GROUP)).unflatten(-1, (-1, GROUPS, GROUP)).to(torch.int32)
    )
    word_EOSc = torch.zeros_like(code_EOSgc[..., 0, :])
    for group, places in enumerate(PLACES):
        for bit, place in enumerate(places):
            word_EOSc |= (code_EOSgc[..., group, :] >> 3 - bit & 1) << place
    word_ESOc = word_EOSc.to(torch.int16).transpose(1, 2).contiguous()
    biased = scale_EOG.to(torch.int64) + SCALE_OFFSET
    biased = torch.where(scale_EOG == NAN_SCALE, NAN_SCALE, biased)
    biased = F.pad(biased, (0, missing), value=SCALE_OFFSET + 127).unflatten(-1, (-1, GROUPS))
    word = (biased << 8 * torch.arange(GROUPS, device=biased.device)).sum(-1)
    word = torch.where(word >= 1 << 31, word - (1 << 32), word).to(torch.int32)
    return DeviceWeight(word_ESOc, word.transpose(1, 2).contiguous(), scale_EOG.shape[2] * GROUP)
