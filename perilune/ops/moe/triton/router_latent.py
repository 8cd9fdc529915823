"""The two products that read a layer's tokens, latent-down and router, in one launch on a CUDA device.

Latents are a bfloat16 product. Logits are exact to float32: the tokens are bfloat16, a router weight in float32 is the sum
of three bfloat16 numbers, and products of two bfloat16 numbers are exact in float32. So a tile of logits is a tile with
three times the depth, on the tensor cores; a float32 product without them takes four times as long. Tensor cores cut off
what they add to a large sum (measured: errors of 3e-5 over the whole depth), so the parts of a sum are taken out of them
every FLUSH steps and added in float32. Tiles of logits come first, since they take longest.
"""

# What stands in a kernel is Triton's language, whose loops and constants Python's types do not describe.
# pyright: reportGeneralTypeIssues=false, reportAssignmentType=false, reportAttributeAccessIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from perilune.ops.moe.triton.tiles import dot_add
from perilune.ops.narrow import in_dtype
from perilune.ops.triton.sizes import blocks

PARTS = 3  # 24 bits of a float32 weight in bfloat16 numbers of 8
ROWS, COLUMNS = 256, 128  # of a tile of latents
SCORED_ROWS, SCORED_COLUMNS = 128, 128  # of logits: two sums of each have to be held
DEPTH, FLUSH = 64, 16
GROUP = 4  # rows of tiles that take turns with one column of tiles
WARPS, STAGES = 8, 4
SPLIT = 1024


@triton.jit
def _split_kernel(weight, parts, size, PARTS: tl.constexpr, BLOCK: tl.constexpr):
    """parts [PARTS, size] in bfloat16, each the nearest to what the ones before leave."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    rest = tl.load(weight + at, at < size, 0.0).to(tl.float32)
    for part in tl.static_range(PARTS):
        near = rest.to(tl.bfloat16)
        tl.store(parts + part * size + at, near, at < size)
        rest -= near.to(tl.float32)


@triton.jit
def _place(tile, rows, columns: tl.constexpr, GROUP: tl.constexpr):
    """Row and column of a tile: GROUP rows take turns before the next column, so that both operands stay in the L2 cache."""
    group = tile // (GROUP * columns)
    size = tl.minimum(rows - group * GROUP, GROUP)
    inside = tile - group * (GROUP * columns)
    return group * GROUP + inside % size, inside // size


@triton.jit
def _project_kernel(
    x, x_scored, down, parts, z, logits, tokens, D: tl.constexpr, L: tl.constexpr, E: tl.constexpr, PARTS: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, SM: tl.constexpr, SN: tl.constexpr, BK: tl.constexpr, FLUSH: tl.constexpr,
    GROUP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    STEPS: tl.constexpr = (D + BK - 1) // BK
    CHUNKS: tl.constexpr = (STEPS + FLUSH - 1) // FLUSH
    tile = tl.program_id(0)
    rows = (tokens + SM - 1) // SM
    scored = rows * ((E + SN - 1) // SN)
    if tile < scored:
        m, n = _place(tile, rows, (E + SN - 1) // SN, GROUP)
        total = tl.zeros([SM, SN], tl.float32)
        for chunk in tl.range(0, PARTS * CHUNKS, num_stages=1):
            part = PARTS - 1 - chunk // CHUNKS  # the smallest first
            some = tl.zeros([SM, SN], tl.float32)
            for step in range(FLUSH):  # beyond the depth the copy engine brings zeros
                k = (chunk % CHUNKS * FLUSH + step) * BK
                some = dot_add(x_scored.load([m * SM, k]), parts.load([part * E + n * SN, k]).T, some, PRECISION)
            total += some
        row, column = m * SM + tl.arange(0, SM), n * SN + tl.arange(0, SN)
        target = logits + row.to(tl.int64)[:, None] * E + column[None, :]
        tl.store(target, total, (row < tokens)[:, None] & (column < E)[None, :])
    else:
        m, n = _place(tile - scored, (tokens + BM - 1) // BM, (L + BN - 1) // BN, GROUP)
        product = tl.zeros([BM, BN], tl.float32)
        for step in range(STEPS):
            product = dot_add(x.load([m * BM, step * BK]), down.load([n * BN, step * BK]).T, product, PRECISION)
        z.store([m * BM, n * BN], product.to(z.dtype))


def project(x_ND: Tensor, down_weight_LD: Tensor, router_weight_ED: Tensor) -> tuple[Tensor, Tensor]:
    """Return the latents `[N, L]` in x's dtype (bfloat16) and the logits `[N, E]` in float32."""
    tokens, width = x_ND.shape
    latent, experts = len(down_weight_LD), len(router_weight_ED)
    z = torch.empty(tokens, latent, dtype=x_ND.dtype, device=x_ND.device)
    logits = torch.empty(tokens, experts, device=x_ND.device)
    if tokens == 0:
        return z, logits
    parts = split(router_weight_ED)
    down = in_dtype(down_weight_LD, x_ND.dtype).contiguous()
    tiles = blocks(tokens, SCORED_ROWS) * blocks(experts, SCORED_COLUMNS) + blocks(tokens, ROWS) * blocks(
        latent, COLUMNS
    )
    _project_kernel[(tiles,)](
        TensorDescriptor.from_tensor(x_ND, [ROWS, DEPTH]), TensorDescriptor.from_tensor(x_ND, [SCORED_ROWS, DEPTH]),
        TensorDescriptor.from_tensor(down, [COLUMNS, DEPTH]),
        TensorDescriptor.from_tensor(parts.flatten(0, 1), [SCORED_COLUMNS, DEPTH]),
        TensorDescriptor.from_tensor(z, [ROWS, COLUMNS]), logits, tokens, D=width, L=latent, E=experts, PARTS=PARTS,
        BM=ROWS, BN=COLUMNS, SM=SCORED_ROWS, SN=SCORED_COLUMNS, BK=DEPTH, FLUSH=FLUSH, GROUP=GROUP, PRECISION="ieee",
        num_warps=WARPS, num_stages=STAGES,
    )  # fmt: skip
    return z, logits


def split(weight: Tensor) -> Tensor:
    """A float32 tensor `[...]` as the sum of `[PARTS, ...]` in bfloat16."""
    weight = weight.contiguous()
    parts = torch.empty(PARTS, *weight.shape, dtype=torch.bfloat16, device=weight.device)
    _split_kernel[(blocks(weight.numel(), SPLIT),)](weight, parts, weight.numel(), PARTS=PARTS, BLOCK=SPLIT)
    return parts
