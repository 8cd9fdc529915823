"""Reads over depth of a few tokens as one launch; see read.cu and read.h."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from perilune.ops.cuda import Kernel
from perilune.ops.few_rows.kernels import early_kernel, rows_of

READERS = 256


@cache
def kernel(width: int, sources: int, delta: bool, query: bool, norm: bool) -> Kernel:
    """The kernel for these macros."""
    return early_kernel(
        Path(__file__).with_suffix(".cu"), "P" * sources + "q" * sources + "Pq" + "P" * 5 + "ff", READERS,
        4 * (READERS // 32) * (2 * sources + 1),
        WIDTH=width, SOURCES=sources, HAS_DELTA=int(delta), HAS_QUERY=int(query), HAS_NORM=int(norm),
    )  # fmt: skip


def read(
    sources: Sequence[Tensor], delta: Tensor | None, score_weight_D: Tensor, eps: float, norm_weight_D: Tensor | None,
    norm_eps: float, query_D: Tensor | None,
) -> tuple[Tensor | None, Tensor]:  # fmt: skip
    """`attnres.read` of a few bfloat16 tokens; parameters float32.

    Returns:
        The running sum with delta (None without delta), and the read.
    """
    first = sources[0]
    rows, extra = [rows_of(x) for x in sources], None if delta is None else rows_of(delta)
    width, tokens = first.shape[-1], len(rows[0])
    total = None if delta is None else torch.empty(first.shape, dtype=first.dtype, device=first.device)
    out = torch.empty(first.shape, dtype=first.dtype, device=first.device)
    kernel(width, len(rows), extra is not None, query_D is not None, norm_weight_D is not None).launch(
        (tokens,), *rows, *[x.stride(0) for x in rows], extra, 0 if extra is None else extra.stride(0), score_weight_D, query_D,
        norm_weight_D, total, out, eps, norm_eps,
    )  # fmt: skip
    return total, out
