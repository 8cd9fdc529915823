"""Where chunks and segments lie, as small integer tables on the device, built once for a set of sequence lengths."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

import torch
from torch import Tensor

CHUNK = 64
LEAST_SEGMENT = 32  # chunks: finding a segment's effect costs as much as running it, a shorter one would not pay


@dataclass(frozen=True)
class Plan:
    """Tables over the flattened tokens.

    Attributes:
        chunks: int32 `[chunks, 2]`, first token and number of tokens.
        units: int32 `[units, 6]`, first chunk, chunks, first token, end of its tokens, the sequence that this unit
            begins and the one that it ends (-1: none). Units of one sequence follow each other.
        sequences: int32 `[N, 2]`, first unit and units.
        split: True if a sequence has more than one unit.
        width: value channels of a head that a program of the serial kernels takes.
    """

    chunks: Tensor
    units: Tensor
    sequences: Tensor
    split: bool
    width: int

    @property
    def chunk_count(self) -> int:
        return self.chunks.shape[0]

    @property
    def unit_count(self) -> int:
        return self.units.shape[0]


@lru_cache(maxsize=64)
def plan(offsets: tuple[int, ...], heads: int, value_dim: int, width: int, slots: int, device: torch.device) -> Plan:
    """Cut the sequences with boundaries `offsets` into chunks and, if that fills the device better, into segments.

    Args:
        offsets: N+1 token boundaries.
        heads: value heads.
        value_dim: value channels of a head.
        width: of these, what a program of the serial kernels takes.
        slots: programs that the device runs at once; a segment is about total work / slots long.
        device: of the tables.
    """
    programs_per_unit = heads * (value_dim // width)
    lengths = [-(-(end - begin) // CHUNK) for begin, end in pairwise(offsets)]
    target = max(LEAST_SEGMENT, sum(lengths) * programs_per_unit // slots)
    chunks, units, sequences = [], [], []
    for n, (begin, end) in enumerate(pairwise(offsets)):
        count = lengths[n]
        pieces = max(1, count // target)
        sequences.append((len(units), pieces))
        base = len(chunks)
        for piece in range(pieces):
            low, high = piece * count // pieces, (piece + 1) * count // pieces
            units.append(
                (
                    base + low,
                    high - low,
                    begin + low * CHUNK,
                    end,
                    n if piece == 0 else -1,
                    n if piece == pieces - 1 else -1,
                )
            )
        chunks.extend((t, min(CHUNK, end - t)) for t in range(begin, end, CHUNK))

    def table(rows: list[tuple[int, ...]], width: int) -> Tensor:
        return torch.tensor(rows, dtype=torch.int32).reshape(-1, width).to(device)

    return Plan(table(chunks, 2), table(units, 6), table(sequences, 2), len(units) > len(sequences), width)
