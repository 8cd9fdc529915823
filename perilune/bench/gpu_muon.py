"""Rows of Newton-Schulz on a GPU: stacks of matrices as Muon cuts them, against the plain iteration and a loop over matrices."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from unittest import mock

import torch
from torch import Tensor

from perilune.bench.harness import Case
from perilune.ops import newton_schulz as module

SHAPES = ((96, 128, 7168), (16, 128, 1024), (64, 512, 1024))  # matrices, short side, long side
STEPS = 5


def _pair(shape: tuple[int, int, int], loop: bool) -> tuple[Callable[[], object], Callable[[], object]]:
    x = torch.randn(*shape, device="cuda")

    def plain(matrices: Tensor) -> Tensor:
        with mock.patch.object(module, "GRAM_RATIO", 1 << 30):
            return module.newton_schulz(matrices, dtype=torch.bfloat16)

    peer = (lambda: [plain(matrix) for matrix in x]) if loop else (lambda: plain(x))
    return lambda: module.newton_schulz(x, dtype=torch.bfloat16), peer


def cases() -> Iterator[Case]:
    """Each of `SHAPES` against both peers."""
    for count, short, long in SHAPES:
        for suffix, loop, peer in (
            ("", False, "the plain iteration, batched"),
            ("_vs_loop", True, "one matrix at a time"),
        ):
            yield Case(
                name=f"newton_schulz_gpu_{count}x{short}x{long}{suffix}",
                shape=f"{count} matrices {short}x{long}, bf16 products, {STEPS} steps",
                make=lambda shape=(count, short, long), loop=loop: _pair(shape, loop),
                peer=peer,
                flops=count * STEPS * (4.0 * short * short * long + 2.0 * short**3),
                dtype=torch.bfloat16,
            )
