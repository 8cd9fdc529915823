"""MXFP4 matrices as the CUDA kernels read them: rearranged once, when a model is loaded.

    codes  uint8 [E, G, O, 16]   of each group of 32 columns and each row: byte b holds column b in its low nibble and
                                 column b + 16 in its high one
    scale  int32 [E, G / 4, O]   of four groups and each row, first group in the lowest byte: 2^(s - 127) as s + 126, and
                                 255 for NaN

So a tile of rows of one group is one run of memory, and 16 bytes are a thread's copy. G is rounded up to a multiple of
four; the added codes and scales give zeros, so nothing is read past the end of the scales (traps T07).
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
        groups = self.columns // GROUP
        nibbles = unpack_nibbles(self.codes[e, :groups].transpose(0, 1)).unflatten(-1, (GROUP // 2, 2))
        codes = pack_nibbles(nibbles.transpose(-1, -2).flatten(-2)).flatten(1)
        places = 8 * torch.arange(GROUPS, device=self.scale.device)
        biased = (self.scale[e].T[..., None] >> places & 255).flatten(1)[:, :groups]
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
    nibbles = unpack_nibbles(codes_EOJ).unflatten(-1, (-1, 2, GROUP // 2))  # [E, O, G, half, 16]
    bytes_EOGb = pack_nibbles(nibbles.transpose(-1, -2).flatten(-2)).unflatten(-1, (-1, GROUP // 2)).flatten(2, -2)
    bytes_EGOb = F.pad(bytes_EOGb, (0, 0, 0, missing)).transpose(1, 2).contiguous()
    biased = scale_EOG.to(torch.int64) + SCALE_OFFSET
    biased = torch.where(scale_EOG == NAN_SCALE, NAN_SCALE, biased)
    biased = F.pad(biased, (0, missing), value=SCALE_OFFSET + 127).unflatten(-1, (-1, GROUPS))
    word = (biased << 8 * torch.arange(GROUPS, device=biased.device)).sum(-1)
    word = torch.where(word >= 1 << 31, word - (1 << 32), word).to(torch.int32)
    return DeviceWeight(bytes_EGOb, word.transpose(1, 2).contiguous(), scale_EOG.shape[2] * GROUP)
