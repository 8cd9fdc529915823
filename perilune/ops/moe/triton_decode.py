"""The experts of a few tokens on a CUDA device: one launch to the hidden values, one to the weighted sum, no plan.

Each (token, expert) pair is a matrix-vector product of its own, so nothing has to be sorted, a result does not depend on
which tokens share the call, and what bounds a step is reading the weights. Pairs that share an expert run side by side on
the same rows of its matrices, which then come out of the L2 cache. Everything is summed in float32 in a fixed order.
"""

# What stands in a kernel is Triton's language, whose loops and constants Python's types do not describe.
# pyright: reportGeneralTypeIssues=false, reportAssignmentType=false, reportAttributeAccessIssue=false

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from perilune.ops.moe.triton.unit import Caps, gated_unit, unit_options
from perilune.ops.triton.sizes import blocks, power_of_two


class Tile(NamedTuple):
    """Matrix rows and columns of a step, and warps of a program."""

    rows: int
    columns: int
    warps: int


HIDDEN = OUTPUT = Tile(4, 1024, 4)  # the fastest of those measured on one H200


@triton.jit
def _hidden_kernel(
    x, x_stride, index, w1, w3, h, active, beta, linear_beta, L: tl.constexpr, F: tl.constexpr, BO: tl.constexpr,
    BK: tl.constexpr, FOUR: tl.constexpr, GATE_CAPPED: tl.constexpr, UP_CAPPED: tl.constexpr,
):  # fmt: skip
    """h = glu(W1 x, W3 x) of one pair and BO hidden units."""
    pair = tl.program_id(0)
    expert = (pair * 0).to(tl.int64)
    if index is not None:
        expert = tl.load(index + pair).to(tl.int64)
    unit, at = tl.program_id(1) * BO + tl.arange(0, BO), tl.arange(0, BK)
    there = unit < F
    x += (pair // active).to(tl.int64) * x_stride
    place = (expert * F + unit)[:, None] * L + at[None, :]
    a = tl.zeros([BO, BK], tl.float32)
    b = tl.zeros([BO, BK], tl.float32)
    for k in range(0, L, BK):
        inside = there[:, None]
        v = tl.load(x + k + at, k + at < L, 0.0).to(tl.float32)[None, :]
        if L % BK != 0:
            inside = inside & (k + at < L)[None, :]
        a += tl.load(w1 + place + k, inside, 0.0).to(tl.float32) * v
        b += tl.load(w3 + place + k, inside, 0.0).to(tl.float32) * v
    gate, up = tl.sum(a, 1), tl.sum(b, 1)
    hidden = gated_unit(gate, up, beta, linear_beta, FOUR, GATE_CAPPED, UP_CAPPED)
    tl.store(h + pair.to(tl.int64) * F + unit, hidden, there)


@triton.jit
def _output_kernel(
    h, index, weight, w2, out, active, L: tl.constexpr, F: tl.constexpr, BO: tl.constexpr, BK: tl.constexpr
):  # fmt: skip
    """Sum over a token's experts of p W2 h, choice after choice, BO columns."""
    token = tl.program_id(1).to(tl.int64)
    unit, at = tl.program_id(0) * BO + tl.arange(0, BO), tl.arange(0, BK)
    there = unit < L
    total = tl.zeros([BO, BK], tl.float32)
    pair = token * active
    while pair < (token + 1) * active:
        expert, p = (pair * 0).to(tl.int64), 1.0
        if index is not None:
            expert, p = tl.load(index + pair).to(tl.int64), tl.load(weight + pair)
        place = (expert * L + unit)[:, None] * F + at[None, :]
        for k in range(0, F, BK):
            inside = there[:, None]
            v = tl.load(h + pair * F + k + at, k + at < F, 0.0) * p
            if F % BK != 0:
                inside = inside & (k + at < F)[None, :]
            total += tl.load(w2 + place + k, inside, 0.0).to(tl.float32) * v[None, :]
        pair += 1
    tl.store(out + token * L + unit, tl.sum(total, 1).to(out.dtype.element_ty), there)


def experts(
    z_NL: Tensor, index_NA: Tensor | None, weight_NA: Tensor | None, w1_EFL: Tensor, w3_EFL: Tensor, w2_ELF: Tensor, caps: Caps,
    tiles: tuple[Tile, Tile] = (HIDDEN, OUTPUT),
) -> Tensor:  # fmt: skip
    """`experts.routed_experts` of a few tokens, without gradients; `caps` = (beta, linear_beta) of SiTU, None = SwiGLU.

    Without routes (both None) every token visits expert 0 with weight 1. Tokens and weights may differ in dtype; the result has the tokens', the hidden values in between are float32.
    """
    tokens, active = (len(z_NL), 1) if index_NA is None else index_NA.shape
    _, hidden, width = w1_EFL.shape
    out_NL = torch.empty(tokens, width, dtype=z_NL.dtype, device=z_NL.device)
    if not tokens:
        return out_NL
    z_NL = z_NL if z_NL.stride(-1) == 1 else z_NL.contiguous()
    w1_EFL, w3_EFL, w2_ELF = (w.contiguous() for w in (w1_EFL, w3_EFL, w2_ELF))
    if index_NA is not None and weight_NA is not None:
        index_NA, weight_NA = index_NA.contiguous(), weight_NA.to(torch.float32).contiguous()
    h_RF = torch.empty(tokens * active, hidden, device=z_NL.device)
    tile = _fitting(tiles[0], width)
    _hidden_kernel[(tokens * active, blocks(hidden, tile.rows))](
        z_NL, z_NL.stride(0), index_NA, w1_EFL, w3_EFL, h_RF, active, L=width, F=hidden, BO=tile.rows,
        BK=tile.columns, **unit_options(caps), num_warps=tile.warps,
    )  # fmt: skip
    tile = _fitting(tiles[1], hidden)
    _output_kernel[(blocks(width, tile.rows), tokens)](
        h_RF, index_NA, weight_NA, w2_ELF, out_NL, active, L=width, F=hidden, BO=tile.rows, BK=tile.columns,
        num_warps=tile.warps,
    )  # fmt: skip
    return out_NL


def _fitting(tile: Tile, width: int) -> Tile:
    """The tile, no wider than the matrices."""
    return tile._replace(columns=min(tile.columns, max(16, power_of_two(width))))
