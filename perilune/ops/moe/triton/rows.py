"""Tokens into the rows of the plan, and rows back into tokens: copies, and sums in a fixed order."""

# What stands in a kernel is Triton's language, whose loops and constants Python's types do not describe.
# pyright: reportGeneralTypeIssues=false, reportAssignmentType=false, reportAttributeAccessIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from perilune.ops.moe.triton.plan import RowPlan
from perilune.ops.triton.sizes import blocks, power_of_two

COLUMNS = 1024  # of a row that a program takes
ROWS = 8


@triton.jit
def _gather_kernel(
    x, x_stride, out, slot_of_row, expert_of_tile, start, counts, experts, active, D: tl.constexpr, TILE: tl.constexpr,
    BR: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    pieces: tl.constexpr = TILE // BR
    tile = tl.program_id(0) // pieces
    if tile < tl.load(start + experts):
        expert = tl.load(expert_of_tile + tile)
        row = tl.program_id(0) * BR + tl.arange(0, BR)
        real = row - tl.load(start + expert) * TILE < tl.load(counts + expert)
        token = (tl.load(slot_of_row + row, real, 0) // active).to(tl.int64)
        at = tl.program_id(1) * BD + tl.arange(0, BD)
        value = tl.load(x + token[:, None] * x_stride + at[None, :], real[:, None] & (at < D)[None, :], 0.0)
        tl.store(out + row.to(tl.int64)[:, None] * D + at[None, :], value, (at < D)[None, :])


@triton.jit
def _sum_kernel(rows, place, out, active: tl.constexpr, D: tl.constexpr, BD: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BD + tl.arange(0, BD)
    total = tl.zeros([BD], tl.float32)
    for a in tl.static_range(active):
        row = tl.load(place + token * active + a).to(tl.int64)
        total += tl.load(rows + row * D + at, at < D, 0.0).to(tl.float32)
    tl.store(out + token * D + at, total.to(out.dtype.element_ty), at < D)


def gather(x_ND: Tensor, plan: RowPlan) -> Tensor:
    """Each row's token `[R', D]`; zeros in the padding, nothing written beyond the tiles in use."""
    x_ND = x_ND if x_ND.stride(-1) == 1 else x_ND.contiguous()
    width = x_ND.shape[1]
    out_RD = torch.empty(plan.rows, width, dtype=x_ND.dtype, device=x_ND.device)
    piece = min(COLUMNS, power_of_two(width))
    _gather_kernel[(plan.rows // ROWS, blocks(width, piece))](
        x_ND, x_ND.stride(0), out_RD, plan.slot_R, plan.expert_T, plan.start_E1, plan.count_E, len(plan.count_E),
        plan.active, D=width, TILE=plan.tile, BR=ROWS, BD=piece, num_warps=4,
    )  # fmt: skip
    return out_RD


def sum_rows(rows_RD: Tensor, plan: RowPlan) -> Tensor:
    """The sum of each token's A rows `[N, D]`, choice after choice, in float32; in the rows' dtype."""
    tokens, width = len(plan.place_R) // plan.active, rows_RD.shape[1]
    out_ND = torch.empty(tokens, width, dtype=rows_RD.dtype, device=rows_RD.device)
    piece = min(COLUMNS, power_of_two(width))
    _sum_kernel[(tokens, blocks(width, piece))](
        rows_RD, plan.place_R, out_ND, active=plan.active, D=width, BD=piece, num_warps=min(4, max(1, piece // 256))
    )
    return out_ND
