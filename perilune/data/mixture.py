"""Which source each sample comes from, in exact proportions and without chance.

Over every period of samples each source gets its rounded share, spread as evenly as possible. Sample g's source, and
how many samples that source gave before, are pure functions of g.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from perilune.errors import ConfigError

PERIOD = 1000


class Mixture:
    """A fixed mixture.

    Attributes:
        names: the sources with a weight above 0.
        counts: samples of each source in a period.
    """

    def __init__(self, weights: Mapping[str, float], period: int = PERIOD) -> None:
        """Normalise `weights` (ConfigError if one is negative or all are 0); shares are rounded to 1 / period.

        A source with a weight above 0 gets at least one sample a period.
        """
        bad = {name: weight for name, weight in weights.items() if not 0.0 <= weight < float("inf")}
        if bad or not any(weights.values()):
            raise ConfigError(f"mixture weights {dict(weights)} must be finite, not negative, and not all 0")
        self.names = tuple(name for name, weight in weights.items() if weight > 0)
        if len(self.names) == 1:
            period = 1
        share = np.array([weights[name] for name in self.names]) / sum(weights.values()) * period
        count = np.maximum(1, np.floor(share)).astype(int)
        while count.sum() != period:  # largest remainder, ties to the first source
            step = 1 if count.sum() < period else -1
            slack = np.where((count + step >= 1), (share - count) * step, -np.inf)
            count[int(np.argmax(slack))] += step
        self.counts = dict(zip(self.names, count.tolist()))
        self._period = period
        # the j-th of a source's c samples belongs at (j + 1/2) / c of the period
        place = [((j + 0.5) / c, s) for s, c in enumerate(count) for j in range(c)]
        self._source = np.array([s for _, s in sorted(place)])
        seen = np.zeros(len(count), dtype=int)
        self._before = np.zeros(period, dtype=int)
        for position, source in enumerate(self._source):
            self._before[position] = seen[source]
            seen[source] += 1

    def assign(self, sample: int) -> tuple[str, int]:
        """Source of global sample `sample`, and its index among that source's samples."""
        cycle, position = divmod(sample, self._period)
        name = self.names[self._source[position]]
        return name, cycle * self.counts[name] + int(self._before[position])
