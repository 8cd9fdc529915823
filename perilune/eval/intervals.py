"""Confidence intervals of shares."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

Z95 = 1.959964
"""Standard deviations of a normal distribution that hold 95 % of it."""


@dataclass(frozen=True, slots=True)
class Share:
    """How many of a number of independent trials went well."""

    correct: int
    total: int

    @property
    def value(self) -> float:
        """correct / total; NaN without trials."""
        return self.correct / self.total if self.total else math.nan

    @property
    def interval(self) -> tuple[float, float]:
        """Wilson's 95 % interval, which stays inside [0, 1] and is honest near its ends (Wilson 1927)."""
        if not self.total:
            return 0.0, 1.0
        n, p, square = self.total, self.value, Z95**2
        centre = (p + square / (2 * n)) / (1 + square / n)
        half = Z95 / (1 + square / n) * math.sqrt(p * (1 - p) / n + square / (4 * n * n))
        # At the ends the interval touches them exactly; rounding must not say otherwise.
        low = centre - half if self.correct else 0.0
        return low, centre + half if self.correct < n else 1.0

    def as_json(self) -> dict[str, Any]:
        """Counts, share and interval."""
        low, high = self.interval
        return {"correct": self.correct, "total": self.total, "accuracy": self.value, "low": low, "high": high}
