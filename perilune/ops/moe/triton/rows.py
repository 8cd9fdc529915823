"""What happens to rows one by one: copies of tokens, the gated unit's gradient, sums of a token's rows in a fixed order."""

# What stands in a kernel is Triton's language, whose loops and constants Python's types do not describe.
# pyright: reportGeneralTypeIssues=false, reportAssignmentType=false, reportAttributeAccessIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from perilune.ops.moe.triton.plan import RowPlan
from perilune.ops.moe.triton.unit import gated_slopes, unit_options
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
def _unit_kernel(
    gate, up, d, weight, dweight, slot_of_row, expert_of_tile, start, counts, experts, beta, linear_beta, F: tl.constexpr,
    TILE: tl.constexpr, BF: tl.constexpr, FOUR: tl.constexpr, GATE_CAPPED: tl.constexpr, UP_CAPPED: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    tile = row // TILE
    if tile < tl.load(start + experts):
        expert = tl.load(expert_of_tile + tile)
        if row - tl.load(start + expert) * TILE < tl.load(counts + expert):
            slot = tl.load(slot_of_row + row)
            p = tl.load(weight + slot)
            total = tl.zeros([BF], tl.float32)
            for first in tl.static_range(0, F, BF):
                at = first + tl.arange(0, BF)
                here = row.to(tl.int64) * F + at
                a = tl.load(gate + here, at < F, 0.0).to(tl.float32)
                b = tl.load(up + here, at < F, 0.0).to(tl.float32)
                g = tl.load(d + here, at < F, 0.0).to(tl.float32)
                h, by_a, by_b = gated_slopes(a, b, beta, linear_beta, FOUR, GATE_CAPPED, UP_CAPPED)
                total += h * g
                g *= p
                tl.store(d + here, (h * p).to(d.dtype.element_ty), at < F)
                tl.store(gate + here, (g * by_a).to(gate.dtype.element_ty), at < F)
                tl.store(up + here, (g * by_b).to(up.dtype.element_ty), at < F)
            tl.store(dweight + slot, tl.sum(total, 0))


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


def unit_gradient_(
    gate_RF: Tensor,
    up_RF: Tensor,
    d_RF: Tensor,
    weight_NA: Tensor,
    plan: RowPlan,
    caps: tuple[float, float | None] | None,
) -> Tensor:
    """The gated unit's backward, in place: d = dy W2 becomes p h, gate and up become their gradients for dh = p d.

    Padding is left as it is, zero in all three. Returns <h, d>, the gradient of the mixing weights `[N, A]` fp32.
    """
    width = gate_RF.shape[1]
    dweight_NA = torch.empty(weight_NA.shape, device=gate_RF.device)
    piece = min(COLUMNS, power_of_two(width))
    _unit_kernel[(plan.rows,)](
        gate_RF, up_RF, d_RF, weight_NA, dweight_NA, plan.slot_R, plan.expert_T, plan.start_E1, plan.count_E,
        len(plan.count_E), F=width, TILE=plan.tile, BF=piece, num_warps=min(4, max(1, piece // 256)), **unit_options(caps),
    )  # fmt: skip
    return dweight_NA


def sum_rows(rows_RD: Tensor, plan: RowPlan) -> Tensor:
    """The sum of each token's A rows `[N, D]`, choice after choice, in float32; in the rows' dtype."""
    tokens, width = len(plan.place_R) // plan.active, rows_RD.shape[1]
    out_ND = torch.empty(tokens, width, dtype=rows_RD.dtype, device=rows_RD.device)
    piece = min(COLUMNS, power_of_two(width))
    _sum_kernel[(tokens, blocks(width, piece))](
        rows_RD, plan.place_R, out_ND, active=plan.active, D=width, BD=piece, num_warps=min(4, max(1, piece // 256))
    )
    return out_ND
