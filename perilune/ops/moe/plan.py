"""The dispatch plan: routed rows sorted by expert, so that each expert's rows are one contiguous slice."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from perilune.ops.choice import forced
from perilune.ops.moe import native


class DispatchPlan(NamedTuple):
    """Order of the R = N*A routed rows. Rows of one expert keep token order, so the plan depends on the routes alone.

    Attributes:
        offset_E1: int64 `[E+1]`; expert e owns the sorted rows offset[e] to offset[e+1].
        slot_R: int64 `[R]`; number n*A + a of the (token, slot) at each sorted row.
        place_R: int64 `[R]`; the inverse: sorted row of each (token, slot).
    """

    offset_E1: Tensor
    slot_R: Tensor
    place_R: Tensor


def dispatch_plan(index_NA: Tensor, num_experts: int) -> DispatchPlan:
    """Sort the routes `index_NA` (int64, each below `num_experts`) by expert, stably."""
    if forced() not in ("torch", "reference") and not native.why_not(index_NA, dtypes=(torch.int64,)):
        return DispatchPlan(*native.plan(index_NA, num_experts))
    flat_R = index_NA.flatten()
    slot_R = torch.argsort(flat_R, stable=True)
    place_R = torch.empty_like(slot_R)
    place_R[slot_R] = torch.arange(len(slot_R), device=slot_R.device)
    counts_E = torch.bincount(flat_R, minlength=num_experts)
    return DispatchPlan(torch.nn.functional.pad(counts_E.cumsum(0), (1, 0)), slot_R, place_R)
