"""Routed experts on MXFP4 weights on a CUDA device, decode and prefill: no expert's weights are ever dense in memory.

Rows are sorted by expert on the device; a tile of an expert's rows meets its matrices in `triton_products`: one kernel to the
hidden values, one to the weighted outputs, and a sum of each token's rows in a fixed order.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from perilune.ops.moe.triton.plan import RowPlan, row_plan
from perilune.ops.moe.triton.rows import sum_rows
from perilune.ops.moe.triton.unit import Caps, unit_options
from perilune.ops.mx import triton_products as products
from perilune.ops.mx.fake_quant import fake_quantize
from perilune.ops.mx.pack import DeviceWeight
from perilune.ops.triton.sizes import blocks


class Tiling(NamedTuple):
    """Tiles of rows of tokens and of matrix rows, warps, and stages of the pipeline, of both products."""

    rows: int
    hidden: int
    hidden_warps: int
    hidden_stages: int
    output: int
    output_warps: int
    output_stages: int


FEW = Tiling(16, 64, 4, 4, 64, 4, 4)  # a decode step: weights are read once, for a few rows
MANY = Tiling(128, 128, 8, 3, 128, 8, 3)  # both the fastest of those measured on one H200
FEW_ROWS = 48  # routed rows an expert, from which tiles of 128 rows waste less than they gain
GROUP = 8  # tiles of rows that take turns with one tile of a matrix


def tiling(slots: int, experts: int) -> Tiling:
    """The tiles for `slots` routed rows over `experts`."""
    return MANY if slots >= FEW_ROWS * experts else FEW


def experts(
    z_NL: Tensor, index_NA: Tensor, weight_NA: Tensor, w1: DeviceWeight, w3: DeviceWeight, w2: DeviceWeight, caps: Caps,
    hidden_rule: str | None = None, tiles: Tiling | None = None,
) -> Tensor:  # fmt: skip
    """sum over a token's experts of p W2 Q(glu(W1 z, W3 z)).

    Args:
        z_NL: `[N, L]` bfloat16 tokens, N at least 1, rounded already where activations are.
        index_NA: int64 `[N, A]`.
        weight_NA: `[N, A]` mixing weights.
        w1, w3, w2: `pack`ed matrices.
        caps: (beta, linear_beta) of SiTU, None = SwiGLU.
        hidden_rule: how scales of the hidden values in MXFP8 are chosen; None = they stay as they are.
        tiles: overrules `tiling`.

    Returns:
        `[N, L]` in the tokens' dtype.
    """
    tile = tiles or tiling(index_NA.numel(), len(w1.codes))
    plan = row_plan(index_NA, len(w1.codes), tile.rows)
    h_RF = hidden(z_NL, w1, w3, plan, tile, caps)
    if hidden_rule is not None:
        h_RF = fake_quantize(h_RF, "mxfp8", hidden_rule)
    return sum_rows(weighted(h_RF, w2, weight_NA, plan, tile), plan).to(z_NL.dtype)


def hidden(z_NL: Tensor, w1: DeviceWeight, w3: DeviceWeight, plan: RowPlan, tile: Tiling, caps: Caps) -> Tensor:
    """glu(W1 z, W3 z) of each routed row, `[R', F]` in the tokens' dtype."""
    z_NL = z_NL if z_NL.stride(-1) == 1 else z_NL.contiguous()
    h_RF = torch.empty(plan.rows, w1.rows, dtype=z_NL.dtype, device=z_NL.device)
    products.glu_kernel[(len(plan.expert_T) * blocks(w1.rows, tile.hidden),)](
        z_NL, z_NL.stride(0), w1.codes, w1.scale, w3.codes, w3.scale, h_RF, *_where(plan), plan.active,
        L=w1.columns, F=w1.rows, STEPS=w1.steps, BO=tile.hidden, BM=tile.rows, GROUP=GROUP, **unit_options(caps),
        num_warps=tile.hidden_warps, num_stages=tile.hidden_stages,
    )  # fmt: skip
    return h_RF


def weighted(h_RF: Tensor, w2: DeviceWeight, weight_NA: Tensor, plan: RowPlan, tile: Tiling) -> Tensor:
    """p W2 h of each routed row, `[R', L]`; of few rows in float32."""
    dtype = torch.float32 if tile.rows <= FEW.rows else h_RF.dtype
    y_RL = torch.empty(plan.rows, w2.rows, dtype=dtype, device=h_RF.device)
    products.down_kernel[(len(plan.expert_T) * blocks(w2.rows, tile.output),)](
        h_RF, w2.codes, w2.scale, y_RL, weight_NA.to(torch.float32).contiguous(), *_where(plan), F=w2.columns, L=w2.rows,
        STEPS=w2.steps, BO=tile.output, BM=tile.rows, GROUP=GROUP, num_warps=tile.output_warps,
        num_stages=tile.output_stages,
    )  # fmt: skip
    return y_RL


def _where(plan: RowPlan) -> tuple:
    return plan.slot_R, plan.expert_T, plan.start_E1, plan.count_E, len(plan.count_E)
