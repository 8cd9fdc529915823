"""What a feed-forward layer makes of a few tokens first, in one launch; see mixture.cu."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from perilune.ops.cuda import Kernel
from perilune.ops.few_rows.kernels import (
    ROWS,
    WARPS,
    Caps,
    early_kernel,
    ring_bytes,
    rows_of,
    token_tiles,
    unit_macros,
    unit_numbers,
)
from perilune.ops.triton.sizes import blocks


@cache
def kernel(width: int, tiles: int, latent: int, experts: int, hidden: int, capped: bool, up_capped: bool) -> Kernel:
    """The kernel for these macros."""
    rings = [ring_bytes(width, rows, tiles) for rows, there in ((2, hidden or experts), (1, latent)) if there]
    return early_kernel(
        Path(__file__).with_suffix(".cu"), "P" * 8 + "qiff", 32 * WARPS, max(rings),
        WIDTH=width, TOKEN_TILES=tiles, LATENT=latent, EXPERTS=experts, HIDDEN=hidden, GATE_CAPPED=int(capped),
        UP_CAPPED=int(up_capped),
    )  # fmt: skip


def mixture(
    x_ND: Tensor,
    down_LD: Tensor | None,
    router_ED: Tensor | None,
    unit_FD: tuple[Tensor, Tensor] | None,
    caps: Caps,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Latents, router logits and hidden values of tokens that `kernels.why_not` lets pass.

    Args:
        x_ND: `[N, D]` bfloat16.
        down_LD: bfloat16; None = no latents.
        router_ED: float32; None = no logits.
        unit_FD: gate and up matrices of a gated MLP, bfloat16; None = no hidden values.
        caps: of the gated unit.

    Returns:
        z `[N, L]` bfloat16, logits `[N, E]` float32 as exact as the router's weights, h `[N, F]` bfloat16; None for each
        that was not asked for.
    """
    x_ND = rows_of(x_ND)
    tokens, width = x_ND.shape
    macros = unit_macros(caps)
    gate, up = unit_FD or (None, None)
    sizes = [0 if weight is None else len(weight) for weight in (down_LD, router_ED, gate)]
    z, logits, hidden = (
        torch.empty(tokens, size, dtype=dtype, device=x_ND.device) if size else None
        for size, dtype in zip(sizes, (torch.bfloat16, torch.float32, torch.bfloat16))
    )
    run = kernel(width, token_tiles(tokens), *sizes, bool(macros["GATE_CAPPED"]), bool(macros["UP_CAPPED"]))
    run.launch(
        (sum(blocks(size, ROWS) for size in sizes),), x_ND, down_LD, router_ED, gate, up, z, logits, hidden, x_ND.stride(0),
        tokens, *unit_numbers(caps),
    )  # fmt: skip
    return z, logits, hidden
