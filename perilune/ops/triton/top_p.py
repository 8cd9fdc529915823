"""The cut-off of a nucleus on a CUDA device, row by row, without sorting: one program a row, which lies in the second cache.

The cut-off is the largest logit such that all logits that reach it weigh at least the goal. Logits have the order of their
bits as integers, so it is found by cutting the range of those in four: each pass over the row weighs what lies above three
numbers at once. The range has 32 bits, so sixteen passes find it exactly, whatever the logits are.
"""

# What stands in a kernel is Triton's language, whose loops and constants Python's types do not describe.
# pyright: reportGeneralTypeIssues=false, reportAssignmentType=false, reportAttributeAccessIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from perilune.ops.triton.sizes import power_of_two

LARGEST = 8192  # logits that a program reads at once
ROUNDS = tl.constexpr(16)  # two bits of the cut-off each
_LOWEST = tl.constexpr(-(2**31))


@triton.jit
def _ordered(bits):
    """A float's bits as an integer of the same order; its own inverse."""
    return tl.where(bits >= 0, bits, bits ^ 0x7FFFFFFF)


@triton.jit
def _above(key, weight, bound, BLOCK: tl.constexpr):
    """Weights of the keys that reach a bound, four neighbours together: a thread's own."""
    return tl.sum(tl.reshape(tl.where(key >= bound, weight, 0.0), [BLOCK // 4, 4]), 1)


@triton.jit
def _cutoff_kernel(logits, weights, stride, goals, cutoffs, Z: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    logits += row * stride
    weights += row * Z
    goal = tl.load(goals + row)
    at = tl.arange(0, BLOCK)
    low = tl.zeros([], tl.int32) + _LOWEST  # all that reach it weigh enough
    step = tl.zeros([], tl.int32) + (1 << 30)  # a quarter of the numbers that the cut-off may be, from `low` on
    for _ in range(ROUNDS):
        one = tl.zeros([BLOCK // 4], tl.float64)
        two = tl.zeros([BLOCK // 4], tl.float64)
        three = tl.zeros([BLOCK // 4], tl.float64)
        middle = low + step + step
        for first in range(0, Z, BLOCK):
            inside = first + at < Z
            logit = tl.load(logits + first + at, inside, float("-inf"))
            weight = tl.load(weights + first + at, inside, 0.0).to(tl.float64)
            key = _ordered(logit.to(tl.int32, bitcast=True))
            one += _above(key, weight, low + step, BLOCK)
            two += _above(key, weight, middle, BLOCK)
            three += _above(key, weight, middle + step, BLOCK)
        low = tl.where(tl.sum(two, 0) >= goal, middle, low)
        low = tl.where(tl.where(low == middle, tl.sum(three, 0), tl.sum(one, 0)) >= goal, low + step, low)
        step = step >> 2
    tl.store(cutoffs + row, _ordered(low).to(tl.float32, bitcast=True))


def cutoff(logits_NZ: Tensor, weights_NZ: Tensor, goal_N1: Tensor) -> Tensor:
    """See `perilune.ops.top_p.top_p_cutoff`; fp32 logits and weights."""
    rows, size = logits_NZ.shape
    logits_NZ = logits_NZ if logits_NZ.stride(1) == 1 else logits_NZ.contiguous()
    cutoff_N1 = torch.empty_like(goal_N1, dtype=logits_NZ.dtype)
    block = min(LARGEST, max(128, power_of_two(size)))
    _cutoff_kernel[(rows,)](
        logits_NZ, weights_NZ.contiguous(), logits_NZ.stride(0), goal_N1.contiguous(), cutoff_N1, size, block,
        num_warps=max(1, block // 512),
    )  # fmt: skip
    return cutoff_N1
