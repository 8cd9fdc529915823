"""Routes of a few tokens as one launch; see route.cu and route.h."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from torch import Tensor

from perilune.ops.cuda import Kernel
from perilune.ops.few_rows.kernels import early_kernel
from perilune.ops.triton.sizes import blocks


def table_bytes(experts: int, tokens: int) -> int:
    """Shared memory that route.h wants."""
    return 128 + 16 * blocks(tokens * experts, 16)


def macros(experts: int, active: int, tokens: int, renormalize: bool) -> dict[str, int]:
    """Macros of route.h."""
    return {"EXPERTS": experts, "ACTIVE": active, "TOKENS": tokens, "RENORMALIZE": int(renormalize)}


@cache
def kernel(experts: int, active: int, tokens: int, renormalize: bool) -> Kernel:
    """The kernel for at most so many tokens."""
    threads = min(1024, max(32 * tokens, 32 * blocks(experts, 32)))
    return early_kernel(
        Path(__file__).with_suffix(".cu"), "PPPPPiif", threads, table_bytes(experts, tokens), THREADS=threads,
        **macros(experts, active, tokens, renormalize),
    )  # fmt: skip


def route(
    run: Kernel, logits_NE: Tensor, bias_E: Tensor, weight_NA: Tensor, pair_NA: Tensor, list_X4: Tensor, scaling: float
) -> None:
    """Fill in weights `[N, A]` float32, pairs `[N, A]` and the list of experts `[X, 4]`, int32; see route.h."""
    run.launch((1,), logits_NE, bias_E, weight_NA, pair_NA, list_X4, len(logits_NE), len(list_X4), scaling)
