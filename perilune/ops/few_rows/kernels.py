"""What the kernels of few rows have in common: which operands they take, and their tiles."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from perilune.ops.cuda import Kernel, unavailable_reason
from perilune.ops.triton.sizes import blocks, power_of_two

MOST_ROWS = 32  # tokens of a call; more are better served by a library's products
ROWS, WARPS, STEP = 16, 8, 32  # of rows.h: matrix rows of a tile, warps of a block, columns of a step
TILE_TOKENS = 8

Caps = tuple[float, float | None] | None  # (beta, linear_beta) of SiTU, None = SwiGLU


def why_not(x_NK: Tensor, *weights_OK: Tensor) -> str | None:
    """Why the kernels take no products of these tokens with these matrices; None if they do."""
    if x_NK.dtype != torch.bfloat16:
        return f"the kernels of few rows multiply bfloat16, not {str(x_NK.dtype).removeprefix('torch.')}"
    width = x_NK.shape[-1]
    tokens = x_NK.numel() // width if width else 0
    if not 0 < tokens <= MOST_ROWS:
        return f"the kernels of few rows take 1 to {MOST_ROWS} tokens, not {tokens}"
    if torch.is_grad_enabled() and any(t.requires_grad for t in (x_NK, *weights_OK)):
        return "the kernels of few rows have no backward, and a gradient is wanted"
    if torch.compiler.is_compiling():
        return "the call is being traced by torch.compile"
    if (reason := unavailable_reason(x_NK.device)) is not None:
        return reason
    for weight in weights_OK:
        if (reason := unfit(weight, width)) is not None:
            return reason
    return None


def unfit(weight: Tensor, width: int, dtype: torch.dtype = torch.bfloat16) -> str | None:
    """Why a matrix, or stack of matrices, `[..., width]` is not read by the kernels; None if it is."""
    if weight.dtype != dtype:
        return f"the kernels of few rows read weights in {str(dtype)[6:]}, not {str(weight.dtype)[6:]}"
    if width % STEP or weight.shape[-1] != width:
        return f"the kernels of few rows need widths that are multiples of {STEP}, not {weight.shape[-1]}"
    if not weight.is_contiguous() or weight.data_ptr() % 16:
        return "the kernels of few rows read dense matrices that start at a multiple of 16 bytes"
    return None


def early_kernel(source: Path, parameters: str, threads: int, shared_bytes: int, **macros: int) -> Kernel:
    """The kernel of a source, named as its file, which begins early and is told how much shared memory it has."""
    return Kernel(
        source, source.stem, parameters, threads=threads, shared_bytes=shared_bytes,
        defines=macros | {"SHARED_BYTES": shared_bytes}, early=True,
    )  # fmt: skip


def rows_of(x: Tensor) -> Tensor:
    """`[N, K]` tokens as the kernels read them: dense rows at multiples of 16 bytes."""
    x = x.flatten(0, -2)
    if x.stride(1) != 1 or x.stride(0) % 8 or x.data_ptr() % 16:
        x = x.clone(memory_format=torch.contiguous_format)
    return x


def token_tiles(tokens: int) -> int:
    """Tiles of eight tokens that a kernel for so many is made for: 1, 2 or 4."""
    return power_of_two(blocks(tokens, TILE_TOKENS))


def ring_bytes(width: int, row_tiles: int, token_pieces: int) -> int:
    """Shared memory of a block for the turns of its warps, as `Ring` of rows.h has it."""
    turns = 2 * blocks(width // STEP, 2 * WARPS)
    return min(turns, 4 if row_tiles == 1 else 2) * (2 * row_tiles + token_pieces) * 16 * 32 * WARPS


def sum_bytes(row_tiles: int, tiles: int) -> int:
    """Shared memory in which the warps leave their sums; those of a ring lie where it was, which is larger."""
    return 4 * WARPS * row_tiles * tiles * 128


def unit_macros(caps: Caps) -> dict[str, int]:
    """Macros of the gated unit."""
    return {"GATE_CAPPED": int(caps is not None), "UP_CAPPED": int(caps is not None and caps[1] is not None)}


def unit_numbers(caps: Caps) -> tuple[float, float]:
    """Its parameters."""
    beta, linear_beta = caps or (0.0, None)
    return float(beta), float(linear_beta or 0.0)
