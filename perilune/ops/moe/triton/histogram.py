"""The balancer's histogram of required biases on a CUDA device: one launch, integer sums in the L2 cache.

The range follows from the bias, which each program reads: nothing waits for the host. Sums of integers come out the same
in any order.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from perilune.ops.triton.sizes import blocks, power_of_two

# A program takes TOKENS tokens of EXPERTS experts at a time, STEPS times. The compiler puts the tokens of an expert beside
# each other in a warp, so that many of its 32 additions fall into a few 32-byte sectors and travel together.
TOKENS, EXPERTS, STEPS, WARPS = 32, 32, 8, 4


@triton.jit
def _histogram_kernel(
    scores, cutoff, valid, bias, count, tokens, experts, bins, BT: tl.constexpr, STEPS: tl.constexpr, BE: tl.constexpr,
    BIAS: tl.constexpr,
):  # fmt: skip
    every = tl.arange(0, BIAS)
    low = tl.min(tl.load(bias + every, every < experts, float("inf")), 0) - 1.0
    high = tl.max(tl.load(bias + every, every < experts, float("-inf")), 0) + 1.0
    inverse = tl.div_rn(1.0, tl.div_rn(high - low, bins.to(tl.float32)))
    expert = tl.program_id(1) * BE + tl.arange(0, BE)
    for step in range(STEPS):
        token = ((tl.program_id(0) * STEPS + step) * BT + tl.arange(0, BT)).to(tl.int64)
        seen = token < tokens
        if valid is not None:
            seen = seen & (tl.load(valid + token, seen, 0) != 0)
        inside = seen[:, None] & (expert < experts)[None, :]
        score = tl.load(scores + token[:, None] * experts + expert[None, :], inside, 0.0)
        required = tl.load(cutoff + token, seen, 0.0)[:, None] - score
        # maximum and minimum take the number beside a NaN: it counts in the first bin, as everything below the range.
        position = tl.minimum(tl.maximum((required - low) * inverse, 0.0), (bins - 1).to(tl.float32))
        where = count + expert[None, :].to(tl.int64) * bins + position.to(tl.int32)
        tl.atomic_add(where, tl.full([BT, BE], 1, tl.int32), inside, sem="relaxed")


def histogram_add(
    count_EB: Tensor, scores_NE: Tensor, cutoff_N: Tensor, valid_N: Tensor | None, bias_E: Tensor
) -> None:
    """Add each valid token's bin of each expert to `count_EB` (int32); see `quantile.QuantileHistogram`."""
    tokens, experts = scores_NE.shape
    if not tokens:
        return
    _histogram_kernel[(blocks(tokens, TOKENS * STEPS), blocks(experts, EXPERTS))](
        scores_NE.contiguous(), cutoff_N.contiguous(), None if valid_N is None else valid_N.contiguous(), bias_E.contiguous(),
        count_EB, tokens, experts, count_EB.shape[1], BT=TOKENS, STEPS=STEPS, BE=EXPERTS, BIAS=power_of_two(experts), num_warps=WARPS,
    )  # fmt: skip
