"""Multi-query associative recall: key-value pairs, then keys alone (Arora et al., Zoology, 2023).

    k1 v1 k2 v2 … kP vP  .  k7 v7  k2 v2 …        the values after the dot are the answers

The number of pairs is the number of associations that the state must hold; queries come in any order, so a window of
the last few tokens does not help.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from perilune.data.synthetic.task import Example, answer_next, require


@dataclass(frozen=True)
class Recall:
    """Attributes: keys, values = sizes of the two alphabets; pairs = associations in a window (fewer if it is short)."""

    keys: int = 64
    values: int = 64
    pairs: int = 32
    name: str = "recall"

    @property
    def symbols(self) -> int:
        """Keys, values, and the dot."""
        return self.keys + self.values + 1

    def make(self, rng: np.random.Generator, length: int) -> Example:
        """Pairs fill at most half of the window; every following pair is a query of one of them."""
        require(length >= 5, self.name, length, 5)
        pairs = min(self.pairs, self.keys, (length - 1) // 4)
        key = rng.permutation(self.keys)[:pairs]
        value = self.keys + rng.integers(self.values, size=pairs)
        rounds = -(-length // (2 * pairs))
        asked = np.concatenate([rng.permutation(pairs) for _ in range(rounds)])
        memory = np.stack([key, value], axis=1).ravel()
        queries = np.stack([key[asked], value[asked]], axis=1).ravel()
        ids = np.concatenate([memory, [self.keys + self.values], queries])[:length].astype(np.int64)
        answer = np.zeros(length, dtype=np.bool_)
        answer[2 * pairs + 2 :: 2] = True
        return answer_next(ids, answer)
