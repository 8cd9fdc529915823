"""How evenly the experts were used: the two numbers of a run's summary.

`max_over_mean`: largest expert load over the mean load, for each step and MoE layer, averaged over layers and the last
20 % of steps: what one step's slowest expert costs. `pooled_worst_layer`: the same ratio from loads summed over those
steps, for the worst layer: whether some expert is favoured for long.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

BUCKETS = 1024


def max_over_mean(counts_LE: Tensor) -> Tensor:
    """Largest over mean load `[L]` from loads `[L, E]`; 1 for a layer that saw nothing."""
    loads = counts_LE.double()
    mean = loads.mean(-1)
    return torch.where(mean > 0, loads.amax(-1) / mean.clamp(min=1e-300), torch.ones_like(mean))


@dataclass
class RoutingHistory:
    """Loads of all steps in at most `BUCKETS` buckets of equally many steps (one step each until they are used up).

    Attributes:
        layers, experts: sizes; 0 layers for a dense model.
    """

    layers: int
    experts: int

    def __post_init__(self) -> None:
        self._counts_BLE = torch.zeros(BUCKETS, self.layers, self.experts, dtype=torch.int64)
        self._ratio_B = torch.zeros(BUCKETS, dtype=torch.float64)
        self._steps = 0
        self._width = 1

    def add(self, counts_LE: Tensor) -> list[float]:
        """Record one step; returns its largest-over-mean load of each layer."""
        if not self.layers:
            return []
        ratio_L = max_over_mean(counts_LE)
        if self._steps == BUCKETS * self._width:
            self._halve()
        bucket = self._steps // self._width
        self._counts_BLE[bucket] += counts_LE
        self._ratio_B[bucket] += ratio_L.mean()
        self._steps += 1
        return ratio_L.tolist()

    def _halve(self) -> None:
        half = BUCKETS // 2
        for name in ("_counts_BLE", "_ratio_B"):
            old = getattr(self, name)
            new = torch.zeros_like(old)
            new[:half] = old.unflatten(0, (half, 2)).sum(1)
            setattr(self, name, new)
        self._width *= 2

    def summary(self, last: float = 0.2) -> dict[str, float | None]:
        """`max_over_mean` and `pooled_worst_layer` over the last fraction of the steps (to a bucket); None if dense."""
        if not self.layers or not self._steps:
            return {"max_over_mean": None, "pooled_worst_layer": None}
        used = -(-self._steps // self._width)
        first = min(used - 1, int(self._steps * (1 - last)) // self._width)
        steps = self._steps - first * self._width
        ratio = float(self._ratio_B[first:used].sum()) / steps
        pooled = float(max_over_mean(self._counts_BLE[first:used].sum(0)).max())
        return {"max_over_mean": ratio, "pooled_worst_layer": pooled}

    def state_tensors(self) -> dict[str, Tensor]:
        """What a checkpoint keeps."""
        used = -(-self._steps // self._width)
        return {
            "routing.counts": self._counts_BLE[:used].clone(),
            "routing.ratio": self._ratio_B[:used].clone(),
            "routing.steps": torch.tensor([self._steps, self._width]),
        }

    def load_state_tensors(self, state: dict[str, Tensor]) -> None:
        """Continue from `state_tensors`."""
        self._steps, self._width = state["routing.steps"].tolist()
        used = state["routing.ratio"].shape[0]
        self._counts_BLE.zero_()
        self._ratio_B.zero_()
        self._counts_BLE[:used] = state["routing.counts"]
        self._ratio_B[:used] = state["routing.ratio"]
