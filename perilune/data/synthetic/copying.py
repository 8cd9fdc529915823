"""Copying a random string, forwards or backwards."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from perilune.data.synthetic.task import Example, answer_next, require


@dataclass(frozen=True)
class Copy:
    """`x1 … xn . x1 … xn`: the second half is the answer. The state must hold n symbols in order."""

    alphabet: int = 32
    name: str = "copy"

    @property
    def symbols(self) -> int:
        """Letters and the dot."""
        return self.alphabet + 1

    def make(self, rng: np.random.Generator, length: int) -> Example:
        """n = (length - 1) // 2; an even window begins with one more dot."""
        require(length >= 3, self.name, length, 3)
        size = (length - 1) // 2
        word = rng.integers(self.alphabet, size=size)
        dot = np.array([self.alphabet])
        ids = np.concatenate([dot[: (length - 1) % 2], word, dot, self._second(word)]).astype(np.int64)
        answer = np.zeros(length, dtype=np.bool_)
        answer[length - size :] = True
        return answer_next(ids, answer)

    def _second(self, word: np.ndarray) -> np.ndarray:
        return word


@dataclass(frozen=True)
class Palindrome(Copy):
    """`x1 … xn . xn … x1`: the first letters are asked last, after the longest wait."""

    name: str = "palindrome"

    def _second(self, word: np.ndarray) -> np.ndarray:
        return word[::-1]
