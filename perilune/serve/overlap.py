"""Which steps the host may run ahead of: where it is decided whether the next step is planned before the last one is read.

See docs/adr/0011-overlap.md.
"""

from __future__ import annotations

import torch

from perilune.serve.schedule import Plan


def pays_off(device: torch.device) -> bool:
    """Whether to run ahead on a device at all.

    On a GPU the host's work is done while the device works. On a CPU a pass computes on all cores in the thread that would
    plan: nothing is hidden, and the row of an answer that has ended is work for nothing. Measured with `nano` on two
    cores (`bench engine`, row `engine_overlap`).
    """
    return device.type == "cuda"


def why_settled_first(plan: Plan, *, crowded: bool) -> str | None:
    """Why a step is settled before the next one is planned; None = the next one is planned and launched while it runs.

    Args:
        plan: of the step.
        crowded: see `Scheduler.crowded`.
    """
    if (
        plan.prefill
    ):  # such a step is long, so there is little to hide; whoever comes meanwhile would wait for two of them
        return "prompts"
    if crowded:  # who could make room has a row under way
        return "room"
    if any(row.sequence.content is not None and row.sequence.content.constraint is not None for row in plan.decode):
        return "grammar"  # the host makes the mask of the next token from the last one
    return None
