"""What Muon does around Newton-Schulz, on a CUDA device, for a batch of equal blocks of any number of parameters.

    G = scale grad;  M ← μ M + G;  N = G + μ M;  X = N / ‖N‖           momentum, then the matrices to be orthogonalised
    W ← (1 - lr·decay) W - lr·factor·O                                  once they are

A block is a contiguous run of a parameter's rows, so of its memory: a table holds the addresses of each block's gradient,
momentum and weight, and nothing is gathered or scattered. N is formed twice, for its norm and for X, since reading takes less
than keeping it. Sums are taken in a fixed order.
"""

# What stands in a kernel is Triton's language, whose loops and constants Python's types do not describe.
# pyright: reportGeneralTypeIssues=false, reportAssignmentType=false, reportAttributeAccessIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from perilune.ops.triton.sizes import blocks, power_of_two

BLOCK, WARPS = 4096, 8  # numbers of a block that a program takes
ALIGNMENT = 16  # bytes of a load


@triton.jit
def _run(table, block, which: tl.constexpr, ALIGNED: tl.constexpr):
    """Where a block's gradient (0), momentum (1) or weight (2) begins."""
    run = tl.load(table + 3 * block + which).to(tl.pointer_type(tl.float32))
    if ALIGNED:
        run = tl.multiple_of(run, 16)
    return run


@triton.jit
def _momentum_kernel(table, scale, squares, numbers, mu, BLOCK: tl.constexpr, ALIGNED: tl.constexpr):
    pieces = tl.cdiv(numbers, BLOCK)
    block = (tl.program_id(0) // pieces).to(tl.int64)
    at = tl.program_id(0) % pieces * BLOCK + tl.arange(0, BLOCK)
    inside = at < numbers
    grad = tl.load(_run(table, block, 0, ALIGNED) + at, inside, 0.0)
    if scale is not None:
        grad *= tl.load(scale)
    place = _run(table, block, 1, ALIGNED) + at
    momentum = mu * tl.load(place, inside, 0.0) + grad
    tl.store(place, momentum, inside)
    wanted = grad + mu * momentum
    tl.store(squares + tl.program_id(0), tl.sum(wanted * wanted, 0))


@triton.jit
def _divide_kernel(
    table, scale, squares, out, numbers, mu, floor, BLOCK: tl.constexpr, PIECES: tl.constexpr, ALIGNED: tl.constexpr
):
    pieces = tl.cdiv(numbers, BLOCK)
    block = (tl.program_id(0) // pieces).to(tl.int64)
    at = tl.program_id(0) % pieces * BLOCK + tl.arange(0, BLOCK)
    inside = at < numbers
    every = tl.arange(0, PIECES)
    total = tl.sum(tl.load(squares + block * pieces + every, every < pieces, 0.0), 0)
    grad = tl.load(_run(table, block, 0, ALIGNED) + at, inside, 0.0)
    if scale is not None:
        grad *= tl.load(scale)
    wanted = grad + mu * tl.load(_run(table, block, 1, ALIGNED) + at, inside, 0.0)
    unit = wanted / tl.maximum(tl.sqrt(total), floor)
    tl.store(out + block * numbers + at, unit.to(out.dtype.element_ty), inside)


@triton.jit
def _move_kernel(table, rate, towards, numbers, decay, factor, BLOCK: tl.constexpr, ALIGNED: tl.constexpr):
    pieces = tl.cdiv(numbers, BLOCK)
    block = (tl.program_id(0) // pieces).to(tl.int64)
    at = tl.program_id(0) % pieces * BLOCK + tl.arange(0, BLOCK)
    inside = at < numbers
    lr = tl.load(rate)
    place = _run(table, block, 2, ALIGNED) + at
    step = tl.load(towards + block * numbers + at, inside, 0.0).to(tl.float32)
    tl.store(place, tl.load(place, inside, 0.0) * (1.0 - lr * decay) - lr * factor * step, inside)


def aligned(addresses: list[int], numbers: int) -> bool:
    """Whether blocks of so many numbers at these addresses can be read in whole units."""
    return all(address % ALIGNMENT == 0 for address in addresses) and numbers % (ALIGNMENT // 4) == 0


def units(
    table_B3: Tensor, scale: Tensor | None, mu: float, shape: tuple[int, int], dtype: torch.dtype, floor: float, dense: bool
) -> Tensor:  # fmt: skip
    """Advance the momenta; return the blocks `[B, *shape]` of norm 1 that are to be orthogonalised, in `dtype`.

    Args:
        table_B3: int64 `[B, 3]`, addresses of each block's gradient, momentum and weight, all in float32.
        scale: `[]`, on the gradients; None = 1.
        mu: decay of the momentum.
        shape: of a block.
        dtype: of the result.
        floor: least norm that is divided by.
        dense: `aligned` for all addresses.
    """
    numbers, count = shape[0] * shape[1], len(table_B3)
    pieces = blocks(numbers, BLOCK)
    squares = torch.empty(count * pieces, device=table_B3.device)
    out = torch.empty(count, *shape, dtype=dtype, device=table_B3.device)
    options = {"BLOCK": BLOCK, "ALIGNED": dense, "num_warps": WARPS}
    _momentum_kernel[(count * pieces,)](table_B3, scale, squares, numbers, mu, **options)
    _divide_kernel[(count * pieces,)](
        table_B3, scale, squares, out, numbers, mu, floor, PIECES=power_of_two(pieces), **options
    )
    return out


def move(table_B3: Tensor, rate: Tensor, towards_BMN: Tensor, decay: float, factor: float, dense: bool) -> None:
    """W ← (1 - rate·decay) W - rate·factor·towards, for each block; `rate` is a float32 `[]` on the device."""
    count, numbers = len(table_B3), towards_BMN[0].numel()
    _move_kernel[(count * blocks(numbers, BLOCK),)](
        table_B3, rate, towards_BMN, numbers, decay, factor, BLOCK=BLOCK, ALIGNED=dense, num_warps=WARPS
    )
