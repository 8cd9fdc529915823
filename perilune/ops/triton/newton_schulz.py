"""The symmetric products of a Newton-Schulz step on a CUDA device: tiles on and below the diagonal, written on both sides.

    A = X X^T (of tall matrices X^T X);   F = a I + b A + c A A        then X ← F X is an ordinary product

Both have the form out[i, j] = sum over k of v[i, k] v[j, k], plus what is added at the end. Written out, a I makes the last
product one without an addend, which torch would first copy.
"""

# What stands in a kernel is Triton's language, whose loops and constants Python's types do not describe.
# pyright: reportGeneralTypeIssues=false, reportAssignmentType=false, reportAttributeAccessIssue=false

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from perilune.ops.moe.triton.tiles import dot_add
from perilune.ops.triton.sizes import blocks, power_of_two


class Tiles(NamedTuple):
    """Side of a tile, depth of a step, steps in flight, warps of a program."""

    side: int
    depth: int
    stages: int
    warps: int


HALF = Tiles(128, 64, 3, 4)
FULL = Tiles(32, 32, 2, 4)  # float32: in the interpreter


@triton.jit
def _symmetric_kernel(
    v, added, out, identity, of_added, of_products, S: tl.constexpr, K: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr,
    TALL: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    tiles: tl.constexpr = (S + BM - 1) // BM
    pairs: tl.constexpr = tiles * (tiles + 1) // 2
    matrix, pair = tl.program_id(0) // pairs, tl.program_id(0) % pairs
    i = pair * 0
    for row in tl.static_range(1, tiles):
        i = tl.where(pair >= row * (row + 1) // 2, row, i)
    j = pair - i * (i + 1) // 2
    total = tl.zeros([BM, BM], tl.float32)
    for k in range(0, K, BK):
        if TALL:
            total = dot_add(v.load([matrix * K + k, i * BM]).T, v.load([matrix * K + k, j * BM]), total, PRECISION)
        else:
            total = dot_add(v.load([matrix * S + i * BM, k]), v.load([matrix * S + j * BM, k]).T, total, PRECISION)
    at_i, at_j = i * BM + tl.arange(0, BM), j * BM + tl.arange(0, BM)
    inside = (at_i < S)[:, None] & (at_j < S)[None, :]
    base = matrix.to(tl.int64) * (S * S)
    value = of_products * total
    if added is not None:
        place = added + base + at_i[:, None] * S + at_j[None, :]
        value += of_added * tl.load(place, inside, 0.0).to(tl.float32)
        value += tl.where(at_i[:, None] == at_j[None, :], identity, 0.0)
    value = value.to(out.dtype.element_ty)
    tl.store(out + base + at_i[:, None] * S + at_j[None, :], value, inside)
    if i != j:
        mirrored = (at_j < S)[:, None] & (at_i < S)[None, :]
        tl.store(out + base + at_j[:, None] * S + at_i[None, :], value.T, mirrored)


def obstacle(x_BMN: Tensor) -> str | None:
    """Why the kernel does not take matrices of this shape; None if it does."""
    if any(size * x_BMN.element_size() % 16 for size in x_BMN.shape[1:]):
        return f"the copy engine needs rows of whole 16-byte units, not {list(x_BMN.shape[1:])} numbers"
    depth = _tiles(x_BMN).depth
    if x_BMN.shape[1] > x_BMN.shape[2] and x_BMN.shape[1] % depth:
        return f"tall matrices are read in steps of {depth} rows, not {x_BMN.shape[1]}"
    if x_BMN.is_cuda and torch.cuda.get_device_capability(x_BMN.device) < (9, 0):
        return "the kernel's copy engine begins with compute capability 9.0"
    return None


def symmetric(
    v_BMN: Tensor, added_BSS: Tensor | None = None, identity: float = 0.0, of_added: float = 0.0, of_products: float = 1.0
) -> Tensor:  # fmt: skip
    """of_products · v v^T (v^T v of tall matrices) + of_added · added + identity · I, `[B, S, S]` with S the short side.

    Args:
        v_BMN: dense matrices that `obstacle` lets pass.
        added_BSS: dense and symmetric; None = neither it nor the unit matrix is added.
        identity, of_added, of_products: factors.
    """
    count, rows, columns = v_BMN.shape
    tall, short, depth = rows > columns, min(rows, columns), max(rows, columns)
    out = torch.empty(count, short, short, dtype=v_BMN.dtype, device=v_BMN.device)
    of = _tiles(v_BMN)
    side = min(of.side, max(16, power_of_two(short)))
    tiles = blocks(short, side)
    block = [of.depth, side] if tall else [side, of.depth]
    _symmetric_kernel[(count * (tiles * (tiles + 1) // 2),)](
        TensorDescriptor.from_tensor(v_BMN.flatten(0, 1), block), added_BSS, out, identity, of_added, of_products, S=short,
        K=depth, BM=side, BK=of.depth, TALL=tall, PRECISION="ieee" if v_BMN.dtype == torch.float32 else "tf32",
        num_warps=of.warps, num_stages=of.stages,
    )  # fmt: skip
    return out


def _tiles(x: Tensor) -> Tiles:
    return FULL if x.dtype == torch.float32 else HALF
