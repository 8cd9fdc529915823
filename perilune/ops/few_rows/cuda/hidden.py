"""Hidden values of (token, expert) pairs as one launch; see hidden.cu."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from perilune.ops.cuda import Kernel
from perilune.ops.few_rows.cuda import route
from perilune.ops.few_rows.kernels import WARPS, early_kernel, ring_bytes


@cache
def kernel(
    width: int, hidden: int, units: int, tiles: int, gate_capped: bool, up_capped: bool, routes: bool, experts: int, active: int,
    tokens: int, renormalize: bool,
) -> Kernel:  # fmt: skip
    """The kernel for these macros; without `routes` the last four do not matter."""
    table = route.table_bytes(experts, tokens) + 16 if routes else 0
    return early_kernel(
        Path(__file__).with_suffix(".cu"), "P" * 9 + "qifff", 32 * WARPS, max(ring_bytes(width, 2 * units, tiles), table),
        WIDTH=width, HIDDEN=hidden, UNIT_TILES=units, TOKEN_TILES=tiles, GATE_CAPPED=int(gate_capped), UP_CAPPED=int(up_capped),
        ROUTES=int(routes), **(route.macros(experts, active, tokens, renormalize) if routes else {}),
    )  # fmt: skip
