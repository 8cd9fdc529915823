"""Rows of logits into losses and gradients on a CUDA device: one program a row, the gradient written over the logits.

    loss = ln sum exp(x) - x[target],   gradient = scale (softmax(x) - onehot(target))

The row is read twice, the second time out of the cache.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from perilune.ops.triton.sizes import power_of_two

BLOCK = 4096  # numbers of a row that a program takes at a time
LOWEST = tl.constexpr(-3.0e38)  # finite, so that lanes without a number add exp(-inf) = 0 and not NaN


@triton.jit
def _rows_kernel(logits, target, scale, loss, ignore, Z: tl.constexpr, BLOCK: tl.constexpr, GRADIENT: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    logits += row * Z
    wanted = tl.load(target + row)
    counts = wanted != ignore
    known = (wanted >= 0) & (wanted < Z)
    top = tl.full([BLOCK], LOWEST, tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, Z, BLOCK):
        at = start + tl.arange(0, BLOCK)
        x = tl.load(logits + at, at < Z, float("-inf")).to(tl.float32)
        higher = tl.maximum(top, x)
        total = total * tl.exp(top - higher) + tl.exp(x - higher)
        top = higher
    most = tl.max(top, 0)
    log = most + tl.log(tl.sum(total * tl.exp(top - most), 0))
    chosen = tl.load(logits + wanted, counts & known, 0.0).to(tl.float32)
    value = tl.where(known, log - chosen, float("nan"))
    tl.store(loss + row, tl.where(counts, value, 0.0))
    if GRADIENT:
        factor = tl.where(counts, 1.0, 0.0)
        if scale is not None:
            factor = tl.where(counts, tl.load(scale + row).to(tl.float32), 0.0)
        for start in range(0, Z, BLOCK):
            at = start + tl.arange(0, BLOCK)
            x = tl.load(logits + at, at < Z, float("-inf")).to(tl.float32)
            # A row that does not count must not let its infinities through.
            pull = tl.where(counts, factor * (tl.exp(x - log) - tl.where(at == wanted, 1.0, 0.0)), 0.0)
            tl.store(logits + at, pull.to(logits.dtype.element_ty), at < Z)


def rows(logits_CZ: Tensor, target_C: Tensor, ignore_index: int, gradient: bool, scale_C: Tensor | None) -> Tensor:
    """Losses `[C]` in float32; with `gradient` the dense logits become their gradient. A target outside 0..Z-1 that is not
    `ignore_index` gives a loss of NaN."""
    tokens, vocabulary = logits_CZ.shape
    loss_C = torch.empty(tokens, device=logits_CZ.device)
    if tokens:
        block = min(BLOCK, power_of_two(vocabulary))
        _rows_kernel[(tokens,)](
            logits_CZ, target_C.contiguous(), None if scale_C is None else scale_C.contiguous(), loss_C, ignore_index,
            Z=vocabulary, BLOCK=block, GRADIENT=gradient, num_warps=max(1, min(8, block // 256)),
        )  # fmt: skip
    return loss_C
