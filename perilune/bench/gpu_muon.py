"""Rows of Newton-Schulz on a GPU: stacks of matrices as Muon cuts them, against the plain iteration.

python -m perilune.bench.gpu_muon [RESULTS.jsonl]
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import torch
from torch import Tensor

from perilune.bench.gpu_decode import report
from perilune.bench.harness import Case, Row, measure
from perilune.errors import ConfigError
from perilune.ops import newton_schulz as module

SHAPES = ((96, 128, 7168), (16, 128, 1024), (64, 512, 1024))  # matrices, short side, long side
STEPS = 5


def _pair(shape: tuple[int, int, int]) -> tuple[Callable[[], Tensor], Callable[[], Tensor]]:
    x = torch.randn(*shape, device="cuda")

    def plain() -> Tensor:
        with mock.patch.object(module, "GRAM_RATIO", 1 << 30):
            return module.newton_schulz(x, dtype=torch.bfloat16)

    return lambda: module.newton_schulz(x, dtype=torch.bfloat16), plain


def run(results: Path | None = None) -> list[Row]:
    """Measure all rows; print them and append them to `results`.

    Raises:
        ConfigError: there is no CUDA device.
    """
    if not torch.cuda.is_available():
        raise ConfigError("these rows need a CUDA device; torch sees none")
    rows = []
    for count, short, long in SHAPES:
        case = Case(
            name=f"newton_schulz_{count}x{short}x{long}",
            shape=f"{count} matrices {short}x{long}, bf16 products, {STEPS} steps",
            make=lambda shape=(count, short, long): _pair(shape),
            peer="the plain iteration, batched",
            flops=count * STEPS * (4.0 * short * short * long + 2.0 * short**3),
            dtype=torch.bfloat16,
        )
        rows.append(measure(case, "cuda"))
        report(rows[-1], results)
    return rows


if __name__ == "__main__":
    run(Path(sys.argv[1]) if len(sys.argv) > 1 else None)
