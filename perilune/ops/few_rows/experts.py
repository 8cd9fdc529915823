"""Routed experts of a few tokens as three launches: routes and hidden values, outputs, their weighted sum.

Each expert that some token chose is read once for all of its tokens, and nothing is sorted or counted on the host. A token's
bits do not depend on its company. With many experts or tokens the routes are a launch of their own.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from perilune.ops.cuda import Kernel
from perilune.ops.few_rows.kernels import (
    MOST_ROWS,
    ROWS,
    WARPS,
    Caps,
    rows_of,
    sum_bytes,
    token_tiles,
    unfit,
    unit_macros,
    unit_numbers,
)
from perilune.ops.triton.sizes import blocks, power_of_two

MOST_EXPERTS, MOST_ACTIVE, MOST_WIDTH = 1024, 16, 4096
ROUTED_EXPERTS = 256  # that every block of the hidden values can route among,
ROUTED_TOKENS = 8  # for at most so many tokens, one a warp
FOLDER = Path(__file__).parent / "cuda"


class Routes(NamedTuple):
    """What route.h is made for."""

    experts: int
    active: int
    tokens: int
    renormalize: bool

    @property
    def macros(self) -> dict[str, int]:
        """Its macros."""
        return {
            "EXPERTS": self.experts, "ACTIVE": self.active, "TOKENS": self.tokens, "RENORMALIZE": int(self.renormalize),
        }  # fmt: skip

    @property
    def table_bytes(self) -> int:
        """Shared memory that it wants."""
        return 128 + 16 * blocks(self.tokens * self.experts, 16)

    @property
    def in_every_block(self) -> bool:
        """Whether the kernel of hidden values finds the routes."""
        return self.experts <= ROUTED_EXPERTS and self.tokens <= ROUTED_TOKENS


@cache
def route_kernel(routes: Routes) -> Kernel:
    """Of route.cu."""
    threads = min(1024, max(32 * routes.tokens, 32 * blocks(routes.experts, 32)))
    return Kernel(
        FOLDER / "route.cu", "route", "PPPPPiif", threads=threads, shared_bytes=routes.table_bytes,
        defines=routes.macros | {"THREADS": threads}, early=True,
    )  # fmt: skip


@cache
def hidden_kernel(
    width: int, hidden: int, tiles: int, gate_capped: bool, up_capped: bool, routes: Routes | None = None
) -> Kernel:
    """Of hidden.cu; with `routes` it finds them."""
    table = 0 if routes is None else routes.table_bytes + 16
    return Kernel(
        FOLDER / "hidden.cu", "hidden", "P" * 9 + "qifff", threads=32 * WARPS, shared_bytes=max(sum_bytes(2, tiles), table),
        defines={
            "WIDTH": width, "HIDDEN": hidden, "TOKEN_TILES": tiles, "GATE_CAPPED": int(gate_capped), "UP_CAPPED": int(up_capped),
            "ROUTES": int(routes is not None),
        } | ({} if routes is None else routes.macros),
        early=True,
    )  # fmt: skip


@cache
def output_kernel(width: int, out: int, tiles: int) -> Kernel:
    """Of output.cu."""
    return Kernel(
        FOLDER / "output.cu", "output", "PPPP", threads=32 * WARPS, shared_bytes=sum_bytes(1, tiles),
        defines={"WIDTH": width, "OUT": out, "TOKEN_TILES": tiles}, early=True,
    )  # fmt: skip


@cache
def combine_kernel(width: int, active: int, norm: bool) -> Kernel:
    """Of combine.cu."""
    threads = 32 * blocks(width // 4, 32)
    return Kernel(
        FOLDER / "combine.cu", "combine", "PPPPPf", threads=threads, shared_bytes=128,
        defines={"WIDTH": width, "ACTIVE": active, "THREADS": threads, "NORM": int(norm)}, early=True,
    )  # fmt: skip


def why_not(w1_EFL: Tensor, w3_EFL: Tensor, w2_ELF: Tensor, active: int) -> str | None:
    """Why the kernels do not take these experts; None if they do. The tokens are `kernels.why_not`'s business."""
    experts, hidden, width = w1_EFL.shape
    if experts > MOST_EXPERTS or active > MOST_ACTIVE or width > MOST_WIDTH:
        return f"the kernels take at most {MOST_EXPERTS} experts, {MOST_ACTIVE} a token, of width {MOST_WIDTH}"
    return unfit(w1_EFL, width) or unfit(w3_EFL, width) or unfit(w2_ELF, hidden)


def experts(
    logits_NE: Tensor, bias_E: Tensor, z_NL: Tensor, w1_EFL: Tensor, w3_EFL: Tensor, w2_ELF: Tensor, k: int, caps: Caps,
    renormalize: bool, scaling_factor: float, norm: tuple[Tensor, float] | None = None,
) -> Tensor:  # fmt: skip
    """`moe.moe_decode` of operands that `why_not` lets pass, and the RMSNorm (weight, eps) of the result if one is given."""
    z_NL, logits_NE = rows_of(z_NL), logits_NE.contiguous()
    tokens, count, (_, hidden, width) = len(z_NL), len(w1_EFL), w1_EFL.shape
    pairs, device = tokens * k, z_NL.device
    most = min(count, pairs)
    weight_NA = torch.empty(tokens, k, device=device)
    pair_NA = torch.empty(tokens, k, dtype=torch.int32, device=device)
    list_X4 = torch.empty(most, 4, dtype=torch.int32, device=device)
    h_PF = torch.empty(pairs, hidden, dtype=z_NL.dtype, device=device)
    y_PL = torch.empty(pairs, width, device=device)
    out_NL = torch.empty(tokens, width, dtype=z_NL.dtype, device=device)
    tiles, macros = token_tiles(tokens), unit_macros(caps)
    routes = Routes(count, k, min(MOST_ROWS, power_of_two(tokens)), renormalize)
    if not routes.in_every_block:
        route_kernel(routes).launch(
            (1,), logits_NE, bias_E, weight_NA, pair_NA, list_X4, tokens, most, scaling_factor
        )  # fmt: skip
    run = hidden_kernel(
        width, hidden, tiles, bool(macros["GATE_CAPPED"]), bool(macros["UP_CAPPED"]), routes if routes.in_every_block else None
    )  # fmt: skip
    run.launch(
        (blocks(hidden, ROWS), most), z_NL, list_X4, w1_EFL, w3_EFL, h_PF, logits_NE, bias_E, weight_NA, pair_NA, z_NL.stride(0),
        tokens, scaling_factor, *unit_numbers(caps),
    )  # fmt: skip
    output_kernel(hidden, width, tiles).launch((blocks(width, ROWS), most), h_PF, list_X4, w2_ELF, y_PL)
    scale, eps = (None, 0.0) if norm is None else norm
    combine_kernel(width, k, norm is not None).launch((tokens,), y_PL, weight_NA, pair_NA, scale, out_NL, eps)
    return out_NL
