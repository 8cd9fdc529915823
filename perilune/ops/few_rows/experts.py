"""Routed experts of a few tokens as three launches: routes and hidden values, outputs, their weighted sum on its way out.

Each expert that some token chose is read once for all of its tokens, and nothing is sorted or counted on the host. A token's
bits do not depend on its company. With many experts or tokens the routes are a launch of their own.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from perilune.ops.few_rows.cuda import combine, hidden, output, route
from perilune.ops.few_rows.cuda import outward as ways_out
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
FEW_PAIRS = 32  # (token, expert) pairs up to which a block takes one tile of a matrix, beyond two
ROUTED_TOKENS = 2  # for at most so many tokens: of more there are too many blocks


def why_not(w1_EFL: Tensor, w3_EFL: Tensor, w2_ELF: Tensor, active: int) -> str | None:
    """Why the kernels do not take these experts; None if they do. The tokens are `kernels.why_not`'s business."""
    experts, hidden, width = w1_EFL.shape
    if experts > MOST_EXPERTS or active > MOST_ACTIVE or width > MOST_WIDTH:
        return f"the kernels take at most {MOST_EXPERTS} experts, {MOST_ACTIVE} a token, of width {MOST_WIDTH}"
    return unfit(w1_EFL, width) or unfit(w3_EFL, width) or unfit(w2_ELF, hidden)


class Outputs(NamedTuple):
    """What the experts made of some tokens.

    Attributes:
        y_PL: float32 `[N A, L]`, the outputs of all (token, expert) pairs, an expert's after the other's.
        weight_NA: float32, of each choice of a token.
        pair_NA: int32, the row of `y_PL` of each choice.
    """

    y_PL: Tensor
    weight_NA: Tensor
    pair_NA: Tensor


def experts(
    logits_NE: Tensor, bias_E: Tensor, z_NL: Tensor, w1_EFL: Tensor, w3_EFL: Tensor, w2_ELF: Tensor, k: int, caps: Caps,
    renormalize: bool, scaling_factor: float,
) -> Outputs:  # fmt: skip
    """Routes and the chosen experts of `moe.moe_decode`, of operands that `why_not` lets pass."""
    z_NL, logits_NE = rows_of(z_NL), logits_NE.contiguous()
    tokens, (count, size, width), device = len(z_NL), w1_EFL.shape, z_NL.device
    pairs = tokens * k
    weight_NA = torch.empty(tokens, k, device=device)
    pair_NA = torch.empty(tokens, k, dtype=torch.int32, device=device)
    list_X4 = torch.empty(min(count, pairs), 4, dtype=torch.int32, device=device)
    h_PF = torch.empty(pairs, size, dtype=z_NL.dtype, device=device)
    y_PL = torch.empty(pairs, width, device=device)
    tiles, unit = token_tiles(tokens), unit_macros(caps)
    each = 1 if pairs <= FEW_PAIRS else 2
    routes = count, k, min(MOST_ROWS, power_of_two(tokens)), renormalize
    in_every_block = count <= ROUTED_EXPERTS and tokens <= ROUTED_TOKENS
    if not in_every_block:
        route.route(route.kernel(*routes), logits_NE, bias_E, weight_NA, pair_NA, list_X4, scaling_factor)
    run = hidden.kernel(
        width, size, each, tiles, bool(unit["GATE_CAPPED"]), bool(unit["UP_CAPPED"]), in_every_block,
        *(routes if in_every_block else (0, 0, 0, False)),
    )  # fmt: skip
    run.launch(
        (blocks(size, ROWS * each), len(list_X4)), z_NL, list_X4, w1_EFL, w3_EFL, h_PF, logits_NE, bias_E, weight_NA, pair_NA,
        z_NL.stride(0), tokens, scaling_factor, *unit_numbers(caps),
    )  # fmt: skip
    output.kernel(size, width, each, tiles).launch(
        (blocks(width, ROWS * each), len(list_X4)), h_PF, list_X4, w2_ELF, y_PL
    )
    return Outputs(y_PL, weight_NA, pair_NA)


def combined(outputs: Outputs, norm: tuple[Tensor, float] | None = None) -> tuple[Tensor, Tensor | None]:
    """The weighted sums of the tokens' experts, bfloat16 `[N, L]`.

    norm: (weight `[L]` float32, eps) of an RMSNorm; the weight is in the sums, the factors `[N]` come beside them.
    """
    y_PL, weight_NA, pair_NA = outputs
    (tokens, k), width = weight_NA.shape, y_PL.shape[1]
    out_NL = torch.empty(tokens, width, dtype=torch.bfloat16, device=y_PL.device)
    factor_N = None if norm is None else torch.empty(tokens, device=y_PL.device)
    scale, eps = (None, 0.0) if norm is None else norm
    combine.kernel(width, k, norm is not None).launch(
        (tokens,), y_PL, weight_NA, pair_NA, scale, out_NL, factor_N, eps
    )  # fmt: skip
    return out_NL, factor_N


def outward(
    outputs: Outputs, up_DL: Tensor, norm: tuple[Tensor, float] | None, second: tuple[Tensor, Tensor] | None
) -> Tensor:
    """W_up norm(sum of the experts) + W_down h, bfloat16 `[N, D]`.

    Args:
        outputs: of `experts`.
        up_DL: bfloat16.
        norm: (weight `[L]` float32, eps), or None.
        second: (h `[N, S]` dense, W_down `[D, S]`), bfloat16, or None.
    """
    (tokens, k), (rows, width) = outputs.weight_NA.shape, up_DL.shape
    h, down = second or (None, None)
    run = ways_out.kernel(width, 0 if h is None else h.shape[1], k, token_tiles(tokens), norm is not None)
    x_NL, factor_N = (None, None) if run.defines["PAIRS"] else combined(outputs, norm)
    out = torch.empty(tokens, rows, dtype=torch.bfloat16, device=up_DL.device)
    scale, eps = (None, 0.0) if norm is None else norm
    run.launch(
        (blocks(rows, ROWS * run.defines["ROW_TILES"]),), up_DL, down, *outputs, x_NL, factor_N, scale, h, out, tokens, rows, eps
    )  # fmt: skip
    return out
