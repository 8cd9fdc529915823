"""Routed experts of a few tokens as three launches: routes and hidden values, outputs, their weighted sum.

Each expert that some token chose is read once for all of its tokens, and nothing is sorted or counted on the host. A token's
bits do not depend on its company. With many experts or tokens the routes are a launch of their own.
"""

from __future__ import annotations

import torch
from torch import Tensor

from perilune.ops.few_rows.cuda import combine, hidden, output, route
from perilune.ops.few_rows.kernels import (
    MOST_ROWS,
    ROWS,
    Caps,
    rows_of,
    token_tiles,
    unfit,
    unit_macros,
    unit_numbers,
)
from perilune.ops.triton.sizes import blocks, power_of_two

MOST_EXPERTS, MOST_ACTIVE, MOST_WIDTH = 1024, 16, 4096
ROUTED_EXPERTS = 256  # that every block of the hidden values can route among,
ROUTED_TOKENS = 8  # for at most so many tokens, one a warp


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
    tokens, (count, size, width), device = len(z_NL), w1_EFL.shape, z_NL.device
    pairs = tokens * k
    weight_NA = torch.empty(tokens, k, device=device)
    pair_NA = torch.empty(tokens, k, dtype=torch.int32, device=device)
    list_X4 = torch.empty(min(count, pairs), 4, dtype=torch.int32, device=device)
    h_PF = torch.empty(pairs, size, dtype=z_NL.dtype, device=device)
    y_PL = torch.empty(pairs, width, device=device)
    out_NL = torch.empty(tokens, width, dtype=z_NL.dtype, device=device)
    tiles, unit = token_tiles(tokens), unit_macros(caps)
    routes = count, k, min(MOST_ROWS, power_of_two(tokens)), renormalize
    in_every_block = count <= ROUTED_EXPERTS and tokens <= ROUTED_TOKENS
    if not in_every_block:
        route.route(route.kernel(*routes), logits_NE, bias_E, weight_NA, pair_NA, list_X4, scaling_factor)
    run = hidden.kernel(
        width, size, tiles, bool(unit["GATE_CAPPED"]), bool(unit["UP_CAPPED"]), in_every_block,
        *(routes if in_every_block else (0, 0, 0, False)),
    )  # fmt: skip
    run.launch(
        (blocks(size, ROWS), len(list_X4)), z_NL, list_X4, w1_EFL, w3_EFL, h_PF, logits_NE, bias_E, weight_NA, pair_NA,
        z_NL.stride(0), tokens, scaling_factor, *unit_numbers(caps),
    )  # fmt: skip
    output.kernel(size, width, tiles).launch((blocks(width, ROWS), len(list_X4)), h_PF, list_X4, w2_ELF, y_PL)
    scale, eps = (None, 0.0) if norm is None else norm
    combine.kernel(width, k, norm is not None).launch((tokens,), y_PL, weight_NA, pair_NA, scale, out_NL, eps)
    return out_NL
