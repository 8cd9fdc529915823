"""Which steps the host may run ahead of: where it is decided whether the next step is planned before the last one is read.

See docs/adr/0011-overlap.md.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from perilune.serve.schedule import Plan, Row, Scheduler


def pays_off(device: torch.device) -> bool:
    """Whether to run ahead on a device at all.

    On a GPU the host's work is done while the device works. On a CPU a pass computes on all cores in the thread that would
    plan: nothing is hidden, and the row of an answer that has ended is work for nothing. Measured with `nano`, processor
    time a token: the same where lengths are known (0.314 and 0.317 ms in batches of 8), 7 % more where answers of a dozen
    tokens end by a stop (0.381 and 0.407 ms).
    """
    return device.type == "cuda"


def why_settled_first(plan: Plan, scheduler: Scheduler) -> str | None:
    """Why a step is settled before the next one is planned; None = the next one is planned and launched while it runs.

    prompts   it holds prompts and others are expected: it is long, and who comes meanwhile would wait for two such steps
    room      somebody lacks a page or a slot, and who could give one up has a row in it

    Args:
        plan: of the step; the scheduler's newest.
        scheduler: that planned it.
    """
    if plan.prefill and scheduler.pace.expects_short:
        return "prompts"
    return "room" if scheduler.crowded else None


def draw_needs_tokens(rows: Iterable[Row]) -> bool:
    """Whether a draw has to wait until the tokens before it are known: the host makes the mask of a grammar's next token from
    the last one. It has the time of the pass for it, as that is launched before."""
    return any(row.sequence.content.constraint is not None for row in rows)
