"""Chains of modular arithmetic, worked from left to right: `3 + 5 * 2 - 1 = 4 ;` modulo a prime."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from perilune.data.synthetic.task import Example, answer_next, require


@dataclass(frozen=True)
class Arithmetic:
    """Attributes: modulus; operations = of one chain. Symbols: the residues, then + - * = ;."""

    modulus: int = 11
    operations: int = 4
    name: str = "arithmetic"

    @property
    def symbols(self) -> int:
        """Residues and five signs."""
        return self.modulus + 5

    def make(self, rng: np.random.Generator, length: int) -> Example:
        """As many chains as fit; the rest of the window is `;`. Answers are the results."""
        chain = 2 * self.operations + 4
        require(length >= chain, self.name, length, chain)
        count = length // chain
        number = rng.integers(self.modulus, size=(count, self.operations + 1))
        sign = rng.integers(3, size=(count, self.operations))
        result = number[:, 0]
        for i in range(self.operations):
            right = number[:, i + 1]
            result = np.choose(sign[:, i], [result + right, result - right, result * right]) % self.modulus
        ids = np.full(length, self.modulus + 4, dtype=np.int64)
        answer = np.zeros(length, dtype=np.bool_)
        block = ids[: count * chain].reshape(count, chain)
        block[:, 0 : chain - 3 : 2] = number
        block[:, 1 : chain - 3 : 2] = self.modulus + sign
        block[:, chain - 3] = self.modulus + 3
        block[:, chain - 2] = result
        answer[: count * chain].reshape(count, chain)[:, chain - 2] = True
        return answer_next(ids, answer)
