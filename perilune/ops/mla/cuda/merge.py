"""What the runs of decode.cu left of the sequences put together by one CUDA kernel. See merge.cu."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from torch import Tensor

from perilune.ops.cuda import Kernel

THREADS = 128
LATENT = 512
FEW_PARTS = 16  # of a sequence, on average, up to which one block takes all channels of a row


@cache
def kernel() -> Kernel:
    """The kernel."""
    return Kernel(
        Path(__file__).parent / "merge.cu", "merge", "PPPPiiiii", threads=THREADS, shared_bytes=16 * THREADS + 4 * 32
    )


def merge(sums: Tensor, logs: Tensor, length_B: Tensor | None, out_BQL: Tensor, cached: int) -> None:
    """Fill in `out`, bfloat16 `[B, rows, 512]`, the sequences that more than one run holds.

    Args:
        sums, logs: `[runs, 2, rows, 512]` and `[runs, 2, rows]`, as `decode.attend` leaves them.
        length_B: int32 `[B]` cached tokens of each sequence, or None: `cached` of each.
    """
    batch, count, _ = out_BQL.shape
    runs = logs.shape[0]
    width = LATENT if runs <= FEW_PARTS * batch else LATENT // 8
    kernel().launch((count, LATENT // width, batch), sums, logs, length_B, out_BQL, cached, batch, runs, count, width)
