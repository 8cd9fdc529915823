"""Absorbed attention on a CUDA device: both up-projections as products of each head, the cache read in parallel between them.

A step has few queries and long caches, so these are cut into as many runs or pieces as the device has room for (split-KV).
Each leaves a normalised sum and the logarithm of its denominator; a second kernel weighs them against each other. The CUDA
kernels deal out the cached tokens of all sequences evenly, whatever their lengths are, which the host does not know; so a
sequence's bits depend on where the cuts lie, hence on its company.
"""

from __future__ import annotations

import torch
from torch import Tensor

from perilune.ops.mla.cuda import decode as cuda
from perilune.ops.mla.cuda.merge import merge
from perilune.ops.triton.available import units
from perilune.ops.triton.sizes import blocks

LOG2E = 1.4426950408889634
MOST_TOKENS = 64  # of a call whose up-projections are our own kernels: more are better served by a library's products


def runs_of(batch: int, tiles: int, steps: int, programs: int) -> int:
    """Equal runs into which all cached tokens are dealt: as many as the device takes at once, each of a block at least.

    Args:
        batch, tiles: sequences, and tiles of rows of each.
        steps: blocks of cached tokens of the longest sequence.
        programs: blocks that the device runs at once.
    """
    return max(1, min(programs // tiles, batch * steps))


def context(
    query_BQL: Tensor, query_shared_BTHr: Tensor, latent_BSL: Tensor, shared_BSr: Tensor, scale: float,
    length_B: Tensor | None = None, table_BP: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """The CUDA kernels on operands that they take.

    Args:
        query_BQL: `[B, T*H, 512]` queries carried into the latent space, dense.
        query_shared_BTHr: `[B, T, H, r]` query parts that meet the shared key channels; r is 0 or 64.
        latent_BSL: `[B, S, 512]` cached latents, or with a table pages `[P, 64 n, 512]`; dense last axis.
        shared_BSr: `[B, S, r]` cached shared key channels (`[P, 64 n, r]`), alike.
        scale: factor on the scores.
        length_B: int32 `[B]` cached tokens of each sequence, the T newest included; None = S.
        table_BP: int32 `[B, pages]` page numbers.

    Returns:
        `[B, T*H, 512]` bfloat16: softmax-weighted sums of latents; zeros for a sequence of length 0.
    """
    batch, count, width = query_BQL.shape
    capacity = latent_BSL.shape[1] * (1 if table_BP is None else table_BP.shape[1])
    runs = runs_of(batch, blocks(count, cuda.ROWS), blocks(capacity, cuda.KEYS), units(query_BQL.device))
    out = torch.empty_like(query_BQL)
    sums = torch.empty(runs, 2, count, width, device=out.device)
    logs = torch.empty(runs, 2, count, device=out.device)
    operands = (query_BQL, query_shared_BTHr, latent_BSL, shared_BSr, scale * LOG2E, length_B, table_BP)
    cuda.attend(*operands, out, sums, logs)
    if runs > 1:
        merge(sums, logs, length_B, out, capacity)
    return out


def attend_latent(
    q_nope_BTHn: Tensor, q_rope_BTHr: Tensor, latent_BSL: Tensor, rope_key_BSr: Tensor, w_uk_HnL: Tensor, w_uv_HvL: Tensor,
    scale: float, length_B: Tensor | None = None, table_BP: Tensor | None = None, *, in_cuda: bool,
) -> Tensor:  # fmt: skip
    """`latent.attend_latent` and `decode.attend_cached`; `in_cuda`: by the CUDA kernels if they take the call, else by Triton's."""
    query_BQL = _project(q_nope_BTHn, w_uk_HnL).flatten(1, 2)
    operands = (query_BQL, q_rope_BTHr, latent_BSL, rope_key_BSr, scale, length_B, table_BP)
    if in_cuda and cuda.unsuitable(q_rope_BTHr, latent_BSL, rope_key_BSr, scale) is None:
        context_BQL = context(*operands)
    else:
        from perilune.ops.mla import triton_decode

        context_BQL = triton_decode.context(*operands)
    return _project(context_BQL.unflatten(1, q_nope_BTHn.shape[1:3]), w_uv_HvL.mT)


def _project(x_BTHK: Tensor, w_HKO: Tensor) -> Tensor:
    """x w of each head, `[B, T, H, O]`, dense."""
    w_HKO = w_HKO.to(x_BTHK.dtype)
    if x_BTHK.shape[:2].numel() <= MOST_TOKENS and x_BTHK.is_cuda and x_BTHK.stride(-1) == 1:
        from perilune.ops.mla.triton_project import project

        return project(x_BTHK.flatten(0, 1), w_HKO).unflatten(0, x_BTHK.shape[:2])
    return torch.einsum("bthk,hko->btho", x_BTHK, w_HKO).contiguous()
