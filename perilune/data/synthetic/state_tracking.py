"""Following a state through a sequence of moves: the word problem of the symmetric group S_n.

The input is a sequence of permutations; the answer at every position is the product so far. S_2 is parity. S_3 needs
order; S_5 is complete for NC^1, beyond what a fixed number of attention layers computes (Barrington 1989; Merrill et al.
2024). A delta rule whose transition has eigenvalues in (0, 1) alone cannot do parity either: hence `allow_neg_eigval`.
"""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from perilune.data.synthetic.task import Example


@dataclass(frozen=True)
class StateTracking:
    """Attributes: n = objects that are permuted (2 to 5); symbols are the n! permutations in lexicographic order."""

    n: int = 5
    name: str = "state"

    @property
    def symbols(self) -> int:
        """n!"""
        return len(_table(self.n))

    def make(self, rng: np.random.Generator, length: int) -> Example:
        """Uniform moves g_1 … g_T; the target at t is g_t ∘ … ∘ g_1, not the next token."""
        table = _table(self.n)
        moves = rng.integers(len(table), size=length)
        states = np.empty(length, dtype=np.int64)
        state = 0
        for position, move in enumerate(moves):
            state = table[move, state]
            states[position] = state
        return Example(moves.astype(np.int64), states)


@functools.cache
def _table(n: int) -> NDArray[np.int64]:
    """`[n!, n!]`: number of the permutation "first column's, then row's"."""
    assert 2 <= n <= 5, f"n={n} outside 2..5"
    elements = list(itertools.permutations(range(n)))
    number = {element: index for index, element in enumerate(elements)}
    return np.array([[number[tuple(a[i] for i in b)] for b in elements] for a in elements])
