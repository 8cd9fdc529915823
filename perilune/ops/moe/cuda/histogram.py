"""The balancer's histogram as a CUDA kernel: a block's bins lie in shared memory. See histogram.cu."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from torch import Tensor

from perilune.ops.cuda import Kernel
from perilune.ops.triton.available import units
from perilune.ops.triton.sizes import blocks

THREADS, EXPERTS, AHEAD = 512, 16, 8
BLOCKS = 2  # a multiprocessor
LEAST_TOKENS = 256  # of a block: each block adds its bins to the sums in memory
LARGEST = 100 * 1024  # bytes of shared memory, so that two blocks fit a multiprocessor


@cache
def _kernel(bins: int) -> Kernel:
    return Kernel(
        Path(__file__).parent / "histogram.cu", "histogram", "PPPPPqqii", threads=THREADS, shared_bytes=_bytes(bins),
        defines={"THREADS": THREADS, "EXPERTS": EXPERTS, "AHEAD": AHEAD},
    )  # fmt: skip


def _bytes(bins: int) -> int:
    return 8 * THREADS + 4 * EXPERTS * bins


def unavailable_reason(scores_NE: Tensor, bins: int) -> str | None:
    """Why the kernel cannot sum bins of these scores; None if it can."""
    if _bytes(bins) > LARGEST:
        return f"{bins} bins of {EXPERTS} experts do not fit into shared memory"
    return _kernel(bins).unavailable_reason(scores_NE.device)


def histogram_add(
    count_EB: Tensor, scores_NE: Tensor, cutoff_N: Tensor, valid_N: Tensor | None, bias_E: Tensor
) -> None:
    """Add each valid token's bin of each expert to `count_EB` (int32); see `quantile.QuantileHistogram`."""
    (tokens, experts), bins = scores_NE.shape, count_EB.shape[1]
    groups = blocks(experts, EXPERTS)
    slabs = max(1, min(BLOCKS * units(scores_NE.device) // groups, tokens // LEAST_TOKENS))
    inputs = scores_NE.contiguous(), cutoff_N.contiguous(), None if valid_N is None else valid_N.contiguous()
    _kernel(bins).launch(
        (groups, slabs), *inputs, bias_E.contiguous(), count_EB, tokens, blocks(tokens, slabs), experts, bins
    )
