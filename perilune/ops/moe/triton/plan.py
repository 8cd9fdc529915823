"""The order of the routed rows on the device: a stable sort by expert, each expert's rows padded to whole tiles.

Nothing is read back to the host, so the sizes of buffers are bounds: R' = `bound_tiles` tiles of rows, of which the
first `tile_start[E]` are used. Four launches: counts of blocks of slots, sums of these over the blocks, first tiles of
the experts, places. A slot's place is its expert's first row, plus the slots of that expert in earlier blocks, plus those
earlier in its block: the order depends on the routes alone.
"""

# What stands in a kernel is Triton's language, whose loops and constants Python's types do not describe.
# pyright: reportGeneralTypeIssues=false, reportAssignmentType=false, reportAttributeAccessIssue=false

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from perilune.ops.triton.sizes import blocks, power_of_two

SLOTS = 256  # of a block
EXPERTS, BLOCKS = 16, 128  # of a tile of the sums over blocks
PIECE = 16  # slots that a block's slots are compared with at a time


class RowPlan(NamedTuple):
    """Where the R = N A slots (a token's a-th choice is slot n A + a) lie among the padded rows R'.

    Attributes:
        tile: rows of a tile; every expert's rows begin at a multiple of it.
        count_E: int32 `[E]` rows of each expert, without padding.
        start_E1: int32 `[E+1]` first tile of each expert; the last entry is the number of tiles in use.
        expert_T: int32 `[R' / tile]` expert of each tile in use.
        slot_R: int32 `[R']` slot of each row that is no padding.
        place_R: int32 `[R]` row of each slot.
        active: A.
    """

    tile: int
    count_E: Tensor
    start_E1: Tensor
    expert_T: Tensor
    slot_R: Tensor
    place_R: Tensor
    active: int

    @property
    def rows(self) -> int:
        """R', the rows that buffers need."""
        return len(self.slot_R)


def row_plan(index_NA: Tensor, experts: int, tile: int) -> RowPlan:
    """Plan the rows of the routes `index_NA` (int64 `[N, A]`, each below `experts`), at least one token."""
    device, slots = index_NA.device, index_NA.numel()
    parts, tiles = blocks(slots, SLOTS), slots // tile + min(experts, slots)

    def integers(*shape: int) -> Tensor:
        return torch.empty(*shape, dtype=torch.int32, device=device)

    before, counts, start = integers(parts, experts), integers(experts), integers(experts + 1)
    plan = RowPlan(tile, counts, start, integers(tiles), integers(tiles * tile), integers(slots), index_NA.shape[1])
    index_NA = index_NA.contiguous()
    _count_kernel[(parts,)](index_NA, before, slots, experts, BE=power_of_two(experts), SLOTS=SLOTS, num_warps=4)
    _sum_kernel[(blocks(experts, EXPERTS),)](before, counts, parts, experts, BE=EXPERTS, BB=BLOCKS, num_warps=4)
    _start_kernel[(1,)](counts, start, experts, TILE=tile, BE=power_of_two(experts), num_warps=4)
    _place_kernel[(parts,)](
        index_NA, before, start, plan.expert_T, plan.slot_R, plan.place_R, slots, experts, TILE=tile, SLOTS=SLOTS,
        PIECE=PIECE, num_warps=4,
    )  # fmt: skip
    return plan


@triton.jit
def _count_kernel(index, before, slots, experts, BE: tl.constexpr, SLOTS: tl.constexpr):
    block = tl.program_id(0)
    slot = block * SLOTS + tl.arange(0, SLOTS)
    expert = tl.load(index + slot, slot < slots, 0).to(tl.int32)
    at = tl.arange(0, BE)
    counts = tl.histogram(expert, BE, slot < slots)
    tl.store(before + block.to(tl.int64) * experts + at, counts, at < experts)


@triton.jit
def _sum_kernel(before, counts, parts, experts, BE: tl.constexpr, BB: tl.constexpr):
    """Each block's counts become those of the blocks before it."""
    at = tl.program_id(0) * BE + tl.arange(0, BE)
    total = tl.zeros([BE], tl.int32)
    first = tl.program_id(0) * 0
    while first < parts:
        part = first + tl.arange(0, BB)
        inside = (part < parts)[:, None] & (at < experts)[None, :]
        where = before + part.to(tl.int64)[:, None] * experts + at[None, :]
        count = tl.load(where, inside, 0)
        tl.store(where, tl.cumsum(count, 0) - count + total[None, :], inside)
        total += tl.sum(count, 0)
        first += BB
    tl.store(counts + at, total, at < experts)


@triton.jit
def _start_kernel(counts, start, experts, TILE: tl.constexpr, BE: tl.constexpr):
    at = tl.arange(0, BE)
    tiles = (tl.load(counts + at, at < experts, 0) + (TILE - 1)) // TILE
    end = tl.cumsum(tiles, 0)
    tl.store(start + at, end - tiles, at < experts)
    tl.store(start + experts, tl.sum(tiles, 0))


@triton.jit
def _place_kernel(
    index, before, start, expert_of_tile, slot_of_row, place, slots, experts, TILE: tl.constexpr, SLOTS: tl.constexpr,
    PIECE: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0)
    at = tl.arange(0, SLOTS)
    slot = block * SLOTS + at
    inside = slot < slots
    expert = tl.load(index + slot, inside, 0).to(tl.int32)
    rank = tl.load(before + block.to(tl.int64) * experts + expert, inside, 0)
    for piece in range(0, SLOTS, PIECE):
        other = piece + tl.arange(0, PIECE)
        mate = tl.load(index + block * SLOTS + other, block * SLOTS + other < slots, -1).to(tl.int32)
        same = (expert[:, None] == mate[None, :]) & (other[None, :] < at[:, None])
        rank += tl.sum(same.to(tl.int32), 1)
    first = tl.load(start + expert, inside, 0)
    row = first * TILE + rank
    tl.store(place + slot, row, inside)
    tl.store(slot_of_row + row, slot, inside)
    tl.store(expert_of_tile + first + rank // TILE, expert, inside & (rank % TILE == 0))
