"""Tables of `plan` in tensors of fixed size, to be refilled for documents that lie elsewhere: what a CUDA graph can read.

There is room for N sequences of together `tokens` tokens, and so for tokens / 64 + N chunks. What is not used is filled up
with sequences without tokens, and with chunks without tokens. Each of the latter is a unit of its own that begins and
ends no sequence, so that all that the backward pass sums over chunks is defined, and 0, there too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import numpy as np
import torch
from torch import Tensor

from perilune.ops.kda.cuda import scan
from perilune.ops.kda.gpu.plan import CHUNK, Plan, fastest, tables
from perilune.ops.triton.available import units as device_units

NEVER = 1 << 30  # chunks: no sequence is cut


@dataclass(frozen=True)
class Room:
    """Fixed sizes, a function of the batch's shape alone: equal shapes are computed in the same order whatever lies in them.

    Attributes:
        tokens: B * T.
        sequences: N, at most.
        target: see `plan`; NEVER = no sequence is cut.
        width: see `Plan`.
    """

    tokens: int
    sequences: int
    target: int
    width: int

    @staticmethod
    def of(
        batch: int, length: int, sequences: int, heads: int, key_dim: int, value_dim: int, dtype: torch.dtype, device: torch.device
    ) -> Room:  # fmt: skip
        """Room for `sequences` documents in `[batch, length]` tokens of `dtype`, cut as whole rows would best be."""
        from perilune.ops.kda.gpu.forward import operand_dtype  # with it comes Triton, which a CPU may lack

        v = torch.empty(1, heads, value_dim, dtype=dtype, device=device)
        in_cuda = scan.unsuitable(v, key_dim, operand_dtype(dtype), dtype) is None
        whole = tuple(range(0, (batch + 1) * length, length))
        target, width = fastest(whole, heads, value_dim, key_dim, in_cuda, device_units(device))
        return Room(batch * length, sequences, target if -(-length // CHUNK) // target > 1 else NEVER, width)

    @property
    def chunks(self) -> int:
        """Rows of the table of chunks."""
        return self.tokens // CHUNK + self.sequences

    @property
    def units(self) -> int:
        """Rows of the table of units: a sequence's first, its further ones, and those of chunks without tokens."""
        return 2 * self.sequences + self.chunks // self.target

    @property
    def numbers(self) -> int:
        """Integers of all tables together."""
        return 2 * self.chunks + 6 * self.units + 2 * self.sequences

    def plan(self, numbers: Tensor) -> Plan:
        """The plan that reads its tables from `numbers`, int32 `[self.numbers]`."""
        parts = numbers.split((2 * self.chunks, 6 * self.units, 2 * self.sequences))
        chunks, units, sequences = (part.view(-1, width) for part, width in zip(parts, (2, 6, 2), strict=True))
        return Plan(chunks, units, sequences, self.target != NEVER, self.width)

    def boundaries(self, offsets: tuple[int, ...]) -> tuple[int, ...]:
        """The boundaries with the last one repeated for the documents that are not there: `[N+1]`."""
        missing = self.sequences + 1 - len(offsets)
        assert missing >= 0, f"{len(offsets) - 1} documents in a room for {self.sequences}"
        assert offsets[-1] == self.tokens, f"boundaries to {offsets[-1]} in a room for {self.tokens} tokens"
        return offsets + offsets[-1:] * missing

    def filled(self, offsets: tuple[int, ...]) -> np.ndarray:
        """What `numbers` has to hold for documents with these boundaries, int32."""
        found = tables(self.boundaries(offsets), self.target)
        chunks = np.zeros((self.chunks, 2), np.int32)
        units = np.tile(np.array([0, 0, 0, 0, -1, -1], np.int32), (self.units, 1))
        chunks[: len(found.chunks)], units[: len(found.units)] = found.chunks, found.units
        unused = np.arange(len(found.chunks), self.chunks)
        own = units[len(found.units) : len(found.units) + len(unused)]
        own[:, 0], own[:, 1] = unused, 1
        return np.concatenate([table.ravel() for table in (chunks, units, found.sequences)])


def place_marks(offsets: tuple[int, ...], marks: Sequence[tuple[int, int]], chunks: int) -> np.ndarray:
    """Of each of a plan's `chunks` the number of the state that is wanted behind it, or -1: int32.

    Args:
        offsets: boundaries of the sequences.
        marks: pairs of a sequence and a multiple of a chunk inside it.
        chunks: rows of the plan's table.
    """
    counts = [-(-(end - begin) // CHUNK) for begin, end in pairwise(offsets)]
    first = list(accumulate(counts, initial=0))  # chunk of each sequence
    slots = np.full(chunks, -1, np.int32)
    for place, (sequence, tokens) in enumerate(marks):
        slots[first[sequence] + tokens // CHUNK - 1] = place
    return slots
