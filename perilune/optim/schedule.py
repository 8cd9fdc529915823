"""Learning-rate schedule (report §3.3): 1 % linear warm-up, then one cosine over all steps.

It is a pure function of the step, so a resumed run and a curriculum stage change neither its value nor its slope.
"""

from __future__ import annotations

import math


def multiplier(step: int, steps: int, *, warmup: float = 0.01, final: float = 0.0) -> float:
    """Factor on the peak learning rate for the optimizer step with index `step`.

    Args:
        step: 0 for the first step, `steps - 1` for the last.
        steps: optimizer steps of the whole run.
        warmup: fraction of the steps in which the factor rises linearly to 1; 0 = none, otherwise at least one step.
        final: value that the cosine reaches at the end of the run.
    """
    rising = math.ceil(warmup * steps) if warmup > 0 else 0
    if step < rising:
        return (step + 1) / rising
    done = (step - rising) / max(1, steps - rising)
    return final + (1.0 - final) * 0.5 * (1.0 + math.cos(math.pi * min(1.0, done)))
