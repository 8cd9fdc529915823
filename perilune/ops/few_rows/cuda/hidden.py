"""Hidden values of (token, expert) pairs as one launch; see hidden.cu."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from perilune.ops.cuda import Kernel
from perilune.ops.few_rows.cuda import route
from perilune.ops.few_rows.kernels import WARPS, ring_bytes


@cache
def kernel(
    width: int, hidden: int, units: int, tiles: int, gate_capped: bool, up_capped: bool, routes: bool, experts: int, active: int,
    tokens: int, renormalize: bool,
) -> Kernel:  # fmt: skip
    """The kernel for these macros; without `routes` the last four do not matter."""
    table = route.table_bytes(experts, tokens) + 16 if routes else 0
    return Kernel(
        Path(__file__).parent / "hidden.cu",
        "hidden",
        "P" * 9 + "qifff",
        threads=32 * WARPS,
        shared_bytes=max(ring_bytes(width, 2 * units, tiles), table),
        defines={
            "WIDTH": width, "HIDDEN": hidden, "UNIT_TILES": units, "TOKEN_TILES": tiles, "GATE_CAPPED": int(gate_capped), "UP_CAPPED": int(up_capped),
            "ROUTES": int(routes),
        } | (route.macros(experts, active, tokens, renormalize) if routes else {}),
        early=True,
    )  # fmt: skip
