"""Products of the routed rows with their experts' matrices, and of rows with rows for the weights' gradients.

Matrices come as descriptors of the tensor copy engine: what lies outside of one reads as zero and is not written. Stacked
weights `[E, M, K]` are one matrix of E M rows; a tile at the end of an expert's rows may read into the next expert's: such
columns lie outside of the result, and such depths meet zeros of the other operand.

Where a product is one step deep its loop folds away, and the compiler would pipeline the loop over tiles in its place,
with a buffer of the result for each stage: more than there is. That loop is held to one stage then (OUTER).
"""

# What stands in a kernel is Triton's language, whose loops and constants Python's types do not describe.
# pyright: reportGeneralTypeIssues=false, reportAssignmentType=false, reportAttributeAccessIssue=false

from __future__ import annotations

import triton
import triton.language as tl

from perilune.ops.moe.triton.tiles import dot_add, place_of_tile, trips
from perilune.ops.moe.triton.unit import gated_unit


@triton.jit
def glu_kernel(
    x, w1, w3, h, gate, up, expert_of_tile, start, experts, beta, linear_beta, L: tl.constexpr, F: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr, FOUR: tl.constexpr,
    GATE_CAPPED: tl.constexpr, UP_CAPPED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """h = glu(x W1^T, x W3^T); or, without h, the two products."""
    columns: tl.constexpr = (F + BN - 1) // BN
    OUTER: tl.constexpr = 1 if L <= BK else None
    tiles = tl.load(start + experts) * columns
    for tile in tl.range(trips(tl.program_id(0)), trips(tiles), trips(tl.num_programs(0)), num_stages=OUTER):
        expert, m, n = place_of_tile(tile, expert_of_tile, start, columns, GROUP)
        row, column = m * BM, n * BN
        a = tl.zeros([BM, BN], tl.float32)
        b = tl.zeros([BM, BN], tl.float32)
        for k in range(0, L, BK):
            v = x.load([row, k])
            a = dot_add(v, w1.load([expert * F + column, k]).T, a, PRECISION)
            b = dot_add(v, w3.load([expert * F + column, k]).T, b, PRECISION)
        if h is None:
            gate.store([row, column], a.to(gate.dtype))
            up.store([row, column], b.to(up.dtype))
        else:
            value = gated_unit(a, b, beta, linear_beta, FOUR, GATE_CAPPED, UP_CAPPED)
            h.store([row, column], value.to(h.dtype))


@triton.jit
def down_kernel(
    h, w2, y, weight, slot_of_row, expert_of_tile, start, counts, experts, F: tl.constexpr, L: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """y = p h W2^T, p the row's mixing weight."""
    columns: tl.constexpr = (L + BN - 1) // BN
    OUTER: tl.constexpr = 1 if F <= BK else None
    tiles = tl.load(start + experts) * columns
    for tile in tl.range(trips(tl.program_id(0)), trips(tiles), trips(tl.num_programs(0)), num_stages=OUTER):
        expert, m, n = place_of_tile(tile, expert_of_tile, start, columns, GROUP)
        row, column = m * BM, n * BN
        total = tl.zeros([BM, BN], tl.float32)
        for k in range(0, F, BK):
            total = dot_add(h.load([row, k]), w2.load([expert * L + column, k]).T, total, PRECISION)
        at = row + tl.arange(0, BM)
        real = at - tl.load(start + expert) * BM < tl.load(counts + expert)
        p = tl.load(weight + tl.load(slot_of_row + at, real, 0), real, 0.0)
        y.store([row, column], (total * p[:, None]).to(y.dtype))


@triton.jit
def back_kernel(
    first, w, second, v, y, expert_of_tile, start, experts, K: tl.constexpr, N: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """y = first W, plus second V where there is one; an expert's W and V are `[K, N]`."""
    columns: tl.constexpr = (N + BN - 1) // BN
    OUTER: tl.constexpr = 1 if K <= BK else None
    tiles = tl.load(start + experts) * columns
    for tile in tl.range(trips(tl.program_id(0)), trips(tiles), trips(tl.num_programs(0)), num_stages=OUTER):
        expert, m, n = place_of_tile(tile, expert_of_tile, start, columns, GROUP)
        row, column = m * BM, n * BN
        total = tl.zeros([BM, BN], tl.float32)
        for k in range(0, K, BK):
            total = dot_add(first.load([row, k]), w.load([expert * K + k, column]), total, PRECISION)
        if second is not None:
            for k in range(0, K, BK):
                total = dot_add(second.load([row, k]), v.load([expert * K + k, column]), total, PRECISION)
        y.store([row, column], total.to(y.dtype))


@triton.jit
def weight_kernel(
    left, right, dw, start, experts, TILE: tl.constexpr, M: tl.constexpr, N: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dW `[E, M, N]` = left^T right over the rows of each expert; zeros for an expert without rows."""
    rows: tl.constexpr = (M + BM - 1) // BM
    columns: tl.constexpr = (N + BN - 1) // BN
    for tile in tl.range(trips(tl.program_id(0)), trips(experts * (rows * columns)), trips(tl.num_programs(0))):
        expert, inside = tile // (rows * columns), tile % (rows * columns)
        group = inside // (GROUP * columns)
        size = tl.minimum(rows - group * GROUP, GROUP)
        inside -= group * (GROUP * columns)
        m, n = (group * GROUP + inside % size) * BM, inside // size * BN
        begin, end = tl.load(start + expert) * TILE, tl.load(start + expert + 1) * TILE
        total = tl.zeros([BM, BN], tl.float32)
        for k in tl.range(trips(begin), trips(end), BK):
            total = dot_add(left.load([k, m]).T, right.load([k, n]), total, PRECISION)
        # The threads write: a buffer for the copy engine would leave room for one program instead of two.
        at_m, at_n = m + tl.arange(0, BM), n + tl.arange(0, BN)
        where = dw + (expert * M + at_m).to(tl.int64)[:, None] * N + at_n[None, :]
        tl.store(where, total.to(dw.dtype.element_ty), (at_m < M)[:, None] & (at_n < N)[None, :])
