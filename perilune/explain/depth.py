"""Names and order of the sources that the residual scheme's sites read."""

from __future__ import annotations

import numpy as np


def running_sum_last(weights: np.ndarray) -> np.ndarray:
    """Move each row's last source, the running sum of the open block, to the last column; NaN between."""
    moved = np.full_like(weights, np.nan)
    for row, values in enumerate(weights):
        known = int(np.isfinite(values).sum())
        moved[row, : known - 1] = values[: known - 1]
        moved[row, -1] = values[known - 1]
    return moved


def site_name(site: str) -> str:
    """A probe's site, such as "3.ffn", as a reader would say it."""
    layer, _, part = site.partition(".")
    return f"layer {layer} {part}" if part else site


def source_names(count: int, block_layers: int | None, residual: str | None) -> list[str]:
    """Labels of the depth sources, oldest first; with `block_layers` the last one is the running sum."""
    if block_layers is None:
        return ["embedding", *(f"output {i}" for i in range(1, count))]
    size = 1 if residual == "full" else block_layers
    spans = [f"{size * (i - 1)}–{size * i - 1}" if size > 1 else f"{i - 1}" for i in range(1, count - 1)]
    return ["embedding", *(f"layers {span}" if size > 1 else f"layer {span}" for span in spans), "running sum"][-count:]
